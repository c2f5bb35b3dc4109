"""The queue of an ingress and its timers: what is next, by every order, and that nothing is lost or waits for ever."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deployments.ingress.core.calls import DEADLINE, HANGING, PAUSE, Pause, Timers
from deployments.ingress.core.inputs import PendingInput, WaitQueue
from earlyexit.engine.queue import OrderName, OrderSpec
from earlyexit.network.boundary import Budget

DEFAULT = OrderSpec()
TWO = Budget(inputs=2)
NAMES: list[OrderName] = ["arrival", "deadline", "shortest", "das"]


def pending(name: str, arrived_s: float = 0.0, deadline_s: float = math.inf, tokens: int = 1) -> PendingInput:
    return PendingInput(0, arrived_s, deadline_s, tokens, key=name)


def queue_of(*inputs: PendingInput) -> WaitQueue:
    queue: WaitQueue = WaitQueue()
    for each in inputs:
        queue.join([each])
    return queue


def gone(queue: WaitQueue, budget: Budget = TWO, order: Any = DEFAULT, now_s: float = 0.0) -> str:
    return "".join(each.key for each in queue.leave(budget, order, now_s))


@pytest.mark.parametrize(("name", "expected"), [("arrival", "ab"), ("deadline", "cd"), ("shortest", "db")])
def test_every_order_chooses_among_all(name: OrderName, expected: str) -> None:
    queue = queue_of(
        pending("a", 0.0, 9.0, 40), pending("b", 1.0, 8.0, 20), pending("c", 2.0, 6.0, 30), pending("d", 3.0, 7.0, 10)
    )
    assert gone(queue, order=OrderSpec(name=name), now_s=0.9) == expected
    assert (queue.length, queue.tokens) == (2, 100 - {"ab": 60, "cd": 40, "db": 30}[expected])
    assert [each.key for each in queue] == [each for each in "cdba" if each not in expected]


def test_of_those_without_a_deadline_the_oldest_goes_first_once_overdue() -> None:
    queue = queue_of(pending("z", 0.0), pending("a", 0.5, 9.0), pending("b", 0.6, 9.0), pending("c", 0.7, 9.0))
    assert gone(queue, now_s=0.9) == "ab"
    queue.join([pending("d", 0.95, 9.0)])
    assert gone(queue, now_s=1.0) == "zc"


# Timers


def numbered(serial: int, *, settled: bool = False) -> PendingInput:
    made = PendingInput(serial, 0.0, 0.0)
    made.settled = settled
    return made


def test_what_is_over_does_not_pile_up() -> None:
    timers = Timers()
    for number in range(10_000):
        timers.add(number, DEADLINE, [numbered(number, settled=number < 9_999)])
    assert len(timers._heap) < 200
    assert timers.next_s() == 9_999


def test_of_one_moment_deadlines_come_first_then_calls_that_hang_then_pauses() -> None:
    timers, each = Timers(), numbered(0)
    pause = Pause("slot", [each])
    for kind, thing in ((PAUSE, pause), (HANGING, each), (DEADLINE, [each])):
        timers.add(1.0, kind, thing)
    assert timers.pop(1.0) == [(DEADLINE, [each]), (HANGING, each), (PAUSE, pause)]
