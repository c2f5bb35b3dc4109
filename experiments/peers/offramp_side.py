"""Offramp as a side of the comparison: one service, which changes to a side's plan when its turn comes."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from deployments.settings import ServeSettings
from experiments.live.service import Service, hand_control, served
from experiments.peers.client import ClientOptions, LoadResult, run_client
from experiments.peers.options import Dtype
from experiments.peers.plans import Machine, Prepared
from experiments.peers.processes import MARK, PeerProcess
from experiments.peers.workloads import Workload
from optimizer.plan import Plan
from optimizer.plan_file import plan_document

NOBODY = -1
"""No process has this id: the service's own processes are found by their mark, and this one is none of them."""


@dataclass(slots=True)
class InForce:
    """Which plan a service follows."""

    service: Service
    plan: Plan

    def change_to(self, plan: Plan) -> None:
        """Put another plan in force, and hold it; nothing is lost meanwhile."""
        if plan != self.plan:
            asyncio.run(self.service.apply(plan, hold=True))
            self.plan = plan


@dataclass(frozen=True, slots=True, kw_only=True)
class OfframpSide:
    """Offramp under one plan."""

    name: str
    plan: Plan
    load: ClientOptions
    """But for rate and seed."""
    in_force: InForce = field(repr=False)
    process: PeerProcess = field(repr=False)

    def measure(self, rate_per_s: float, seed: int) -> LoadResult:
        """Offer this rate; before and after, the service stands still."""
        self.process.resume()
        try:
            self.in_force.change_to(self.plan)
            changes = {"rate_per_s": rate_per_s, "concurrency": None, "seed": seed}
            return run_client(self.load.model_copy(update=changes))
        finally:
            self.process.pause()


@contextmanager
def offramp_sides(
    workload: Workload,
    prepared: Prepared,
    dtype: Dtype,
    machine: Machine,
    load: ClientOptions,
    *,
    port: int,
    metrics_port: int,
) -> Iterator[list[OfframpSide]]:
    """The service, and a side for each of its plans; it runs only while it is measured. `load` is what is sent.

    As it is shipped, but for probes: a share of inputs that run to the end for the record answers no question here.
    """
    first = prepared.plans["stock"]
    settings = ServeSettings(
        model=str(workload.folder.resolve()),
        plan=plan_document(first),
        slots={"cpu": 1},
        control=hand_control(prepared.problem, workload.policy, state=f"peers-{workload.name}"),
        slo_s=prepared.slo_s,
        dtype=dtype,
        threads_per_replica=machine.threads,
    )
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    with served(settings, first, port=port, metrics_port=metrics_port) as service:
        in_force, process = InForce(service, first), PeerProcess(service.url, NOBODY, mark)
        yield [
            OfframpSide(
                name=name,
                plan=plan,
                in_force=in_force,
                process=process,
                load=load.model_copy(update={"url": service.url}),
            )
            for name, plan in prepared.plans.items()
        ]
