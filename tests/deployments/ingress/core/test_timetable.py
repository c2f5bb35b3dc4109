from __future__ import annotations

import random

from deployments.ingress.core.inputs import Timetable


def test_what_is_over_is_never_due() -> None:
    over = {"a", "c"}
    due: Timetable[str] = Timetable(over.__contains__)
    for at_s, name in enumerate("abcd"):
        due.add(float(at_s), name)
    assert due.next_s() == 1.0
    over.add("b")
    assert due.pop(9.0) == ["d"]


def test_what_is_over_does_not_pile_up() -> None:
    due: Timetable[int] = Timetable(lambda number: number < 9_999)
    for number in range(10_000):
        due.add(number, number)
    assert len(due._line) < 200


def test_it_agrees_with_a_sorted_list() -> None:
    rng = random.Random(0)
    due: Timetable[float] = Timetable(lambda _: False)
    times_s = [rng.random() for _ in range(200)]
    for at_s in times_s:
        due.add(at_s, at_s)
    assert due.pop(0.5) + due.pop(1.0) == sorted(times_s)
