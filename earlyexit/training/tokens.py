"""Offline generation for many prompts, and training of a decoder's ramps to imitate the full model on the answers.

All sequences of a batch take their steps together, with greedy decoding. An answer never depends on the other
sequences of its batch. Thresholds are calibrated with such answers too.

Blocks and head are frozen in training. The target at a token is the full model's answer, not the text's next token.
Norms and adapters are trained by cross-entropy over the tokens that occur as targets, because these are few. Then each
ramp's classifier is trained to predict whether the ramp's answer equals the full model's (Schuster et al. 2022, CALM,
section 3.4). Legend: N tokens of all texts, D hidden size, V tokens of the vocabulary, W tokens that occur as targets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyexit.errors import ModelFolderError
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.network.boundary import Answer, Encoded, array_of, entry_piece
from earlyexit.network.model import Cut, EarlyExitModel, from_wire
from earlyexit.network.piece import Layout, Piece
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.ramps.heads import AdaptedRamp, BiasedVocabularyHead, NormedRamp, VocabularyHead
from earlyexit.sequences.sequence import PAGE_TOKENS, Sampling, TokenSequence, step_of
from earlyexit.training.ramps import Descent, FitOptions, Progress, after_exits, no_progress, reinitialise

BATCH = 16
"""Sequences per batch."""
NEVER_EXIT = ConfidencePolicy(2.0)
"""A policy with a threshold that no confidence reaches."""


@dataclass(slots=True, kw_only=True)
class Generated:
    """A prompt, the tokens of its answer, and the exit at which each token left."""

    prompt: tuple[int, ...]
    answer: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    """The block after which each token left."""
    scores: list[float] = field(default_factory=list)
    """The score of that exit for each token."""
    observed: list[dict[int, Answer]] = field(default_factory=list)
    """The results of all exits for each token, by block; empty unless `GenerationOptions.observe` is set."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Options for `generate`."""

    max_tokens: int
    ends: frozenset[int] = frozenset()
    """End-of-sequence tokens. They are part of the answer."""
    policy: ExitPolicy = NEVER_EXIT
    ramps: tuple[int, ...] = ()
    """The active ramps."""
    observe: bool = False
    """Whether all ramps are observed. Every token then runs all blocks."""


def generate(
    model: EarlyExitModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    progress: Progress = no_progress,
) -> list[Generated]:
    """Returns greedy answers to prompts of token ids. Raises InputError for a prompt that is empty or too long."""
    backbone = decoder_of(model)
    generated: list[Generated] = []
    for batch in batches(model, prompts, options.max_tokens):
        cut = Cut(model, 0, model.num_blocks, options.ramps, options.policy)
        backbone.fill = "compute"
        _generate_batch(model, cut.observing(model.ramp_indices) if options.observe else cut, batch, options)
        generated += batch
        progress("answers", len(generated), len(prompts))
    return generated


def decoder_of(model: EarlyExitModel) -> DecoderBackbone:
    """Returns the model's backbone. Raises ModelFolderError for models that do not generate text."""
    if not isinstance(model.backbone, DecoderBackbone):
        raise ModelFolderError(f"{model.info.name}: models of the family {model.info.family} do not generate text")
    return model.backbone


def batches(model: EarlyExitModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[Generated]]:
    """Yields the prompts in batches. For each batch the backbone gets a new store for prompts and answers."""
    backbone = decoder_of(model)
    for first in range(0, len(prompts), BATCH):
        batch = [Generated(prompt=tuple(prompt)) for prompt in prompts[first : first + BATCH]]
        backbone.open_store(sum(-(-(len(each.prompt) + max_tokens) // PAGE_TOKENS) for each in batch))
        yield batch


def admitted_piece(model: EarlyExitModel, steps: Mapping[int, Encoded], policy: ExitPolicy = NEVER_EXIT) -> Piece:
    """Returns one step of several sequences as a piece before block 0. `steps`: by the sequence's number."""
    wire = entry_piece(list(map(str, steps)), list(steps.values()))
    for error in decoder_of(model).memory.admit(wire, list(steps)):
        if error is not None:
            raise error
    return from_wire(model, wire, policy)


def _generate_batch(model: EarlyExitModel, cut: Cut, batch: Sequence[Generated], options: GenerationOptions) -> None:
    """Generates the answers of a batch, and adds their tokens to `batch`."""
    active: dict[int, tuple[TokenSequence, Generated]] = {}
    for number, generated in enumerate(batch, 1):
        sequence = TokenSequence(
            generated.prompt,
            None,
            max_tokens=options.max_tokens,
            max_length=model.max_length,
            ends=tuple(options.ends),
            sampling=Sampling(),
            chunk=len(generated.prompt),  # the whole prompt in one step
        )
        sequence.begin(number)
        active[number] = sequence, generated
    while active:
        for _, generated in active.values() if options.observe else ():
            generated.observed.append({})
        steps = {number: sequence.step() for number, (sequence, _) in active.items()}
        for step in cut.run(admitted_piece(model, steps, options.policy)):
            for answer in step.answers:
                sequence, generated = active[int(answer.sample_id)]
                result = sequence.answered(array_of(answer.value), answer.exit)
                assert result is not None, "each step has the whole prompt"
                generated.answer.append(result.token)
                generated.exits.append(result.exit)
                generated.scores.append(answer.score)
            for seen in step.seen:
                active[int(seen.sample_id)][1].observed[-1][seen.exit] = seen
        for number, (sequence, _) in list(active.items()):
            if sequence.ended is not None:
                decoder_of(model).memory.end(number)
                del active[number]


TOKEN_OPTIONS = FitOptions(epochs=10, batch=256, learning_rate=2e-3, weight_decay=0.01)
CLASSIFIER_EPOCHS = 6
ROWS = 256
"""Rows of logits that are computed at once, to bound memory: 50 MB for SmolLM2."""


def train_token_ramps(
    model: EarlyExitModel, texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], options: FitOptions
) -> None:
    """Train all ramps on texts, which are token ids: first norms and adapters, then classifiers.

    `prompt_lengths`: the tokens of each text's prompt, its first tokens, of which only the last one is trained on.
    """
    if not model.ramp_indices:
        return
    states = _states(model, texts, prompt_lengths, options)
    full_N = _answers(model.head, states[model.num_blocks - 1])
    ramps: dict[int, NormedRamp] = {}
    for block in model.ramp_indices:
        ramp = model.exit_head(block)
        assert isinstance(ramp, NormedRamp), "a decoder's ramps share its head"
        _initialise(ramp, decoder_of(model).norm, options.seed + block)
        ramps[block] = ramp
    _train_answers(model, ramps, states, full_N, options)
    _train_classifiers(ramps, states, full_N, replace(options, epochs=CLASSIFIER_EPOCHS))
    model.eval()


@torch.no_grad()
def _states(
    model: EarlyExitModel, texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], options: FitOptions
) -> dict[int, Tensor]:
    """Returns the inputs of all exits, by block (N, D)."""
    kept: defaultdict[int, list[Tensor]] = defaultdict(list)
    done, lengths = 0, iter(prompt_lengths)
    for batch in batches(model, texts, max_tokens=0):
        steps, wanted = {}, []
        for key, text in enumerate(batch, start=1):
            length, prompt_length = len(text.prompt), next(lengths)
            steps[key] = step_of(text.prompt, key, 0, length, prompt_length)
            wanted.append(torch.arange(length) >= prompt_length - 1)
        piece, wanted_N = admitted_piece(model, steps), torch.cat(wanted)
        for block, after in after_exits(model, piece.tensors, Layout(piece.lengths_B, model.device)):
            kept[block].append(after[0][wanted_N].float())
        done += len(batch)
        options.progress("states", done, len(texts))
    return {block: torch.cat(parts) for block, parts in kept.items()}


@torch.no_grad()
def _initialise(ramp: NormedRamp, last_norm: torch.nn.Module, seed: int) -> None:
    """Copy the decoder's last norm, set the adapter's output to zero, and initialise the rest at random.

    Decoders without a last norm, such as Marian, leave the ramp's norm at ones.
    """
    reinitialise(ramp, seed)
    if isinstance(last_norm, torch.nn.RMSNorm):
        ramp.norm.weight.copy_(last_norm.weight)
    if isinstance(ramp, AdaptedRamp):
        ramp.widen.weight.zero_()


def _train_answers(
    model: EarlyExitModel,
    ramps: Mapping[int, NormedRamp],
    states: Mapping[int, Tensor],
    full_N: Tensor,
    options: FitOptions,
) -> None:
    tokens_W, target_N = torch.unique(full_N, return_inverse=True)
    assert isinstance(model.head, VocabularyHead)
    weight_WD = model.head.classifier.weight[tokens_W].float()
    bias_W = model.head.bias_V[tokens_W].float() if isinstance(model.head, BiasedVocabularyHead) else None

    def losses(rows: Tensor) -> Iterator[Tensor]:
        for block, ramp in ramps.items():
            logits_BW = F.linear(ramp.norm(ramp.adapted(states[block][rows])), weight_WD, bias_W)
            yield F.cross_entropy(logits_BW, target_N[rows])

    named = (parameter for ramp in ramps.values() for parameter in ramp.named_parameters())
    trained = [parameter for name, parameter in named if not name.startswith("sureness")]
    Descent([(trained, 1.0)], len(target_N), options).run(losses, "ramps")


def _train_classifiers(
    ramps: Mapping[int, NormedRamp], states: Mapping[int, Tensor], full_N: Tensor, options: FitOptions
) -> None:
    agrees = {block: (_answers(ramp, states[block]) == full_N).float() for block, ramp in ramps.items()}

    def losses(rows: Tensor) -> Iterator[Tensor]:
        for block, ramp in ramps.items():
            yield F.binary_cross_entropy_with_logits(ramp.foresee(states[block][rows]), agrees[block][rows])

    trained = [parameter for ramp in ramps.values() for parameter in ramp.sureness.parameters()]
    Descent([(trained, 1.0)], len(full_N), options).run(losses, "classifiers")


@torch.no_grad()
def _answers(head: torch.nn.Module, states_ND: Tensor) -> Tensor:
    """Returns the answers of an exit, (N,)."""
    assert isinstance(head, VocabularyHead | NormedRamp)
    return torch.cat([head.classify(rows).argmax(-1) for rows in torch.split(states_ND, ROWS)])
