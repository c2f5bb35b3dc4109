"""A simulated accelerator whose batches may overlap: their steps, one by one, as fast as each leaves the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.pace import Pace
from cluster.sharing import Sharing
from deployments.ingress.core.flights import Flight
from earlyexit.engine import Batch
from simulator.events import ENDS, Events
from simulator.trip import Input
from simulator.work import Exit, Work, Works

Ended = tuple[Batch[Flight[int]], Work, float | None, float, Sequence[Exit], list[Input]]
"""A batch that has run, its work, the seconds until its first answers (None: its end) and in all, who is answered at
its end, and who goes on."""


@dataclass(slots=True, kw_only=True)
class Course:
    """What lies before a batch."""

    batch: Batch[Flight[int]]
    work: Work
    pace: Pace
    ramps: Collection[int]
    """Those that are evaluated."""
    exits: deque[Exit]
    """On the way, before the end."""
    end: int
    """The block at which it ends."""
    leaving: Exit | None
    """At the end."""
    going_on: list[Input]
    at: int
    """The block that comes next."""
    inside: int
    """Inputs, or where lengths count, tokens."""
    first_s: float | None = None


def course_of(batch: Batch[Flight[int]], works: Works, all_ramps: Collection[int]) -> Course:
    """What lies before a batch that begins; `all_ramps`: those that look at probes."""
    split, work = batch.split, works.of(batch.split)
    exits, going_on = work.part(batch.members)
    last, ramps = None, all_ramps if batch.probe else split.ramps
    if batch.stays:
        going_on = list(batch.members)
    elif exits and (not going_on or exits[-1][0] + 1 == split.end):
        last = exits.pop()
    return Course(
        batch=batch,
        work=work,
        pace=works.pace,
        ramps=ramps,
        exits=deque(exits),
        end=split.end if last is None else last[0] + 1,
        leaving=last,
        going_on=going_on,
        at=split.first,
        inside=work.size_of(batch.members),
    )


class SideBySide:
    """The courses of a replica's batches, driven by events."""

    __slots__ = ("_courses", "_events", "_is_alive", "_on_end", "_on_exit", "_serial", "_sharing")

    def __init__(
        self,
        events: Events,
        is_alive: Callable[[], bool],
        on_exit: Callable[[Batch[Flight[int]], Exit], None],
        on_end: Callable[[Ended], None],
    ) -> None:
        """`on_exit` is told who is answered on the way."""
        self._events = events
        self._is_alive = is_alive
        self._on_exit = on_exit
        self._on_end = on_end
        self._sharing = Sharing()
        self._courses: dict[int, Course] = {}
        self._serial = 0

    def begin(self, course: Course) -> None:
        """Have a batch run from now on."""
        self._courses[course.batch.lane] = course
        self._go_on(course)

    def _go_on(self, course: Course) -> None:
        """To the next exit where somebody is answered, or the end."""
        end = course.exits[0][0] + 1 if course.exits else course.end
        self._sharing.step(
            course.batch.lane,
            course.pace,
            course.at,
            end,
            course.ramps,
            inside=course.pace.size_of(course.inside, course.inside),
            at_s=self._events.time_s,
        )
        course.at = end
        self._tell()

    def _tell(self) -> None:
        """When each batch is at its next exit, or its end, if nothing happens before: what was told so far is void."""
        self._serial += 1
        for lane in self._courses:
            due_s = max(self._events.time_s, self._sharing.due_s(lane))
            self._events.at(due_s, ENDS, self._arrive, (lane, self._serial))

    def _arrive(self, told: tuple[int, int]) -> Any:
        lane, serial = told
        if serial != self._serial or not self._is_alive():
            return False  # void: nothing happens now
        course, now_s = self._courses[lane], self._events.time_s
        elapsed_s = now_s - course.batch.started_s
        if not course.exits:
            del self._courses[lane]
            self._sharing.leave(lane, now_s)
            self._tell()
            at_end = [] if course.leaving is None else [course.leaving]
            self._on_end((course.batch, course.work, course.first_s, elapsed_s, at_end, course.going_on))
            return None
        if course.first_s is None:
            course.first_s = elapsed_s
        exited = course.exits.popleft()
        course.inside = course.inside if course.batch.stays else course.inside - course.work.size_of(exited[1])
        self._go_on(course)
        self._on_exit(course.batch, exited)
        return None
