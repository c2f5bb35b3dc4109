"""The controller's eyes: what ingresses and replicas report is collected, remembered, and known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deployments.control.fleet import Fleet
from deployments.control.history import History
from deployments.control.intake import IngressIntake, ReplicaIntake
from deployments.control.knowledge import Knowledge
from deployments.control.tuning import Tuning
from deployments.reports import IngressReport, ReplicaReport
from earlyexit.clock import Clock
from earlyexit.errors import DataError
from profiles.stream import Observations, empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at the service."""

    at_s: float
    ingresses: tuple[IngressReport, ...]
    replicas: tuple[ReplicaReport, ...]
    capacity: Mapping[str, int]
    """Accelerators alive per type."""
    running: Mapping[str, int]
    """Replicas per slot."""


class Watch:
    """Looks, and forgets nothing of what was handed over."""

    def __init__(
        self,
        fleet: Fleet,
        history: History,
        knowledge: Knowledge,
        clock: Clock,
        complain: Callable[[str], None],
        tuning: Tuning,
    ) -> None:
        """`complain` is told of probes that cannot be used."""
        self._fleet = fleet
        self._history = history
        self._knowledge = knowledge
        self._clock = clock
        self._complain = complain
        self._tuning = tuning
        self._ingresses = IngressIntake()
        self.replicas = ReplicaIntake()
        self._mark = True
        self.looked_s = 0.0
        """When ingresses were last asked."""

    def restore(self) -> None:
        """Know again what was remembered."""
        now_s = self._clock.now_s()
        self._history.forget(now_s)
        counts = self._history.counts(since_s=0.0)
        if counts:
            self._knowledge.began_s = counts[0].since_s
        for interval in counts:
            self._knowledge.add_counts(interval)
        try:
            for probes in self._history.probes():
                self._know(probes)
        except DataError as error:
            self._complain(str(error))
        self._knowledge.forget(now_s)

    def mark(self) -> None:
        """Hold replicas against each other from the next look on."""
        self._mark = True

    async def look(self) -> Look:
        """Ask everybody at once."""
        ingresses, replicas, capacity, running = await asyncio.gather(
            self.ingress_reports(), self._fleet.replica_reports(), self._fleet.capacity(), self._fleet.running()
        )
        if self._mark and replicas:
            self.replicas.mark(replicas)
            self._mark = False
        return Look(
            at_s=self._clock.now_s(),
            ingresses=tuple(ingresses),
            replicas=tuple(replicas),
            capacity=capacity,
            running=running,
        )

    async def ingress_reports(self) -> Sequence[IngressReport]:
        """Ask the ingresses; their probes and counts are kept."""
        reports = await self._fleet.ingress_reports()
        now_s = self.looked_s = self._clock.now_s()
        interval = self._ingresses.take(reports, now_s)
        if interval is not None and interval.seconds > 0:
            self._history.add_counts(interval)
            self._knowledge.add_counts(interval)
        seen = [report.probes for report in reports if report.probes is not None and len(report.probes)]
        for part in seen:
            if len(kept := self._know(part)):
                self._history.add_probes(now_s, kept)
        if seen:
            self._tuning.observe(seen)
        self._history.commit()  # probes come once, and whoever waits for the file next must not wait for a change-over
        self._knowledge.forget(now_s)
        return reports

    def _know(self, seen: Observations) -> Observations:
        """What there is to remember of it; nothing of what cannot be used."""
        try:
            return self._knowledge.add_probes(seen)
        except DataError as error:
            self._complain(f"probes cannot be used: {error}")
            return empty(seen.shape)
