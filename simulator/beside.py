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
class Remaining:
    """What a batch has still to do."""

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


def remaining_of(batch: Batch[Flight[int]], works: Works, all_ramps: Collection[int]) -> Remaining:
    """All that a batch does which begins; `all_ramps`: those that look at probes."""
    split, work = batch.split, works.of(batch.split)
    exits, going_on = work.part(batch.members)
    last, ramps = None, all_ramps if batch.probe else split.ramps
    if batch.stays:
        going_on = list(batch.members)
    elif exits and (not going_on or exits[-1][0] + 1 == split.end):
        last = exits.pop()
    return Remaining(
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
    """A replica's batches, driven by events."""

    __slots__ = ("_events", "_is_alive", "_on_end", "_on_exit", "_running", "_serial", "_sharing")

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
        self._running: dict[int, Remaining] = {}
        self._serial = 0

    def begin(self, remaining: Remaining) -> None:
        """Have a batch run from now on."""
        self._running[remaining.batch.lane] = remaining
        self._go_on(remaining)

    def _go_on(self, remaining: Remaining) -> None:
        """To the next exit where somebody is answered, or the end."""
        end = remaining.exits[0][0] + 1 if remaining.exits else remaining.end
        self._sharing.step(
            remaining.batch.lane,
            remaining.pace,
            remaining.at,
            end,
            remaining.ramps,
            inside=remaining.pace.size_of(remaining.inside, remaining.inside),
            at_s=self._events.time_s,
        )
        remaining.at = end
        self._tell()

    def _tell(self) -> None:
        """When each batch is at its next exit, or its end, if nothing happens before: what was told so far is void."""
        self._serial += 1
        for lane in self._running:
            due_s = max(self._events.time_s, self._sharing.due_s(lane))
            self._events.at(due_s, ENDS, self._arrive, (lane, self._serial))

    def _arrive(self, told: tuple[int, int]) -> Any:
        lane, serial = told
        if serial != self._serial or not self._is_alive():
            return False  # void: nothing happens now
        remaining, now_s = self._running[lane], self._events.time_s
        elapsed_s = now_s - remaining.batch.started_s
        if not remaining.exits:
            del self._running[lane]
            self._sharing.leave(lane, now_s)
            self._tell()
            at_end = [] if remaining.leaving is None else [remaining.leaving]
            self._on_end((remaining.batch, remaining.work, remaining.first_s, elapsed_s, at_end, remaining.going_on))
            return None
        if remaining.first_s is None:
            remaining.first_s = elapsed_s
        exited = remaining.exits.popleft()
        remaining.inside = (
            remaining.inside if remaining.batch.stays else remaining.inside - remaining.work.size_of(exited[1])
        )
        self._go_on(remaining)
        self._on_exit(remaining.batch, exited)
        return None
