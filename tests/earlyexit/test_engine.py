from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.engine.engine import Dispatch
from earlyexit.engine.times import ObservedTimes
from earlyexit.errors import PlanError
from earlyexit.network.split import Split
from tests.earlyexit.engine_driver import (
    Arrival,
    Driver,
    Engine,
    TableTimes,
    chosen,
    member,
    names,
    one_split,
    two_splits,
)


def test_of_two_full_batches_the_deepest_runs_first() -> None:
    log = two_splits().play([Arrival(0, "ab"), Arrival(0, "xy", block=2)])
    assert log == ["0.000 start 2:[x y]", "1.000 start 0:[a b]", "2.000 start 2:[a b]"]


def test_a_full_batch_runs_before_a_more_urgent_partial_one() -> None:
    log = two_splits().play([Arrival(0, "a", deadline_s=4.0), Arrival(0, "xy", block=2, deadline_s=50.0)])
    assert log == ["0.000 start 2:[x y]", "1.000 start 0:[a]", "2.000 start 2:[a]"]


@pytest.mark.parametrize(
    ("deadline_of_x_s", "expected"),
    [
        # a must run both splits: it must start at 10 - 2 = 8.
        pytest.param(8.5, ["0.000 start 2:[x]", "1.000 start 0:[a]", "2.000 start 2:[a]"], id="x must start at 7.5"),
        pytest.param(9.5, ["0.000 start 0:[a]", "1.000 start 2:[x a]"], id="x must start at 8.5"),
        pytest.param(9.0, ["0.000 start 0:[a]", "1.000 start 2:[x a]"], id="both at 8, a came first"),
    ],
)
def test_without_a_full_batch_the_most_urgent_queue_runs(deadline_of_x_s: float, expected: list[str]) -> None:
    log = two_splits().play([Arrival(0, "a", deadline_s=10.0), Arrival(0, "x", block=2, deadline_s=deadline_of_x_s)])
    assert log == expected


def test_members_that_arrive_while_the_device_is_busy_still_fit_into_the_next_batch() -> None:
    log = one_split(4).play([Arrival(0, "a"), Arrival(0.25, "b"), Arrival(0.75, "c"), Arrival(1.0, "d")])
    assert log == ["0.000 start 0:[a]", "1.000 start 0:[b c d]"]


def test_members_that_came_together_are_parted_where_a_batch_is_full() -> None:
    log = one_split(4).play([Arrival(0, "abc"), Arrival(0, "xyz")])
    assert log == ["0.000 start 0:[a b c x]", "1.000 start 0:[y z]"]


def test_survivors_wait_on_the_device_for_a_full_batch() -> None:
    driver = two_splits(leave={0: "ad"})
    assert driver.play([Arrival(0, "abcd")]) == ["0.000 start 0:[a b]", "1.000 start 0:[c d]", "2.000 start 2:[b c]"]


def test_earlier_deadlines_go_first_and_equal_ones_in_the_order_of_arrival() -> None:
    log = one_split(2).play(
        [Arrival(0, "ab", deadline_s=20.0), Arrival(0, "c", deadline_s=10.0), Arrival(0, "de", deadline_s=20.0)]
    )
    assert log == ["0.000 start 0:[c a]", "1.000 start 0:[b d]", "2.000 start 0:[e]"]


def test_work_conserving_starts_at_once() -> None:
    log = one_split(4).play([Arrival(0, "a", deadline_s=10.0), Arrival(0.5, "b", deadline_s=10.0)])
    assert log == ["0.000 start 0:[a]", "1.000 start 0:[b]"]


def test_deferred_waits_until_the_deadline_would_be_at_risk() -> None:
    log = one_split(4, dispatch="deferred").play([Arrival(0, "a", deadline_s=10.0), Arrival(0.5, "b", deadline_s=10.0)])
    assert log == ["9.000 start 0:[a b]"]


def test_deferred_keeps_the_reserve_for_what_comes_after_this_device() -> None:
    log = one_split(4, dispatch="deferred").play([Arrival(0, "a", deadline_s=10.0, reserve_s=2.5)])
    assert log == ["6.500 start 0:[a]"]


def test_deferred_keeps_time_for_the_deeper_splits_of_the_device() -> None:
    log = two_splits(dispatch="deferred").play([Arrival(0, "a", deadline_s=10.0)])
    assert log == ["8.000 start 0:[a]", "9.000 start 2:[a]"]


def test_deferred_starts_a_full_batch_at_once() -> None:
    log = one_split(2, dispatch="deferred").play([Arrival(0, "a", deadline_s=10.0), Arrival(3, "b", deadline_s=20.0)])
    assert log == ["3.000 start 0:[a b]"]


def test_deferred_does_not_wait_where_no_deadline_says_how_long() -> None:
    assert one_split(4, dispatch="deferred").play([Arrival(2, "a")]) == ["2.000 start 0:[a]"]


@pytest.mark.parametrize("known", [[], [Split(first=0, end=2, batch=4)]], ids=["nothing is known", "of one split"])
def test_deferred_does_not_wait_while_it_is_unknown_how_long_its_splits_take(known: list[Split]) -> None:
    times = ObservedTimes()
    for split in known:
        times.observe(split, 4, 4, 1.0, 1.0)
    splits = [Split(first=0, end=2, batch=4), Split(first=2, end=4, batch=4)]
    engine = Engine(splits, times, dispatch="deferred")
    engine.submit(0, [member("a", deadline_s=10.0)], 0.0)
    assert engine.choose(0.0).batch is not None


def test_deferred_says_when_to_ask_again() -> None:
    engine = one_split(4, dispatch="deferred").engine
    engine.submit(0, [member("a", deadline_s=10.0)], 0.0)
    assert engine.choose(0.0).wake_s == 9.0


def test_an_empty_engine_has_nothing_to_ask_again_for() -> None:
    choice = one_split(4).engine.choose(0.0)
    assert (choice.batch, choice.dropped, choice.wake_s) == (None, (), None)


def test_members_whose_deadline_cannot_be_met_are_dropped_before_work_is_spent_on_them() -> None:
    driver = one_split(1)
    log = driver.play(
        [Arrival(0, "a", deadline_s=1.0), Arrival(0, "b", deadline_s=1.5), Arrival(0, "c", deadline_s=2.0)]
    )
    assert log == ["0.000 start 0:[a]", "1.000 drop [b]", "1.000 start 0:[c]"]
    assert driver.engine.counts[0].dropped == 1
    assert driver.engine.counts[0].inputs == 2


def test_times_that_leave_an_idle_device_without_work_are_tried_again() -> None:
    engine = Engine([Split(first=0, end=4, batch=1)], ObservedTimes())
    engine.submit(0, [member("cold")], 0.0)
    engine.finished(chosen(engine), first_s=2.0, total_s=2.0)
    dropped = 0
    for now_s in range(2, 100):
        engine.submit(0, [member("a", deadline_s=now_s + 1.0)], now_s)
        batch = engine.choose(now_s).batch
        if batch is None:
            dropped += 1
        else:
            engine.finished(batch, first_s=0.5, total_s=0.5)
    assert dropped == 7  # 2 * 0.9 ** 7 is 0.96


def test_times_that_leave_one_split_without_a_batch_are_tried_again_though_others_have_some() -> None:
    engine = Engine([Split(first=0, end=2, batch=1), Split(first=2, end=4, batch=1)], ObservedTimes())
    engine.submit(2, [member("cold")], 0.0)
    engine.finished(chosen(engine), first_s=2.0, total_s=2.0)
    ran: list[int] = []
    for now_s in range(2, 100):
        engine.submit(2, [member("deep", deadline_s=now_s + 1.0)], now_s)
        engine.submit(0, [member("new", deadline_s=now_s + 1.0)], now_s)
        while (batch := engine.choose(now_s).batch) is not None:
            engine.finished(batch, first_s=0.5, total_s=0.5)
            ran.append(batch.split.first)
    assert ran.count(0) == 98
    assert ran.count(2) == 98 - 7  # as where it is alone


def test_members_know_since_when_they_wait_and_their_batch_until_when() -> None:
    a, b = member("a"), member("b")
    engine = two_splits().engine
    engine.submit(0, [a, b], 1.0)
    batch = chosen(engine, 4.0)
    assert (batch.started_s, a.since_s, b.since_s) == (4.0, 1.0, 1.0)
    engine.submit(2, [b], 5.0)
    batch = chosen(engine, 5.5)
    assert (batch.started_s, a.since_s, b.since_s) == (5.5, 1.0, 5.0)


def test_a_forgotten_origin_loses_its_queued_members_in_every_split_and_nobody_else() -> None:
    engine = two_splits().engine
    mine, yours = object(), object()
    engine.submit(0, [member("a", origin=mine), member("b", origin=yours), member("c", origin=mine)], 0.0)
    engine.submit(2, [member("d", origin=mine)], 0.0)
    assert engine.waiting() == {0: 3, 2: 1}
    assert engine.forget(mine) == 3
    assert engine.waiting() == {0: 1, 2: 0}
    assert names(chosen(engine).members) == "b"


def test_a_block_that_no_split_holds_is_refused() -> None:
    engine = two_splits().engine
    assert [engine.hosts(block) for block in range(5)] == [True, True, True, True, False]
    with pytest.raises(PlanError, match="no split here holds block 4; splits hold the blocks 0 to 1, 2 to 3"):
        engine.submit(4, [member("a")], 0.0)


def test_where_a_network_begins_nobody_waits_who_comes_from_the_one_before() -> None:
    driver = two_splits(starts=(0, 2))
    assert [driver.engine.hosts(block) for block in range(5)] == [False, True, False, True, False]
    log = driver.play([Arrival(0, "ab"), Arrival(0, "xy", block=2)])  # who was encoded for it does
    assert log == ["0.000 start 2:[x y]", "1.000 start 0:[a b]"]


def test_deferred_keeps_no_time_for_the_next_network_which_is_in_the_reserve() -> None:
    log = two_splits(dispatch="deferred", starts=(0, 2)).play([Arrival(0, "a", deadline_s=10.0, reserve_s=3.0)])
    assert log == ["6.000 start 0:[a]"]


def test_counts_tell_how_full_and_how_busy_every_split_was() -> None:
    driver = two_splits(leave={0: "ab"})
    driver.play([Arrival(0, "abc")])
    counts = driver.engine.counts
    assert (counts[0].batches, counts[0].inputs, counts[0].capacity, counts[0].busy_s) == (2, 3, 4, 2.0)
    assert (counts[0].fill, counts[0].tokens, counts[0].token_fill) == (0.75, 3, None)
    assert counts[2].fill == 0.5


def test_a_split_that_never_ran_has_no_fill() -> None:
    assert two_splits().engine.counts[0].fill is None


def test_finished_batches_teach_the_times() -> None:
    times = TableTimes({0: 1.0})
    engine = Engine([Split(first=0, end=4, batch=4)], times)
    engine.submit(0, [member("a"), member("b")], 0.0)
    batch = chosen(engine)
    engine.finished(batch, first_s=0.25, total_s=0.5)
    assert times.observed == [(0, 2, 0.25, 0.5)]


def test_a_batch_is_counted_where_a_new_plan_has_its_split_too_and_not_where_it_has_another() -> None:
    for batch_size, busy_s in ((4, 0.5), (2, 0.0)):
        engine = Engine([Split(first=0, end=4, batch=4)], TableTimes({0: 1.0}))
        engine.submit(0, [member("a")], 0.0)
        batch = chosen(engine)
        engine.follow([Split(first=0, end=4, batch=batch_size)], "work-conserving")
        engine.finished(batch, first_s=0.25, total_s=0.5)
        assert [counts.busy_s for counts in engine.counts.values()] == [busy_s]


@settings(max_examples=150, deadline=None)
@given(
    batches=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dispatch=st.sampled_from(["work-conserving", "deferred"]),
    arrivals=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 2), st.sampled_from([1, 4, 8, 20, math.inf])), max_size=25
    ),
)
def test_every_member_is_run_to_its_end_or_dropped_exactly_once(
    batches: list[int], dispatch: Dispatch, arrivals: list[tuple[int, int, float]]
) -> None:
    splits = [Split(first=k, end=k + 1, batch=batch) for k, batch in enumerate(batches)]
    seconds = {k: 0.5 * (k + 1) for k in range(len(batches))}
    driver = Driver(Engine(splits, TableTimes(seconds), dispatch=dispatch), seconds)
    entered = {chr(97 + k): min(block, len(batches) - 1) for k, (_, block, _) in enumerate(arrivals)}
    log = driver.play(
        [
            Arrival(at / 4, name, block=entered[name], deadline_s=at / 4 + slack)
            for name, (at, _, slack) in zip(entered, arrivals, strict=True)
        ]
    )
    runs: dict[str, list[int]] = {name: [] for name in entered}
    drops: list[str] = []
    for line in log:
        names = line.partition("[")[2].rstrip("]").split()
        if " drop " in line:
            drops += names
            continue
        first = int(line.split()[2].partition(":")[0])
        assert len(names) <= batches[first]
        for name in names:
            runs[name].append(first)
    assert len(drops) == len(set(drops))
    for name, block in entered.items():
        whole_way = list(range(block, len(batches)))
        assert runs[name] == whole_way[: len(runs[name])]
        assert (runs[name] == whole_way) != (name in drops)
