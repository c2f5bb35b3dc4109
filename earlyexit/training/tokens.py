"""Training of a decoder's ramps to imitate the full model at every token of texts, with blocks and head frozen.

The target at a token is the full model's answer, not the text's next token. Norms and adapters are trained by
cross-entropy over the tokens that occur as targets, because these are few. Then each ramp's classifier is trained to
predict whether the ramp's answer equals the full model's (Schuster et al. 2022, CALM, section 3.4).
Legend: N tokens of all texts, D hidden size, V tokens of the vocabulary, W tokens that occur as targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Layout
from earlyexit.ramps.heads import AdaptedRamp, BiasedVocabularyHead, NormedRamp, VocabularyHead
from earlyexit.sequences.offline import admitted_piece, batches, decoder_of
from earlyexit.sequences.sequence import step_of
from earlyexit.training.ramps import Descent, TrainOptions, reinitialise

TOKEN_OPTIONS = TrainOptions(epochs=10, batch=256, learning_rate=2e-3, weight_decay=0.01)
CLASSIFIER_EPOCHS = 6
ROWS = 256
"""Rows of logits that are computed at once, to bound memory: 50 MB for SmolLM2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStates:
    """Inputs of all exits, by block (N, D), and the full model's answers (N,), for the tokens of texts."""

    states: Mapping[int, Tensor]
    full_N: Tensor


@torch.no_grad()
def token_states(
    model: EarlyExitModel, texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], options: TrainOptions
) -> TokenStates:
    """Returns the states at the tokens of texts, which are token ids.

    `prompt_lengths`: the tokens of each text's prompt, its first tokens. Of a prompt, only the last token has a state.
    """
    last = model.num_blocks - 1
    kept: dict[int, list[Tensor]] = {block: [] for block in (*model.ramp_indices, last)}
    done, lengths = 0, iter(prompt_lengths)
    for batch in batches(model, texts, max_tokens=0):
        steps, wanted = {}, []
        for key, text in enumerate(batch, start=1):
            length, prompt_length = len(text.prompt), next(lengths)
            steps[key] = step_of(text.prompt, key, 0, length, prompt_length)
            wanted.append(torch.arange(length) >= prompt_length - 1)
        piece, wanted_N = admitted_piece(model, steps), torch.cat(wanted)
        layout, tensors = Layout(piece.lengths_B, model.device), piece.tensors
        first = 0
        for block in kept:
            tensors = model.run_blocks(first, block + 1, tensors, layout)
            kept[block].append(tensors[0][wanted_N].float())
            first = block + 1
        done += len(batch)
        options.progress("states", done, len(texts))
    states = {block: torch.cat(parts) for block, parts in kept.items()}
    return TokenStates(states=states, full_N=_answers(model.head, states[last]))


def train_token_ramps(model: EarlyExitModel, learned: TokenStates, options: TrainOptions = TOKEN_OPTIONS) -> None:
    """Train all ramps: first norms and adapters, then classifiers."""
    ramps: dict[int, NormedRamp] = {}
    for block in model.ramp_indices:
        ramp = model.exit_head(block)
        assert isinstance(ramp, NormedRamp), "a decoder's ramps share its head"
        _initialise(ramp, decoder_of(model).norm, options.seed + block)
        ramps[block] = ramp
    _train_answers(model, ramps, learned, options)
    _train_classifiers(ramps, learned, replace(options, epochs=CLASSIFIER_EPOCHS))
    model.eval()


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
    model: EarlyExitModel, ramps: Mapping[int, NormedRamp], learned: TokenStates, options: TrainOptions
) -> None:
    tokens_W, target_N = torch.unique(learned.full_N, return_inverse=True)
    assert isinstance(model.head, VocabularyHead)
    weight_WD = model.head.classifier.weight[tokens_W].float()
    bias_W = model.head.bias_V[tokens_W].float() if isinstance(model.head, BiasedVocabularyHead) else None

    def loss(rows: Tensor) -> Tensor:
        losses = []
        for block, ramp in ramps.items():
            logits_BW = F.linear(ramp.norm(ramp.adapted(learned.states[block][rows])), weight_WD, bias_W)
            losses.append(F.cross_entropy(logits_BW, target_N[rows]))
        return torch.stack(losses).sum()

    named = (parameter for ramp in ramps.values() for parameter in ramp.named_parameters())
    trained = [parameter for name, parameter in named if not name.startswith("sureness")]
    Descent(trained, len(target_N), options).run(loss, "ramps")


def _train_classifiers(ramps: Mapping[int, NormedRamp], learned: TokenStates, options: TrainOptions) -> None:
    agrees = {block: (_answers(ramp, learned.states[block]) == learned.full_N).float() for block, ramp in ramps.items()}

    def loss(rows: Tensor) -> Tensor:
        losses = [
            F.binary_cross_entropy_with_logits(ramp.foresee(learned.states[block][rows]), agrees[block][rows])
            for block, ramp in ramps.items()
        ]
        return torch.stack(losses).sum()

    trained = [parameter for ramp in ramps.values() for parameter in ramp.sureness.parameters()]
    Descent(trained, len(learned.full_N), options).run(loss, "classifiers")


@torch.no_grad()
def _answers(head: torch.nn.Module, states_ND: Tensor) -> Tensor:
    """Returns the answers of an exit, (N,)."""
    assert isinstance(head, VocabularyHead | NormedRamp)
    return torch.cat([head.classify(rows).argmax(-1) for rows in torch.split(states_ND, ROWS)])
