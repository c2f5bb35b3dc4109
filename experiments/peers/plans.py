"""What Offramp serves a workload by: plans from a profile of this machine, one per strategy."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from earlyexit.clock import MonotonicClock
from experiments.peers.stock import Dtype, ServerOptions, StockModel
from experiments.peers.workloads import Workload
from offramp.demo.plans import Processors, measured_problem, plan_for, with_slo
from optimizer.decision import Strategy
from optimizer.plan import Plan
from optimizer.problem import PlanProblem

SLO_FACTOR = 12.5
"""E3's 100 ms is so many times its V100's 8 ms for a batch of one (section 5)."""
STOCK_RUNS = 60
STRATEGIES: dict[str, Strategy] = {"offramp": "serial", "early-exit": "early-exit", "stock": "stock"}
"""Sides and the spaces that their plans are from. One machine is one stage: its replicas run every split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A workload measured on this machine, and its plans."""

    stock_s: float
    """One text alone through the full model: median over texts."""
    slo_s: float
    problem: PlanProblem
    plans: dict[str, Plan]
    """By side."""


def prepare(workload: Workload, dtype: Dtype, machine: Processors) -> Prepared:
    """Measure the model on one thread, and plan. Raises PlanError where a strategy has no plan.

    The SLO is `SLO_FACTOR` times what one text alone takes.
    """
    stock_s = stock_alone_s(workload, dtype, machine)
    slo_s = SLO_FACTOR * stock_s
    measured = measured_problem(workload.folder, workload.texts, workload.records, workload.thresholds, machine, dtype)
    problem = with_slo(measured, slo_s)
    plans = {side: plan_for(problem, each, workload.policy, workload.records) for side, each in STRATEGIES.items()}
    return Prepared(stock_s=stock_s, slo_s=slo_s, problem=problem, plans=plans)


def stock_alone_s(workload: Workload, dtype: Dtype, machine: Processors) -> float:
    """Seconds of the full model for one text, tokens ready: the median over texts."""
    model = StockModel.load(ServerOptions(model=workload.folder, dtype=dtype, threads=machine.threads))
    clock = MonotonicClock()
    seconds = []
    order = np.random.default_rng(0).permutation(len(workload.texts))[:STOCK_RUNS]
    for encoded in model.encode([workload.texts[row] for row in order]):
        started_s = clock.now_s()
        model.predict_encoded([encoded])
        seconds.append(clock.now_s() - started_s)
    return median(seconds[STOCK_RUNS // 6 :])  # the first are cold
