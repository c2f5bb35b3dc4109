"""One device with the live batch engine and its orders, whose batches take what a scheme's layout costs.

No ingress and no network, as in TCB's own evaluation: requests reach the device's queue when they arrive.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.engine import Batch, BatchEngine
from earlyexit.member import Member
from earlyexit.order import OrderSpec
from earlyexit.split import Split
from earlyexit.times import ObservedTimes
from experiments.tcb.cost import Cost
from experiments.tcb.schemes import Run, Scheme, layout
from simulator.decisions import BoolArray, IntArray
from simulator.scenario import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How batches are bounded, chosen and laid out."""

    scheme: Scheme
    inputs: int
    """At most, in a batch."""
    tokens: int | None = None
    """At most, in a batch."""
    row: int = 0
    """Tokens of a row, for schemes with rows."""

    @property
    def split(self) -> Split:
        """The whole model, as one split."""
        return Split(first=0, end=1, batch=self.inputs, tokens=self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """Requests of one input each."""

    arrivals_s: FloatArray
    """Ascending."""
    lengths: IntArray
    deadlines_s: FloatArray
    """On the same clock as the arrivals; infinite where there are none."""

    def __len__(self) -> int:
        return len(self.arrivals_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """What came of a stream."""

    stream: Stream
    done_s_N: FloatArray
    """When each was answered; NaN: dropped."""
    began_s_N: FloatArray
    """When each one's batch began; NaN: dropped."""
    batch_s: FloatArray
    """Of every batch."""
    batch_inputs: IntArray
    choosing_s: FloatArray
    """Processor time here that the engine took to choose each batch."""
    ended_s: float

    @property
    def scheduled_N(self) -> BoolArray:
        """Whose batch began before the deadline: what TCB counts (section 5.1)."""
        return self.began_s_N <= self.stream.deadlines_s

    @property
    def in_time_N(self) -> BoolArray:
        """Who was answered by the deadline: what callers count."""
        return self.done_s_N <= self.stream.deadlines_s

    def per_s(self, counted_N: BoolArray) -> float:
        """So many of these requests per second of the run."""
        return float(counted_N.sum()) / self.ended_s

    def utility_per_s(self, counted_N: BoolArray) -> float:
        """Their sum of 1 / length (TCB, section 5.1) per second of the run."""
        return float((1 / self.stream.lengths[counted_N]).sum()) / self.ended_s

    @property
    def longest_wait_s(self) -> float:
        """Of those who were answered, until their batch began."""
        return float(np.nanmax(self.began_s_N - self.stream.arrivals_s))


def serve(stream: Stream, side: Side, order: OrderSpec, cost: Cost) -> Served:
    """Run a stream to its end: whenever the device is free, the engine's next batch."""
    device = _Device(stream, side, order)
    while (batch := device.next_batch()) is not None:
        device.run(batch, layout(side.scheme, [member.tokens for member in batch.members], cost, row=side.row), cost)
    return device.served()


class _Device:
    """The state of a run."""

    def __init__(self, stream: Stream, side: Side, order: OrderSpec) -> None:
        self._stream, self._now_s, self._submitted = stream, 0.0, 0
        self._engine: BatchEngine[int] = BatchEngine([side.split], ObservedTimes(), order=order)
        self._members = _members(stream)
        self._began_s_N, self._done_s_N = np.full(len(stream), np.nan), np.full(len(stream), np.nan)
        self._took_s: list[float] = []
        self._sizes: list[int] = []
        self._choosing_s: list[float] = []

    def next_batch(self) -> Batch[int] | None:
        """Of those who have arrived; where nobody waits, of who arrives next. None at the end."""
        while True:
            self._arrive()
            began_s = time.thread_time()
            batch = self._engine.choose(self._now_s).batch
            if batch is not None:
                self._choosing_s.append(time.thread_time() - began_s)
                return batch
            if self._submitted == len(self._stream):
                return None
            self._now_s = float(self._stream.arrivals_s[self._submitted])

    def run(self, batch: Batch[int], runs: Sequence[Run], cost: Cost) -> None:
        """The batch's runs, one after the other; each one's inputs have their answers when it ends."""
        numbers = [member.payload for member in batch.members]
        self._began_s_N[numbers] = self._now_s
        ends_s = np.cumsum([cost.seconds(run.work) for run in runs])
        for run, end_s in zip(runs, ends_s, strict=True):
            self._done_s_N[[numbers[position] for position in run.positions]] = self._now_s + end_s
        total_s = float(ends_s[-1])
        self._engine.finished(batch, first_s=float(ends_s[0]), total_s=total_s)
        self._took_s.append(total_s)
        self._sizes.append(len(numbers))
        self._now_s += total_s

    def served(self) -> Served:
        """All that was seen."""
        return Served(
            stream=self._stream,
            done_s_N=self._done_s_N,
            began_s_N=self._began_s_N,
            batch_s=np.array(self._took_s),
            batch_inputs=np.array(self._sizes, dtype=np.int64),
            choosing_s=np.array(self._choosing_s),
            ended_s=max(self._now_s, float(self._stream.arrivals_s[-1])),
        )

    def _arrive(self) -> None:
        until = int(np.searchsorted(self._stream.arrivals_s, self._now_s, side="right"))
        for number in range(self._submitted, until):
            self._engine.submit(0, [self._members[number]], float(self._stream.arrivals_s[number]))
        self._submitted = until


def _members(stream: Stream) -> Sequence[Member[int]]:
    return [
        Member(sample_id="", payload=number, tokens=tokens, deadline_s=deadline_s)
        for number, (tokens, deadline_s) in enumerate(
            zip(stream.lengths.tolist(), stream.deadlines_s.tolist(), strict=True)
        )
    ]
