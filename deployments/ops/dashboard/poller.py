"""Looks at the whole service: all ingresses and stages every time, the controller now and then."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from pydantic_core import to_json

from deployments.ops.dashboard.snapshot import ControllerState, ServiceFacts, Snapshot, within
from deployments.ops.dashboard.state import SHARES_S, page_state
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.clock import Clock
from earlyexit.errors import ControllerUnavailableError
from optimizer.placement import PlacedPlan

CONTROLLER_S = 5.0
"""How often the controller is asked: it looks at the service no more often itself."""
SOME_CHANGES = 12
"""Plans of the history that the page shows."""
MISSED = 2
"""Looks in a row that do not list an ingress among the running ones, after which it knows that it ends: Serve tells a
replica nothing of that while it drains."""
RETRY = b"retry: 2000\n"
ANSWER_S = 4.0
"""Less than the page waits before it says that it has no news."""

logger = logging.getLogger(f"ray.serve.{__name__}")

AskAll = Callable[[str, str], Awaitable[list[Any] | None]]
"""What every running replica of a deployment says to a method; None where they could not be asked."""


async def ask_service(ask_all: AskAll, slots: Iterable[str]) -> tuple[list[IngressReport] | None, list[ReplicaReport]]:
    """Returns what every ingress and every replica of the slots counts; None if the ingresses could not be asked."""
    ingresses, *of_slots = await asyncio.gather(
        ask_all("ingress", "peek"), *(ask_all(slot, "report") for slot in slots)
    )
    return ingresses, [report for reports in of_slots for report in reports or ()]


class PlanTeller(Protocol):
    """What is asked of the controller; `ControllerLink` does."""

    async def describe(self) -> dict[str, Any]: ...

    async def history(self, limit: int) -> list[dict[str, Any]]: ...


class OwnView(Protocol):
    """What the ingress that looks knows by itself; `IngressCore` has it."""

    @property
    def name(self) -> str: ...

    @property
    def placed(self) -> PlacedPlan: ...

    @property
    def suspended(self) -> str | None: ...

    @property
    def agreement(self) -> float | None: ...


class SnapshotPoller:
    """Makes one event of every look; remembers as many looks as rates and shares need."""

    def __init__(
        self, facts: ServiceFacts, ingress: OwnView, ask_all: AskAll, controller: PlanTeller | None, wall: Clock
    ) -> None:
        """`wall`: seconds since 1970."""
        self._facts = facts
        self._ingress = ingress
        self._ask_all = ask_all
        self._controller = controller
        self._wall = wall
        self._snapshots: deque[Snapshot] = deque()
        self._asked_s = -CONTROLLER_S
        self._said: ControllerState = "none" if controller is None else "silent"
        self._described: Mapping[str, Any] | None = None
        self._history: Sequence[Mapping[str, Any]] = ()
        self._missed = 0
        self._serial = 0

    async def event(self) -> bytes | None:
        """The page's state now, as a server-sent event; None when this ingress is to end."""
        snapshot = await self._look()
        if snapshot is None:
            return None
        self._snapshots.append(snapshot)
        while len(self._snapshots) > len(within(list(self._snapshots), SHARES_S)):
            self._snapshots.popleft()
        self._serial += 1
        state = page_state(self._facts, list(self._snapshots)) | {"serial": self._serial}
        return RETRY + b"event: state\ndata: " + to_json(state, inf_nan_mode="null") + b"\n\n"

    async def _look(self) -> Snapshot | None:
        slots = dict.fromkeys((*self._ingress.placed.slots, *self._ingress.placed.avoided.values()))
        ingresses, replicas = await ask_service(self._ask_all, slots)
        await self._ask_controller()
        if self._is_ending(ingresses):
            return None
        return Snapshot(
            at_s=self._wall.now_s(),
            placed=self._ingress.placed,
            suspended=self._ingress.suspended,
            ingresses=ingresses or (),
            replicas=replicas,
            controller=self._said,
            described=self._described,
            history=self._history,
            agreement=self._ingress.agreement,
        )

    def _is_ending(self, ingresses: Sequence[Any] | None) -> bool:
        """Whether the running ingresses are known, and this one is none of them any more."""
        if ingresses is not None:
            is_listed = any(report.name == self._ingress.name for report in ingresses)
            self._missed = 0 if is_listed else self._missed + 1
        return self._missed >= MISSED

    async def _ask_controller(self) -> None:
        now_s = self._wall.now_s()
        if self._controller is None or now_s - self._asked_s < CONTROLLER_S:
            return
        self._asked_s = now_s
        try:
            self._described, self._history = await asyncio.gather(
                self._controller.describe(), self._controller.history(SOME_CHANGES)
            )
            self._said = "answers"
        except ControllerUnavailableError:  # the page says so, once, where a log would every few seconds
            self._said = "silent"


class Everyone:
    """Of one application, asked from inside one of its replicas."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._handles: dict[str, Any] = {}

    async def ask(self, deployment: str, method: str) -> list[Any] | None:
        """What each says; nothing where none runs, None where one that runs does not answer."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import DeploymentUnavailableError

        if deployment not in self._handles:  # in a thread, because making a handle waits for Serve
            self._handles[deployment] = await asyncio.to_thread(serve.get_deployment_handle, deployment, self._app)
        try:
            answers = await self._handles[deployment].broadcast(method).results_async(timeout_s=ANSWER_S)
        except DeploymentUnavailableError:
            return []
        except (TimeoutError, RayError) as error:
            logger.warning("the live page misses %s: %r", deployment, error)
            return None
        return list(answers)
