"""Batches bounded by tokens: what the engine runs, and in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.engine.engine import Dispatch
from earlyexit.network.split import Split
from tests.earlyexit.engine_driver import Arrival, Driver, Engine, Switch, TableTimes

SECONDS = {0: 1.0}


def budget_of(
    tokens: int | None, batch: int = 4, *, dispatch: Dispatch = "work-conserving", times: TableTimes | None = None
) -> Driver:
    """Blocks 0-3, one second."""
    split = Split(first=0, end=4, batch=batch, tokens=tokens)
    return Driver(Engine([split], times or TableTimes(SECONDS), dispatch=dispatch), SECONDS)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param((4, 4, 2, 1), ["0.000 start 0:[a b c]", "1.000 start 0:[d]"], id="full to the token"),
        pytest.param((4, 4, 3, 1), ["0.000 start 0:[a b]", "1.000 start 0:[c d]"], id="the next is too long"),
        pytest.param((1, 1, 1, 1), ["0.000 start 0:[a b c d]"], id="inputs bound it first"),
        pytest.param((12, 1, 1, 1), ["0.000 start 0:[a]", "1.000 start 0:[b c d]"], id="longer than the budget"),
        pytest.param((1, 12, 1, 1), ["0.000 start 0:[a]", "1.000 start 0:[b]", "2.000 start 0:[c d]"], id="behind one"),
    ],
)
def test_a_batch_ends_before_the_first_input_that_does_not_fit(lengths: tuple[int, ...], expected: list[str]) -> None:
    assert budget_of(10).play([Arrival(0, "abcd", tokens=lengths)]) == expected


def test_without_a_budget_lengths_change_nothing() -> None:
    assert budget_of(None).play([Arrival(0, "abcde", tokens=(900, 1, 900, 1, 900))]) == [
        "0.000 start 0:[a b c d]",
        "1.000 start 0:[e]",
    ]


@pytest.mark.parametrize(
    ("lengths", "start_s"),
    [
        pytest.param((4, 6), 1.0, id="exactly"),
        pytest.param((4, 7), 1.0, id="more"),
        pytest.param((4, 5), 9.0, id="less"),
    ],
)
def test_a_deferred_batch_is_full_as_soon_as_enough_tokens_wait(lengths: tuple[int, int], start_s: float) -> None:
    log = budget_of(10, dispatch="deferred").play(
        [
            Arrival(0, "a", tokens=lengths[:1], deadline_s=10.0),
            Arrival(1, "b", tokens=lengths[1:], deadline_s=10.0),
        ]
    )
    assert log[0].startswith(f"{start_s:.3f} start 0:[a")


def test_who_waits_is_counted_by_the_budgets_of_the_plan_that_is_followed() -> None:
    without, narrow = ((Split(first=0, end=4, batch=4, tokens=tokens),) for tokens in (None, 5))
    log = budget_of(None).play(
        [
            Arrival(0, "x"),
            Arrival(0.1, "abcdef", tokens=(3, 2, 2, 9, 1, 1)),
            Switch(0.5, narrow),
            Switch(2.5, without),
        ]
    )
    assert log == ["0.000 start 0:[x]", "1.000 start 0:[a b]", "2.000 start 0:[c]", "3.000 start 0:[d e f]"]


def test_probes_keep_to_the_budget_and_wait_for_nobody() -> None:
    log = budget_of(10, dispatch="deferred").play([Arrival(0, "ABC", tokens=(6, 4, 1), deadline_s=90.0)])
    assert log == ["0.000 start 0:[A B]", "1.000 start 0:[C]"]


class TokenTimes(TableTimes):
    """A tenth of a second a token; inputs have five on average."""

    def __init__(self) -> None:
        super().__init__({0: 0.1})

    def batch_s(self, split: Split, tokens: float) -> float:
        return 0.1 * tokens

    def mean_tokens(self, split: Split) -> float:
        return 5.0


@pytest.mark.parametrize(
    ("tokens", "length", "start_s"),
    [
        pytest.param(None, 10, 17.5, id="10 tokens and three inputs of 5"),
        pytest.param(None, 100, 8.5, id="100 tokens and three inputs of 5"),
        pytest.param(20, 10, 18.0, id="20 tokens at most"),
        pytest.param(4, 3, 19.5, id="one input of 5, larger than the budget"),
    ],
)
def test_deferred_keeps_time_for_who_waits_and_as_many_as_may_still_come(
    tokens: int | None, length: int, start_s: float
) -> None:
    driver = budget_of(tokens, dispatch="deferred", times=TokenTimes())
    log = driver.play([Arrival(0, "a", tokens=(length,), deadline_s=20.0)])
    assert log == [f"{start_s:.3f} start 0:[a]"]


def test_deferred_keeps_time_for_full_batches_of_deeper_splits() -> None:
    splits = [Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=8, tokens=30)]
    driver = Driver(Engine(splits, TokenTimes(), dispatch="deferred"), {0: 1.0, 2: 1.0}, {0: "a"})
    # 1 and 5 tokens here, 30 there: 3.6 s.
    assert driver.play([Arrival(0, "a", deadline_s=20.0)]) == ["16.400 start 0:[a]"]


def test_batches_are_counted_and_learnt_with_their_tokens() -> None:
    driver = budget_of(10)
    driver.play([Arrival(0, "abcde", tokens=(4, 5, 9, 1, 30))])
    counts = driver.engine.counts[0]
    assert (counts.batches, counts.inputs, counts.tokens, counts.token_fill) == (3, 5, 49, 49 / 30)
    runs = {run.size: (run.batches, run.tokens) for run in driver.engine.times_run}
    assert runs == {1: (1, 30), 2: (2, 19)}


Play = list[tuple[int, int, float]]
arriving = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 1), st.sampled_from([1, 4, 8, 20, math.inf])), max_size=25
)


def played(splits: Sequence[Split], arrivals: Play, dispatch: Dispatch, other: Sequence[Split] = ()) -> list[str]:
    seconds = {0: 0.5, 1: 1.0}
    driver = Driver(Engine(splits, TableTimes(seconds), dispatch=dispatch), seconds, {0: "adgjmpsv"})
    events: list[Arrival | Switch] = [
        Arrival(at / 4, chr(97 + k), block=block, deadline_s=at / 4 + slack)
        for k, (at, block, slack) in enumerate(arrivals)
    ]
    switches = [Switch(4.0, tuple(other), dispatch), Switch(7.0, tuple(splits), dispatch)] if other else []
    return driver.play([*events, *switches])


@settings(max_examples=150, deadline=None)
@given(
    batches=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dispatch=st.sampled_from(["work-conserving", "deferred"]),
    arrivals=arriving,
)
def test_inputs_of_one_token_run_as_without_tokens_whatever_bounds_their_batches(
    batches: tuple[int, int], dispatch: Dispatch, arrivals: Play
) -> None:
    without = [Split(first=k, end=k + 1, batch=batch) for k, batch in enumerate(batches)]
    by_tokens = [Split(first=k, end=k + 1, batch=50, tokens=batch) for k, batch in enumerate(batches)]
    expected = played(without, arrivals, dispatch)
    assert played(by_tokens, arrivals, dispatch) == expected
    assert played(by_tokens, arrivals, dispatch, other=without) == expected
