"""Emulated accelerators: times come from latency profiles, and exits from exit records. Does not import torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.clock import Clock
from earlyexit.engine.device import PayloadT, Runner, Step, warm_up_length
from earlyexit.engine.engine import Batch, Dispatch
from earlyexit.engine.queue import Member
from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Budget, Lengths, Split, WirePiece, values_of
from profiles.records import ExitRecords
from profiles.table import LatencyTable


class Pace:
    """Interpolates the seconds of consecutive blocks for any batch size, from a latency profile.

    If lengths count, the size of a batch is its tokens divided by the length of the profile's inputs, so it is not
    always a whole number. The constructor interpolates all whole sizes, so that a lookup takes only additions.
    """

    def __init__(
        self, table: LatencyTable, ramps: tuple[int, ...], stretch: float, *, length: int | None = None
    ) -> None:
        """`length`: tokens per input in the profile; None if the cost of an input does not depend on its length."""
        self.length = length
        sizes_X = np.arange(1, table.batches[-1] + 1, dtype=np.float64)
        block_s_NX = table.blocks_at(sizes_X) * stretch
        # For each batch size: the seconds before every block, then the seconds of all blocks.
        self._before_s = np.vstack([np.zeros(len(sizes_X)), block_s_NX.cumsum(0)]).T.tolist()
        self._ramp_s = dict(zip(ramps, (table.ramps_at(sizes_X) * stretch).tolist(), strict=True))
        self._largest = table.batches[-1]

    def check_budget(self, budget: Budget) -> None:
        """Raises PlanError if batches may become larger than the profile's largest batch."""
        if self.length is None or budget.tokens is None:
            self.check_batch(budget.inputs)
        elif budget.tokens > self._largest * self.length:
            raise PlanError(
                f"the profile has no batch of {budget.tokens} tokens: its largest is {self._largest} inputs of "
                f"{self.length} tokens"
            )

    def check_batch(self, size: int) -> None:
        """Raises PlanError if a batch of `size` inputs is larger than the profile's largest batch."""
        if size > self._largest:
            raise PlanError(f"the profile has no batch of {size}: its largest is {self._largest}")

    def size_of(self, num_inputs: int, num_tokens: int) -> float:
        """Returns the size of a batch in inputs of the profile's length."""
        return num_inputs if self.length is None else num_tokens / self.length

    def seconds(self, first: int, end: int, size: float, ramps: Collection[int]) -> float:
        """Returns the seconds of blocks first to end - 1, and of those `ramps` that are after them, at a batch size.

        Sizes between whole numbers are interpolated linearly; sizes below 1 count as 1.
        """
        whole = int(size)
        lower_s = self._whole_s(first, end, max(1, whole), ramps)
        if whole == size or whole < 1:
            return lower_s
        return lower_s + (size - whole) * (self._whole_s(first, end, whole + 1, ramps) - lower_s)

    def seconds_of_any(self, first: int, end: int, size: float, ramps: Collection[int]) -> float:
        """Returns `seconds` also above the largest measured batch, where they grow in proportion to the size."""
        measured = min(size, self._largest)
        return self.seconds(first, end, measured, ramps) * (size / measured)

    def split_s(self, split: Split, size: float) -> tuple[float, float]:
        """Returns the seconds until a split's first active ramp (or its end), and until its end if no input leaves."""
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
    """Consecutive blocks that one batch is running."""

    pace: Pace
    first: int
    end: int
    ramps: Collection[int]
    inside: float
    """Size of the batch in inputs of the profile's length."""
    left_s: float
    """Remaining seconds if the batch were alone on the accelerator."""


class Sharing:
    """Tracks the remaining work of batches that run on one accelerator at the same time.

    PAME says only that "the co-location may slow down the current batch" (section 4.2). In this model, a batch runs as
    slowly as the profile's time for the sum of all batches' sizes. Where the profile is flat, two small batches cost
    no more than one. Where it is steep, they share the accelerator in proportion to their sizes. Concurrent batches are
    never faster than one combined batch. Real devices may be faster: two streams read the weights twice, but each fills
    the gaps between the other's kernels.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        """The time up to which progress has been counted."""
        self._steps: dict[int, _Step] = {}
        """The running step of each lane."""

    def __len__(self) -> int:
        return len(self._steps)

    def step(
        self, lane: int, pace: Pace, first: int, end: int, ramps: Collection[int], *, inside: float, at_s: float
    ) -> None:
        """Starts blocks first to end - 1 with these active ramps in a lane's batch, at `at_s`.

        If `at_s` is before `now_s`, the time between them counts as progress at the batch's present speed.
        """
        self.advance(at_s)
        alone_s = pace.seconds_of_any(first, end, inside, ramps)
        step = _Step(pace=pace, first=first, end=end, ramps=ramps, inside=inside, left_s=alone_s)
        self._steps[lane] = step
        if at_s < self.now_s:
            step.left_s = max(0.0, alone_s - (self.now_s - at_s) * self._speed(step))

    def shrink(self, lane: int, inside: float, at_s: float) -> None:
        """Ends a lane's step at `at_s`. `inside`: the size of the batch that remains for the lane's next step."""
        self.advance(at_s)
        self._steps[lane].inside, self._steps[lane].left_s = inside, 0.0

    def leave(self, lane: int, at_s: float) -> None:
        """Removes a lane's batch, if there is one."""
        self.advance(at_s)
        self._steps.pop(lane, None)

    def due_s(self, lane: int) -> float:
        """Returns the time at which a lane's step ends if no batch starts, shrinks or ends before."""
        step = self._steps[lane]
        return self.now_s + step.left_s / self._speed(step)

    def advance(self, at_s: float) -> None:
        """Counts the progress of all lanes up to `at_s`. Does nothing if `at_s` is before `now_s`."""
        if at_s > self.now_s:
            for step in self._steps.values():
                step.left_s = max(0.0, step.left_s - (at_s - self.now_s) * self._speed(step))
            self.now_s = at_s

    def _speed(self, step: _Step) -> float:
        """Returns the speed of a step relative to running alone, above 0 and at most 1."""
        total = sum(each.inside for each in self._steps.values())
        if total == step.inside or not step.left_s:
            return 1.0
        alone_s = step.pace.seconds_of_any(step.first, step.end, step.inside, step.ramps)
        return alone_s / max(alone_s, step.pace.seconds_of_any(step.first, step.end, total, step.ramps))


class PacedRunner(Runner[PayloadT]):
    """Delays the steps of another runner until the emulated accelerator would have finished them.

    A block is charged for the inputs (or tokens) that are still in the batch, and a ramp only where it is evaluated. A
    batch counts as started when the accelerator was free and the batch's last input had arrived, so this process's own
    overhead between two batches is not charged.
    """

    def __init__(
        self,
        inner: Runner[PayloadT],
        table: LatencyTable,
        ramps: tuple[int, ...],
        *,
        time_scale: float,
        length: int | None = None,
        clock: Clock,
        sleep: Callable[[float], None],
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        """`length`: tokens per input in the profile; None if the cost of an input does not depend on its length.

        `wait` waits on a condition, at most for the given seconds, and returns early if the condition is notified.
        """
        self.inner = inner
        self.memory = inner.memory
        self.pace = Pace(table, ramps, time_scale, length=length)
        self.dispatch: Dispatch = "work-conserving"
        """The engine's dispatch mode. With "deferred", a partial batch waited on purpose and starts when chosen."""
        self._ramps = ramps
        self._clock = clock
        self._sleep = sleep
        self._wait = wait
        self._free_s = -math.inf
        self._stayed: dict[int, tuple[str, ...]] = {}
        """By lane: the sample ids of survivors of the latest step."""
        self._changed = threading.Condition()
        """Guards the fields above and `_sharing`; notified when a batch begins, shrinks or ends."""
        self._sharing = Sharing()

    def from_wire(self, wire: WirePiece) -> PayloadT:
        return self.inner.from_wire(wire)

    def follow(self, policy: Any) -> None:
        self.inner.follow(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        """Raises PlanError also for batches that are larger than the profile's largest."""
        for split in splits:
            self.pace.check_budget(split.budget)
        self.inner.prepare(splits)

    def warm_up_pieces(self, split: Split, size: int) -> PayloadT:
        return self.inner.warm_up_pieces(split, size)

    def run(self, batch: Batch[PayloadT]) -> Iterator[Step[PayloadT]]:
        """Yields the steps of a batch. Batches of two threads at the same time slow each other down (see `Sharing`)."""
        if self.pace.length is None:
            self.pace.check_batch(len(batch.members))
        with self._changed:
            is_shared = batch.split.overlap_below is not None or len(self._sharing) > 0
        return self._run_shared(batch) if is_shared else self._run_alone(batch)

    def _run_alone(self, batch: Batch[PayloadT]) -> Iterator[Step[PayloadT]]:
        evaluated, size_of = self._evaluated(batch), _sizes_in(batch, self.pace)
        inside = self.pace.size_of(len(batch.members), batch.tokens)
        at_block, due_s = batch.split.first, self._start_s(batch)
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

    def _run_shared(self, batch: Batch[PayloadT]) -> Iterator[Step[PayloadT]]:
        evaluated, size_of, lane = self._evaluated(batch), _sizes_in(batch, self.pace), batch.lane
        inside = self.pace.size_of(len(batch.members), batch.tokens)
        at_block, due_s = batch.split.first, self._start_s(batch)
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
        finally:  # the batch ended or failed, or the caller stopped the iteration
            with self._changed:
                self._sharing.leave(lane, due_s)
                self._changed.notify_all()

    def _wait_shared(self, lane: int) -> float:
        """Waits until a lane's step is over, and returns its end. Changes in the other lane move the end."""
        self._changed.notify_all()
        due_s = self._sharing.due_s(lane)
        while (left_s := due_s - self._clock.now_s()) > 0:
            self._wait(self._changed, left_s)
            due_s = self._sharing.due_s(lane)
        return due_s

    def _evaluated(self, batch: Batch[PayloadT]) -> tuple[int, ...]:
        return self._ramps if batch.probe else batch.split.ramps

    def _start_s(self, batch: Batch[PayloadT]) -> float:
        with self._changed:  # another lane writes these fields
            free_s, stayed = self._free_s, {each for sample_ids in self._stayed.values() for each in sample_ids}
        # A batch that is full by tokens also waited, for an input that may have gone into another batch.
        if self.dispatch == "deferred" and len(batch.members) < batch.split.batch:
            return max(free_s, batch.started_s)
        # Survivors of the previous batch were on the device when it ended, although they were queued again later.
        return max([free_s, *[member.since_s for member in batch.members if member.sample_id not in stayed]])

    def _sleep_until(self, due_s: float) -> None:
        left_s = due_s - self._clock.now_s()
        if left_s > 0:
            self._sleep(left_s)


def _end_of(step: Step[Any]) -> int:
    """Returns the block after the last one that a step ran."""
    return step.answers[-1].exit + 1 if step.survivors is None else step.survivors.next_block


def _sizes_in(batch: Batch[Any], pace: Pace) -> Callable[[Sequence[str]], float]:
    """Returns a function from sample ids of a batch to their total size, in inputs of the profile's length."""
    if pace.length is None:
        return len
    tokens_of = {member.sample_id: member.tokens for member in batch.members}
    return lambda sample_ids: pace.size_of(len(sample_ids), sum([tokens_of[each] for each in sample_ids]))


IntArray = npt.NDArray[np.int64]
NO_EXIT = -1
"""Stands for the ramp of an input that leaves at none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPiece:
    """Inputs of a model that is not computed: sample ids and lengths, without hidden states."""

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, keep: Sequence[int]) -> EmulatedPiece:
        """Returns the inputs at the given positions, in the given order."""
        return self.at(self.next_block, keep)

    def singles(self) -> list[EmulatedPiece]:
        """Returns one piece per input."""
        return [
            EmulatedPiece(sample_ids=(sample_id,), next_block=self.next_block, lengths_B=self.lengths_B[k : k + 1])
            for k, sample_id in enumerate(self.sample_ids)
        ]

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        """Returns the piece in the form for another process, without tensors."""
        return WirePiece(
            sample_ids=self.sample_ids,
            next_block=self.next_block,
            lengths_B=self.lengths_B,
            tensors=(),
            state_BS=None,
        )

    def at(self, next_block: int, keep: Sequence[int]) -> EmulatedPiece:
        """Returns the inputs at the given positions, which next run block `next_block`."""
        return EmulatedPiece(
            sample_ids=tuple([self.sample_ids[k] for k in keep]),
            next_block=next_block,
            lengths_B=self.lengths_B[list(keep)],
        )


def _concatenated(members: Sequence[Member[EmulatedPiece]]) -> EmulatedPiece:
    return EmulatedPiece(
        sample_ids=tuple([member.sample_id for member in members]),
        next_block=members[0].payload.next_block,
        lengths_B=np.concatenate([member.payload.lengths_B for member in members]),
    )


class RecordedRunner(Runner[EmulatedPiece]):
    """Takes exits and answers from exit records, by sample id.

    The part of a sample id after its last `#` is ignored, so that several inputs can use the same record.
    """

    def __init__(self, records: ExitRecords, num_blocks: int, *, has_tokens: bool = True) -> None:
        """`has_tokens`: whether inputs have lengths in tokens. Images, for example, have none."""
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
        """Sets the thresholds in the records' unit: one per ramp, one for all ramps, or None if no ramp is active."""
        by_ramp = policy if isinstance(policy, Mapping) else dict.fromkeys(self._records.ramps, policy)
        thresholds = {ramp: limit for ramp in self._records.ramps if (limit := by_ramp.get(ramp)) is not None}
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
        """Yields one step for every ramp where an input leaves or that is observed, and one for the split's end.

        Probes observe all recorded ramps, and batches of inputs that stay observe the active ramps. No input leaves at
        a ramp without a threshold, as in a plan that was replaced. Raises UnprocessableInputError for unknown ids.
        """
        rows_B = np.array([self._row(member.sample_id) for member in batch.members], dtype=np.int64)
        observed: Sequence[int] = batch.split.ramps if batch.stays else ()
        if batch.probe:
            observed = self._records.ramps
        return self._steps(batch, self._column_of.keys() & observed, rows_B, self._exits(batch.split.ramps, rows_B))

    def _exits(self, ramps: Sequence[int], rows_B: IntArray) -> list[int]:
        """Returns the first ramp at which each input leaves, or NO_EXIT."""
        active = [ramp for ramp in ramps if ramp in self._thresholds]
        if not active:
            return [NO_EXIT] * len(rows_B)
        sure_BA = self._sure_NR[rows_B[:, None], [self._column_of[ramp] for ramp in active]]
        exits_B = np.where(sure_BA.any(1), np.array(active)[sure_BA.argmax(1)], NO_EXIT)
        exits: list[int] = exits_B.tolist()
        return exits

    def _steps(
        self, batch: Batch[EmulatedPiece], observed: set[int], rows_B: IntArray, exits: list[int]
    ) -> Iterator[Step[EmulatedPiece]]:
        split, piece = batch.split, _concatenated(batch.members)
        inside = list(range(len(piece)))
        for ramp in sorted(ramp for ramp in observed.union(exits) if split.first <= ramp < split.end):
            leaving = [k for k in inside if exits[k] == ramp]
            if not batch.stays:
                inside = [k for k in inside if exits[k] != ramp]
            yield Step(
                answers=self._answers(ramp, piece, leaving, rows_B),
                survivors=piece.at(ramp + 1, inside) if inside else None,
                seen=self._answers(ramp, piece, range(len(piece)), rows_B) if ramp in observed else (),
            )
            if not inside or ramp + 1 == split.end:
                return
        end = self._end(split, piece, inside, rows_B)
        yield replace(end, seen=tuple(replace(each, score=math.nan) for each in end.answers)) if batch.stays else end

    def _answers(
        self, ramp: int, piece: EmulatedPiece, positions: Sequence[int], rows_B: IntArray
    ) -> tuple[Answer, ...]:
        """Returns the recorded answers of a ramp for the inputs at these positions."""
        if not positions:
            return ()
        rows_X, column = rows_B[list(positions)], self._column_of[ramp]
        values, scores = values_of(self._answers_NE[rows_X, column]), self._records.scores_NR[rows_X, column].tolist()
        return tuple(
            [
                Answer(sample_id=piece.sample_ids[k], value=value, score=score, exit=ramp)
                for k, value, score in zip(positions, values, scores, strict=True)
            ]
        )

    def _end(self, split: Split, piece: EmulatedPiece, inside: Sequence[int], rows_B: IntArray) -> Step[EmulatedPiece]:
        if split.end < self._num_blocks:
            return Step(answers=(), survivors=piece.at(split.end, inside))
        values = values_of(self._answers_NE[rows_B[list(inside)], -1])
        answers = [
            Answer(sample_id=piece.sample_ids[k], value=value, score=1.0, exit=split.end - 1)
            for k, value in zip(inside, values, strict=True)
        ]
        return Step(answers=tuple(answers), survivors=None)

    def _row(self, sample_id: str) -> int:
        known = sample_id.rpartition("#")[0] or sample_id
        row = self._row_of.get(known)
        if row is None:
            raise UnprocessableInputError(f"no exit record for the id {known!r}; send the `ids` of recorded inputs")
        return row
