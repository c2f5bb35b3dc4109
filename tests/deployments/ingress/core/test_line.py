"""The line of an ingress: who goes next, by every order, and that nobody is lost or waits for ever."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from deployments.ingress.core.inputs import PendingInput, WaitQueue
from earlyexit.engine.order import OrderName, OrderSpec
from earlyexit.network.split import Budget
from tests.deployments.ingress.core.core_scene import plan

DEFAULT = OrderSpec().build()
TWO = Budget(inputs=2)
NAMES: list[OrderName] = ["arrival", "deadline", "shortest", "das"]


def flight(name: str, arrived_s: float = 0.0, deadline_s: float = math.inf, tokens: int = 1) -> PendingInput:
    return PendingInput(0, arrived_s, deadline_s, tokens, key=name)


def line_of(*flights: PendingInput) -> WaitQueue:
    line: WaitQueue = WaitQueue()
    for each in flights:
        line.join([each])
    return line


def gone(line: WaitQueue, budget: Budget = TWO, order: Any = DEFAULT, now_s: float = 0.0) -> str:
    return "".join(each.key for each in line.leave(budget, order, now_s))


def test_with_one_slo_for_all_who_came_first_goes_first() -> None:
    line = line_of(*[flight(name, k, k + 2.0) for k, name in enumerate("abcd")])
    assert [gone(line), gone(line), gone(line)] == ["ab", "cd", ""]


def test_a_shorter_deadline_goes_before() -> None:
    line = line_of(flight("a", 0.0, 9.0), flight("b", 1.0, 3.0), flight("c", 2.0), flight("d", 3.0, 9.0))
    assert [gone(line), gone(line)] == ["ba", "dc"]


@pytest.mark.parametrize("deadline_s", [5.0, math.inf])
def test_who_is_sent_again_has_the_old_place(deadline_s: float) -> None:
    line = line_of(*[flight(name, k, deadline_s + k) for k, name in enumerate("abcde")])
    first = line.leave(TWO, DEFAULT, 0.0)
    second = line.leave(TWO, DEFAULT, 0.0)
    line.rejoin(second)
    line.rejoin(first)
    assert (line.length, line.tokens) == (5, 5)
    assert [gone(line), gone(line), gone(line)] == ["ab", "cd", "e"]


@pytest.mark.parametrize(("name", "expected"), [("arrival", "ab"), ("deadline", "cd"), ("shortest", "db")])
def test_every_order_chooses_among_all(name: OrderName, expected: str) -> None:
    line = line_of(
        flight("a", 0.0, 9.0, 40), flight("b", 1.0, 8.0, 20), flight("c", 2.0, 6.0, 30), flight("d", 3.0, 7.0, 10)
    )
    assert gone(line, order=OrderSpec(name=name).build(), now_s=0.9) == expected
    assert (line.length, line.tokens) == (2, 100 - {"ab": 60, "cd": 40, "db": 30}[expected])
    assert [each.key for each in line] == [each for each in "cdba" if each not in expected]


def test_of_those_without_a_deadline_the_oldest_goes_first_once_overdue() -> None:
    line = line_of(flight("z", 0.0), flight("a", 0.5, 9.0), flight("b", 0.6, 9.0), flight("c", 0.7, 9.0))
    assert gone(line, now_s=0.9) == "ab"
    line.join([flight("d", 0.95, 9.0)])
    assert gone(line, now_s=1.0) == "zc"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [None, 50])
def test_nobody_is_lost_whoever_is_settled_meanwhile(name: OrderName, tokens: int | None) -> None:
    rng, order = random.Random(f"{name} {tokens}"), OrderSpec(name=name).build()
    line: WaitQueue = WaitQueue()
    waiting: dict[str, PendingInput] = {}
    for step in range(400):
        what = rng.choice("jjjlgr")
        if what == "j":
            deadline_s = rng.choice([math.inf, step + 5.0, step + rng.random() * 50])
            come = [flight(f"{step}.{k}", step, deadline_s, rng.randint(1, 70)) for k in range(rng.randint(1, 4))]
            line.join(come)
            waiting |= {each.key: each for each in come}
        elif what == "g" and waiting:
            settled = [waiting.pop(rng.choice(list(waiting)))]
            settled[0].settled = True
            line.forget(settled)
        elif waiting:
            left = line.leave(Budget(inputs=4, tokens=tokens), order, float(step))
            assert 1 <= len(left) <= 4
            for each in left:
                assert waiting.pop(each.key) is each
            if what == "r":
                line.rejoin(left)
                waiting |= {each.key: each for each in left}
        assert line.length == len(waiting)
        assert line.tokens == sum(each.tokens for each in waiting.values())
        assert {each.key for each in line} == set(waiting)
        assert [each.deadline_s for each in line] == sorted(each.deadline_s for each in waiting.values())


def ordered(name: OrderName, epoch: int = 1) -> Any:
    placed = plan(epoch=epoch)
    return replace(placed, plan=replace(placed.plan, order=OrderSpec(name=name)))
