"""A service on this machine whose plan is changed from outside, so that several plans can take turns on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ControlSettings, ServeSettings
from deployments.wire.controller_link import ask_controller
from offramp.client.client import Client
from optimizer.plan import Plan, PolicySpec
from optimizer.plan_file import plan_document
from optimizer.problem import PlanProblem

APPLY_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 120.0
NEVER_S = 1e9
"""A planning period that does not end."""


def hand_control(problem: PlanProblem, policy: PolicySpec, state: Path) -> ControlSettings:
    """A controller that observes as always and never plans: plans come by `RunningService.apply`, held.

    It remembers nothing of earlier runs.
    """
    state.parent.mkdir(parents=True, exist_ok=True)
    for leftover in state.parent.glob(f"{state.name}*"):  # with its journals
        leftover.unlink()
    return ControlSettings(problem=problem, policy=policy, state=str(state.resolve()), period_s=NEVER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """A running service, and the controller that is told its plans."""

    url: str
    app: str = "offramp"

    async def apply(self, plan: Plan, *, hold: bool = False) -> None:
        """Put a plan in force, until something better is found or for good; returns when the old one has drained."""
        asked = "apply", plan_document(plan), hold
        await asyncio.to_thread(ask_controller, self.app, *asked, timeout_s=APPLY_TIMEOUT_S)


@contextmanager
def served(settings: ServeSettings, plan: Plan, cluster: LocalCluster) -> Iterator[RunningService]:
    """The service on this machine, ready, its plan in force; everything ends with the block.

    A controller that plans takes over from there, one that never does holds the plan.
    """
    with serving(settings, cluster) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=READY_TIMEOUT_S)
        service = RunningService(url=url, app=settings.app)
        if settings.control is not None:
            asyncio.run(service.apply(plan, hold=settings.control.period_s == NEVER_S))
        yield service
