"""Runs the splits of a plan on a live device, with all inputs queued or as they arrive."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from earlyexit.clock import Clock
from earlyexit.engine.device import Answered, Device, DeviceThreads, Release, Runner
from earlyexit.engine.engine import Batch, BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member
from earlyexit.network.boundary import Answer, Split
from earlyexit.network.piece import Piece

FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class Log:
    """The record of a run."""

    answers: list[Answer] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)
    """Time of each answer on the device's clock."""
    sizes: list[int] = field(default_factory=list)
    """Number of inputs in every batch."""


class Side:
    """A device under one plan. It checks that every input is answered once, as in the records."""

    def __init__(
        self,
        splits: Sequence[Split],
        runner: Runner[Piece],
        clock: Clock,
        expected: Mapping[str, tuple[int, int]] | None = None,
        times: ObservedTimes | None = None,
    ) -> None:
        """Builds the device; `expected` is every known input's exit and label, or None to skip this check."""
        self.log = Log()
        self._clock = clock
        self._expected = expected
        engine: BatchEngine[Piece] = BatchEngine(splits, ObservedTimes() if times is None else times)
        self._device = Device(engine, runner, clock, self._deliver, self._count)
        self._device.overlaps = any(split.overlap_below is not None for split in splits)
        self._number, self._is_over = 0, threading.Event()

    def saturate(self, members: Sequence[Member[Piece]]) -> float:
        """Queues all inputs and runs until the last answer; returns the seconds that this took."""
        return float(self.serve(members, np.zeros(len(members))).max())

    def serve(self, members: Sequence[Member[Piece]], arrival_s_N: FloatArray) -> FloatArray:
        """Queues each input at its arrival, in seconds after the start; returns latencies (N) until the answer."""
        self.log, self._number = Log(), len(members)
        self._is_over.clear()
        threads = DeviceThreads(self._device, on_death=self._is_over.set)
        threads.start()
        due_s = (arrival_s_N + self._clock.now_s()).tolist()
        num_come = 0
        while num_come < len(due_s) and not self._is_over.wait(max(0.0, due_s[num_come] - self._clock.now_s())):
            first, now_s = num_come, self._clock.now_s()
            while num_come < len(due_s) and due_s[num_come] <= now_s:
                num_come += 1
            if num_come > first:
                self._device.submit(0, members[first:num_come])
        self._is_over.wait()
        threads.stop()
        self._check(members)
        due_of = {member.sample_id: at_s for member, at_s in zip(members, due_s, strict=True)}
        answered = zip(self.log.answers, self.log.answered_s, strict=True)
        return np.array([at_s - due_of[answer.sample_id] for answer, at_s in answered])

    def _deliver(self, releases: list[Release[Piece]]) -> None:
        now_s = self._clock.now_s()
        for release in releases:
            assert isinstance(release, Answered), release
            self.log.answers.append(release.answer)
            self.log.answered_s.append(now_s)
        if len(self.log.answers) == self._number:
            self._is_over.set()

    def _count(self, batch: Batch[Piece], seconds: float) -> None:
        self.log.sizes.append(len(batch.members))

    def _check(self, members: Sequence[Member[Piece]]) -> None:
        assert sorted(answer.sample_id for answer in self.log.answers) == sorted(each.sample_id for each in members)
        if self._expected is None:
            return
        for answer in self.log.answers:
            known = self._expected[answer.sample_id.rpartition("#")[0]]
            assert (answer.exit, answer.value) == known, (answer, known)


def members_of(piece: Piece) -> list[Member[Piece]]:
    """Returns the inputs of a piece as single members of a queue."""
    return [
        Member(sample_id=single.sample_ids[0], payload=single, tokens=int(single.lengths_B[0]))
        for single in piece.singles()
    ]
