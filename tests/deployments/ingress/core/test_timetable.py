from __future__ import annotations

import math
import random

from deployments.ingress.core.inputs import Timetable


def test_things_are_due_in_their_order_whatever_order_they_came_in() -> None:
    due: Timetable[str] = Timetable(lambda _: False)
    for at_s, name in ((2.0, "b"), (1.0, "a"), (3.0, "d"), (2.0, "c")):
        due.add(at_s, name)
    assert due.next_s() == 1.0
    assert due.pop(2.5) == ["a", "b", "c"]
    assert (due.next_s(), due.pop(3.0), due.next_s()) == (3.0, ["d"], math.inf)


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


def test_what_came_after_something_later_is_due_in_the_order_in_which_it_came() -> None:
    due: Timetable[dict[str, int]] = Timetable(lambda _: False)
    due.add(9.0, {"last": 9})
    for number in range(3):
        due.add(5.0, {"number": number})  # what cannot be compared is never compared
    assert due.next_s() == 5.0
    assert due.pop(5.0) == [{"number": 0}, {"number": 1}, {"number": 2}]
