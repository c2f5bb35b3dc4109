from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.network.boundary import Budget, Segment, Split
from earlyexit.network.checkpoint import random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece, Tensors
from earlyexit.sequences.sequence import PAGE_TOKENS, RUN, sequence_of
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.token import TokenTask
from profiles.measure import LiveSplits, Point, TimedSplit, latency_tables, profile_splits, room_for, time_splits
from profiles.table import LatencyTable
from tests.clock import ManualClock

LENGTH, CONTEXT = 8, 40
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


def test_every_block_is_timed_with_and_without_its_ramp() -> None:
    splits = profile_splits(2, ramps=(0,), batches=(1, 4), lengths=(8,))
    assert [timed.split for timed in splits] == [
        *(split(0, 1), split(1, 2), split(0, 1, ramps=(0,)), split(0, 2)),
        *(split(0, 1, 4), split(1, 2, 4), split(0, 1, 4, ramps=(0,)), split(0, 2, 4)),
    ]
    assert {timed.length for timed in splits} == {8}
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


def test_blocks_and_ramps_divide_the_time_of_the_network() -> None:
    table = table_of(
        {split(0, 1): [5.0], split(1, 2): [7.0], split(0, 1, ramps=(0,)): [6.0], split(0, 2): [10.0]}, 2, [0]
    )
    # Alone 5 + 7 = 12, together 10: a call takes 2, and each of the two blocks gives up 1.
    assert table.block_s_NB.tolist() == [[4.0], [6.0]]
    # The two segments take 6 + 7 with the ramp.
    assert table.ramp_s_EB.tolist() == [[3.0]]
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
    # The ramp adds 4, 1 and 1 in the rounds, so the median is 1. The difference of medians would be 5 - 2 = 3.
    assert table.ramp_s_EB.tolist() == [[1.0]]
    # More inputs never take less time.
    table = table_of({split(0, 1, 1): [4.0], split(0, 1, 2): [2.0], split(0, 1, 4): [10.0]}, 1, [])
    assert table.batches == (1, 2, 4)
    assert table.block_s_NB.tolist() == [[3.0, 3.0, 10.0]]
    # A block takes at least a tenth of its time alone. By the call: 4 - (4 + 100 - 20) / 2 = -38 and 100 - 42 = 58.
    table = table_of({split(0, 1): [4.0], split(1, 2): [100.0], split(0, 2): [20.0]}, 2, [])
    assert table.block_s_NB.tolist() == [[pytest.approx(0.4)], [58.0]]
    table = table_of(
        {split(0, 1): [5.0], split(1, 2): [7.0], split(0, 1, ramps=(0,)): [4.0], split(0, 2): [12.0]}, 2, [0]
    )
    assert table.ramp_s_EB.tolist() == [[0.0]]


def test_a_longer_context_adds_a_cost_per_block_and_token() -> None:
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
    """Every timed run takes the next of its seconds; the last one repeats."""

    def __init__(self, seconds: Mapping[int, Sequence[float]]) -> None:
        self.clock = ManualClock()
        self.log: list[int] = []
        self._seconds: dict[int, Iterator[float]] = {length: chain(s, repeat(s[-1])) for length, s in seconds.items()}

    def prepare(self, timed: TimedSplit) -> Callable[[], None]:
        def run() -> None:
            self.log.append(timed.length)
            self.clock.advance(next(self._seconds[timed.length]))

        return run


def timed(runner: FakeRunner, lengths: Sequence[int], repeats: int, seed: int = 0) -> list[tuple[float, ...]]:
    splits = [TimedSplit(split=split(0, 1), length=length) for length in lengths]
    rng = np.random.default_rng(seed)
    return [
        point.seconds for point in time_splits(splits, runner.prepare, clock=runner.clock, rng=rng, repeats=repeats)
    ]


@pytest.mark.parametrize(
    ("seconds", "counted"),
    [
        pytest.param([50.0, 2.0, 2.0, 1.0, 4.0], (1.0, 4.0, 4.0), id="stable from the second run on"),
        pytest.param([64.0, 32.0, 16.0, 8.0, 8.0, 1.0], (1.0, 1.0, 1.0), id="stable once two runs take as long"),
    ],
)
def test_warm_up_runs_until_stable_and_is_not_counted(seconds: list[float], counted: tuple[float, ...]) -> None:
    assert timed(FakeRunner({8: seconds}), [8], repeats=3) == [counted]


def test_warming_up_ends_on_a_machine_that_never_settles() -> None:
    runner = FakeRunner({8: [1.0, 2.0] * 5 + [3.0]})
    assert timed(runner, [8], repeats=1) == [(3.0,)]
    assert len(runner.log) == 10 + 1


def test_every_round_runs_every_probe_once() -> None:
    lengths = [1, 2, 3, 4, 5, 6]
    runner = FakeRunner({length: [float(length)] for length in lengths})
    assert timed(runner, lengths, repeats=2) == [(length, length) for length in map(float, lengths)]
    rounds = runner.log[18:24], runner.log[24:]
    assert [sorted(each) for each in rounds] == [lengths, lengths]
    assert rounds[0] != rounds[1]


# Segments of a real model


class LoggedSegments:
    """Records what was computed, with the numbers of inputs and tokens."""

    def __init__(self, model: EarlyExitModel) -> None:
        self._model = model
        self.log: list[tuple[int, int, int | None, int, int]] = []
        self.values: list[Tensors] = []
        self.prepared: dict[Segment, Budget] = {}

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        self.log.append((segment.first, segment.end, segment.ramp, len(piece), int(piece.lengths_B.sum())))
        self.values.append(piece.tensors)
        return self._model.run(segment, piece)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        self.prepared = dict(segments)


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    """Returns three blocks with ramps after 0 and 1, and random weights."""
    return random_model(SIZES, task=LabelTask(("a", "b")))


def run_live(model: EarlyExitModel, *splits: Split, seed: int = 0) -> LoggedSegments:
    logged = LoggedSegments(model)
    live = LiveSplits(model, np.random.default_rng(seed), logged)
    for each in splits:
        live.prepare(TimedSplit(split=each, length=LENGTH))()
    return logged


def test_a_timed_split_runs_its_segments_on_the_whole_batch(model: EarlyExitModel) -> None:
    logged = run_live(model, split(0, 3, 4, ramps=(0, 1)), split(1, 2, 2))
    assert logged.log == [(0, 1, 0, 4, 32), (1, 2, 1, 4, 32), (2, 3, None, 4, 32), (1, 2, None, 2, 16)]
    logged = LoggedSegments(model)
    splits = profile_splits(3, (0,), (2, 4), (4, 8))
    LiveSplits(model, np.random.default_rng(0), logged).make_ready(splits)
    assert set(logged.prepared.values()) == {Budget(inputs=4)}
    assert {(each.first, each.end, each.ramp) for each in logged.prepared} == {
        (0, 1, None), (1, 2, None), (2, 3, None), (0, 1, 0), (0, 3, None),
    }  # fmt: skip


def test_the_first_block_gets_random_tokens_and_later_ones_a_hidden_state(model: EarlyExitModel) -> None:
    (first,), (later,) = run_live(model, split(0, 1, 4), split(2, 3, 4)).values
    assert (first.dtype, first.shape) == (torch.int32, (32,))
    assert 0 <= int(first.min()) < int(first.max()) < 50
    assert later.shape == (32, 16)
    assert torch.equal(first, run_live(model, split(0, 1, 4)).values[0][0])
    assert not torch.equal(first, run_live(model, split(0, 1, 4), seed=1).values[0][0])


@pytest.fixture(scope="module")
def decoder() -> EarlyExitModel:
    sizes = SIZES | {"num_kv_heads": 1, "head_size": 8, "max_length": 256}
    return random_model(sizes, family="llama", task=TokenTask(50)).requires_grad_(False)


def test_steps_come_after_a_context_and_a_prompt_is_one_input(decoder: EarlyExitModel) -> None:
    splits = profile_splits(3, (0,), (1, 4), (1, 8))
    memory = decoder.backbone.open_memory(room_for(splits, CONTEXT))
    logged = LoggedSegments(decoder)
    live = LiveSplits(decoder, np.random.default_rng(0), logged, CONTEXT)
    for timed in (TimedSplit(split=split(1, 2, 4), length=1), TimedSplit(split=split(0, 3, 4), length=8)):
        live.prepare(timed)()
    assert logged.log == [(1, 2, None, 4, 4), (0, 3, None, 1, 32)]
    steps, prompts = (
        next(values for spec, values in zip(decoder.takes(first), tensors, strict=True) if spec.name == RUN).tolist()
        for first, tensors in zip((1, 0), logged.values, strict=True)
    )
    assert [(sequence_of(*run[:2]), *run[2:4]) for run in steps] == [(k, CONTEXT, CONTEXT + 1) for k in range(1, 5)]
    assert [run[2:4] for run in prompts] == [[0, 32]]
    assert memory.use().sequences == 5


def test_the_store_has_room_for_all_timed_sequences_and_no_more(decoder: EarlyExitModel) -> None:
    splits = profile_splits(3, (0, 1), (1, 2, 4), (1, 8), further=60)
    memory = decoder.backbone.open_memory(room_for(splits, CONTEXT))
    live = LiveSplits(decoder, np.random.default_rng(0), context=CONTEXT)
    for _ in range(2):
        for timed in splits:
            live.prepare(timed)()
    use = memory.use()
    assert use.pages == use.num_pages == 4 * (_pages(CONTEXT + 1) + _pages(CONTEXT + 61)) + 1 + 1 + 2


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
