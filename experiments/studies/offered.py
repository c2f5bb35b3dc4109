"""What a plan does under a load that is given: E3's goodput at a fixed rate, its latencies, and bursts."""

from __future__ import annotations

from experiments.studies.sides import Workload, plan_of, poisson_scenario
from experiments.studies.study import Effort
from optimizer.decision import Planned
from optimizer.problem import PlanProblem
from simulator.outcome import Figures, Outcome
from simulator.scenario import FloatArray, Scenario
from simulator.simulate import simulate


def serve(
    problem: PlanProblem,
    planned: Planned,
    inputs: Workload,
    arrivals_s: FloatArray,
    duration_s: float,
    *,
    warm_up_s: float = 0.0,
    inputs_per_request: int = 1,
    admission: bool = False,
) -> Outcome:
    """Simulate a plan on a workload; requests arrive when `arrivals_s` says."""
    plan = plan_of(planned.stages, rate_per_s=planned.figures.rate_per_s, latency_s=planned.figures.latency_s)
    scenario = Scenario(
        problem=problem,
        plan=plan,
        decisions=inputs.decisions,
        rows_N=inputs.rows_N,
        arrivals_s=arrivals_s,
        duration_s=duration_s,
        inputs_per_request=inputs_per_request,
        slo_s=problem.slo.latency_s,
        admission=admission,
        warm_up_s=warm_up_s,
    )
    return _finished(scenario)


def serve_poisson(
    problem: PlanProblem, planned: Planned, inputs: Workload, rate_per_s: float, effort: Effort, *, seed: int = 0
) -> Figures:
    """At a Poisson rate, as long as a trial of `sides.goodput` is, and without admission as there."""
    return _finished(poisson_scenario(problem, planned, inputs, rate_per_s, effort, seed=seed)).figures()


def _finished(scenario: Scenario) -> Outcome:
    outcome = simulate(scenario)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome
