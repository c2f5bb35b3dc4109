"""The dispatch rule `filling`: when a batch that is not full begins, on processors that devices share. Pure.

A device of its own loses nothing by running whatever waits. On shared processors an input that starts alone takes the
cores from the inputs behind it: a batch of 16 costs three to five times a batch of 1. So batches wait, and the busier
the device was, the longer: up to half of what their deadlines leave. Below a load of two fifths they do not wait. Full
batches leave the device less to do, so that the wait settles where it is needed.

Devices may share processors with each other, with the ingress and with other programs. Two replicas of one thread then
look half busy on two cores that are full. The sign of it is the time that the device's own thread waits for a
processor. The load of the machine is no sign: idle-priority work keeps processors busy and makes no thread wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from earlyexit.engine.queue import P, Queue
from earlyexit.engine.times import ObservedTimes

IDLE_ENOUGH = 0.4
"""Share of its time that a device may run before batches wait to fill."""
MOST_PATIENCE = 0.5
"""Largest share of what deadlines leave; the times of batches vary on shared processors."""
SLOPE = 2.5
"""Patience per load beyond `IDLE_ENOUGH`: it is largest from a load of three fifths on."""
SHARED = 2.0
"""Factor on the share of the time that a device waits for processors, by which it counts as busier. Example: two
devices share two processors with an ingress and its clients. Each runs half of the time and waits for a quarter of
that; a quarter of the processors is then left. The wait alone says little: a thread that seldom runs waits for its
waker."""
MOST_BATCHES = 3.0
"""What deadlines leave counts up to so many times the seconds of a batch: a longer wait saves little more, however far
the deadline is. At the largest patience a batch waits one and a half times its own seconds."""
FADE = 0.9
"""Factor on the weight of earlier batches with every new one: about ten batches say how busy a device is."""
WORTH = 1.15
"""Seconds per input, relative to a full batch, from which a wait is worth it."""
KEPT_WHEN_CHOOSING = 0.5
"""Share of the reserve for later stages that may be spent on running another queue's batch first."""


class Load:
    """How busy a device has been lately."""

    __slots__ = ("_busy_s", "_ended_s", "_span_s", "waited")

    def __init__(self) -> None:
        self.waited = 0.0
        """Share of the time in which it wanted a processor that it waited for one lately; 0 with its own processor."""
        self._busy_s = 0.0
        self._span_s = 0.0
        self._ended_s: float | None = None

    def ran(self, busy_s: float, ended_s: float) -> None:
        """Note that a batch had the device for `busy_s` seconds."""
        since_s = ended_s - busy_s if self._ended_s is None else self._ended_s
        self._busy_s = FADE * self._busy_s + busy_s
        self._span_s = FADE * self._span_s + max(busy_s, ended_s - since_s)
        self._ended_s = ended_s

    def share(self, now_s: float) -> float:
        """Returns the share of its time that the device ran, plus waits for processors; 0 before the first batch."""
        if self._ended_s is None or not self._span_s:
            return 0.0
        return self._weighed_s / (self._span_s + max(0.0, now_s - self._ended_s))

    def due_s(self, since_s: float, latest_s: float) -> float:
        """Returns when a batch that waits since `since_s` and must start by `latest_s` has waited long enough.

        An idle device becomes less busy, so the wait ends sooner than it seemed when it began: at the second t at which
        t - since = patience(busy / (span + t - ended)) * (latest - since), a quadratic equation.
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
    """Returns the share of the time left by deadlines that a batch may wait, for a device with the load `busy`."""
    return min(MOST_PATIENCE, SLOPE * max(0.0, busy - IDLE_ENOUGH))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing(Generic[P]):
    """A queue with waiting members, on a free device."""

    queue: Queue[P]
    number: int
    """Inputs of its next batch."""
    batch_s: float
    """Seconds of that batch."""
    full_each_s: float
    """Seconds per input in a full batch."""
    latest_s: float
    """When it must start at the latest; infinite without a deadline, or while its times are unknown."""
    may_wait: bool
    """Whether it may wait for a fuller batch; inputs that waited at the ingress do not wait again."""

    @property
    def order(self) -> int:
        """Its place by arrival."""
        return self.queue.members[0].queued_serial

    @property
    def press_s(self) -> float:
        """When other queues may no longer go first."""
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


def standing_of(queue: Queue[P], times: ObservedTimes, latest_s: float, *, may_wait: bool) -> Standing[P]:
    """Returns the standing of a queue, by the known times of batches."""
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
    """Returns the queue whose batch begins now, or None and the second at which to ask again.

    Of the queues that are due, the one with the fewest seconds per input goes first, so that the others fill meanwhile
    and most inputs get on soonest. The most urgent queue goes first if it could not wait for that.
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
