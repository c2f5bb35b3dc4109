"""Plans that change while members wait, and probes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.engine.engine import BatchEngine, Dispatch
from earlyexit.engine.queue import Member
from earlyexit.engine.times import MOST_SPLITS
from earlyexit.errors import PlanError
from earlyexit.network.split import Split
from tests.earlyexit.engine_driver import Arrival, Driver, Engine, Switch, TableTimes, chosen, member

EVERY_BLOCK = dict.fromkeys(range(8), 1.0)
"""Every split takes one second, wherever it starts."""


def splits_of(*bounds: int, batch: int = 2) -> tuple[Split, ...]:
    return tuple(Split(first=first, end=end, batch=batch) for first, end in pairwise(bounds))


def driver_of(splits: Sequence[Split], *, leave: Mapping[int, str] | None = None) -> Driver:
    return Driver(Engine(splits, TableTimes(EVERY_BLOCK)), EVERY_BLOCK, leave or {})


def sizes_run(engine: Engine) -> list[tuple[int, int, int, int, float]]:
    return [(run.first, run.end, run.size, run.batches, run.seconds) for run in engine.times_run]


def test_queued_members_move_to_the_new_split_that_starts_with_their_block() -> None:
    driver = driver_of(splits_of(0, 2, 4))
    log = driver.play([Arrival(0, "ab"), Arrival(0.5, "cde"), Switch(0.75, splits_of(0, 1, 4, batch=3))])
    # a and b, running when the plan came, went on to block 2, inside the new split of blocks 1 to 3.
    assert log == [
        "0.000 start 0:[a b]",
        "1.000 start 0:[c d e]",
        "2.000 start 1:[c d e]",
        "3.000 start 2 to 4:[a b]",
    ]


def test_queued_members_run_by_their_old_split_where_no_new_one_starts() -> None:
    driver = driver_of(splits_of(2, 4, 6))
    log = driver.play([Arrival(0, "ab", block=2), Arrival(0, "cde", block=4), Switch(0.5, splits_of(0, 3))])
    assert log == ["0.000 start 4:[c d]", "1.000 start 2 to 4:[a b]", "2.000 start 4 to 6:[e]"]
    assert driver.engine.waiting() == {0: 0}


def test_a_plan_that_changes_nothing_keeps_queues_and_counts() -> None:
    engine = driver_of(splits_of(0, 2, 4)).engine
    engine.submit(0, [member("a"), member("b"), member("c")], 0.0)
    assert engine.choose(0.0).batch is not None
    engine.follow(splits_of(0, 2, 3, 4), "work-conserving")
    assert engine.waiting() == {0: 1, 2: 0, 3: 0}
    assert [counts.inputs for counts in engine.counts.values()] == [2, 0, 0]


def test_a_plan_may_take_everything_from_a_replica() -> None:
    driver = driver_of(splits_of(0, 2))
    assert driver.play([Arrival(0, "abc"), Switch(0.5, ())]) == ["0.000 start 0:[a b]", "1.000 start 0 to 2:[c]"]
    assert driver.engine.splits == ()
    with pytest.raises(PlanError, match="no split here holds block 0"):
        driver.engine.submit(0, [member("d")], 2.0)


def test_another_dispatch_rule_holds_from_the_switch_on() -> None:
    driver = driver_of(splits_of(0, 4))
    log = driver.play([Switch(0, splits_of(0, 4), "deferred"), Arrival(0, "a", deadline_s=9.0), Arrival(3, "b")])
    assert log == ["3.000 start 0:[a b]"]
    driver = driver_of(splits_of(0, 4))
    log = driver.play([Switch(0, splits_of(0, 4), "deferred"), Arrival(0, "a", deadline_s=9.0)])
    assert log == ["8.000 start 0:[a]"]


def test_a_block_inside_a_split_gets_the_rest_of_it_as_a_split_of_its_own() -> None:
    engine = BatchEngine[None]([Split(first=0, end=4, batch=3, ramps=(0, 1, 2))], TableTimes(EVERY_BLOCK))
    engine.submit(2, [member("a")], 0.0)
    assert chosen(engine).split == Split(first=2, end=4, batch=3, ramps=(2,))


def test_pieces_for_the_same_block_inside_a_split_are_fused() -> None:
    log = driver_of(splits_of(0, 4)).play([Arrival(0, "ab"), Arrival(0.25, "c", block=1), Arrival(0.5, "d", block=1)])
    assert log == ["0.000 start 0:[a b]", "1.000 start 1 to 4:[c d]"]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        pytest.param(4, "0.000 start 4 to 6:[a]", id="a split of the fallback starts there"),
        pytest.param(5, "0.000 start 5 to 6:[a]", id="inside a split of the fallback"),
        pytest.param(1, "0.000 start 1 to 2:[a]", id="here the plan comes first"),
    ],
)
def test_a_block_that_is_not_hosted_runs_by_the_call_s_own_plan(block: int, expected: str) -> None:
    driver = driver_of(splits_of(0, 2))
    assert driver.play([Arrival(0, "a", block=block, fallback=splits_of(0, 4, 6))]) == [expected]


def test_a_block_that_neither_plan_holds_is_refused() -> None:
    engine = driver_of(splits_of(0, 2)).engine
    with pytest.raises(PlanError, match="no split here holds block 6; splits hold the blocks 0 to 1"):
        engine.submit(6, [member("a")], 0.0, splits_of(2, 6))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(
            [Arrival(0, "abX")], ["0.000 start 0:[X]", "1.000 start 0:[a b]"], id="a single probe before a full batch"
        ),
        pytest.param(
            [Arrival(0, "XY"), Arrival(0, "ab", block=2)],
            ["0.000 start 2:[a b]", "1.000 start 0:[X Y]"],
            id="a full batch that is deeper before probes",
        ),
        pytest.param(
            [Arrival(0, "ab"), Arrival(0, "X", block=2)],
            ["0.000 start 2:[X]", "1.000 start 0:[a b]"],
            id="the deepest of two",
        ),
    ],
)
def test_a_queue_with_a_probe_counts_as_full(events: list[Arrival], expected: list[str]) -> None:
    driver = Driver(Engine(splits_of(0, 2, 3), TableTimes(EVERY_BLOCK)), EVERY_BLOCK, {0: "abXY"})
    assert driver.play(events) == expected


def test_probes_too_are_dropped_where_their_deadline_cannot_be_met() -> None:
    driver = driver_of(splits_of(0, 4))
    log = driver.play([Arrival(0, "A", deadline_s=9.0), Arrival(0.5, "bC", deadline_s=1.5)])
    assert log == ["0.000 start 0:[A]", "1.000 drop [C b]"]
    assert driver.engine.counts[0].dropped == 2


def test_members_of_queues_on_their_way_out_are_dropped_where_their_deadline_cannot_be_met() -> None:
    driver = driver_of(splits_of(2, 4))
    log = driver.play(
        [Arrival(0, "xy", block=2), Arrival(0, "a", block=2, deadline_s=1.5), Switch(0.5, splits_of(0, 4))]
    )
    assert log == ["0.000 start 2:[a x]", "1.000 start 2 to 4:[y]"]
    driver = driver_of(splits_of(2, 4, batch=1))
    log = driver.play([Arrival(0, "ab", block=2, deadline_s=1.5), Switch(0.5, splits_of(0, 4))])
    assert log == ["0.000 start 2:[a]", "1.000 drop [b]"]
    assert driver.engine.waiting() == {0: 0}


def test_times_are_summed_by_split_and_size_over_plans_and_without_probes() -> None:
    times = TableTimes(EVERY_BLOCK)
    driver = Driver(Engine(splits_of(0, 4), times), EVERY_BLOCK)
    driver.play([Arrival(0, "abc"), Arrival(0, "XY"), Switch(2.5, splits_of(0, 2)), Arrival(4, "de"), Arrival(4, "fg")])
    assert sizes_run(driver.engine) == [(0, 4, 2, 1, 1.0), (0, 4, 1, 1, 1.0), (0, 2, 2, 2, 2.0)]
    assert [(first, size) for first, size, _, _ in times.observed] == [(0, 2), (0, 1), (0, 2), (0, 2)]


def test_the_split_that_has_not_run_for_longest_makes_room_in_the_sums() -> None:
    engine = driver_of(()).engine
    for end in [*range(1, MOST_SPLITS + 1), 1, MOST_SPLITS + 1]:
        engine.submit(0, [member("a")], 0.0, [Split(first=0, end=end, batch=1)])
        batch = chosen(engine)
        engine.finished(batch, first_s=1.0, total_s=1.0)
    assert [run.end for run in engine.times_run] == [1, *range(3, MOST_SPLITS + 2)]
    assert engine.times_run[0].batches == 2


NUM_BLOCKS = 6
Plans = list[tuple[Split, ...]]


@st.composite
def hosted(draw: st.DrawFn) -> tuple[Split, ...]:
    """Consecutive splits of some blocks, or none at all."""
    bounds = sorted(draw(st.sets(st.integers(0, NUM_BLOCKS), max_size=4)))
    return tuple(
        Split(first=first, end=end, batch=draw(st.integers(1, 4)), tokens=draw(st.none() | st.integers(1, 20)))
        for first, end in pairwise(bounds)
    )


@settings(max_examples=200, deadline=None)
@given(
    plans=st.lists(hosted(), min_size=1, max_size=6),
    entries=st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.booleans(), st.booleans()), min_size=1, max_size=30),
    dispatch=st.sampled_from(["work-conserving", "deferred"]),
    seed=st.integers(0, 2**32),
)
def test_every_member_runs_every_block_once_or_is_dropped_once_however_plans_change(
    plans: Plans, entries: list[tuple[int, bool, bool]], dispatch: Dispatch, seed: int
) -> None:
    rng = random.Random(seed)
    engine = BatchEngine[int](plans[0], TableTimes(EVERY_BLOCK), dispatch=dispatch)
    arriving = [
        Member(
            sample_id=str(k),
            payload=block,
            tokens=rng.randint(1, 12),
            deadline_s=rng.uniform(5, 40) if hurried else math.inf,
            probe=probe,
        )
        for k, (block, probe, hurried) in enumerate(entries)
    ]
    following = plans[1:]
    ran: dict[str, list[int]] = {each.sample_id: [] for each in arriving}
    dropped: list[str] = []
    entered = {each.sample_id: each.payload for each in arriving}
    now_s = 0.0

    def submit(block: int, members: Sequence[Member[int]]) -> None:
        engine.submit(block, members, now_s, [Split(first=0, end=NUM_BLOCKS, batch=3)])

    while arriving or following or engine.num_waiting:
        now_s += rng.random()
        event = rng.choice(["arrive", "follow", "run", "run"])
        if event == "arrive" and arriving:
            each = arriving.pop()
            submit(each.payload, [each])
        elif event == "follow" and following:
            engine.follow(following.pop(), dispatch)
        elif event == "run":
            choice = engine.choose(now_s)
            dropped += [each.sample_id for each in choice.dropped]
            batch = choice.batch
            if batch is None:
                continue
            if following and rng.random() < 0.3:  # while it runs
                engine.follow(following.pop(), dispatch)
            assert len(batch.members) <= batch.split.batch
            num_tokens = sum(each.tokens for each in batch.members)
            assert len(batch.members) == 1 or num_tokens <= (batch.split.tokens or math.inf)
            now_s += 1.0
            engine.finished(batch, first_s=1.0, total_s=1.0)
            for each in batch.members:
                assert (each.probe, each.payload) == (batch.probe, batch.split.first)
                ran[each.sample_id] += range(batch.split.first, batch.split.end)
                each.payload = batch.split.end
            if batch.split.end < NUM_BLOCKS:
                submit(batch.split.end, batch.members)
    assert len(dropped) == len(set(dropped))
    for name, block in entered.items():
        whole_way = list(range(block, NUM_BLOCKS))
        assert ran[name] == whole_way[: len(ran[name])]
        assert (ran[name] == whole_way) != (name in dropped)
    assert set(engine.waiting().values()) <= {0}
