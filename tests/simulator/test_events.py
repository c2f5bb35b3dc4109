"""The order in which things happen."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.events import COMES, CONTROLS, ENDS, Events


class Written:
    """Events that write down when they happen."""

    def __init__(self) -> None:
        self.events = Events()
        self.log: list[str] = []

    def write(self, what: object) -> None:
        self.log.append(f"{self.events.time_s:g} {what}")


def test_of_one_moment_ends_come_before_arrivals_over_links_the_controller_and_requests() -> None:
    written = Written()
    for priority, name in ((CONTROLS, "control"), (COMES, "comes"), (ENDS, "ends"), (COMES, "comes later")):
        written.events.at(2.0, priority, written.write, name)
    written.events.at(1.0, CONTROLS, written.write, "before")
    written.events.run_out()
    assert written.log == ["1 before", "2 ends", "2 comes", "2 comes later", "2 control"]
    written = Written()
    written.events.at(1.0, CONTROLS, written.write, "control")
    written.events.at(2.0, ENDS, written.write, "ends")
    written.events.run_arrivals([0.5, 1.0, 1.0], lambda number: written.write(f"request {number}"), first=7)
    assert written.log == ["0.5 request 7", "1 control", "1 request 8", "1 request 9"]
    assert written.events.next_s == 2.0


def test_the_clock_goes_to_where_it_is_run_even_if_nothing_happens() -> None:
    written = Written()
    assert written.events.next_s == math.inf
    written.events.at(3.0, ENDS, written.write, "ends")
    written.events.run_until(2.5)
    assert (written.log, written.events.now_s()) == ([], 2.5)
    written.events.run_until(3.0)
    assert written.log == ["3 ends"]


class Heap:
    """One heap for all events: what `Events` must be the same as."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._serial = 0

    def at(self, time_s: float, priority: int, action: Callable[[Any], None], argument: Any = None) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (time_s, priority, self._serial, action, argument))

    def run_out(self) -> None:
        while self._heap:
            self.time_s, _, _, action, argument = heapq.heappop(self._heap)
            action(argument)


def chain(events: Events | Heap, begins: list[tuple[float, int]], delays_s: list[float]) -> list[tuple[float, int]]:
    """Every event brings about the next of its chain; returns what happened when."""
    happened: list[tuple[float, int]] = []

    def happen(step: tuple[int, int]) -> None:
        name, done = step
        happened.append((events.time_s, name))
        if done < len(delays_s):
            later_s = events.time_s + delays_s[(name + done) % len(delays_s)]
            events.at(later_s, (name + done) % 3, happen, (name, done + 1))

    for name, (time_s, priority) in enumerate(begins):
        events.at(time_s, priority, happen, (name, 0))
    events.run_out()
    return happened


MOMENTS = st.one_of(
    st.floats(0, 1e-3), st.floats(0, 1e5), st.sampled_from([0.0, 1 / 1024, 1 / 512, 0.25, 1.0, 1.0, 7200.0])
)


@settings(max_examples=100, deadline=None)
@given(
    begins=st.lists(st.tuples(MOMENTS, st.integers(0, 2)), max_size=60),
    delays_s=st.lists(MOMENTS, max_size=8),
)
def test_events_happen_as_they_would_from_one_heap(begins: list[tuple[float, int]], delays_s: list[float]) -> None:
    assert chain(Events(), begins, delays_s) == chain(Heap(), begins, delays_s)


@pytest.mark.parametrize("spread_s", [1e-4, 1.0, 1e4])
def test_many_events_close_together_and_far_apart_happen_as_they_would_from_one_heap(spread_s: float) -> None:
    begins = [(spread_s * (number * 7919 % 3000) / 3000, number % 3) for number in range(3000)]
    delays_s = [spread_s / 50, spread_s * 30, spread_s / 5000]
    assert chain(Events(), begins, delays_s) == chain(Heap(), begins, delays_s)
