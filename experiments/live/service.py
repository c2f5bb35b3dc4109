"""Services on emulated accelerators: what they are told, how they are started, and their controller."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.local_ray.proxy import HttpFront
from deployments.settings import ControlSettings, EmulatedSettings, ServeSettings
from experiments.data import RUNS
from experiments.live.emulation import Emulation, emulated
from offramp.client.client import Client
from optimizer.plan import Plan, PolicySpec, stock_plan
from optimizer.plan_file import plan_document
from optimizer.problem import PlanProblem

STATE = RUNS / "live" / "state"
SLOTS = 6
"""Per accelerator type: more stages than any plan here has, so that new ones start beside those that end."""
APPLY_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 120.0
NEVER_S = 1e9
"""A planning period that does not end."""


def emulated_settings(
    emulation: Emulation,
    model: Path,
    plan: Plan,
    *,
    control: ControlSettings | None = None,
    **options: Any,
) -> ServeSettings:
    """Settings of a service for `plan`; `options` are further ones of `ServeSettings`.

    With a controller every idle slot has a replica until the controller takes it away, which leaves no room for a plan
    of all accelerators: the settings then begin with `seed_plan`, and `served` puts the plan in force.
    """
    slots = {emulated(name): min(SLOTS, count) for name, count in emulation.counts.items()}
    problem = emulation.problem((1.0,) * plan.num_blocks, time_scale=1.0)
    devices = {
        device: EmulatedSettings(
            batch=list(table.batches),
            block_s=table.block_s_NB.tolist(),
            ramp_s=table.ramp_s_EB.tolist(),
            time_scale=emulation.time_scale,
        )
        for device, table in problem.latency.items()
    }
    defaults: dict[str, Any] = {"probe_share": 0.0 if control is None else 0.02, "slack": problem.slo.slack}
    return ServeSettings(
        model=str(model.resolve()),
        plan=plan if control is None else seed_plan(emulation, plan.num_blocks, plan.networks),
        emulated=devices,
        slots={} if control is None else slots,
        control=control,
        slo_s=emulation.wall_slo_s,
        **(defaults | options),
    )


def seed_plan(emulation: Emulation, num_blocks: int, networks: tuple[int, ...] = ()) -> Plan:
    """The model without exits, of a chain the last one, on what the idle slots of the first accelerator type leave."""
    name, count = next(iter(emulation.counts.items()))
    replicas = count - min(SLOTS, count) + 1
    return stock_plan(
        num_blocks, batch=emulation.batch_limit, device=emulated(name), replicas=replicas, networks=networks
    )


def control_settings(
    problem: PlanProblem, spec: PolicySpec, *, state: str, folder: Path = STATE, **options: Any
) -> ControlSettings:
    """A controller that remembers nothing of earlier runs; `options` are further ones of `ControlSettings`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{state}.sqlite").resolve()
    for leftover in path.parent.glob(f"{path.name}*"):  # with its journals
        leftover.unlink()
    return ControlSettings(problem=problem, policy=spec, state=str(path), **options)


def hand_control(problem: PlanProblem, spec: PolicySpec, *, state: str) -> ControlSettings:
    """A controller that looks as always, and plans never: plans come by `apply`, held."""
    return control_settings(problem, spec, state=state, period_s=NEVER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service, and what its controller is asked."""

    url: str
    app: str = "offramp"

    async def apply(self, plan: Plan, *, hold: bool = False, timeout_s: float = APPLY_TIMEOUT_S) -> None:
        """Put a plan in force, until something better is found or for good; returns when the old one has drained."""
        await self._ask("apply", plan_document(plan), hold, timeout_s=timeout_s)

    async def describe(self, timeout_s: float = APPLY_TIMEOUT_S) -> dict[str, Any]:
        """What the controller says of itself."""
        return await self._ask("describe", timeout_s=timeout_s)

    async def current(self) -> dict[str, Any]:
        """The placed plan in force; empty while nothing is served."""
        return await self._ask("current")

    async def _ask(self, method: str, *arguments: Any, timeout_s: float = APPLY_TIMEOUT_S) -> dict[str, Any]:
        from ray import serve

        handle: Any = serve.get_deployment_handle("controller", self.app)
        if not handle.is_initialized:  # Serve keeps handles; its throughput switches would have them on this loop
            handle._init(_run_router_in_separate_loop=True)

        def ask() -> dict[str, Any]:
            return getattr(handle, method).remote(*arguments).result(timeout_s=timeout_s) or {}

        return await asyncio.to_thread(ask)


@contextmanager
def served(
    settings: ServeSettings,
    plan: Plan,
    *,
    port: int = 8000,
    front: HttpFront = "auto",
    metrics_port: int | None = None,
) -> Iterator[Service]:
    """The service on this machine, ready, its plan in force; everything ends with the block.

    A controller that plans takes over from there, one that never does holds the plan.
    """
    with serving(settings, LocalCluster(port=port, front=front, metrics_port=metrics_port)) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=READY_TIMEOUT_S)
        service = Service(url=url, app=settings.app)
        if settings.control is not None:
            asyncio.run(service.apply(plan, hold=settings.control.period_s == NEVER_S))
        yield service
