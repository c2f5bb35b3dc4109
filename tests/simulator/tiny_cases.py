"""A service with short timetables: four blocks, three ramps, and rows named by the ramp at which they leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from earlyexit.engine.engine import Dispatch
from earlyexit.network.boundary import Split
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.problems.problem import Link, PlanProblem, Slo, Supply
from profiles.table import LatencyTable
from simulator.inputs import ByRamp
from simulator.processes import SimulatedReplica
from simulator.scenario import Scenario
from simulator.service import SimulatedService
from tests.optimizer.plain_problem import plain_problem

NUM_BLOCKS: Final = 4
RAMPS: Final = (0, 1, 2)
AT_0, AT_1, AT_2, TO_END = range(4)
"""Rows: inputs that leave at that ramp, or at none."""
DECISIONS: Final = ByRamp(ramps=RAMPS, sure_NR=np.array([[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]], dtype=np.bool_))
POLICY: Final = PolicySpec(name="entropy", thresholds=0.4)


def problem(*, ramp_s: float = 0.0, count: int = 8, slo: Slo | None = None) -> PlanProblem:
    """Returns a problem: a block takes 1 s, 0.25 s more for each further input; the link takes 0.5 s per input."""
    block_s_NB = np.tile([1.0, 1.25, 1.75], (NUM_BLOCKS, 1))
    return plain_problem(
        survival_N=(1.0,) * NUM_BLOCKS,
        latency={"cpu": LatencyTable(batches=(1, 2, 4), block_s_NB=block_s_NB, ramp_s_EB=np.full((3, 3), ramp_s))},
        devices={"cpu": Supply(count=count, usd_per_hour=3.0)},
        link=Link(bandwidth_bytes_per_s=2.0),
        bytes_per_sample_N=(1.0,) * NUM_BLOCKS,
        slo=slo or Slo(latency_s=100.0),
    )


def split(first: int, end: int, batch: int = 4, *, ramps: tuple[int, ...] = ()) -> Split:
    return Split(first=first, end=end, batch=batch, ramps=ramps)


def stage(replicas: int, *splits: Split) -> Stage:
    return Stage(device="cpu", replicas=replicas, splits=splits)


def plan(*stages: Stage, dispatch: Dispatch = "work-conserving", **predicted: float) -> Plan:
    return Plan(stages=stages, policy=POLICY, dispatch=dispatch, predicted=predicted)


def scenario(served_by: Plan, arrivals_s: Sequence[float], rows: Sequence[int] = (TO_END,), **options: Any) -> Scenario:
    """Returns a scenario without admission that ends a second after the last arrival, unless the options differ."""
    given: dict[str, Any] = {
        "problem": problem(),
        "plan": served_by,
        "decisions": DECISIONS,
        "rows_N": np.array(rows, dtype=np.int64),
        "arrivals_s": np.array(arrivals_s, dtype=np.float64),
        "duration_s": max(arrivals_s, default=0.0) + 1.0,
        "admission": False,
    }
    return Scenario(**given | options)


def kill(service: SimulatedService, replica: SimulatedReplica) -> None:
    """Ends a replica at once; its inputs start again on other replicas."""
    if replica.index in service.running[replica.device]:
        service.stop(replica)
    for call in replica.die():
        service.ingresses[call.ingress.index].restart(call)
