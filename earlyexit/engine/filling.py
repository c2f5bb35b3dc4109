"""Batches that fill where processors are full: when one begins that is not full, on processors that others share. Pure.

A device of its own loses nothing by running whatever is there. On shared processors an input that starts alone takes
the cores from those that follow it: a batch of 16 costs three to five times what one of 1 does. So batches wait, the
longer the busier the device was, up to half of what their deadlines leave: not at all below two fifths, where an idle
core is worth nothing. As they fill, the device has less to do, so that the wait settles where it is needed.

Where devices are processors that they share with each other, with what sends them work and with whatever else runs, it
is these that are full: two replicas of a thread look half busy on two cores on which nothing is left. What tells is how
long the device itself waits for a processor: that somebody else could use the time that a batch takes. How busy the
machine is does not tell: what runs only in time that nobody wants keeps processors busy, and makes nobody wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from earlyexit.engine.queue import P, Queue
from earlyexit.engine.times import Times

IDLE_ENOUGH = 0.4
"""Share of its time that a device may run without anybody waiting for it to run less."""
MOST_PATIENCE = 0.5
"""Of what deadlines leave: what batches take wavers where others take the processors."""
SLOPE = 2.5
"""Patience by share beyond `IDLE_ENOUGH`: batches wait as long as they may from three fifths on."""
SHARED = 2.0
"""A device that waits for processors a share of the time counts as busier by so many times that share: of two
processors that two devices share with what sends them work and with who asks, a quarter is left when each runs for half
of the time and waits for a quarter of that. The wait alone says little: who is seldom woken waits for whoever woke him.
"""
MOST_BATCHES = 3.0
"""What deadlines leave counts up to so many times what a batch takes: to wait for much longer than that saves little
more, however far the deadline is. At most patience it is one and a half times as long."""
FADE = 0.9
"""What is left of the weight of a batch when the next has run: about ten batches tell how busy a device is."""
WORTH = 1.15
"""Seconds per input, in those of a full batch, from which on a wait is worth it."""
KEPT_WHEN_CHOOSING = 0.5
"""Of what is kept in hand for what comes later, as much may be spent on running another queue's batch first."""


class Load:
    """How busy a device has been, of late."""

    __slots__ = ("_busy_s", "_ended_s", "_span_s", "waited")

    def __init__(self) -> None:
        self.waited = 0.0
        """Share of the time in which it wanted a processor that it waited for one, of late; 0 where it has its own."""
        self._busy_s = 0.0
        self._span_s = 0.0
        self._ended_s: float | None = None

    def ran(self, busy_s: float, ended_s: float) -> None:
        """A batch had the device for so long."""
        since_s = ended_s - busy_s if self._ended_s is None else self._ended_s
        self._busy_s = FADE * self._busy_s + busy_s
        self._span_s = FADE * self._span_s + max(busy_s, ended_s - since_s)
        self._ended_s = ended_s

    def share(self, now_s: float) -> float:
        """Of its time that the device ran, more where it waits for processors meanwhile; 0 before the first batch."""
        if self._ended_s is None or not self._span_s:
            return 0.0
        return self._weighed_s / (self._span_s + max(0.0, now_s - self._ended_s))

    def due_s(self, since_s: float, latest_s: float) -> float:
        """When who waits since then, and must start by `latest_s`, has waited `patience` of that, should nothing run.

        While the device idles it becomes less busy, so the wait is over sooner than it looked when it began: the second
        t at which t - since = patience(busy / (span + t - ended)) * (latest - since), a quadratic equation.
        """
        if self._ended_s is None:
            return since_s
        slope = SLOPE * max(0.0, latest_s - since_s)
        before_s = self._span_s - self._ended_s
        p = before_s - since_s + slope * IDLE_ENOUGH
        q = before_s * (slope * IDLE_ENOUGH - since_s) - slope * self._weighed_s
        root_s = (math.sqrt(max(0.0, p * p - 4 * q)) - p) / 2
        return max(since_s, min(root_s, since_s + MOST_PATIENCE * (latest_s - since_s)))

    @property
    def _weighed_s(self) -> float:
        return self._busy_s * (1 + SHARED * self.waited)


def patience(busy: float) -> float:
    """Share of the time that deadlines leave which a batch may wait, where the device was busy for such a share."""
    return min(MOST_PATIENCE, SLOPE * max(0.0, busy - IDLE_ENOUGH))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing(Generic[P]):
    """A queue that has somebody, on a device that is free."""

    queue: Queue[P]
    number: int
    """Of those who would be in its batch."""
    batch_s: float
    """What that would take."""
    full_each_s: float
    """What an input takes in a full one."""
    latest_s: float
    """When it must start at the latest; infinite without a deadline, or while nothing is known of its way."""
    may_wait: bool
    """Whether it may wait for a fuller batch; those who waited at the ingress do not wait again."""

    @property
    def order(self) -> int:
        """Of arrival."""
        return self.queue.members[0].queued_serial

    @property
    def press_s(self) -> float:
        """When others may not go first any more."""
        return self.latest_s + KEPT_WHEN_CHOOSING * self.queue.members[0].reserve_s

    @property
    def each_s(self) -> float:
        return self.batch_s / self.number

    def due_s(self, load: Load) -> float:
        """When its batch begins, full or not."""
        if not self.may_wait or math.isinf(self.latest_s) or self.each_s <= WORTH * self.full_each_s:
            return -math.inf
        since_s = self.queue.members[0].since_s
        full_s = self.full_each_s * self.queue.budget.inputs
        return load.due_s(since_s, min(self.latest_s, since_s + MOST_BATCHES * full_s))


def standing_of(queue: Queue[P], times: Times, latest_s: float, *, may_wait: bool) -> Standing[P]:
    """Of a queue, by what batches are known to take."""
    split, budget, mean_tokens = queue.split, queue.budget, times.mean_tokens(queue.split)
    front = queue.members[: budget.inputs]
    full_tokens = budget.tokens_when_full(mean_tokens)
    return Standing(
        queue=queue,
        number=len(front),
        batch_s=times.batch_s(split, sum([member.tokens for member in front])),
        full_each_s=times.batch_s(split, full_tokens) * mean_tokens / full_tokens,
        latest_s=latest_s,
        may_wait=may_wait and not queue.probe,
    )


def pick(standings: Sequence[Standing[P]], load: Load, now_s: float) -> tuple[Queue[P] | None, float | None]:
    """The queue whose batch begins now, or None and the second at which to ask again.

    Of those that are due it is the one that takes the fewest seconds per input, so that the others fill meanwhile
    (and most inputs get on soonest: the shortest first), unless the most urgent could not wait for it.
    """
    due = [(each.due_s(load), each) for each in standings]
    ready = [each for at_s, each in due if at_s <= now_s]
    if not ready:
        return None, min(at_s for at_s, _ in due)
    urgent = min(ready, key=lambda each: (each.press_s, each.order))
    cheapest = min(ready, key=lambda each: (each.each_s, each.order))
    if cheapest is not urgent and now_s + cheapest.batch_s > urgent.press_s:
        return urgent.queue, None
    return cheapest.queue, None
