"""One device and its loop: what may begin beside what, as a literal log on a clock that events move."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.errors import PlanError
from earlyexit.network.split import Split
from tests.earlyexit.engine_driver import Engine, TableTimes, member

WHOLE = Split(first=0, end=4, batch=4, ramps=(0, 1), overlap_below=2)
QUARTER_S = 0.25


@dataclass
class Bench:
    """Batches take a second a block; the letters a, e, i, o and u leave at ramp 0, the other small ones up to m at ramp
    1. Capital letters are probes, and stay."""

    split: Split = WHOLE
    engine: Engine = field(init=False)
    log: list[str] = field(default_factory=list)
    now_s: float = 0.0
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.engine = BatchEngine([self.split], TableTimes({0: 4.0, 2: 4.0}))
        self._events: list[tuple[float, int, tuple[Batch[None], int, str] | str]] = []
        self._serial = 0

    def play(self, arrivals: Sequence[tuple[float, str]]) -> list[str]:
        for at_s, names in arrivals:
            self._at(at_s, names)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, str):
                self.engine.submit(0, [member(name) for name in event], self.now_s)
            else:
                self._step(*event)
            self._begin()
        return self.log

    def _at(self, at_s: float, event: tuple[Batch[None], int, str] | str) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at_s, self._serial, event))

    def _begin(self) -> None:
        while (batch := self.engine.begin(self.now_s).batch) is not None:
            names = "".join(each.sample_id for each in batch.members)
            self._write(f"lane {batch.lane} starts [{names}]")
            self._at(self.now_s + 1.0, (batch, 0, names))
        self.most_at_once = max(self.most_at_once, self.engine.num_running)

    def _step(self, batch: Batch[None], block: int, inside: str) -> None:
        leaving = {0: "aeiou", 1: "abcdefghijklm"}.get(block, inside if block == 3 else "")
        left = [name for name in inside if name in leaving]
        stay = "".join(name for name in inside if name not in left)
        if left:
            self._write(f"lane {batch.lane} answers [{''.join(left)}]")
            self.engine.shrink(batch, len(left))
        if stay:
            self._at(self.now_s + 1.0, (batch, block + 1, stay))
            return
        total_s = self.now_s - batch.started_s
        busy_s = self.engine.end(batch, first_s=None, total_s=total_s, now_s=self.now_s)
        self.engine.leave(batch, self.now_s)
        self._write(f"lane {batch.lane} had the device {busy_s:g} of {total_s:g} s")

    def _write(self, what: str) -> None:
        self.log.append(f"{self.now_s:g} {what}")


def test_the_next_batch_begins_when_fewer_than_so_many_remain_inside() -> None:
    assert Bench().play([(0.0, "aebzeicy")]) == [
        "0 lane 0 starts [aebz]",
        "1 lane 0 answers [ae]",  # two remain: not fewer than two
        "2 lane 0 answers [b]",
        "2 lane 1 starts [eicy]",
        "3 lane 1 answers [ei]",
        "4 lane 0 answers [z]",
        "4 lane 0 had the device 3 of 4 s",  # from 2 to 4 s there were two
        "4 lane 1 answers [c]",
        "6 lane 1 answers [y]",
        "6 lane 1 had the device 3 of 4 s",
    ]


def test_without_the_word_batches_follow_each_other() -> None:
    log = Bench(replace(WHOLE, overlap_below=None)).play([(0.0, "aebzeicy")])
    assert [line for line in log if "starts" in line or "device" in line] == [
        "0 lane 0 starts [aebz]",
        "4 lane 0 had the device 4 of 4 s",
        "4 lane 0 starts [eicy]",
        "8 lane 0 had the device 4 of 4 s",
    ]


def test_there_are_never_more_than_two_however_few_remain() -> None:
    bench = Bench()
    log = bench.play([(0.0, "z"), (0.5, "y"), (0.5, "x"), (1.0, "w")])
    assert [line for line in log if "starts" in line] == [
        "0 lane 0 starts [z]",
        "0.5 lane 1 starts [y]",  # one runs, which is fewer than two
        "4 lane 0 starts [xw]",  # y is all that remains
    ]
    assert bench.most_at_once == 2


def test_the_free_lane_is_taken() -> None:
    log = Bench().play([(0.0, "a"), (0.5, "z"), (1.0, "y")])
    assert [line for line in log if "starts" in line] == [
        "0 lane 0 starts [a]",
        "0.5 lane 1 starts [z]",
        "1 lane 0 starts [y]",
    ]


def test_probes_stay_and_so_count_until_their_end() -> None:
    log = Bench().play([(0.0, "AB"), (0.5, "z")])
    assert [line for line in log if "starts" in line] == ["0 lane 0 starts [AB]", "4 lane 0 starts [z]"]


def test_only_batches_that_ran_alone_are_a_measure_of_the_device() -> None:
    bench = Bench()
    bench.play([(0.0, "aebzeicy"), (10.0, "yz")])
    runs = [(run.size, run.batches, run.seconds, run.shared) for run in bench.engine.times_run]
    assert runs == [(4, 2, 6.0, True), (2, 1, 4.0, False)]
    assert bench.engine.counts[0].busy_s == 10.0  # from 0 to 6 and from 10 to 14


def test_a_shared_device_does_not_teach_how_soon_an_answer_can_come_at_best() -> None:
    bench = Bench()
    times = bench.engine.times
    assert isinstance(times, TableTimes)
    bench.engine.submit(0, [member("z")], 0.0)
    batch = bench.engine.begin(0.0).batch
    assert batch is not None
    bench.engine.finished(batch, first_s=9.0, total_s=9.0, shared_s=5.0)
    bench.engine.finished(batch, first_s=9.0, total_s=9.0)
    assert times.observed == [(0, 1, 4.0, 9.0), (0, 1, 9.0, 9.0)]


def test_a_plan_that_comes_leaves_the_running_batch_what_its_own_plan_said() -> None:
    bench = Bench()
    bench.engine.submit(0, [member(name) for name in "zy"], 0.0)
    first = bench.engine.begin(0.0).batch
    assert first is not None
    bench.engine.follow([replace(WHOLE, overlap_below=None)], "work-conserving")
    bench.engine.submit(0, [member(name) for name in "x"], 0.0)
    assert not bench.engine.may_begin
    bench.engine.shrink(first, 1)
    beside = bench.engine.begin(1.0).batch
    assert beside is not None
    assert (beside.lane, beside.split.overlap_below) == (1, None)
    bench.engine.leave(first, 2.0)
    assert not bench.engine.may_begin  # the new plan's batch is alone, and says never


def test_what_runs_again_alone_shares_only_from_then_on() -> None:
    bench = Bench()
    bench.engine.submit(0, [member(name) for name in "z"], 0.0)
    failing = bench.engine.begin(0.0).batch
    bench.engine.submit(0, [member(name) for name in "y"], 0.0)
    other = bench.engine.begin(0.0).batch
    assert failing is not None
    assert other is not None
    again = bench.engine.again(failing, failing.members, 3.0)
    assert (again.started_s, again.lane) == (3.0, 0)
    assert bench.engine.end(again, first_s=None, total_s=4.0, now_s=7.0) == 2.0
    bench.engine.leave(failing, 7.0)
    assert bench.engine.end(other, first_s=None, total_s=9.0, now_s=9.0) == 9.0 - 7.0 / 2


@pytest.mark.parametrize("below", [0, -1])
def test_a_threshold_below_1_is_refused(below: int) -> None:
    with pytest.raises(PlanError, match="overlap_below must be at least 1"):
        replace(WHOLE, overlap_below=below)
