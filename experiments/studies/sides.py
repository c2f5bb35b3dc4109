"""What the studies compare: strategies on one problem and one workload, and the goodput of each, simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.problems import ENTROPY, PROBLEMS, stretched
from experiments.recorded_exits import bert12_sst2
from experiments.studies.mixes import mixed_rows
from experiments.studies.study import Effort
from experiments.sustained import Capacity, highest_rate
from optimizer.decision import Decision, Planned, Strategy
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.problem_file import read_problem
from profiles.table import LatencyTable
from simulator.inputs import Decisions, IntArray, recorded, survival_of
from simulator.outcome import Outcome
from simulator.scenario import FloatArray, Scenario, poisson_arrivals
from simulator.simulate import simulate

SIDES: tuple[Strategy, ...] = ("stock", "early-exit", "e3", "best")
BATCHES: Mapping[Effort, tuple[int, ...]] = {"full": (1, 2, 4, 8), "quick": (8,)}
"""Largest batches of E3's figures."""
SEED = 0
E3_SLOWER = 6.5
"""TensorRT's V100 takes 1.23 ms for BERT-base at batch 1. E3 does not print its V100's time; 8 ms is an estimate."""
NUM_ROWS = 20_000
"""Inputs of a workload; then they come again."""
INPUTS = {"full": 60_000, "quick": 12_000}
"""Of one simulation."""
WARM_UP_SLOS = 2
"""Until then the queues are shorter than they will be."""
LEAST_SLOS = 40
"""A simulation is at least so many SLOs long: what cannot be sustained must have the time to show it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Inputs, where each leaves, and the survival that follows, which is what a planner is told."""

    words: str
    decisions: Decisions
    rows_N: IntArray
    survival_N: tuple[float, ...]


def equal_cluster(times: float = E3_SLOWER) -> PlanProblem:
    """E3's 16 V100 (section 5.1.1), at published times stretched by `times`."""
    return stretched(read_problem(PROBLEMS / "bert_base_16_v100.yaml").problem, times)


def mixed_cluster(times: float = E3_SLOWER) -> PlanProblem:
    """E3's 6 V100, 8 P100 and 15 K80, at the same 0.013 USD/s (section 5.2)."""
    return stretched(replace(read_problem(PROBLEMS / "bert_base_hetero.yaml").problem, most_chains=1), times)


def sst2(easy_share: float | None = None, *, entropy: float = ENTROPY, seed: int = SEED) -> Workload:
    """BERT-base's recorded exits on SST-2 dev, in random order; with `easy_share`, a mix of easy and hard inputs.

    Where the records are absent, SystemExit says so.
    """
    rng = np.random.default_rng(seed)
    records = bert12_sst2("entropy")
    decisions = recorded(records, dict.fromkeys(records.ramps, entropy))
    if easy_share is None:
        rows_N, mix = rng.integers(len(records), size=NUM_ROWS), ""
    else:
        thresholds = dict.fromkeys(records.ramps, ENTROPY)
        rows_N = mixed_rows(records, thresholds, easy_share, rng, num_inputs=NUM_ROWS)
        mix = f", {easy_share:.0%} easy"
    return workload(f"recorded: BERT-base on SST-2 dev, entropy {entropy:g}{mix}", decisions, rows_N, equal_cluster())


def workload(words: str, decisions: Decisions, rows_N: IntArray, problem: PlanProblem) -> Workload:
    """With the survival that these rows have, all ramps active."""
    survival_N = survival_of(decisions, problem.ramps, problem.num_blocks, rows_N)
    return Workload(words=words, decisions=decisions, rows_N=rows_N, survival_N=survival_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Shares of the whole model's seconds that exits save an input, where a batch is always full."""

    compute: float
    """Of the blocks, as if ramps took nothing."""
    latency: float
    """Less what the ramps take; below 0 where that is more than they save."""

    @property
    def most_times(self) -> float:
        """How many times the stock model's rate they allow, at the same batch and with all ramps active."""
        return 1 / (1 - self.latency)


def savings(survival_N: Sequence[float], table: LatencyTable, ramps: Sequence[int], batch: int = 1) -> Savings:
    """With all ramps active: a block, and the ramp after it, costs an input that reaches it its part of a batch."""
    size = np.array(float(batch))
    block_s_N, ramp_s_E = table.blocks_at(size), table.ramps_at(size)
    whole_s = float(block_s_N.sum())
    blocks_s = float(np.dot(survival_N, block_s_N))
    ramps_s = sum(survival_N[ramp] * float(seconds) for ramp, seconds in zip(ramps, ramp_s_E, strict=True))
    return Savings(compute=1 - blocks_s / whole_s, latency=1 - (blocks_s + ramps_s) / whole_s)


def facing(problem: PlanProblem, inputs: Workload) -> PlanProblem:
    """The problem of that workload."""
    return replace(problem, survival_N=inputs.survival_N)


def decide(problem: PlanProblem, strategies: Sequence[Strategy] = SIDES) -> dict[str, Decision]:
    """Every strategy's decision."""
    return {strategy: solve(problem, strategy) for strategy in strategies}


def plan_of(stages: tuple[Stage, ...], *, rate_per_s: float, latency_s: float) -> Plan:
    """Stages as a service takes them. Thresholds are not read: where inputs leave is the workload's."""
    return Plan(
        stages=stages,
        policy=PolicySpec(name="entropy", thresholds=ENTROPY),
        predicted={"rate_per_s": rate_per_s, "latency_s": latency_s},
    )


def scenario(
    problem: PlanProblem,
    planned: Planned,
    inputs: Workload,
    arrivals_s: FloatArray,
    duration_s: float,
    *,
    warm_up_s: float = 0.0,
    inputs_per_request: int = 1,
    admission: bool = False,
) -> Scenario:
    """A plan on a workload; requests arrive when `arrivals_s` says."""
    return Scenario(
        problem=problem,
        plan=plan_of(planned.stages, rate_per_s=planned.figures.rate_per_s, latency_s=planned.figures.latency_s),
        decisions=inputs.decisions,
        rows_N=inputs.rows_N,
        arrivals_s=arrivals_s,
        duration_s=duration_s,
        inputs_per_request=inputs_per_request,
        slo_s=problem.slo.latency_s,
        admission=admission,
        warm_up_s=warm_up_s,
    )


def poisson(problem: PlanProblem, planned: Planned, inputs: Workload, rate_per_s: float, effort: Effort) -> Scenario:
    """A plan under a Poisson rate, without admission."""
    slo_s = problem.slo.latency_s
    warm_up_s = WARM_UP_SLOS * slo_s
    duration_s = warm_up_s + max(INPUTS[effort] / rate_per_s, LEAST_SLOS * slo_s)
    arrivals_s = poisson_arrivals(rate_per_s, duration_s, SEED)
    return scenario(problem, planned, inputs, arrivals_s, duration_s, warm_up_s=warm_up_s)


def serve(offered: Scenario) -> Outcome:
    """Simulate it; Ctrl-C ends the study."""
    outcome = simulate(offered)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome


def goodput(problem: PlanProblem, planned: Planned, inputs: Workload, effort: Effort) -> Capacity:
    """The highest Poisson rate of which 99 % is answered within the SLO, without admission."""
    return highest_rate(
        lambda rate_per_s: poisson(problem, planned, inputs, rate_per_s, effort), planned.figures.rate_per_s
    )
