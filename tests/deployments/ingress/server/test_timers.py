"""Deadlines on a loop whose time is set by hand."""

from __future__ import annotations

from collections.abc import Callable

from deployments.ingress.server.timers import LEAST_PAUSE_S, Deadlines


class Handle:
    """A call that is planned."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """Keeps what is planned until its time comes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.planned: list[tuple[float, Handle, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], object]) -> Handle:
        handle = Handle()
        self.planned.append((when, handle, callback))
        return handle

    def alarms(self) -> list[float]:
        """When those that are not cancelled are due."""
        return [when for when, handle, _ in self.planned if not handle.is_cancelled]

    def run_until(self, now_s: float) -> None:
        while due := [each for each in self.planned if each[0] <= now_s]:
            first = min(due, key=lambda each: each[0])
            self.planned.remove(first)
            when, handle, callback = first
            self.now_s = max(self.now_s, when)
            if not handle.is_cancelled:
                callback()
        self.now_s = now_s


def deadlines_of(loop: Loop) -> tuple[Deadlines[str], list[tuple[float, str, str]]]:
    log: list[tuple[float, str, str]] = []
    return Deadlines({"idle": 90.0, "head": 10.0}, lambda who, kind: log.append((loop.now_s, who, kind)), loop), log


def test_who_is_due_is_told_once_and_in_time() -> None:
    loop = Loop()
    deadlines, log = deadlines_of(loop)
    deadlines.arm("a", "idle")
    deadlines.arm("b", "head")
    loop.run_until(5.0)
    deadlines.arm("c", "head")
    loop.run_until(200.0)
    assert log == [(10.0, "b", "head"), (15.0, "c", "head"), (90.0, "a", "idle")]
    assert loop.alarms() == []


def test_who_is_disarmed_is_not_told_and_who_is_armed_anew_waits_from_then() -> None:
    loop = Loop()
    deadlines, log = deadlines_of(loop)
    for who in "ab":
        deadlines.arm(who, "head")
    loop.run_until(9.0)
    for who in "ab":
        deadlines.disarm(who, "head")
    deadlines.arm("b", "head")
    deadlines.disarm("nobody", "idle")
    loop.run_until(100.0)
    assert log == [(19.0, "b", "head")]


def test_ten_thousand_have_one_alarm() -> None:
    loop = Loop()
    deadlines, log = deadlines_of(loop)
    for k in range(10_000):
        deadlines.arm(f"{k}", "idle")
    assert loop.alarms() == [90.0]
    loop.run_until(90.0)
    assert len(log) == 10_000


def test_one_who_comes_while_others_are_told_waits_its_time() -> None:
    loop = Loop()
    log: list[float] = []

    def told(who: str, kind: str) -> None:
        log.append(loop.now_s)
        if kind == "head":
            deadlines.arm(who, "idle")

    deadlines = Deadlines[str]({"idle": 90.0, "head": 10.0}, told, loop)
    deadlines.arm("a", "head")
    loop.run_until(1.0)
    deadlines.arm("b", "head")
    loop.run_until(300.0)
    assert log == [10.0, 11.0, 100.0, 101.0]


def test_looks_are_no_closer_than_a_pause_and_end_with_the_server() -> None:
    loop = Loop()
    deadlines = Deadlines[str]({"now": 0.0}, lambda *_: None, loop)
    deadlines.arm("a", "now")
    assert loop.alarms() == [LEAST_PAUSE_S]
    deadlines.close()
    assert loop.alarms() == []
