"""What Offramp serves a workload by: plans from a profile of this machine, one per strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from earlyexit.clock import MonotonicClock
from earlyexit.codecs.tokenizer import TextTokenizer
from earlyexit.errors import PlanError
from experiments.peers.options import Dtype, ServerOptions
from experiments.peers.stock import StockModel
from experiments.peers.workloads import Workload
from offramp.commands.profile import ProfileJob, profile_model
from optimizer.decision import NoPlan, Strategy
from optimizer.plan import Plan
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.rescore import joint_reach, rechosen, rescore

SLO_FACTOR = 12.5
"""E3's 100 ms is so many times its V100's 8 ms for a batch of one (section 5)."""
SLACK = 0.5
"""Of the SLO, what plans leave for queues. E3 has 0.2 (section 4), for bursts; but who arrives at a busy replica waits
for the batch under way, then for his own: both must fit (so Nexus, SOSP'19, takes batches of half the SLO).
On CPUs, where a batch of eight takes six times as long as one, that is what decides: docs/results.md has figures.
"""
STOCK_RUNS = 60
HIDDEN_BYTES = {"float32": 4, "bfloat16": 2}
STRATEGIES: dict[str, Strategy] = {"offramp": "serial", "early-exit": "early-exit", "stock": "stock"}
"""Sides and the spaces that their plans are from. One machine is one stage: its replicas run every split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What every side may use."""

    workers: int = 2
    """Processes with a copy of the model."""
    threads: int = 1
    """Of each."""
    batch_limit: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A workload measured on this machine, and its plans."""

    stock_s: float
    """One text alone through the full model: median over texts."""
    slo_s: float
    problem: PlanProblem
    plans: dict[str, Plan]
    """By side."""


def prepare(
    workload: Workload, dtype: Dtype, machine: Machine, *, slo_factor: float = SLO_FACTOR, repeats: int = 5
) -> Prepared:
    """Measure the model on one thread, and plan. Raises PlanError where a strategy has no plan.

    The SLO is `slo_factor` times what one text alone takes.
    """
    stock_s = stock_alone_s(workload, dtype, machine)
    slo_s = slo_factor * stock_s
    problem = _problem(workload, dtype, machine, slo_s=slo_s, repeats=repeats)
    plans = {side: _plan(problem, strategy, workload) for side, strategy in STRATEGIES.items()}
    return Prepared(stock_s=stock_s, slo_s=slo_s, problem=problem, plans=plans)


def stock_alone_s(workload: Workload, dtype: Dtype, machine: Machine) -> float:
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


def _problem(workload: Workload, dtype: Dtype, machine: Machine, *, slo_s: float, repeats: int) -> PlanProblem:
    length = _mean_length(workload)
    batches = tuple(2**k for k in range(machine.batch_limit.bit_length()))
    job = ProfileJob(dtype=dtype, batches=batches, lengths=(length,), threads=machine.threads, repeats=repeats)
    profile, _ = profile_model(workload.folder, job)
    ramps = tuple(sorted(workload.thresholds))
    rows = [profile.ramps.index(ramp) for ramp in ramps]
    table = profile.at(length)
    hidden = HIDDEN_BYTES[dtype] * length
    return PlanProblem(
        num_blocks=profile.num_blocks,
        ramps=ramps,
        survival_N=workload.records.nested_survival(workload.thresholds),
        latency={"cpu": replace(table, ramp_s_EB=table.ramp_s_EB[rows])},
        devices={"cpu": Supply(count=machine.workers, usd_per_hour=0.0)},
        link=Link(bandwidth_bytes_per_s=1e9, delay_s=0.002),
        bytes_per_sample_N=(float(hidden),) * profile.num_blocks,
        slo=Slo(latency_s=slo_s, slack=SLACK),
        objective=MaximizeRate(),
    )


def _mean_length(workload: Workload) -> int:
    from earlyexit.network.store import read_card

    tokenizer = TextTokenizer.load(workload.folder, read_card(workload.folder).max_length)
    return round(np.mean([each.length for each in tokenizer.encode(workload.texts, truncate=True)]))


def _plan(problem: PlanProblem, strategy: Strategy, workload: Workload) -> Plan:
    decision = solve(problem, strategy)
    if isinstance(decision, NoPlan):
        raise PlanError(f"no {strategy} plan keeps {problem.slo.limit_s:.3g} s here: {decision.binding}")
    reach = joint_reach(workload.records, workload.thresholds)
    chosen = rechosen(problem, decision, rescore(problem, decision, reach))
    predicted = {"rate_per_s": chosen.figures.rate_per_s, "latency_s": chosen.figures.latency_s}
    return Plan(stages=chosen.stages, policy=workload.policy, predicted=predicted)
