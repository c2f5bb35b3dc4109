"""Answers to many prompts at once, offline: ramps learn from them, and thresholds are tested on them.

All sequences of a batch take their steps together, greedily. No sequence's answer depends on its batch-mates.
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
"""Sequences at once."""
NEVER_EXIT = ConfidencePolicy(2.0)
"""No exit is ever as sure as this threshold."""


@dataclass(slots=True, kw_only=True)
class Generated:
    """One sequence, and where each token of its answer came from."""

    prompt: tuple[int, ...]
    answer: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    """The block after which each token left."""
    scores: list[float] = field(default_factory=list)
    """The score of that exit."""
    looks: list[dict[int, ExitResult]] = field(default_factory=list)
    """For each token what every ramp said, by block, the full model last; only where ramps look."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How sequences are generated."""

    max_tokens: int
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer, and are its last."""
    policy: ExitPolicy = NEVER_EXIT
    ramps: tuple[int, ...] = ()
    """The ramps at which tokens may leave."""
    look: bool = False
    """Whether every ramp looks at every token, which then runs all blocks."""


def generate(
    model: EarlyExitModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    progress: Callable[[str, int, int], None] = no_progress,
) -> list[Generated]:
    """Returns greedy answers to prompts of token ids, in their order, with a new store of keys and values.

    Raises InputError for a prompt without tokens, UnprocessableInputError for one that leaves no room for an answer.
    """
    backbone = decoder_of(model)
    found: list[Generated] = []
    for batch in batches(model, prompts, options.max_tokens):
        cut = Cut(model, 0, model.num_blocks, options.ramps, options.policy)
        backbone.fill = "compute"
        found += _together(model, cut.for_probes() if options.look else cut, batch, options)
        progress("answers", len(found), len(prompts))
    return found


def decoder_of(model: EarlyExitModel) -> DecoderBackbone:
    """Returns the model's backbone; raises ModelFolderError for models that do not generate."""
    if not isinstance(model.backbone, DecoderBackbone):
        raise ModelFolderError(f"{model.info.name}: {model.info.family} generates nothing")
    return model.backbone


def batches(model: EarlyExitModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[Generated]]:
    """Yields the prompts in batches. For each batch the backbone gets a new store for prompts and answers."""
    backbone = decoder_of(model)
    for first in range(0, len(prompts), BATCH):
        begun = [Generated(prompt=tuple(prompt)) for prompt in prompts[first : first + BATCH]]
        backbone.open_store(sum(-(-(len(each.prompt) + max_tokens) // PAGE_TOKENS) for each in begun))
        yield begun


def admitted_piece(model: EarlyExitModel, steps: Mapping[int, Encoded], policy: ExitPolicy = NEVER_EXIT) -> Piece:
    """Returns inputs of sequences, by their numbers, before block 0, after the model has admitted them."""
    wire = entry_piece(list(map(str, steps)), list(steps.values()))
    for refused in decoder_of(model).memory.admit(wire, list(steps)):
        if refused is not None:
            raise refused
    return from_wire(model, wire, policy)


def _together(model: EarlyExitModel, cut: Cut, batch: list[Generated], options: GenerationOptions) -> list[Generated]:
    going: dict[int, tuple[TokenSequence, Generated]] = {}
    for number, each in enumerate(batch, 1):
        sequence = TokenSequence(
            each.prompt,
            None,
            max_tokens=options.max_tokens,
            max_length=model.max_length,
            ends=tuple(options.ends),
            sampling=Sampling(),
            chunk=len(each.prompt),  # prompts are shown whole
        )
        sequence.begin(number)
        going[number] = sequence, each
    while going:
        looks: dict[int, dict[int, ExitResult]] = {number: {} for number in going}
        for step in cut.run(admitted_piece(model, {k: each.step() for k, (each, _) in going.items()}, options.policy)):
            for answer in step.answers:
                one, each = going[int(answer.sample_id)]
                assert isinstance(answer.value, PackedArray)
                said = one.answered(answer.value.numpy(), answer.exit)
                assert said is not None, "prompts are shown whole"
                each.answer.append(said.chosen.token)
                each.exits.append(said.exit)
                each.scores.append(answer.score)
            for look in step.seen:
                looks[int(look.sample_id)][look.block] = look
        for number, (one, each) in list(going.items()):
            if options.look:
                each.looks.append(looks[number])
            if one.ended is not None:
                decoder_of(model).memory.end(number)
                del going[number]
    return batch
