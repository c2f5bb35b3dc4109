"""Whether an input that arrives now can be answered in time: Clockwork's rule, as E3 takes it (section 3.1). Pure.

A plan is made for less than the whole SLO (`slack`, E3 section 4); the rest is the buffer of bursts. An input is begun
if what is ahead of it, at the rate that the service really has, and what inputs really take beyond that, end before its
deadline, less a share (`SAFETY`) for what no estimate knows. (Clockwork knows every execution's time beforehand; where
inputs leave early nobody does, hence rate and quantile.)

What is ahead are all unanswered inputs, not only those that wait here: by Little's law they leave at the service's rate
wherever they queue, so a queue before a later stage is seen when it begins, not when its first input is late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAFETY = 0.1
"""Share of the time left that is not counted on. In a steady overload half of it would do; a burst after quiet fills
batches that were half empty when their time was seen, and with 5 % a twentieth of it came late in simulation."""
QUANTILE = 0.99
"""Of the inputs that went deepest, so many took no longer than estimated."""
PROOFS = 5
"""An input is begun, whatever the estimate says, if so many had as much ahead of them as it has, or more, while no more
than `LATE_SHARE` of all were late. The estimate is made of the few that took longest; where their way takes most of the
SLO it would refuse many for the sake of one: docs/performance.md has figures."""
LATE_SHARE = 0.01
"""To let more in than was proven, step by step, gains a tenth where the load is just too much, but under a steady
overload 2 to 9 % come late then."""
MEMORY_S = 4
"""Seconds that the estimate is taken from: once the service has changed, it is wrong no longer than this."""
GAIN = 0.5
"""Weight of the last second in the rate: a service that lost half of its replicas is known to 10 % within 3 seconds."""
FILLING = 0.25
"""Inputs ahead that take no more than this share of the SLO are no queue but the stages' work: to refuse because of
them would make no other input faster, and nothing would be learnt of a service that has recovered."""
EFFICIENCY = (1 / 16, 4.0)
"""Bounds of the rate over the plan's: beyond, the plan is of another service."""
MOST_SAMPLES = 250
"""Inputs per second that the estimate is taken from."""


@dataclass(slots=True)
class Second:
    """What happened within one."""

    ends_s: float
    answered: int = 0
    refused: int = 0
    num_deep: int = 0
    least_waiting: float = math.inf
    """Of what was noted; infinite where nothing was."""
    least_unanswered: float = math.inf
    ways: list[tuple[float, int]] = field(default_factory=list)
    """Latency, and the inputs that were ahead at arrival: of some that went deepest."""


class Admission:
    """What one ingress knows of the service's rate and of its way; times are the caller's, and never go back."""

    def __init__(self, predicted: Mapping[str, Any], *, slo_s: float, num_ingresses: int) -> None:
        """`predicted` is a plan's: `rate_per_s`, of which each ingress has its part, and `latency_s`, where known."""
        self._slo_s = slo_s
        self._num_ingresses = num_ingresses
        self._efficiency = 1.0
        self._proven = 0
        """Inputs ahead with which others were in time."""
        self._second: Second | None = None
        self._stride = 1
        self._ways: deque[list[tuple[float, int]]] = deque(maxlen=MEMORY_S)
        self.follow(predicted)

    def follow(self, predicted: Mapping[str, Any]) -> None:
        """Another plan: of its rate as much is expected as there was of the last one's; its way is new."""
        # A plan that somebody wrote by hand may predict nothing, or a rate of zero: that is not known either.
        rate_per_s = predicted.get("rate_per_s") or None
        self._planned_per_s = None if rate_per_s is None else rate_per_s / self._num_ingresses
        self._planned_s: float = predicted.get("latency_s") or 0.0
        self._beyond_s: float | None = None
        self._ways.clear()
        self._proven = 0

    @property
    def capacity_per_s(self) -> float:
        """Answers per second that can be had; infinite until something is known of it."""
        return math.inf if self._planned_per_s is None else self._planned_per_s * self._efficiency

    def late_s(self, num_inputs: int, left_s: float, *, waiting: int, unanswered: int, now_s: float) -> float:
        """By how much a request that has `left_s` would be late, counted as refused if it would be; 0: begin it.

        An idle service begins everything, so no estimate can keep it idle; so does one of which nothing is known.
        """
        second = self._at(now_s)
        capacity_per_s = self.capacity_per_s
        if (
            math.isinf(capacity_per_s)
            or not unanswered
            or unanswered <= self._proven
            or (not waiting and unanswered <= FILLING * self._slo_s * capacity_per_s)
        ):
            return 0.0
        if self._beyond_s is None:
            needed_s = (waiting + num_inputs) / capacity_per_s + self._planned_s
        else:
            needed_s = (unanswered + num_inputs) / capacity_per_s + self._beyond_s
        late_s = max(0.0, needed_s - left_s * (1 - SAFETY))
        second.refused += num_inputs if late_s else 0
        return late_s

    def observe(self, waiting: int, unanswered: int, now_s: float) -> None:
        """Take note of what is left after inputs have departed."""
        second = self._at(now_s)
        second.least_waiting = min(second.least_waiting, waiting)
        second.least_unanswered = min(second.least_unanswered, unanswered)

    def answered(self, now_s: float) -> None:
        """An answer."""
        self._at(now_s).answered += 1

    def went_deep(self, latency_s: float, ahead: int, now_s: float) -> None:
        """An input that went as deep as inputs go, or was given up for its deadline, after so long.

        `ahead`: inputs that were unanswered when it arrived.
        """
        second = self._at(now_s)
        second.num_deep += 1
        if second.num_deep % self._stride == 0:
            second.ways.append((latency_s, ahead))

    def _at(self, now_s: float) -> Second:
        second = self._second
        if second is None or now_s >= second.ends_s:
            if second is not None:
                self._learn(second, 1.0 + now_s - second.ends_s)
            self._second = second = Second(now_s + 1.0)
        return second

    def _learn(self, second: Second, length_s: float) -> None:
        if length_s < MEMORY_S:  # in longer ones nobody asked anything: they say nothing of what could be had
            self._learn_rate(second, second.answered / length_s)
        self._stride = 1 + second.num_deep // MOST_SAMPLES
        self._ways.append(second.ways)
        for _ in range(min(MEMORY_S, math.floor(length_s) - 1)):  # seconds in which nothing happened
            self._ways.append([])
        beyond_s = sorted(took_s - ahead / self.capacity_per_s for ways in self._ways for took_s, ahead in ways)
        self._beyond_s = beyond_s[math.ceil(QUANTILE * len(beyond_s)) - 1] if beyond_s else None
        self._proven = self._find_proven()

    def _find_proven(self) -> int:
        ways = [way for second in self._ways for way in second]
        num_late = sum(took_s >= self._slo_s for took_s, _ in ways)
        if len(ways) < PROOFS or num_late > LATE_SHARE * len(ways):
            return 0
        return sorted((ahead for _, ahead in ways), reverse=True)[PROOFS - 1]

    def _learn_rate(self, second: Second, measured_per_s: float) -> None:
        """More than is expected is believed at once; less only where there was a queue all the time."""
        waited = 0 < second.least_waiting < math.inf
        if self._planned_per_s is None:
            if waited:
                self._planned_per_s = measured_per_s or None
            return
        was_full = FILLING * self._slo_s * self.capacity_per_s <= second.least_unanswered < math.inf
        if measured_per_s > self.capacity_per_s or waited or (second.refused and was_full):
            least, most = EFFICIENCY
            self._efficiency += GAIN * (measured_per_s / self._planned_per_s - self._efficiency)
            self._efficiency = min(max(self._efficiency, least), most)
