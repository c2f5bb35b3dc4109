"""The engine's decisions, as literal logs of a fake device that takes one second per batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.engine.engine import MOST_SPLITS, RETURN_SHARE, BatchEngine, Dispatch, ObservedTimes
from earlyexit.engine.queue import Member, OrderName, OrderSpec
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from tests.earlyexit.engine.driver import (
    Arrival,
    Engine,
    Event,
    Switch,
    TableTimes,
    begun,
    chosen,
    driver_of,
    member,
    names,
    ran,
    splits_of,
)

TWO = splits_of(0, 2, 4)
"""Blocks 0 and 1, and 2 and 3, in batches of 2."""
ONE = splits_of(0, 4, batch=4)


class TokenTimes(TableTimes):
    """A tenth of a second per token; inputs have five tokens on average."""

    def __init__(self) -> None:
        super().__init__({0: 0.1})

    def batch_s(self, split: Split, tokens: float) -> float:
        return 0.1 * tokens

    def mean_tokens(self, split: Split) -> float:
        return 5.0


WORK_CONSERVING: dict[str, tuple[Sequence[Split], str, str]] = {
    "of two full batches the deepest": (TWO, "0 ab; 0 xy @2", "0 start 2:[x y]; 1 start 0:[a b]; 2 start 2:[a b]"),
    "a full one before an urgent one": (TWO, "0 a <4; 0 xy @2 <50", "0 start 2:[x y]; 1 start 0:[a]; 2 start 2:[a]"),
    # a must run both splits: it must start at 10 - 2 = 8.
    "x must start at 7.5": (TWO, "0 a <10; 0 x @2 <8.5", "0 start 2:[x]; 1 start 0:[a]; 2 start 2:[a]"),
    "x must start at 8.5": (TWO, "0 a <10; 0 x @2 <9.5", "0 start 0:[a]; 1 start 2:[x a]"),
    "both at 8, a came first": (TWO, "0 a <10; 0 x @2 <9", "0 start 0:[a]; 1 start 2:[x a]"),
    "arrivals during a batch": (ONE, "0 a; 0.25 b; 0.75 c; 1 d", "0 start 0:[a]; 1 start 0:[b c d]"),
    "a submission is divided": (ONE, "0 abc; 0 xyz", "0 start 0:[a b c x]; 1 start 0:[y z]"),
    "earlier deadlines, then arrival": (
        splits_of(0, 4),
        "0 ab <20; 0 c <10; 0 de <20",
        "0 start 0:[c a]; 1 start 0:[b d]; 2 start 0:[e]",
    ),
    "too late to be run": (
        splits_of(0, 4, batch=1),
        "0 a <1; 0 b <1.5; 0 c <2",
        "0 start 0:[a]; 1 drop [b]; 1 start 0:[c]",
    ),
    "probes too late": (splits_of(0, 4), "0 A <9; 0.5 bC <1.5", "0 start 0:[A]; 1 drop [C b]"),
    "a probe before a full batch": (splits_of(0, 2), "0 abX", "0 start 0:[X]; 1 start 0:[a b]"),
    "a deeper full batch before probes": (TWO, "0 XY <2; 0 ab @2", "0 start 2:[a b]; 1 start 0:[X Y]; 2 drop [X Y]"),
    "the deepest though it is one probe": (TWO, "0 ab <2; 0 X @2", "0 start 2:[X]; 1 start 0:[a b]; 2 drop [a b]"),
    "full to the token": (splits_of(0, 4, batch=4, tokens=10), "0 abcd 4,4,2,1", "0 start 0:[a b c]; 1 start 0:[d]"),
    "the next is too long": (splits_of(0, 4, batch=4, tokens=10), "0 abcd 4,4,3,1", "0 start 0:[a b]; 1 start 0:[c d]"),
    "inputs bound it first": (splits_of(0, 4, batch=4, tokens=10), "0 abcd 1,1,1,1", "0 start 0:[a b c d]"),
    "longer than the budget": (splits_of(0, 4, batch=4, tokens=10), "0 abc 12,1,1", "0 start 0:[a]; 1 start 0:[b c]"),
    "lengths without a budget": (ONE, "0 abcde 900,1,900,1,900", "0 start 0:[a b c d]; 1 start 0:[e]"),
    "pieces for a block inside a split": (ONE, "0 ab; 0.25 c @1; 0.5 d @1", "0 start 0:[a b]; 1 start 1 to 4:[c d]"),
}
DEFERRED: dict[str, tuple[Sequence[Split], str, str]] = {
    "until the deadline is at risk": (ONE, "0 a <10; 0.5 b <10", "9 start 0:[a b]"),
    "with the reserve": (ONE, "0 a <10 -2.5", "6.5 start 0:[a]"),
    "with time for deeper splits": (TWO, "0 a <10", "8 start 0:[a]; 9 start 2:[a]"),
    "a full batch at once": (splits_of(0, 4), "0 a <10; 3 b <20", "3 start 0:[a b]"),
    "at once without a deadline": (ONE, "2 a", "2 start 0:[a]"),
    "enough tokens": (splits_of(0, 4, batch=4, tokens=10), "0 a <10 4; 1 b <10 6", "1 start 0:[a b]"),
    "too many tokens": (splits_of(0, 4, batch=4, tokens=10), "0 a <10 4; 1 b <10 7", "1 start 0:[a]; 9 start 0:[b]"),
    "too few tokens": (splits_of(0, 4, batch=4, tokens=10), "0 a <10 4; 1 b <10 5", "9 start 0:[a b]"),
    "probes": (splits_of(0, 4, batch=4, tokens=10), "0 ABC <90 6,4,1", "0 start 0:[A B]; 1 start 0:[C]"),
}


@pytest.mark.parametrize("dispatch", ["work-conserving", "filling"])
@pytest.mark.parametrize(("splits", "events", "log"), WORK_CONSERVING.values(), ids=WORK_CONSERVING)
def test_a_free_device_runs_a_full_batch_or_the_most_urgent_one(
    splits: Sequence[Split], events: str, log: str, dispatch: Dispatch
) -> None:
    assert driver_of(*splits, dispatch=dispatch).play(events) == log


@pytest.mark.parametrize(("splits", "events", "log"), DEFERRED.values(), ids=DEFERRED)
def test_a_deferred_batch_waits_for_others_while_its_deadlines_allow_it(
    splits: Sequence[Split], events: str, log: str
) -> None:
    assert driver_of(*splits, dispatch="deferred").play(events) == log


@pytest.mark.parametrize(
    ("tokens", "length", "start_s"),
    [
        pytest.param(None, 10, "17.5", id="10 tokens and three inputs of 5"),
        pytest.param(None, 100, "8.5", id="100 tokens and three inputs of 5"),
        pytest.param(20, 10, "18", id="20 tokens at most"),
        pytest.param(4, 3, "19.5", id="one input of 5, larger than the budget"),
    ],
)
def test_a_deferred_batch_keeps_time_for_the_inputs_that_may_still_come(
    tokens: int | None, length: int, start_s: str
) -> None:
    driver = driver_of(*splits_of(0, 4, batch=4, tokens=tokens), dispatch="deferred", times=TokenTimes())
    assert driver.play(f"0 a <20 {length}") == f"{start_s} start 0:[a]"


def test_a_deferred_batch_keeps_time_for_full_batches_of_deeper_splits() -> None:
    splits = Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=8, tokens=30)
    driver = driver_of(*splits, dispatch="deferred", times=TokenTimes(), leave={0: "a"})
    assert driver.play("0 a <20") == "16.4 start 0:[a]"


@pytest.mark.parametrize("known", [[], [TWO[0]]], ids=["nothing is known", "of one split"])
def test_a_deferred_batch_does_not_wait_while_the_times_of_its_splits_are_unknown(known: list[Split]) -> None:
    times = ObservedTimes()
    for split in known:
        times.observe(split, 4, 4, 1.0, 1.0)
    engine = Engine(TWO, times)
    engine.follow(TWO, "deferred")
    engine.submit(0, [member("a", deadline_s=10.0)], 0.0)
    assert engine.choose(0.0).batch is not None


def test_survivors_wait_on_the_device_for_a_full_batch() -> None:
    driver = driver_of(*TWO, leave={0: "ad"})
    assert driver.engine.counts[0].fill is None
    assert driver.play("0 abcd; 5 e") == (
        "0 start 0:[a b]; 1 start 0:[c d]; 2 start 2:[b c]; 5 start 0:[e]; 6 start 2:[e]"
    )
    counts = driver.engine.counts
    assert (counts[0].batches, counts[0].inputs, counts[0].fill, counts[0].busy_s) == (3, 5, 5 / 6, 3.0)
    assert (counts[2].fill, counts[2].tokens, counts[2].token_fill) == (0.75, 3, None)


def test_batches_are_counted_and_learnt_with_their_tokens() -> None:
    driver = driver_of(*splits_of(0, 4, batch=4, tokens=10))
    driver.play("0 abcde 4,5,9,1,30")
    counts = driver.engine.counts[0]
    assert (counts.batches, counts.inputs, counts.tokens, counts.token_fill) == (3, 5, 49, 49 / 30)
    assert {run.size: (run.batches, run.tokens) for run in driver.engine.times.runs()} == {1: (1, 30), 2: (2, 19)}


def test_a_split_is_tried_again_if_its_times_drop_every_input() -> None:
    engine = Engine(splits_of(0, 2, 4, batch=1), ObservedTimes())
    engine.submit(2, [member("cold")], 0.0)
    ran(engine, begun(engine), 2.0)
    firsts: list[int] = []
    for now_s in range(2, 100):
        engine.submit(2, [member("PROBE" if now_s == 9 else "deep", deadline_s=now_s + 1.0)], now_s)
        engine.submit(0, [member("new", deadline_s=now_s + 1.0)], now_s)
        while (batch := engine.begin(now_s).batch) is not None:
            ran(engine, batch, 0.5)
            firsts.append(batch.split.first)
    assert (firsts.count(0), firsts.count(2)) == (98, 98 - 7)  # 2 * 0.9 ** 7 is 0.96


def test_inputs_that_arrive_too_late_do_not_change_the_trust_in_times() -> None:
    engine = Engine(splits_of(0, 2, batch=1), ObservedTimes())
    for name, deadline_s, seconds in (("a", 9.0, 1.0), ("too late", -1.0, 0.0), ("c", 9.0, 6.0)):
        engine.submit(0, [member(name, deadline_s=deadline_s)], 0.0)
        if (batch := engine.begin(0.0).batch) is not None:
            ran(engine, batch, seconds)
    assert engine.times.batch_s(engine.splits[0], 1) == 1.0 + 0.2 * (6.0 - 1.0)


def test_a_slow_batch_does_not_keep_its_size_from_being_run_and_measured_again() -> None:
    engine = Engine(splits_of(0, 2, batch=2), ObservedTimes())
    for members, seconds in (("a", 0.5), ("bc", 3.0), *[("d", 0.5)] * 8):
        engine.submit(0, [member(name) for name in members], 0.0)
        ran(engine, begun(engine), seconds)
    engine.submit(0, [member("e", deadline_s=1.5), member("f", deadline_s=1.5)], 0.0)
    assert names(chosen(engine, 0.25).members) == "e f", "by the recent batches of one, they take 1.1 s"
    engine.submit(0, [member("g", deadline_s=1.5), member("h", deadline_s=2.0)], 0.0)
    choice = engine.choose(0.5)
    assert (names(choice.dropped), names(choice.batch.members if choice.batch else ())) == ("g", "h")


def test_a_forgotten_call_loses_its_members() -> None:
    engine = driver_of(*TWO).engine
    mine, yours = object(), object()
    engine.submit(0, [member("a", origin=mine), member("b", origin=yours), member("c", origin=mine)], 0.0)
    engine.submit(2, [member("d", origin=mine)], 0.0)
    assert engine.num_waiting == 4
    assert (engine.forget(mine), engine.num_waiting) == (3, 1)
    assert names(chosen(engine).members) == "b"


def test_an_unchanged_split_keeps_its_queue() -> None:
    engine = driver_of(*TWO).engine
    engine.submit(0, [member("a"), member("b"), member("c")], 0.0)
    assert engine.choose(0.0).batch is not None
    engine.follow(splits_of(0, 2, 3, 4), "work-conserving")
    assert [counts.inputs for counts in engine.counts.values()] == [2, 0, 0]
    assert (engine.num_waiting, names(chosen(engine).members)) == (1, "c")


# Orders


@pytest.mark.parametrize(
    ("name", "log"),
    [
        ("deadline", "0 start 0:[z]; 1 start 0:[b c]; 2 start 0:[a d]"),
        ("arrival", "0 start 0:[z]; 1 start 0:[a b]; 2 start 0:[c d]"),
        ("shortest", "0 start 0:[z]; 1 start 0:[d c]; 2 start 0:[b a]"),
        ("das", "0 start 0:[z]; 1 start 0:[d c]; 2 start 0:[b a]"),
    ],
)
def test_the_order_selects_the_inputs_of_a_batch(name: OrderName, log: str) -> None:
    order = OrderSpec(name=name, overdue_s=None if name == "arrival" else 99.0)
    events = "0 z; 0.25 a <9 40; 0.5 b <7 30; 0.75 c <8 20; 0.875 d <10 10"
    assert driver_of(*splits_of(0, 4), order=order).play(events) == log


def test_overdue_inputs_go_first_among_probes_and_in_later_splits_too() -> None:
    shortest = OrderSpec(name="shortest", overdue_s=99.0)
    splits = Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=1)
    assert driver_of(*splits, order=shortest).play("0 ab 9,5; 0 XY 7,3") == (
        "0 start 0:[Y X]; 1 start 2:[Y]; 2 start 2:[X]; 3 start 0:[b a]; 4 start 2:[b]; 5 start 2:[a]"
    )
    keep_coming = "; ".join(f"{second} ab 1,1" for second in range(9))
    log = driver_of(*splits_of(0, 4), order=replace(shortest, overdue_s=3.0)).play(f"0 l 99; {keep_coming}")
    assert [line for line in log.split("; ") if "[l" in line] == ["3 start 0:[l a]"]


# Plans that change while inputs wait

CHANGES: dict[str, tuple[Sequence[Split], list[Event | str], str]] = {
    # a and b, running when the plan came, went on to block 2, inside the new split of blocks 1 to 3.
    "queued members move to the new split of their block": (
        TWO,
        ["0 ab; 0.5 cde", Switch(0.75, splits_of(0, 1, 4, batch=3))],
        "0 start 0:[a b]; 1 start 0:[c d e]; 2 start 1:[c d e]; 3 start 2 to 4:[a b]",
    ),
    "the old split runs them where no new one starts": (
        splits_of(2, 4, 6),
        ["0 ab @2; 0 cde @4", Switch(0.5, splits_of(0, 3))],
        "0 start 4:[c d]; 1 start 2 to 4:[a b]; 2 start 4 to 6:[e]",
    ),
    "everything is taken away": (splits_of(0, 2), ["0 abc", Switch(0.5, ())], "0 start 0:[a b]; 1 start 0 to 2:[c]"),
    "late members of a queue on its way out": (
        splits_of(2, 4, batch=1),
        ["0 ab @2 <1.5", Switch(0.5, splits_of(0, 4))],
        "0 start 2:[a]; 1 drop [b]",
    ),
    "another dispatch rule": (splits_of(0, 4), [Switch(0, splits_of(0, 4), "deferred"), "0 a <9"], "8 start 0:[a]"),
    "budgets are those of the new plan": (
        ONE,
        ["0 x; 0.1 abcdef 3,2,2,9,1,1", Switch(0.5, splits_of(0, 4, batch=4, tokens=5)), Switch(2.5, ONE)],
        "0 start 0:[x]; 1 start 0:[a b]; 2 start 0:[c]; 3 start 0:[d e f]",
    ),
    "a block of the call's own plan": (
        splits_of(0, 2),
        [Arrival(0, "a", block=4, fallback=splits_of(0, 4, 6))],
        "0 start 4 to 6:[a]",
    ),
    "inside a split of the call's own plan": (
        splits_of(0, 2),
        [Arrival(0, "a", block=5, fallback=splits_of(0, 4, 6))],
        "0 start 5 to 6:[a]",
    ),
    "the plan here comes first": (
        splits_of(0, 2),
        [Arrival(0, "a", block=1, fallback=splits_of(0, 4, 6))],
        "0 start 1 to 2:[a]",
    ),
}


@pytest.mark.parametrize(("splits", "events", "log"), CHANGES.values(), ids=CHANGES)
def test_plans_change_while_inputs_wait(splits: Sequence[Split], events: list[Event | str], log: str) -> None:
    driver = driver_of(*splits)
    assert driver.play(*events) == log
    assert driver.engine.num_waiting == 0


def test_an_input_may_begin_inside_a_split_but_not_outside_all_splits() -> None:
    engine = Engine([Split(first=0, end=4, batch=3, ramps=(0, 1, 2))], TableTimes({0: 1.0, 2: 1.0}))
    engine.submit(2, [member("a")], 0.0)
    assert chosen(engine).split == Split(first=2, end=4, batch=3, ramps=(2,))
    engine = driver_of(*TWO).engine
    assert [engine.hosts(block) for block in range(5)] == [True, True, True, True, False]
    with pytest.raises(PlanError, match="no split here holds block 6; splits hold the blocks 0 to 1, 2 to 3"):
        engine.submit(6, [member("a")], 0.0, splits_of(4, 6))


def test_survivors_do_not_wait_where_the_next_network_of_a_chain_begins() -> None:
    driver = driver_of(*TWO, starts=(0, 2))
    assert [driver.engine.hosts(block) for block in range(5)] == [False, True, False, True, False]
    assert driver.play("0 ab; 0 xy @2") == "0 start 2:[x y]; 1 start 0:[a b]"
    deferred = driver_of(*TWO, dispatch="deferred", starts=(0, 2))
    assert deferred.play("0 a <10 -3") == "6 start 0:[a]", "the reserve has the next network's time"


def test_times_are_summed_by_split_and_size_over_plans_and_without_probes() -> None:
    driver = driver_of(*splits_of(0, 4))
    driver.play("0 abc; 0 XY", Switch(2.5, splits_of(0, 2)), "4 de; 4 fg")
    runs = [(run.first, run.end, run.size, run.batches, run.seconds) for run in driver.engine.times.runs()]
    assert runs == [(0, 4, 2, 1, 1.0), (0, 4, 1, 1, 1.0), (0, 2, 2, 2, 2.0)]
    assert driver.engine.counts[0].busy_s == 2.0, "only of the present split"
    times = driver.engine.times
    assert isinstance(times, TableTimes)
    assert times.observed == [(0, 2, 1.0, 1.0), (0, 1, 1.0, 1.0), (0, 2, 1.0, 1.0), (0, 2, 1.0, 1.0)]


def test_the_split_that_has_not_run_for_longest_makes_room_in_the_sums() -> None:
    engine = driver_of().engine
    for end in [*range(1, MOST_SPLITS + 1), 1, MOST_SPLITS + 1]:
        engine.submit(0, [member("a")], 0.0, splits_of(0, end, batch=1))
        ran(engine, begun(engine), 1.0)
    batches = {run.end: run.batches for run in engine.times.runs()}
    assert batches == {1: 2} | dict.fromkeys(range(3, MOST_SPLITS + 2), 1)


# Steps of sequences: a batch waits a moment for those that are on their way back

UNTIL_S = 1.0 + RETURN_SHARE
WHOLE = Split(first=0, end=2, batch=2)


def step(name: str, sequence: int) -> Member[None]:
    """Capital letters are probes."""
    return Member(sample_id=name, payload=None, sequence=sequence, probe=name.isupper())


def two_have_run(batch: int = 8) -> Engine:
    """Steps of sequences 1 and 2 were answered at 1 s; steps of sequences 3 and 4 arrived while they ran."""
    engine = Engine([replace(WHOLE, batch=batch)], TableTimes({0: 1.0}))
    engine.submit(0, [step("a", 1), step("b", 2)], 0.0)
    first = begun(engine)
    engine.submit(0, [step("c", 3), step("d", 4)], 0.5)
    ran(engine, first, 1.0, 1.0, answered=[1, 2])
    return engine


def test_returning_steps_are_awaited_until_a_limit_a_full_batch_or_the_end_of_their_sequences() -> None:
    engine = two_have_run()
    waits = engine.choose(1.0)
    assert (waits.batch, waits.wake_s) == (None, UNTIL_S)
    engine.submit(0, [step("e", 1)], 1.01)
    assert engine.choose(1.01).wake_s == UNTIL_S
    engine.submit(0, [step("f", 2)], 1.02)
    assert names(chosen(engine, 1.02).members) == "c d e f"
    engine = two_have_run()
    assert names(chosen(engine, UNTIL_S).members) == "c d"
    engine.submit(0, [step("e", 1)], 1.2)
    assert names(chosen(engine, 1.2).members) == "e", "b is not awaited again"
    engine = two_have_run()
    engine.remove_sequences([1])
    assert engine.choose(1.0).wake_s == UNTIL_S, "the other one may come"
    engine.remove_sequences([2])
    assert names(chosen(engine, 1.0).members) == "c d"
    assert names(chosen(two_have_run(batch=2), 1.0).members) == "c d"


def test_a_sequence_that_ended_before_its_batch_is_not_awaited() -> None:
    engine = Engine([replace(WHOLE, batch=8)], TableTimes({0: 1.0}))
    engine.submit(0, [step("a", 1)], 0.0)
    first = begun(engine)
    engine.submit(0, [step("c", 3)], 0.5)
    engine.remove_sequences([1])
    ran(engine, first, 1.0, 1.0, answered=[1])
    assert names(chosen(engine, 1.0).members) == "c"


def in_turn(engine: Engine, *coming_back: Member[None]) -> str:
    """Returns the batches if one of these members arrives after each batch."""
    found = []
    for each in coming_back:
        found.append(names(chosen(engine).members))
        engine.submit(0, [each], 0.0)
    return "; ".join([*found, names(chosen(engine).members)])


def engine_of(*members: Member[None], dispatch: Dispatch = "work-conserving") -> Engine:
    engine = Engine((WHOLE,), TableTimes({0: 1.0}))
    engine.follow((WHOLE,), dispatch)
    for each in members:
        engine.submit(0, [each], 0.0)
    return engine


def test_probes_that_are_steps_of_sequences_take_turns_with_other_inputs() -> None:
    came = step("B", 2), step("A", 1), step("c", 3), step("B", 2)
    assert in_turn(engine_of(step("A", 1), step("c", 3)), *came) == "A; c; B A; c; B"
    always_full = engine_of(*(step(name, 2 + k) for k, name in enumerate("abcdef")), step("A", 1))
    assert in_turn(always_full, step("A", 1), step("g", 9), step("A", 1)) == "A; a b; A; c d"
    assert in_turn(engine_of(step("A", 1)), step("B", 2), step("A", 1)) == "A; B; A"
    assert in_turn(engine_of(step("A", 0), step("b", 0)), step("B", 0)) == "A; B", "they are of no sequence"
    engine = engine_of(step("A", 1), step("b", 2))
    first = begun(engine)
    assert names(first.members) == "A"
    ran(engine, first, 1.0, 1.0, answered=[1])
    assert names(chosen(engine, 1.0).members) == "b", "a probe's next step is not awaited"


@pytest.mark.parametrize(("dispatch", "second"), [("deferred", "A"), ("filling", "a")])
def test_a_probe_starts_while_other_inputs_wait_for_a_full_batch(dispatch: Dispatch, second: str) -> None:
    waits = Member[None](sample_id="a", payload=None, sequence=2, deadline_s=99.0)
    assert in_turn(engine_of(waits, step("A", 1), dispatch=dispatch), step("A", 1)) == f"A; {second}"


# Laws

TIMES = st.sampled_from([1, 4, 8, 20, math.inf])
RULES = st.sampled_from(["work-conserving", "deferred"])


@settings(max_examples=150)
@given(
    batches=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dispatch=RULES,
    came=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1), TIMES), max_size=25),
)
def test_inputs_of_one_token_run_like_inputs_without_tokens(
    batches: tuple[int, int], dispatch: Dispatch, came: list[tuple[int, int, float]]
) -> None:
    without = tuple(Split(first=k, end=k + 1, batch=batch) for k, batch in enumerate(batches))
    by_tokens = tuple(Split(first=k, end=k + 1, batch=50, tokens=batch) for k, batch in enumerate(batches))
    events = [Arrival(at / 4, chr(97 + k), block, at / 4 + slack) for k, (at, block, slack) in enumerate(came)]
    switches = [Switch(4.0, without, dispatch), Switch(7.0, by_tokens, dispatch)]
    logs = [
        driver_of(*splits, dispatch=dispatch, leave={0: "adgjmpsv"}).play(*events, *others)
        for splits, others in ((without, []), (by_tokens, []), (by_tokens, switches))
    ]
    assert logs == logs[:1] * 3


NUM_BLOCKS = 6


@st.composite
def hosted(draw: st.DrawFn) -> tuple[Split, ...]:
    """Draws consecutive splits of some blocks, or no split."""
    bounds = sorted(draw(st.sets(st.integers(0, NUM_BLOCKS), max_size=4)))
    return tuple(
        Split(first=first, end=end, batch=draw(st.integers(1, 4)), tokens=draw(st.none() | st.integers(1, 20)))
        for first, end in pairwise(bounds)
    )


@settings(max_examples=200)
@given(
    plans=st.lists(hosted(), min_size=1, max_size=6),
    entries=st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.booleans(), st.booleans()), min_size=1, max_size=30),
    dispatch=RULES,
    seed=st.integers(0, 2**32),
)
def test_every_member_runs_every_block_once_or_is_dropped_once_however_plans_change(
    plans: list[tuple[Split, ...]], entries: list[tuple[int, bool, bool]], dispatch: Dispatch, seed: int
) -> None:
    rng = random.Random(seed)
    orders = [OrderSpec(name=name) for name in ("das", "shortest", "arrival", "deadline")]
    engine = BatchEngine[int](plans[0], TableTimes(dict.fromkeys(range(8), 1.0)))
    engine.follow(plans[0], dispatch)
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
            engine.follow(following.pop(), dispatch, rng.choice(orders))
        elif event == "run":
            choice = engine.begin(now_s)
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
            engine.end(batch, first_s=1.0, total_s=1.0, now_s=now_s)
            engine.leave(batch, now_s)
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
    assert engine.num_waiting == 0
