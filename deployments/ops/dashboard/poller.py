"""Polls the whole service for the live page: all ingresses and replicas each time, the controller less often."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from deployments.ingress.core.ingress_core import IngressCore
from deployments.ops.dashboard.state import SHARES_S, ControllerState, ServiceFacts, Snapshot, page_state, within
from deployments.wire.controller_link import ControllerLink
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.clock import Clock
from earlyexit.errors import ControllerUnavailableError
from optimizer.placement import deployment_name

CONTROLLER_S = 5.0
"""Interval between questions to the controller, in seconds: it looks at the service no more often itself."""
SOME_CHANGES = 12
"""Plans of the history on the page."""
MISSED = 2
"""After so many snapshots in a row without itself, an ingress knows that it stops: Serve tells a draining replica
nothing."""
RETRY = b"retry: 2000\n"

AskAll = Callable[[str, str], Awaitable[list[Any] | None]]
"""Calls a method of each running replica of a deployment; returns None if they could not be asked."""


async def ask_service(
    ask_all: AskAll, devices: Iterable[str]
) -> tuple[list[IngressReport] | None, list[ReplicaReport]]:
    """Returns the counts of all ingresses, or None if they could not be asked, and of all replicas of the types."""
    ingresses, *of_types = await asyncio.gather(
        ask_all("ingress", "peek"), *(ask_all(deployment_name(device), "report") for device in devices)
    )
    return ingresses, [report for reports in of_types for report in reports or ()]


@dataclass(slots=True, eq=False)
class SnapshotPoller:
    """Takes a snapshot for each event; keeps as many as rates and shares need."""

    facts: ServiceFacts
    ingress: IngressCore
    ask_all: AskAll
    controller: ControllerLink | None
    wall: Clock
    """Seconds since 1970."""
    _snapshots: deque[Snapshot] = field(default_factory=deque, init=False)
    _asked_s: float = field(default=-CONTROLLER_S, init=False)
    _said: ControllerState = field(default="none", init=False)
    _described: Mapping[str, Any] | None = field(default=None, init=False)
    _history: Sequence[Mapping[str, Any]] = field(default=(), init=False)
    _missed: int = field(default=0, init=False)
    _serial: int = field(default=0, init=False)

    async def event(self) -> bytes | None:
        """Returns the page's present state as a server-sent event; None if this ingress stops."""
        snapshot = await self._look()
        if snapshot is None:
            return None
        self._snapshots.append(snapshot)
        while len(self._snapshots) > len(within(list(self._snapshots), SHARES_S)):
            self._snapshots.popleft()
        self._serial += 1
        state = page_state(self.facts, list(self._snapshots)) | {"serial": self._serial}
        return RETRY + b"event: state\ndata: " + to_json(state, inf_nan_mode="null") + b"\n\n"

    async def _look(self) -> Snapshot | None:
        ingresses, replicas = await ask_service(self.ask_all, self.ingress.placed.occupied)
        await self._ask_controller()
        if ingresses is not None:
            is_listed = any(report.name == self.ingress.name for report in ingresses)
            self._missed = 0 if is_listed else self._missed + 1
        if self._missed >= MISSED:
            return None
        return Snapshot(
            at_s=self.wall.now_s(),
            placed=self.ingress.placed,
            suspended=self.ingress.suspended,
            ingresses=ingresses or (),
            replicas=replicas,
            controller=self._said,
            described=self._described,
            history=self._history,
            agreement=self.ingress.agreement,
        )

    async def _ask_controller(self) -> None:
        now_s = self.wall.now_s()
        if self.controller is None or now_s - self._asked_s < CONTROLLER_S:
            return
        self._asked_s = now_s
        try:
            self._described, self._history = await asyncio.gather(
                self.controller.describe(), self.controller.history(SOME_CHANGES)
            )
            self._said = "answers"
        except ControllerUnavailableError:  # shown on the page; a log would repeat it every few seconds
            self._said = "silent"
