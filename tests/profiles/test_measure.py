from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from earlyexit.clock import ManualClock
from earlyexit.network.boundary import Split
from profiles.measure import Point, TimedSplit, latency_tables, profile_splits, time_splits
from profiles.table import LatencyTable

ROOT = Path(__file__).parents[2]
LENGTH = 8
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_blocks": 3,
    "num_heads": 2,
    "intermediate_size": 16,
    "max_length": 16,
}


def split(first: int, end: int, batch: int = 1, ramps: tuple[int, ...] = ()) -> Split:
    return Split(first=first, end=end, batch=batch, ramps=ramps)


def points(of_split: Mapping[Split, Sequence[float]], length: int = LENGTH) -> list[Point]:
    return [Point(timed=TimedSplit(split=each, length=length), seconds=tuple(s)) for each, s in of_split.items()]


def table_of(of_split: Mapping[Split, Sequence[float]], num_blocks: int, ramps: Sequence[int]) -> LatencyTable:
    return latency_tables(points(of_split), num_blocks, ramps)[LENGTH]


# Probes


def test_a_profile_times_every_block_with_and_without_its_ramp_and_the_whole_model() -> None:
    splits = profile_splits(2, ramps=(0,), batches=(1, 4), lengths=(8,))
    assert [timed.split for timed in splits] == [
        *(split(0, 1), split(1, 2), split(0, 1, ramps=(0,)), split(0, 2)),
        *(split(0, 1, 4), split(1, 2, 4), split(0, 1, 4, ramps=(0,)), split(0, 2, 4)),
    ]
    assert {timed.length for timed in splits} == {8}


def test_steps_are_timed_with_a_longer_context_too() -> None:
    near = profile_splits(2, (), batches=(1, 4, 16), lengths=(1, 8))
    assert profile_splits(2, (), (1, 4, 16), (8,), further=30) == profile_splits(2, (), (1, 4, 16), (8,))
    *others, far = profile_splits(2, (), (1, 4, 16), (1, 8), further=30)
    assert (tuple(others), far) == (near, TimedSplit(split=split(0, 2, 4), length=1, further=30))


# Points


@pytest.mark.parametrize(
    ("seconds", "outliers"),
    [
        pytest.param((1.0, 2.0, 3.0, 4.0, 100.0), 1, id="MAD 1, so beyond 4.4 from the median 3"),
        pytest.param((1.0, 2.0, 3.0, 4.0, 7.4), 0, id="4.4 from the median"),
        pytest.param((1.0, 1.0, 1.0, 1.0, 2.0), 1, id="MAD 0"),
        pytest.param((1.0,), 0, id="alone"),
    ],
)
def test_outliers_are_rounds_beyond_three_scaled_mads(seconds: tuple[float, ...], outliers: int) -> None:
    assert Point(timed=TimedSplit(split=split(0, 1), length=8), seconds=seconds).outliers == outliers


def test_a_point_is_one_line_of_plain_data() -> None:
    point = Point(timed=TimedSplit(split=split(1, 2, 4, ramps=(1,)), length=8), seconds=(3.0, 1.0, 2.0))
    assert point.to_json() == {
        "length": 8,
        "batch": 4,
        "first": 1,
        "end": 2,
        "ramps": [1],
        "median_s": 2.0,
        "spread": 1.4826 / 2,
        "outliers": 0,
        "seconds": [3.0, 1.0, 2.0],
    }


# From points to tables


def test_blocks_carry_half_of_what_a_call_adds_and_a_ramp_what_its_block_takes_with_it() -> None:
    table = table_of(
        {split(0, 1): [5.0], split(1, 2): [7.0], split(0, 1, ramps=(0,)): [6.0], split(0, 2): [10.0]}, 2, [0]
    )
    # Alone 5 + 7 = 12, together 10: the sum becomes 11, and each of the two blocks gives up a half.
    assert table.block_s_NB.tolist() == [[4.5], [6.5]]
    # Block 0 with its ramp takes 6.
    assert table.ramp_s_EB.tolist() == [[1.5]]


def test_a_whole_model_that_is_slower_than_its_blocks_alone_lifts_them() -> None:
    table = table_of({split(0, 1): [5.0], split(1, 2): [7.0], split(0, 2): [14.0]}, 2, [])
    assert table.block_s_NB.tolist() == [[5.5], [7.5]]
    assert table.ramp_s_EB.shape == (0, 1)


def test_a_table_is_of_medians_and_a_slow_spell_of_the_machine_does_not_make_a_ramp_dear() -> None:
    table = table_of(
        {
            split(0, 1): [4.0, 8.0, 4.0],
            split(1, 2): [6.0, 12.0, 6.0],
            split(0, 1, ramps=(0,)): [5.0, 10.0, 5.0],
            split(0, 2): [10.0, 20.0, 10.0],
        },
        2,
        [0],
    )
    assert table.block_s_NB.tolist() == [[4.0], [6.0]]
    assert table.ramp_s_EB.tolist() == [[1.0]]


def test_a_ramp_is_the_median_of_what_it_adds_round_by_round() -> None:
    table = table_of(
        {
            split(0, 1): [1.0, 2.0, 9.0],
            split(1, 2): [1.0, 1.0, 1.0],
            split(0, 1, ramps=(0,)): [5.0, 3.0, 10.0],
            split(0, 2): [3.0, 3.0, 3.0],
        },
        2,
        [0],
    )
    # It adds 4, 1 and 1; of the medians, 5 - 2 = 3 would come out.
    assert table.ramp_s_EB.tolist() == [[1.0]]


def test_more_inputs_never_cost_less() -> None:
    table = table_of({split(0, 1, 1): [4.0], split(0, 1, 2): [2.0], split(0, 1, 4): [10.0]}, 1, [])
    assert table.batches == (1, 2, 4)
    assert table.block_s_NB.tolist() == [[3.0, 3.0, 10.0]]


def test_a_block_takes_a_tenth_of_its_time_alone_at_least() -> None:
    # By the half call alone: 4 - (4 + 100 - 20) / 4 = -17 and 100 - 21 = 79.
    table = table_of({split(0, 1): [4.0], split(1, 2): [100.0], split(0, 2): [20.0]}, 2, [])
    assert table.block_s_NB.tolist() == [[pytest.approx(0.4)], [79.0]]


def test_nothing_costs_less_than_nothing() -> None:
    table = table_of(
        {split(0, 1): [5.0], split(1, 2): [7.0], split(0, 1, ramps=(0,)): [4.0], split(0, 2): [12.0]}, 2, [0]
    )
    assert table.ramp_s_EB.tolist() == [[0.0]]


def test_a_longer_context_costs_a_block_so_much_for_a_token_of_a_step() -> None:
    timed = profile_splits(2, (), (1, 4), (1, 8), further=30)
    seconds = dict.fromkeys(timed, (10.0, 20.0, 30.0))
    seconds[timed[-1]] = (10.0 + 2.4, 20.0 + 4.8, 30.0 + 2.4)
    taken = [Point(timed=each, seconds=s) for each, s in seconds.items()]
    tables = latency_tables(taken, 2, (), context=20)
    assert tables[1].context == 20
    assert tables[1].context_s == pytest.approx(2.4 / (30 * 4 * 2))
    assert (tables[8].context, tables[8].context_s) == (None, 0.0)


# Timing


class FakeRunner:
    """Every run of a timed takes the next of its seconds; the last one for ever."""

    def __init__(self, seconds: Mapping[int, Sequence[float]]) -> None:
        self.clock = ManualClock()
        self.log: list[int] = []
        self._seconds: dict[int, Iterator[float]] = {length: _last_for_ever(s) for length, s in seconds.items()}

    def prepare(self, timed: TimedSplit) -> Callable[[], None]:
        def run() -> None:
            self.log.append(timed.length)
            self.clock.advance(next(self._seconds[timed.length]))

        return run


def _last_for_ever(seconds: Sequence[float]) -> Iterator[float]:
    yield from seconds
    while True:
        yield seconds[-1]


def timed(runner: FakeRunner, lengths: Sequence[int], repeats: int, seed: int = 0) -> list[tuple[float, ...]]:
    splits = [TimedSplit(split=split(0, 1), length=length) for length in lengths]
    rng = np.random.default_rng(seed)
    return [point.seconds for point in time_splits(splits, runner, clock=runner.clock, rng=rng, repeats=repeats)]


def test_three_runs_warm_up_where_they_are_stable_and_are_not_counted() -> None:
    runner = FakeRunner({8: [50.0, 2.0, 2.0, 1.0, 4.0]})
    assert timed(runner, [8], repeats=3) == [(1.0, 4.0, 4.0)]


def test_warming_up_goes_on_until_two_runs_take_as_long() -> None:
    runner = FakeRunner({8: [64.0, 32.0, 16.0, 8.0, 8.0, 1.0]})
    assert timed(runner, [8], repeats=1) == [(1.0,)]


def test_warming_up_ends_on_a_machine_that_never_settles() -> None:
    runner = FakeRunner({8: [1.0, 2.0] * 5 + [3.0]})
    assert timed(runner, [8], repeats=1) == [(3.0,)]
    assert len(runner.log) == 10 + 1


def test_rounds_hold_every_probe_once_in_an_order_of_their_own() -> None:
    lengths = [1, 2, 3, 4, 5, 6]
    runner = FakeRunner({length: [float(length)] for length in lengths})
    assert timed(runner, lengths, repeats=2) == [(length, length) for length in map(float, lengths)]
    rounds = runner.log[18:24], runner.log[24:]
    assert [sorted(each) for each in rounds] == [lengths, lengths]
    assert rounds[0] != rounds[1]


def test_the_seed_decides_the_order() -> None:
    lengths = [1, 2, 3, 4, 5, 6]
    logs = []
    for _ in range(2):
        runner = FakeRunner({length: [1.0] for length in lengths})
        timed(runner, lengths, repeats=2, seed=3)
        logs.append(runner.log)
    assert logs[0] == logs[1]


def test_warm_up_and_rounds_report_their_progress() -> None:
    seen: list[tuple[str, int, int]] = []
    runner = FakeRunner({8: [1.0]})
    time_splits(
        [TimedSplit(split=split(0, 1), length=8)],
        runner,
        clock=runner.clock,
        rng=np.random.default_rng(0),
        repeats=2,
        progress=lambda *step: seen.append(step),
    )
    assert seen == [("warm-up", 1, 1), ("measure", 1, 2), ("measure", 2, 2)]


def test_measuring_loads_torch_only_when_a_model_is_run() -> None:
    code = "import sys, profiles.measure; assert not {'torch', 'ray', 'scipy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
