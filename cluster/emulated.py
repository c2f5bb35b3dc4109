"""Accelerators that are not there: what leaves where is decided from exit records. Loads no torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from earlyexit.clock import Clock
from earlyexit.engine.device import Payload, Runner, Step, warm_up_length
from earlyexit.engine.engine import Batch, Dispatch
from earlyexit.engine.queue import Member
from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Budget, ExitResult, Lengths, Split, Value, WirePiece, values_of
from profiles.records import ExitRecords
from profiles.table import LatencyTable


class Pace:
    """Seconds of consecutive blocks at any number of inputs, up to the largest measured batch.

    Where lengths count, a batch is as large as so many inputs of the profile's length hold its tokens; that is no whole
    number. Interpolated once, here: a batch then costs its replica additions only.
    """

    def __init__(
        self, table: LatencyTable, ramps: tuple[int, ...], stretch: float, *, length: int | None = None
    ) -> None:
        """`length`: tokens of the inputs that the profile was measured with; None: inputs cost alike."""
        self.length = length
        sizes_X = np.arange(1, table.batches[-1] + 1, dtype=np.float64)
        block_s_NX = table.blocks_at(sizes_X) * stretch
        # Per number of inputs, the seconds before every block and, last, those of all blocks.
        self._before_s = np.vstack([np.zeros(len(sizes_X)), block_s_NX.cumsum(0)]).T.tolist()
        self._ramp_s = dict(zip(ramps, (table.ramps_at(sizes_X) * stretch).tolist(), strict=True))
        self._largest = table.batches[-1]

    def check_budget(self, budget: Budget) -> None:
        """Raise PlanError for batches about which the profile says nothing."""
        if self.length is None or budget.tokens is None:
            self.check_batch(budget.inputs)
        elif budget.tokens > self._largest * self.length:
            raise PlanError(
                f"the profile knows no batch of {budget.tokens} tokens: its largest is {self._largest} inputs of "
                f"{self.length}"
            )

    def check_batch(self, size: int) -> None:
        """Raise PlanError for a batch of so many inputs about which the profile says nothing."""
        if size > self._largest:
            raise PlanError(f"the profile knows no batch of {size}: its largest is {self._largest}")

    def size_of(self, num_inputs: int, num_tokens: int) -> float:
        """In inputs as the profile has them, how large a batch is."""
        return num_inputs if self.length is None else num_tokens / self.length

    def seconds(self, first: int, end: int, size: float, ramps: Collection[int]) -> float:
        """Of blocks first to end - 1 with `size` inputs inside, with those of the given ramps that are among them.

        Linear between whole numbers, as the profile is between its batch sizes; below 1 as at 1.
        """
        whole = int(size)
        at_s = self._whole_s(first, end, max(1, whole), ramps)
        if whole == size or whole < 1:
            return at_s
        return at_s + (size - whole) * (self._whole_s(first, end, whole + 1, ramps) - at_s)

    def seconds_of_any(self, first: int, end: int, size: float, ramps: Collection[int]) -> float:
        """The same for more inputs, too, than were ever measured: then as many times those of the largest batch."""
        measured = min(size, self._largest)
        return self.seconds(first, end, measured, ramps) * (size / measured)

    def split_s(self, split: Split, size: float) -> tuple[float, float]:
        """Seconds until a split's first active ramp or its end, and until its end, when no input leaves."""
        first_end = split.segments()[0].end
        return (
            self.seconds_of_any(split.first, first_end, size, split.ramps),
            self.seconds_of_any(split.first, split.end, size, split.ramps),
        )

    def _whole_s(self, first: int, end: int, size: int, ramps: Collection[int]) -> float:
        before_s = self._before_s[size - 1]
        ramp_s = sum([self._ramp_s[ramp][size - 1] for ramp in ramps if first <= ramp < end])
        return float(before_s[end] - before_s[first] + ramp_s)


@dataclass(slots=True, kw_only=True)
class _Step:
    """Consecutive blocks that one batch runs now."""

    pace: Pace
    first: int
    end: int
    ramps: Collection[int]
    inside: float
    """In inputs as the profile has them."""
    left_s: float
    """Of its seconds, were it alone."""


class Sharing:
    """What batches that run at once have left to do.

    PAME says only that "the co-location may slow down the current batch" (section 4.2). Here each batch is as slow as
    the latency profile has its blocks at the inputs of both together: where the profile is flat two small batches cost
    nothing more than one, where it is steep they share the accelerator by their sizes, and never do they do better
    than one batch of all of them would. Real devices may: two streams read the weights twice, but hide each other's
    gaps between kernels.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        """Until when all progress is counted."""
        self._steps: dict[int, _Step] = {}
        """By lane."""

    def __len__(self) -> int:
        return len(self._steps)

    def step(
        self, lane: int, pace: Pace, first: int, end: int, ramps: Collection[int], *, inside: float, at_s: float
    ) -> None:
        """Have a lane's batch begin blocks first to end - 1, with these active ramps, at `at_s`.

        Where that is before what is counted already, the batch has done as much since as it does now in that time.
        """
        self.advance(at_s)
        alone_s = pace.seconds_of_any(first, end, inside, ramps)
        step = _Step(pace=pace, first=first, end=end, ramps=ramps, inside=inside, left_s=alone_s)
        self._steps[lane] = step
        if at_s < self.now_s:
            step.left_s = max(0.0, alone_s - (self.now_s - at_s) * self._speed(step))

    def shrink(self, lane: int, inside: float, at_s: float) -> None:
        """A lane's step is over, at `at_s`; so many inputs are still inside, for another."""
        self.advance(at_s)
        self._steps[lane].inside, self._steps[lane].left_s = inside, 0.0

    def leave(self, lane: int, at_s: float) -> None:
        """A lane's batch is over, if one was there."""
        self.advance(at_s)
        self._steps.pop(lane, None)

    def due_s(self, lane: int) -> float:
        """When a lane's step is over, if nothing changes until then."""
        step = self._steps[lane]
        return self.now_s + step.left_s / self._speed(step)

    def advance(self, at_s: float) -> None:
        """Count what was done until then; what lies before `now_s` is counted."""
        if at_s > self.now_s:
            for step in self._steps.values():
                step.left_s = max(0.0, step.left_s - (at_s - self.now_s) * self._speed(step))
            self.now_s = at_s

    def _speed(self, step: _Step) -> float:
        """Of a step, 1 while it is alone."""
        together = sum(each.inside for each in self._steps.values())
        if together == step.inside or not step.left_s:
            return 1.0
        alone_s = step.pace.seconds_of_any(step.first, step.end, step.inside, step.ramps)
        return alone_s / max(alone_s, step.pace.seconds_of_any(step.first, step.end, together, step.ramps))


P = TypeVar("P", bound=Payload)


class PacedRunner(Runner[P]):
    """Another runner's steps, each not before the time that the emulated accelerator would have needed for it.

    Blocks count at the inputs really inside them, or at their tokens where lengths count; ramps where they are
    evaluated. A batch starts, for the emulated accelerator, as soon as the accelerator and the batch's last input were
    there: what this process needs between two batches costs it nothing.
    """

    def __init__(
        self,
        inner: Runner[P],
        table: LatencyTable,
        ramps: tuple[int, ...],
        *,
        time_scale: float,
        length: int | None = None,
        clock: Clock,
        sleep: Callable[[float], None],
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        """`length`: tokens of the profile's inputs; None: inputs cost alike, however long they are.

        `wait`: for so many seconds at most, or until the condition is told of a change.
        """
        self.inner = inner
        self.memory = inner.memory
        self.pace = Pace(table, ramps, time_scale, length=length)
        self.dispatch: Dispatch = "work-conserving"
        """Of the engine it runs for; a deferred batch that is not full was waited with, and starts when chosen."""
        self._ramps = ramps
        self._clock = clock
        self._sleep = sleep
        self._wait = wait
        self._free_s = -math.inf
        self._stayed: dict[int, tuple[str, ...]] = {}
        """By lane."""
        self._changed = threading.Condition()
        """Of what follows: another batch began, shrank or ended."""
        self._sharing = Sharing()

    def from_wire(self, wire: WirePiece) -> P:
        return self.inner.from_wire(wire)

    def follow(self, policy: Any) -> None:
        self.inner.follow(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        """Raises PlanError for batches above the profile's, too."""
        for split in splits:
            self.pace.check_budget(split.budget)
        self.inner.prepare(splits)

    def warm_up_pieces(self, split: Split, size: int) -> P:
        return self.inner.warm_up_pieces(split, size)

    def run(self, batch: Batch[P]) -> Iterator[Step[P]]:
        """With a batch in each of two threads, each is as slow as `Sharing` says."""
        if self.pace.length is None:
            self.pace.check_batch(len(batch.members))
        with self._changed:
            is_shared = batch.split.overlap_below is not None or len(self._sharing) > 0
        return self._run_shared(batch) if is_shared else self._run_alone(batch)

    def _run_alone(self, batch: Batch[P]) -> Iterator[Step[P]]:
        evaluated, size_of = self._evaluated(batch), _sizes_in(batch, self.pace)
        at_block, inside, due_s = batch.split.first, size_of(_ids_of(batch)), self._start_s(batch)
        for step in self.inner.run(batch):
            end = _end_of(step)
            due_s += self.pace.seconds_of_any(at_block, end, inside, evaluated)
            stay = () if step.survivors is None else step.survivors.sample_ids
            with self._changed:
                self._free_s = due_s
                self._stayed[batch.lane] = stay
            self._sleep_until(due_s)
            yield step
            at_block, inside = end, size_of(stay)

    def _run_shared(self, batch: Batch[P]) -> Iterator[Step[P]]:
        evaluated, size_of, lane = self._evaluated(batch), _sizes_in(batch, self.pace), batch.lane
        at_block, inside, due_s = batch.split.first, size_of(_ids_of(batch)), self._start_s(batch)
        try:
            for step in self.inner.run(batch):
                end, stay = _end_of(step), () if step.survivors is None else step.survivors.sample_ids
                with self._changed:
                    self._sharing.step(lane, self.pace, at_block, end, evaluated, inside=inside, at_s=due_s)
                    due_s = self._wait_shared(lane)
                    self._sharing.shrink(lane, size_of(stay), due_s)
                    self._free_s = max(self._free_s, due_s)
                    self._stayed[lane] = stay
                    self._changed.notify_all()
                yield step
                at_block, inside = end, size_of(stay)
        finally:  # whether it ended, failed, or is not wanted any more
            with self._changed:
                self._sharing.leave(lane, due_s)
                self._changed.notify_all()

    def _wait_shared(self, lane: int) -> float:
        """Until a lane's step is over, however the other's changes meanwhile; gives when that was."""
        self._changed.notify_all()
        while (left_s := (due_s := self._sharing.due_s(lane)) - self._clock.now_s()) > 0:
            self._wait(self._changed, left_s)
        return due_s

    def _evaluated(self, batch: Batch[P]) -> tuple[int, ...]:
        return self._ramps if batch.probe else batch.split.ramps

    def _start_s(self, batch: Batch[P]) -> float:
        with self._changed:  # another lane writes them
            free_s, stayed = self._free_s, {each for sample_ids in self._stayed.values() for each in sample_ids}
        # A batch that tokens filled waited too: for an input that may not be in it.
        if self.dispatch == "deferred" and len(batch.members) < batch.split.batch:
            return max(free_s, batch.started_s)
        # An input that stayed on the device was here when the batch before ended, whenever it was queued again.
        return max([free_s, *[member.since_s for member in batch.members if member.sample_id not in stayed]])

    def _sleep_until(self, due_s: float) -> None:
        left_s = due_s - self._clock.now_s()
        if left_s > 0:
            self._sleep(left_s)


def _end_of(step: Step[Any]) -> int:
    """The block that a step's survivors wait for, or would."""
    return step.answers[-1].exit + 1 if step.survivors is None else step.survivors.next_block


def _sizes_in(batch: Batch[Any], pace: Pace) -> Callable[[Sequence[str]], float]:
    """How large some of a batch's inputs are together, by their sample ids, as the profile counts."""
    if pace.length is None:
        return len
    tokens_of = {member.sample_id: member.tokens for member in batch.members}
    return lambda sample_ids: pace.size_of(len(sample_ids), sum([tokens_of[each] for each in sample_ids]))


def _ids_of(batch: Batch[Any]) -> list[str]:
    return [member.sample_id for member in batch.members]


IntArray = npt.NDArray[np.int64]
NOWHERE = -1
"""The ramp of an input that none lets leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPiece:
    """Inputs on their way through a model that is not computed: their ids, without a hidden state."""

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, keep: Sequence[int]) -> EmulatedPiece:
        """The inputs at the given positions, in the given order."""
        return self.at(self.next_block, keep)

    def singles(self) -> list[EmulatedPiece]:
        """One piece per input."""
        return [
            EmulatedPiece(sample_ids=(sample_id,), next_block=self.next_block, lengths_B=self.lengths_B[k : k + 1])
            for k, sample_id in enumerate(self.sample_ids)
        ]

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        """For another process, without values."""
        return WirePiece(
            sample_ids=self.sample_ids,
            next_block=self.next_block,
            lengths_B=self.lengths_B,
            tensors=(),
            state_BS=None,
        )

    def at(self, next_block: int, keep: Sequence[int]) -> EmulatedPiece:
        """The inputs at the given positions, further on."""
        return EmulatedPiece(
            sample_ids=tuple([self.sample_ids[k] for k in keep]),
            next_block=next_block,
            lengths_B=self.lengths_B[list(keep)],
        )


def _together(members: Sequence[Member[EmulatedPiece]]) -> EmulatedPiece:
    return EmulatedPiece(
        sample_ids=tuple([member.sample_id for member in members]),
        next_block=members[0].payload.next_block,
        lengths_B=np.concatenate([member.payload.lengths_B for member in members]),
    )


class RecordedRunner(Runner[EmulatedPiece]):
    """Decides from exit records, by sample id (up to its last `#`, so that one record can be asked many times)."""

    def __init__(self, records: ExitRecords, num_blocks: int, *, has_tokens: bool = True) -> None:
        """`has_tokens`: whether inputs have lengths; images, say, have none."""
        self._records = records
        self._answers_NE = records.answers()
        self._num_blocks = num_blocks
        self._has_tokens = has_tokens
        self._column_of = {ramp: column for column, ramp in enumerate(records.ramps)}
        self._row_of = {sample_id: row for row, sample_id in enumerate(records.sample_ids)}
        self._thresholds: dict[int, float] = {}
        self._sure_NR = np.zeros(records.scores_NR.shape, dtype=bool)

    def from_wire(self, wire: WirePiece) -> EmulatedPiece:
        return EmulatedPiece(sample_ids=wire.sample_ids, next_block=wire.next_block, lengths_B=wire.lengths_B)

    def follow(self, policy: Mapping[int, float] | float | None) -> None:
        """Take the thresholds, one per ramp or one for all, in the records' unit; None where no ramp is active."""
        given = policy if isinstance(policy, Mapping) else dict.fromkeys(self._records.ramps, policy)
        thresholds = {ramp: limit for ramp in self._records.ramps if (limit := given.get(ramp)) is not None}
        if thresholds != self._thresholds:
            self._sure_NR = self._records.sure_NR(thresholds)
            self._thresholds = thresholds

    def prepare(self, splits: Sequence[Split]) -> None:
        """Raises PlanError for active ramps that were not recorded."""
        missing = sorted({ramp for split in splits for ramp in split.ramps} - set(self._records.ramps))
        if missing:
            raise PlanError(f"the exit records hold no ramps {missing}; they hold {list(self._records.ramps)}")

    def warm_up_pieces(self, split: Split, size: int) -> EmulatedPiece:
        known = self._records.sample_ids[0]
        return EmulatedPiece(
            sample_ids=tuple(f"{known}#{k}" for k in range(size)),
            next_block=split.first,
            lengths_B=np.full(size, warm_up_length(split, size) if self._has_tokens else 1, dtype=np.int32),
        )

    def run(self, batch: Batch[EmulatedPiece]) -> Iterator[Step[EmulatedPiece]]:
        """One step for every ramp where an input leaves, or that looks, and one for the split's end.

        Where inputs stay the active ramps look; where they are probes, all that were recorded. At a ramp without a
        threshold, of a plan that another has replaced, no input leaves. Raises UnprocessableInputError for ids without
        records.
        """
        rows_B = np.array([self._row(member.sample_id) for member in batch.members], dtype=np.int64)
        asked = self._records.ramps if batch.probe else batch.split.ramps if batch.stays else ()
        looks = self._column_of.keys() & asked
        return self._steps(batch, looks, rows_B, self._exits(batch.split.ramps, rows_B))

    def _exits(self, ramps: Sequence[int], rows_B: IntArray) -> list[int]:
        """The first of the ramps where each input is sure enough; NOWHERE for those that leave nowhere."""
        active = [ramp for ramp in ramps if ramp in self._thresholds]
        if not active:
            return [NOWHERE] * len(rows_B)
        sure_BA = self._sure_NR[rows_B[:, None], [self._column_of[ramp] for ramp in active]]
        exits_B = np.where(sure_BA.any(1), np.array(active)[sure_BA.argmax(1)], NOWHERE)
        exits: list[int] = exits_B.tolist()
        return exits

    def _steps(
        self, batch: Batch[EmulatedPiece], looks: set[int], rows_B: IntArray, exits: list[int]
    ) -> Iterator[Step[EmulatedPiece]]:
        split, all_of_it = batch.split, _together(batch.members)
        inside = list(range(len(all_of_it)))
        for ramp in sorted(ramp for ramp in looks.union(exits) if split.first <= ramp < split.end):
            left = [k for k in inside if exits[k] == ramp]
            if not batch.stays:
                inside = [k for k in inside if exits[k] != ramp]
            yield Step(
                answers=self._early(ramp, all_of_it, left, rows_B),
                survivors=all_of_it.at(ramp + 1, inside) if inside else None,
                seen=self._seen(ramp, all_of_it, rows_B) if ramp in looks else (),
            )
            if not inside or ramp + 1 == split.end:
                return
        end = self._end(split, all_of_it, inside, rows_B)
        yield replace(end, seen=tuple(map(_full_model, end.answers))) if batch.stays else end

    def _early(self, ramp: int, inside: EmulatedPiece, left: Sequence[int], rows_B: IntArray) -> tuple[Answer, ...]:
        if not left:
            return ()
        said = self._said(ramp, rows_B[left])
        return tuple(
            [
                Answer(sample_id=inside.sample_ids[k], value=value, score=score, exit=ramp)
                for k, (value, score) in zip(left, said, strict=True)
            ]
        )

    def _seen(self, ramp: int, inside: EmulatedPiece, rows_B: IntArray) -> tuple[ExitResult, ...]:
        return tuple(
            ExitResult(sample_id=sample_id, block=ramp, score=score, value=value)
            for sample_id, (value, score) in zip(inside.sample_ids, self._said(ramp, rows_B), strict=True)
        )

    def _said(self, ramp: int, rows_X: IntArray) -> list[tuple[Value, float]]:
        column = self._column_of[ramp]
        answers = values_of(self._answers_NE[rows_X, column])
        return list(zip(answers, self._records.scores_NR[rows_X, column].tolist(), strict=True))

    def _end(self, split: Split, inside: EmulatedPiece, stay: Sequence[int], rows_B: IntArray) -> Step[EmulatedPiece]:
        if split.end < self._num_blocks:
            return Step(answers=(), survivors=inside.at(split.end, stay))
        answers = values_of(self._answers_NE[rows_B[list(stay)], -1])
        return Step(
            answers=tuple(
                [
                    Answer(sample_id=inside.sample_ids[k], value=value, score=1.0, exit=split.end - 1)
                    for k, value in zip(stay, answers, strict=True)
                ]
            ),
            survivors=None,
        )

    def _row(self, sample_id: str) -> int:
        known = sample_id.rpartition("#")[0] or sample_id
        row = self._row_of.get(known)
        if row is None:
            raise UnprocessableInputError(f"no exit records of the id {known!r}; send the `ids` of recorded inputs")
        return row


def _full_model(answer: Answer) -> ExitResult:
    return ExitResult(sample_id=answer.sample_id, block=answer.exit, score=math.nan, value=answer.value)
