"""The counts, the queue and the timers of an ingress."""

from __future__ import annotations

import random

import pytest

from deployments.ingress.core.calls import CALL_TIMEOUT, DEADLINE, PAUSE, IngressCounts, Timers, latencies_within
from deployments.ingress.core.inputs import PendingInput, WaitQueue
from earlyexit.engine.queue import OrderName, OrderSpec
from earlyexit.network.boundary import Budget


def test_latencies_are_never_counted_in_a_bucket_below_their_own() -> None:
    counts, ends = IngressCounts(slo_s=0.04), ("0.01", "0.05", "0.1", "0.2", "+Inf")
    for seconds in (0.004, 0.04, 0.095, 0.0999, 400.0):  # of the third and the fourth, one bucket ends below 0.1 s
        counts.record_answers(1, [seconds], 1)
    assert [latencies_within(counts.latencies)[le] for le in ends] == [1, 2, 3, 4, 5]
    counts.record_answers(1, [0.04, 0.03], 2)  # the first in a bucket that was read, both below one end
    assert [latencies_within(counts.latencies)[le] for le in ends] == [1, 4, 5, 6, 7]
    assert (counts.answered, counts.in_slo, counts.exits) == (7, 4, {1: 7})


@pytest.mark.parametrize(("name", "expected"), [("arrival", "ab"), ("deadline", "cd"), ("shortest", "db")])
def test_every_order_chooses_among_all_waiting_inputs(name: OrderName, expected: str) -> None:
    queue = WaitQueue()
    for key, arrived_s, deadline_s, tokens in (("a", 0, 9, 40), ("b", 1, 8, 20), ("c", 2, 6, 30), ("d", 3, 7, 10)):
        queue.push([PendingInput(0, arrived_s, deadline_s, tokens, key=key)])
    batch = queue.pop_batch(Budget(inputs=2), OrderSpec(name=name), 0.9)
    assert "".join(each.key for each in batch) == expected
    assert queue.tokens == 100 - {"ab": 60, "cd": 40, "db": 30}[expected]
    assert [each.key for each in queue.inputs] == [each for each in "cdba" if each not in expected]


# Timers


def numbered(serial: int, *, settled: bool = False) -> PendingInput:
    made = PendingInput(serial, 0.0, 0.0)
    made.settled = settled
    return made


def test_obsolete_timers_do_not_accumulate() -> None:
    timers, expired = Timers(), []
    for number in random.Random(0).sample(range(10_000), 10_000):
        timers.add(number, DEADLINE, [numbered(number, settled=number % 100 > 0)])
    assert len(timers._heap) < 300
    while (timer := timers.pop(9_999)) is not None:
        expired.append(timer[1][0].serial)
    assert expired == [*range(0, 10_000, 100)]
    for number in range(15_000):  # first a burst of requests that time out, then requests that are answered at once
        timers.add(number, DEADLINE, [numbered(number, settled=number >= 6_000)])
        while number == 5_999 and timers.pop(number):
            pass
    assert len(timers._heap) < 100


def test_of_simultaneous_timers_deadlines_expire_first_then_calls_then_pauses() -> None:
    timers, each = Timers(), numbered(0)
    for kind, slot in ((PAUSE, "slot"), (CALL_TIMEOUT, ""), (DEADLINE, "")):
        timers.add(1.0, kind, [each], slot)
    expired = [(DEADLINE, [each], ""), (CALL_TIMEOUT, [each], ""), (PAUSE, [each], "slot")]
    assert [timers.pop(1.0) for _ in range(3)] == expired
