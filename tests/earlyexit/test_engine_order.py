"""Orders in the engine: who is in the batch, and what becomes of everybody else."""

from __future__ import annotations

import random

import pytest

from earlyexit.engine.order import OrderSpec
from earlyexit.network.split import Split
from tests.earlyexit.engine_driver import Arrival, Driver, Engine, Switch, TableTimes

SECONDS = {0: 1.0, 2: 1.0}
SHORTEST = OrderSpec(name="shortest", overdue_s=99.0)


def ordered(order: OrderSpec, *splits: Split) -> Driver:
    splits = splits or (Split(first=0, end=4, batch=2),)
    return Driver(Engine(splits, TableTimes(SECONDS), order=order), SECONDS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deadline", ["0.000 start 0:[z]", "1.000 start 0:[b c]", "2.000 start 0:[a d]"]),
        ("arrival", ["0.000 start 0:[z]", "1.000 start 0:[a b]", "2.000 start 0:[c d]"]),
        ("shortest", ["0.000 start 0:[z]", "1.000 start 0:[d c]", "2.000 start 0:[b a]"]),
        ("das", ["0.000 start 0:[z]", "1.000 start 0:[d c]", "2.000 start 0:[b a]"]),
    ],
)
def test_the_order_says_who_is_in_the_batch(name: str, expected: list[str]) -> None:
    log = ordered(OrderSpec(name=name, overdue_s=None if name == "arrival" else 99.0)).play(  # type: ignore[arg-type]
        [
            Arrival(0.0, "z"),
            Arrival(0.25, "a", deadline_s=9.0, tokens=(40,)),
            Arrival(0.5, "b", deadline_s=7.0, tokens=(30,)),
            Arrival(0.75, "c", deadline_s=8.0, tokens=(20,)),
            Arrival(0.875, "d", deadline_s=10.0, tokens=(10,)),
        ]
    )
    assert log == expected


def test_probes_and_later_splits_go_by_it_too() -> None:
    splits = Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=1)
    log = ordered(SHORTEST, *splits).play([Arrival(0.0, "ab", tokens=(9, 5)), Arrival(0.0, "XY", tokens=(7, 3))])
    assert log[0] == "0.000 start 0:[Y X]"
    assert log[1:3] == ["1.000 start 2:[Y]", "2.000 start 2:[X]"]
    assert log[3:] == ["3.000 start 0:[b a]", "4.000 start 2:[b]", "5.000 start 2:[a]"]


def test_who_is_overdue_goes_before_shorter_ones_that_keep_coming() -> None:
    events = [Arrival(0.0, "L", tokens=(99,)), *[Arrival(second, "ab", tokens=(1, 1)) for second in range(9)]]
    events[0] = Arrival(0.0, "l", tokens=(99,))
    log = ordered(OrderSpec(name="shortest", overdue_s=3.0)).play(events)
    assert [line for line in log if "l" in line.split(":")[1]] == ["3.000 start 0:[l a]"]


@pytest.mark.parametrize("dispatch", ["work-conserving", "deferred"])
def test_a_change_of_order_loses_nobody(dispatch: str) -> None:
    rng = random.Random(7)
    names = "abcdefghijklmnopqrstuvwxyz"
    splits = Split(first=0, end=2, batch=3, tokens=40), Split(first=2, end=4, batch=2)
    orders = [OrderSpec(name=name) for name in ("das", "shortest", "arrival", "deadline")]
    events: list[Arrival | Switch] = [
        Arrival(k / 4, name, deadline_s=100.0 + rng.random(), tokens=(rng.randint(1, 60),))
        for k, name in enumerate(names)
    ]
    events += [
        Switch(1.1 + 1.7 * k, splits, dispatch, order)  # type: ignore[arg-type]
        for k, order in enumerate(rng.choices(orders, k=12))
    ]
    log = ordered(orders[0], *splits).play(events)
    for first in (0, 2):
        ran = "".join(line.split("[")[1].rstrip("]").replace(" ", "") for line in log if f"start {first}:" in line)
        assert sorted(ran) == list(names)


def test_the_new_order_counts_from_the_next_batch_on() -> None:
    splits = (Split(first=0, end=4, batch=1),)
    log = ordered(SHORTEST, *splits).play(
        [Arrival(0.0, "abcd", tokens=(3, 2, 4, 1)), Switch(0.5, splits, "work-conserving", OrderSpec())]
    )
    assert log == ["0.000 start 0:[d]", "1.000 start 0:[a]", "2.000 start 0:[b]", "3.000 start 0:[c]"]
