"""Batches bounded by tokens: what the engine runs, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from earlyexit.engine import Dispatch
from earlyexit.split import Split
from tests.earlyexit.engine_driver import Arrival, Driver, Engine, Switch, TableTimes, chosen, member, names

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


def test_tokens_that_were_run_dropped_or_forgotten_fill_no_batch() -> None:
    engine = Engine([Split(first=0, end=4, batch=4, tokens=10)], TableTimes(SECONDS), dispatch="deferred")
    caller = object()
    engine.submit(0, [member("a", tokens=9, deadline_s=50.0), member("b", tokens=2, deadline_s=50.0)], 0.0)
    assert names(chosen(engine).members) == "a"
    engine.submit(
        0, [member("c", tokens=5, deadline_s=50.0, origin=caller), member("d", tokens=4, deadline_s=0.5)], 0.0
    )
    assert engine.forget(caller) == 1
    choice = engine.choose(0.0)
    assert (names(choice.dropped), choice.batch) == ("d", None)
    engine.submit(0, [member("e", tokens=7, deadline_s=50.0)], 0.0)
    assert engine.choose(0.0).batch is None
    engine.submit(0, [member("f", deadline_s=50.0)], 0.0)
    assert names(chosen(engine).members) == "b e f"


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


@pytest.mark.parametrize("lengths", [(1,) * 7, (3, 1, 4, 1, 5, 9, 2)], ids=["of one token", "of several"])
def test_survivors_keep_their_tokens(lengths: Sequence[int]) -> None:
    splits = [Split(first=0, end=2, batch=7, tokens=12), Split(first=2, end=4, batch=7, tokens=9)]
    driver = Driver(Engine(splits, TableTimes({0: 1.0, 2: 1.0})), {0: 1.0, 2: 1.0}, {0: "be"})
    driver.play([Arrival(0, "abcdefg", tokens=tuple(lengths))])
    by_name = dict(zip("abcdefg", lengths, strict=True))
    started = [line.partition("[")[2].rstrip("]").split() for line in driver.log if "start 2" in line]
    assert sorted(name for batch in started for name in batch) == list("acdfg")
    assert all(len(batch) == 1 or sum(by_name[name] for name in batch) <= 9 for batch in started)
