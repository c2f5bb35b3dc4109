"""Cuts: runnable parts of a model, pieces in, answers and survivors out; and the runner that runs batches through them.

Exits may share an expensive head, such as one over a vocabulary; it is computed once per batch. SmolLM2's head has a
fifth of all weights, and a CPU reads all of them for a single row too. So inputs that leave early wait for the end of
the batch. No sequence's next token is later for it, since the device is busy with the batch until then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from earlyexit.engine.device import Memory, Step, warm_up_length
from earlyexit.engine.engine import Batch
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Answer, ExitResult, Segment, Split, WirePiece, values_of
from earlyexit.network.model import EarlyExitModel, Network, SegmentRunner, arbitrary_tensors, from_wire
from earlyexit.network.piece import (
    Piece,
    Tensors,
    all_to_host,
    fuse,
    mark_cuda,
    to_device,
    to_host,
    wait_for,
    when_computed,
)
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.policies.foresight import Foreseen
from earlyexit.ramps.heads import NormedRamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Inputs that leave at a ramp and are not answered yet."""

    piece: Piece
    positions: list[int]
    """Positions in the piece of the inputs that leave."""
    score_B: Tensor
    """Scores of all of the piece's inputs."""
    ramp: int
    rows_KD: Tensor
    """What the shared head looks at, for the inputs that leave."""


class Cut:
    """Blocks first to end - 1 with some ramps active. An input's answer does not depend on its batch-mates.

    Only the active ramps decide and change the policy's state. Inputs that they let leave are gone. Where inputs stay,
    each is answered and remains inside; steps then also hold what the ramps that look, and the model's end, say of it.
    """

    def __init__(
        self,
        network: Network,
        first: int,
        end: int,
        ramps: tuple[int, ...],
        policy: ExitPolicy,
        segments: SegmentRunner | None = None,
        *,
        looks: frozenset[int] | None = None,
    ) -> None:
        """`segments` computes it; None for the network itself.

        `looks`: of inputs that stay, the ramps, active or not, that the policy looks at; None: inputs leave. Raises
        PlanError for blocks or ramps that the network does not have, and for a policy that cannot judge them.
        """
        _check(network, first, end, ramps, policy)
        self.first = first
        self.end = end
        self._network = network
        self._late = network if isinstance(network, EarlyExitModel) else None  # asked once: it takes time
        self._ramps = ramps
        self._policy = policy
        self._others = segments
        self._stays = looks is not None
        self._looks = looks or frozenset()
        active = Split(first=first, end=end, batch=1, ramps=ramps)
        run = tuple(sorted(self._looks.union(ramps)))
        self._segments = replace(active, ramps=run).segments()
        if policy.foresees == "states":
            self._segments = tuple(part for segment in self._segments for part in _before_its_last(segment))
        # The network itself runs cuts in which inactive ramps look, whatever runs the others: one batch in fifty is no
        # reason for a session of ONNX Runtime, with its own copy of the weights, for every ramp.
        self._runner = network if segments is None or run != ramps else segments

    def staying(self) -> Cut:
        """Returns the same blocks and active ramps for inputs that stay: every active ramp looks."""
        return self._staying(self._ramps)

    def for_probes(self) -> Cut:
        """Returns the same blocks and active ramps for probes: they stay, and every ramp looks."""
        return self._staying(self._network.ramp_indices)

    def _staying(self, ramps: Iterable[int]) -> Cut:
        looks = frozenset(ramp for ramp in ramps if self.first <= ramp < self.end and self._policy.can_look(ramp))
        return Cut(self._network, self.first, self.end, self._ramps, self._policy, self._others, looks=looks)

    def run(self, piece: Piece) -> Iterator[Step[Piece]]:
        """Runs a piece whose next block is `first`; yields a step per segment, as soon as it is computed.

        Inputs that leave by an exit with the shared head are answered in the last step. The survivors of the last step
        wait for block `end`; at the model's end there are none.
        """
        assert piece.next_block == self.first
        steps = self._steps(piece)
        device = self._network.device
        if device.type == "cuda" and self._policy.foreknows:  # others read the logits, and so wait for them
            return when_computed(steps, lambda: mark_cuda(device))
        return steps

    @torch.inference_mode()
    def _steps(self, piece: Piece) -> Iterator[Step[Piece]]:
        inside: Piece | None = piece
        answered: set[str] = set()
        late: list[Leaving] = []
        for segment in self._segments:
            if inside is None:
                break
            if late and segment.end == self._network.num_blocks and self._runner is self._network:
                yield self._end_together(late, segment, inside)
                return
            step = self._step(segment, inside, answered, late)
            inside = step.survivors
            yield step
        if late:
            yield Step(answers=self._together(late)[0], survivors=inside)

    def _together(
        self, late: Sequence[Leaving], *others: tuple[int, Tensor]
    ) -> tuple[tuple[Answer, ...], list[Tensor]]:
        """Returns the answers of inputs that wait for the shared head, and its outputs for others: one computation."""
        network = self._late
        assert network is not None
        outputs = network.outputs_together([*((each.ramp, each.rows_KD) for each in late), *others])
        answers = tuple(
            answer
            for each, outputs_KC in zip(late, outputs, strict=False)
            for answer in _answers(
                each.piece, each.positions, to_host(network.task.answer(outputs_KC)), each.score_B, each.ramp
            )
        )
        return answers, outputs[len(late) :]

    def _end_together(self, late: Sequence[Leaving], segment: Segment, piece: Piece) -> Step[Piece]:
        """Runs the model's last blocks, and the shared head for all inputs of this batch that left on the way."""
        network = self._late
        assert network is not None
        last = network.num_blocks - 1
        hidden = network.run_blocks(segment.first, segment.end, piece.tensors, network.layout(piece.lengths_B))
        last_BD = network.before_head(last, network.gathered(last, hidden, piece.lengths_B))
        assert last_BD is not None, "the full model has the head that its ramps share"
        answers, (outputs_BC,) = self._together(late, (last, last_BD))
        opinion, state_BS = self._said(segment, piece, (), outputs_BC)
        return Step(answers=(*answers, *self._conclude(piece, opinion, state_BS).answers), survivors=None)

    def _step(self, segment: Segment, piece: Piece, answered: set[str], late: list[Leaving]) -> Step[Piece]:
        foresees = self._policy.foresees is not None and segment.ramp is not None
        values, outputs_BC = self._runner.run(replace(segment, ramp=None) if foresees else segment, piece)
        after = replace(piece, next_block=segment.end, tensors=values)
        if outputs_BC is None and not foresees:
            if not self._policy.foreknows:
                wait_for(self._network.device)  # or the batch's time would not be known
            return Step(answers=(), survivors=after)
        opinion, state_BS = self._said(segment, piece, values, outputs_BC)
        if segment.end == self._network.num_blocks:
            return self._conclude(piece, opinion, state_BS)
        assert segment.ramp is not None
        seen = self._look(segment.ramp, opinion, state_BS, piece) if segment.ramp in self._looks else ()
        if segment.ramp not in self._ramps:
            return Step(answers=(), survivors=after, seen=seen)
        verdict = self._policy.decide(segment.ramp, opinion, state_BS, piece.sample_ids)
        leave_B = verdict.leave_B.tolist()
        left = [k for k, leaves in enumerate(leave_B) if leaves and piece.sample_ids[k] not in answered]
        is_late = bool(left) and self._waits(late, piece, left, opinion, verdict, segment.ramp)
        answers: tuple[Answer, ...] = ()
        if left and not is_late:
            value_K = opinion.answers(left) if verdict.value_B is None else verdict.value_B[left]
            answers = _answers(piece, left, value_K, verdict.score_B, segment.ramp)
        after = replace(after, state_BS=to_device(verdict.state_BS, piece.state_BS.device))
        if self._stays:
            answered.update(answer.sample_id for answer in answers)
            return Step(answers=answers, survivors=after, seen=seen)
        if not left:
            return Step(answers=(), survivors=after)
        stay = [k for k, leaves in enumerate(leave_B) if not leaves]
        return Step(answers=answers, survivors=after.select(stay) if stay else None)

    def _said(
        self, segment: Segment, before: Piece, after: Tensors, outputs_BC: Tensor | None
    ) -> tuple[Opinion, Tensor]:
        """Returns the opinion of the exit at a segment's end, and the policy's state; None: no outputs yet."""
        if outputs_BC is None:
            assert self._late is not None
            assert segment.ramp is not None
            return Foreseen(self._late, segment.ramp, before, after), to_host(before.state_BS)
        said = outputs_BC, before.state_BS
        stay_there = self._policy.foreknows or self._network.task.large
        outputs_BC, state_BS = said if stay_there else all_to_host(said)
        return Opinion(self._network.task, outputs_BC), state_BS

    def _waits(
        self, late: list[Leaving], piece: Piece, left: list[int], opinion: Opinion, verdict: Verdict, ramp: int
    ) -> bool:
        """Whether the inputs that leave are answered at the batch's end, by the shared head; notes them then."""
        if self._stays or verdict.value_B is not None or not isinstance(opinion, Foreseen):
            return False
        rows_KD = opinion.before_head(left)
        if rows_KD is not None:
            late.append(Leaving(piece=piece, positions=left, score_B=verdict.score_B, ramp=ramp, rows_KD=rows_KD))
        return rows_KD is not None

    def _conclude(self, piece: Piece, opinion: Opinion, state_BS: Tensor) -> Step[Piece]:
        value_B, score_B = self._policy.conclude(opinion, state_BS, piece.sample_ids)
        last = self._network.num_blocks - 1
        answers = _answers(piece, range(len(piece)), value_B, score_B, last)
        if not self._stays:
            return Step(answers=answers, survivors=None)
        full_B = self._policy.full_answers(opinion, piece.sample_ids)
        seen = _seen(piece, full_B, [math.nan] * len(piece), last)
        return Step(answers=answers, survivors=None, seen=seen)

    def _look(self, ramp: int, opinion: Opinion, state_BS: Tensor, piece: Piece) -> tuple[ExitResult, ...]:
        score_B, value_B = self._policy.look(ramp, opinion, state_BS, piece.sample_ids)
        # A broken ramp, which may not even be active, costs the record of an input, not its answer.
        seen = _seen(piece, value_B, score_B.tolist(), ramp)
        finite_B = _are_finite(value_B).tolist()
        return tuple(each for each, finite in zip(seen, finite_B, strict=True) if finite and not math.isnan(each.score))


def _check(network: Network, first: int, end: int, ramps: tuple[int, ...], policy: ExitPolicy) -> None:
    if not 0 <= first < end <= network.num_blocks:
        raise PlanError(
            f"blocks {first} to {end - 1} are not in the model, whose blocks are 0 to {network.num_blocks - 1}"
        )
    unknown = sorted(set(ramps) - set(network.ramp_indices))
    if unknown:
        raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(network.ramp_indices)}")
    policy.check_ramps(ramps)
    if ramps:
        policy.check_task(network.task)
    if ramps and policy.foresees is not None:
        named = f"exit policy {policy.name!r}"
        if not isinstance(network, EarlyExitModel):
            raise PlanError(f"{named} asks ramps before their outputs; this network's cannot be asked")
        blind = [ramp for ramp in ramps if not isinstance(network.exit_head(ramp), NormedRamp)]
        if blind and policy.foresees == "classifier":
            raise PlanError(f"{named} asks a ramp's classifier, and ramps {blind} have none")


def _before_its_last(segment: Segment) -> tuple[Segment, ...]:
    """Splits a segment that ends at a ramp in two, so that the state before the ramp's block is known."""
    if segment.ramp is None or segment.first == segment.end - 1:
        return (segment,)
    last = segment.end - 1
    return Segment(first=segment.first, end=last, ramp=None), replace(segment, first=last)


def _seen(piece: Piece, value_B: Tensor, scores: Sequence[float], block: int) -> tuple[ExitResult, ...]:
    values = values_of(value_B.numpy(), pack=True)  # every exit's of an input; early answers leave in the same step
    return tuple(
        ExitResult(sample_id=sample_id, block=block, score=score, value=value)
        for sample_id, value, score in zip(piece.sample_ids, values, scores, strict=True)
    )


def _answers(
    piece: Piece, positions: list[int] | range, value_K: Tensor, score_B: Tensor, block: int
) -> tuple[Answer, ...]:
    scores = score_B.tolist()
    if any(map(math.isnan, scores)):
        raise ArithmeticError(f"the exit after block {block} gave scores that are not numbers")
    if value_K.is_floating_point() and not _are_finite(value_K).all():
        raise ArithmeticError(f"the exit after block {block} gave answers that are not finite")
    values = values_of(value_K.numpy())
    return tuple(
        Answer(sample_id=piece.sample_ids[k], value=value, score=scores[k], exit=block)
        for k, value in zip(positions, values, strict=True)
    )


def _are_finite(value_B: Tensor) -> Tensor:
    """Returns whether all numbers of each answer are finite, bool (B,)."""
    return value_B.reshape(len(value_B), -1).isfinite().all(1)


logger = logging.getLogger(__name__)


class TorchRunner:
    """A `Runner` of pieces: any split of the model, under one exit policy at a time.

    Inputs may come from replaced plans. No input leaves at an active ramp for which the policy has no threshold, and an
    input with another policy's state gets the initial state.
    """

    def __init__(
        self,
        network: Network,
        policy: ExitPolicy,
        segments: SegmentRunner | None = None,
        memory: Memory[Piece] | None = None,
    ) -> None:
        """`segments` computes all inputs but probes, once it is prepared; None for the network itself.

        `memory`: what the network keeps of sequences.
        """
        self.memory = memory
        self._network = network
        self._segments = None if segments is None or segments is network else _OnceReady(network, segments)
        self._prepared: SegmentRunner = segments or network
        self._regime = _Regime(policy)

    def from_wire(self, wire: WirePiece) -> Piece:
        return from_wire(self._network, wire, self._regime.policy)

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        regime = self._regime  # one policy decides a batch, even if another comes while it runs
        pieces = [self._in_state(member.payload, regime.policy) for member in batch.members]
        return self._cut(regime, batch.split, probe=batch.probe).run(fuse(pieces))

    def follow(self, policy: ExitPolicy) -> None:
        self._regime = _Regime(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        self._prepared.prepare({segment: split.budget for split in splits for segment in split.segments()})

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        network, policy = self._network, self._regime.policy
        lengths_B = np.full(size, min(warm_up_length(split, size), network.max_length), dtype=np.int32)
        return Piece(
            sample_ids=policy.warm_up_ids(size),
            next_block=split.first,
            lengths_B=lengths_B,
            tensors=arbitrary_tensors(network, split.first, lengths_B, np.random.default_rng(0)),
            state_BS=policy.initial_state(size, network.task.num_outputs, network.device),
        )

    def _cut(self, regime: _Regime, split: Split, *, probe: bool) -> Cut:
        """Returns the split's cut; raises PlanError for blocks or ramps that the model does not have."""
        if (split, probe) not in regime.cuts:
            ramps = tuple(ramp for ramp in split.ramps if regime.policy.can_decide(ramp))
            cut = Cut(self._network, split.first, split.end, ramps, regime.policy, self._segments)
            # A probe that no ramp can look at runs as any other input.
            if probe and any(map(regime.policy.can_look, self._network.ramp_indices)):
                cut = cut.for_probes()
            elif split.stays:
                cut = cut.staying()
            regime.cuts[split, probe] = cut
        return regime.cuts[split, probe]

    def _in_state(self, piece: Piece, policy: ExitPolicy) -> Piece:
        num_outputs, device = self._network.task.num_outputs, self._network.device
        width = policy.state_width(num_outputs)
        if piece.state_BS.shape[1] == width and (width == 0 or piece.state_BS.dtype == policy.state_dtype):
            return piece
        return replace(piece, state_BS=policy.initial_state(len(piece), num_outputs, device))


@dataclass(frozen=True, slots=True)
class _Regime:
    """A policy and the cuts that decide by it: one object, because it is replaced while the device runs."""

    policy: ExitPolicy
    cuts: dict[tuple[Split, bool], Cut] = field(default_factory=dict)
    """By split and whether the cut is for probes."""


class _OnceReady(SegmentRunner):
    """Runs segments by another runner as soon as it is ready for them; until then by the network itself."""

    def __init__(self, network: Network, segments: SegmentRunner) -> None:
        self._network = network
        self._segments = segments

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        if self._segments.is_ready(segment):
            return self._segments.run(segment, piece)
        logger.debug("blocks %d to %d are not prepared: the network itself runs them", segment.first, segment.end - 1)
        return self._network.run(segment, piece)
