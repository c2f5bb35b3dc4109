"""Offline generation for many prompts. Ramps are trained on the answers, and thresholds are calibrated with them.

All sequences of a batch take their steps together, with greedy decoding. An answer never depends on the other
sequences of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from earlyexit.errors import ModelFolderError
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.network.boundary import Encoded, ExitResult, PackedArray, entry_piece
from earlyexit.network.cut import Cut
from earlyexit.network.model import from_wire
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.sequences.sequence import PAGE_TOKENS, Sampling, TokenSequence
from earlyexit.training.ramps import no_progress

if TYPE_CHECKING:
    from earlyexit.network.model import EarlyExitModel
    from earlyexit.network.piece import Piece

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
    looks: list[dict[int, ExitResult]] = field(default_factory=list)
    """The results of all exits for each token, by block; empty unless `GenerationOptions.look` is set."""

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
    look: bool = False
    """Whether all ramps are observed. Every token then runs all blocks."""


def generate(
    model: EarlyExitModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    progress: Callable[[str, int, int], None] = no_progress,
) -> list[Generated]:
    """Returns greedy answers to prompts of token ids. Raises InputError for a prompt that is empty or too long."""
    backbone = decoder_of(model)
    generated: list[Generated] = []
    for batch in batches(model, prompts, options.max_tokens):
        cut = Cut(model, 0, model.num_blocks, options.ramps, options.policy)
        backbone.fill = "compute"
        _generate_batch(model, cut.for_probes() if options.look else cut, batch, options)
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
        looks: dict[int, dict[int, ExitResult]] = {number: {} for number in active}
        steps = {number: sequence.step() for number, (sequence, _) in active.items()}
        for step in cut.run(admitted_piece(model, steps, options.policy)):
            for answer in step.answers:
                sequence, generated = active[int(answer.sample_id)]
                assert isinstance(answer.value, PackedArray)
                result = sequence.answered(answer.value.numpy(), answer.exit)
                assert result is not None, "each step has the whole prompt"
                generated.answer.append(result.chosen.token)
                generated.exits.append(result.exit)
                generated.scores.append(answer.score)
            for look in step.seen:
                looks[int(look.sample_id)][look.block] = look
        for number, (sequence, generated) in list(active.items()):
            if options.look:
                generated.looks.append(looks[number])
            if sequence.ended is not None:
                decoder_of(model).memory.end(number)
                del active[number]
