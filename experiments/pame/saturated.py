"""A simulated device whose queue is never empty: what it answers per second, and how long batches take.

The live engine and its rule of when the next batch begins; no ingress, no arrivals. So every batch is full, as where
PAME measures (section 7.1), and an input's latency is counted from when its batch began.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.pace import Pace
from earlyexit.counts import SplitCounts
from earlyexit.engine import Batch, BatchEngine
from earlyexit.loop import DeviceLoop
from earlyexit.member import Member
from earlyexit.split import Split
from earlyexit.times import ObservedTimes
from profiles.table import LatencyTable
from simulator.beside import Ended, SideBySide, remaining_of
from simulator.decisions import ByRamp, IntArray
from simulator.events import Events
from simulator.scenario import FloatArray
from simulator.work import Exit, Work, Works


@dataclass(frozen=True, slots=True)
class Item:
    """One input, by its number."""

    input: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saturated:
    """What a run gave."""

    seconds: float
    latency_s_N: FloatArray
    """From the beginning of an input's first batch to its answer."""
    alone_share: float
    """Of the batches, those that no other ran beside."""

    @property
    def per_s(self) -> float:
        """Inputs answered per second."""
        return len(self.latency_s_N) / self.seconds

    def late_share(self, limit_s: float) -> float:
        """Of the inputs, those that took longer."""
        return float((self.latency_s_N > limit_s * (1 + 1e-9)).mean())


class Device:
    """One device with everything queued at once."""

    def __init__(self, splits: Sequence[Split], table: LatencyTable, decisions: ByRamp, rows_N: IntArray) -> None:
        self._events = Events()
        self._num_blocks = splits[-1].end
        self._ramps, self._decisions, self._rows_N = decisions.ramps, decisions, rows_N
        self._works = Works(Pace(table, decisions.ramps, 1.0), self._work)
        self._engine: BatchEngine[Any] = BatchEngine(splits, ObservedTimes())
        self._loop: DeviceLoop[Any] = DeviceLoop(self._engine)
        self._beside = SideBySide(self._events, lambda: True, self._exit, self._end)
        self._began_s_N = np.full(len(rows_N), np.nan)
        self._latency_s_N = np.full(len(rows_N), np.nan)

    def run(self) -> Saturated:
        """Until everybody is answered."""
        members = [Member(sample_id="", payload=Item(number)) for number in range(len(self._rows_N))]
        self._engine.submit(0, members, 0.0)
        self._begin()
        self._events.run_out()
        runs = self._engine.times_run
        alone, batches = (sum(run.batches for run in kind) for kind in ([r for r in runs if not r.shared], runs))
        return Saturated(
            seconds=self._events.time_s, latency_s_N=self._latency_s_N, alone_share=alone / batches if batches else 1.0
        )

    def _begin(self) -> None:
        while (batch := self._loop.begin(self._events.time_s).batch) is not None:
            for member in batch.members:
                if np.isnan(self._began_s_N[member.payload.input]):
                    self._began_s_N[member.payload.input] = batch.started_s
            self._beside.begin(remaining_of(batch, self._works, self._ramps))

    def _exit(self, batch: Batch[Any], leaving: Exit) -> None:
        self._answer(leaving)
        self._loop.shrink(batch, len(leaving[1]))
        self._begin()

    def _end(self, ended: Ended) -> None:
        batch, _, first_s, total_s, leaving, going_on = ended
        now_s = self._events.time_s
        self._loop.end(batch, first_s=first_s, total_s=total_s, now_s=now_s)
        self._loop.leave(batch, now_s)
        for each in leaving:
            self._answer(each)
        if going_on and not self._loop.go_on(batch.split.end, going_on, now_s):
            self._answer((batch.split.end - 1, going_on))
        self._begin()

    def _answer(self, leaving: Exit) -> None:
        numbers = [member.payload.input for member in leaving[1]]
        self._latency_s_N[numbers] = self._events.time_s - self._began_s_N[numbers]

    def _work(self, split: Split, pace: Pace) -> Work:
        leaves_N = self._decisions.leaves_N(split.ramps, split.ramps)[self._rows_N]
        return Work(split, array("h", leaves_N.astype(np.int16).tobytes()), pace, SplitCounts(split.budget))
