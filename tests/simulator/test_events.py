"""Tests of the order of events."""

from __future__ import annotations

import math

from simulator.events import COMES, CONTROLS, ENDS, Events


class Written:
    """Events that record when they happen."""

    def __init__(self) -> None:
        self.events = Events()
        self.log: list[str] = []

    def write(self, what: object) -> None:
        self.log.append(f"{self.events.time_s:g} {what}")


def test_events_of_equal_time_are_ordered_as_ends_links_controller_and_requests() -> None:
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


def test_the_clock_advances_to_the_end_of_the_run_even_without_events() -> None:
    written = Written()
    assert written.events.next_s == math.inf
    written.events.at(3.0, ENDS, written.write, "ends")
    written.events.run_arrivals([2.5], lambda _: None)
    assert (written.log, written.events.now_s()) == ([], 2.5)
    written.events.run_arrivals([3.0], lambda _: None)
    assert written.log == ["3 ends"]
