from __future__ import annotations

import random

from deployments.ingress.core.calls import DEADLINE, HANGING, PAUSE, Pause, Timers
from deployments.ingress.core.inputs import PendingInput


def pending(serial: int, *, settled: bool = False) -> PendingInput:
    made = PendingInput(serial, 0.0, 0.0)
    made.settled = settled
    return made


def test_what_is_over_never_expires() -> None:
    timers, inputs = Timers(), [pending(k, settled=k in (0, 2)) for k in range(4)]
    for at_s, each in enumerate(inputs):
        timers.add(float(at_s), DEADLINE, [each])
    assert timers.next_s() == 1.0
    inputs[1].settled = True
    assert timers.pop(9.0) == [(DEADLINE, [inputs[3]])]


def test_what_is_over_does_not_pile_up() -> None:
    timers = Timers()
    for number in range(10_000):
        timers.add(number, DEADLINE, [pending(number, settled=number < 9_999)])
    assert len(timers._heap) < 200
    assert timers.next_s() == 9_999


def test_of_one_moment_deadlines_come_first_then_calls_that_hang_then_pauses() -> None:
    timers, each = Timers(), pending(0)
    pause = Pause("slot", [each])
    for kind, thing in ((PAUSE, pause), (HANGING, each), (DEADLINE, [each])):
        timers.add(1.0, kind, thing)
    assert timers.pop(1.0) == [(DEADLINE, [each]), (HANGING, each), (PAUSE, pause)]


def test_they_expire_in_the_order_of_their_times() -> None:
    rng, timers = random.Random(0), Timers()
    times_s = [rng.random() for _ in range(200)]
    for at_s in times_s:
        timers.add(at_s, DEADLINE, [pending(int(1e9 * at_s))])
    expired = [[each] for _, [each] in timers.pop(0.5) + timers.pop(1.0)]
    assert [each.serial for [each] in expired] == [int(1e9 * at_s) for at_s in sorted(times_s)]
