"""The controller's Serve deployment: one control loop over one application's slots."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deployments.controller.description import describe
from deployments.controller.history import History
from deployments.controller.loop import ControlLoop
from deployments.controller.metrics import ControlMetrics
from deployments.controller.ray_fleet import RayFleet
from deployments.controller.settings import check_own_plan
from deployments.local_ray.grpc_binding import bind_calls
from deployments.process_setup import Supervised
from deployments.settings import ServeSettings
from deployments.slots import slot_counts, slot_devices
from deployments.wire.messages import Assignment
from earlyexit.clock import Clock, WallClock
from earlyexit.errors import PlanError
from earlyexit.network.store import read_card
from optimizer.decision import Decision, Strategy
from optimizer.placement import initial_placement, placed_document
from optimizer.problem import PlanProblem

logger = logging.getLogger(f"ray.serve.{__name__}")

POLITE = 5
"""Added to the process's niceness: planning takes no core that serving wants."""


class Controller:
    """Thin: it builds the loop, runs it, and answers for it."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        bind_calls()
        os.nice(POLITE)
        self._settings = ServeSettings.model_validate(settings)
        self._chain = read_card(Path(self._settings.model)).chain
        self._clock = WallClock()
        self._metrics = ControlMetrics()
        self._history, self._loop = build_loop(self._settings, self._clock)
        self._background = Supervised()
        self._background.start("control loop", self._loop.run())
        self._background.start("show metrics", self._show())

    async def current(self) -> dict[str, Any]:
        """The placed plan that ingresses shall follow now, or the reason why there is none."""
        standing = self._loop.keeper.standing
        if standing.suspended is not None:
            return {"reason": standing.suspended}
        return placed_document(standing.followed or standing.placed)

    async def assignment_of(self, slot: str) -> Assignment | None:
        """See `PlanExecutor.assignment_of`."""
        return self._loop.keeper.assignment_of(slot)

    async def describe(self) -> dict[str, Any]:
        """The plan, what was expected, and what is seen."""
        return describe(self._loop, self._history, self._settings, self._clock.now_s(), self._chain)

    async def history(self, limit: int) -> list[dict[str, Any]]:
        """The last plans in force or proposed, newest first."""
        return [asdict(row) for row in self._history.plans(limit)]

    async def replan(self, reason: str = "asked") -> dict[str, Any]:
        """See `ControlLoop.replan`."""
        return await self._loop.replan(reason)

    async def apply(self, plan_document: dict[str, Any], hold: bool = False) -> dict[str, Any]:
        """See `ControlLoop.apply`; raises PlanError too for words to be pruned that the model's inputs do not have."""
        check_own_plan(Path(self._settings.model), plan_document)
        return await self._loop.apply(plan_document, hold=hold)

    def check_health(self) -> None:
        """Serve asks every second. A controller whose loop has ended must be replaced."""
        self._background.check()

    async def _show(self) -> None:
        while True:
            try:
                self._metrics.show(await self.describe())
            except Exception as error:  # figures that cannot be shown must not end planning
                logger.warning("metrics are missing", exc_info=error)
            await asyncio.sleep(self._settings.control.watch_s if self._settings.control else 1.0)


def build_loop(settings: ServeSettings, clock: Clock) -> tuple[History, ControlLoop]:
    """The loop over a service on Ray; raises DataError for a memory that is not its own."""
    control = settings.control
    if control is None:
        raise PlanError("these settings have no control")
    slots = slot_counts(settings, settings.plan)
    history = History.open(Path(control.state), settings.app)
    fleet = RayFleet(
        settings.app, slot_devices(slots), tuple(control.problem.devices), control.dashboard_url, settings.node_labels
    )
    loop = ControlLoop(
        fleet,
        history,
        control,
        problem=control.problem,
        policy=control.policy,
        slots=slots,
        first=initial_placement(settings.plan),
        clock=clock,
        sleep=asyncio.sleep,
        solve=_solve,
    )
    return history, loop


async def _solve(problem: PlanProblem, strategy: Strategy) -> Decision:
    from optimizer.planner import solve  # its compiled parts take a moment to load

    return await asyncio.to_thread(solve, problem, strategy)
