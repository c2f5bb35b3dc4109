"""Replays request traces against the live controller, which plans anew every two minutes: one chain against several.

    OFFRAMP_DATA=... python -m experiments.planning.replay [--rate 2500] [--hours 2] [--chains 1,3] [--traces ...]

Simulated on virtual time: BERT-base with recorded exits on E3's 6 V100, 8 P100 and 15 K80, SLO 100 ms, the least cost at
the upper end of the forecast rate. Accelerators and the SLO are so many times slower than E3's as the time scale says,
and requests rarer; trace, controller and start of replicas keep their seconds. Writes runs/planning/replay.json.
Minutes: 15.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace

import numpy as np

from experiments.data import RUNS, require_data
from experiments.kit import keep, show
from experiments.problems import ENTROPY
from experiments.recorded_exits import bert12_sst2
from experiments.studies.fig19_bursts import AZURE, BURSTY_HOUR_S, HOUR_S, TWITTER
from experiments.studies.following import BATCH_LIMIT, PERIOD_S
from experiments.studies.sides import E3_SLOWER, Workload, facing, mixed_cluster, sst2, with_slo
from offramp.load.arrivals import parse_arrivals
from optimizer.decision import NoPlan
from optimizer.evaluate import promised
from optimizer.plan import Plan, PolicySpec
from optimizer.planner import solve
from optimizer.problem import MinimizeCost, PlanProblem
from optimizer.what_if import with_batch_limit
from simulator.controlled import Control, Controlled, control_settings, simulate_controlled
from simulator.scenario import FloatArray, Scenario

TRACES = {"Twitter": (TWITTER, BURSTY_HOUR_S - HOUR_S), "Azure Functions": (AZURE, 0)}
"""File, and the second at which the replay begins."""
PROBE_SHARE = 0.005
COLUMNS = (
    *("trace", "most chains", "requests", "in time (%)", "refused (%)", "late (%)", "p99 (SLO)", "usd_per_hour", "busy"),
    *("plans", "chains of plans", "took_s"),
)


def problem_of(options: Namespace, inputs: Workload, most_chains: int) -> PlanProblem:
    """Returns what the controller plans for, at first at the mean rate."""
    cluster = with_batch_limit(mixed_cluster(E3_SLOWER * options.time_scale), BATCH_LIMIT)
    objective = MinimizeCost(rate_per_s=options.rate / options.time_scale)
    slower = with_slo(cluster, cluster.slo.latency_s * options.time_scale)
    return replace(facing(slower, inputs), objective=objective, most_chains=most_chains)


def play(options: Namespace, inputs: Workload, arrivals_s: FloatArray, most_chains: int) -> Controlled:
    """Serves a trace, with plans of up to so many chains."""
    problem, records = problem_of(options, inputs, most_chains), bert12_sst2("entropy")
    planned = solve(problem)
    assert not isinstance(planned, NoPlan), planned.binding
    first = Plan(
        stages=planned.stages,
        shares=planned.figures.shares,
        policy=PolicySpec(name="entropy", thresholds=ENTROPY),
        predicted=promised(problem, planned.figures),
    )
    scenario = Scenario(
        problem=problem,
        plan=first,
        decisions=inputs.decisions,
        rows_N=inputs.rows_N,
        arrivals_s=arrivals_s,
        duration_s=options.hours * HOUR_S,
        slo_s=problem.slo.latency_s,
    )
    settings = control_settings(problem, period_s=PERIOD_S)
    control = Control(settings=settings, problem=problem, records=records, probe_share=PROBE_SHARE)
    return simulate_controlled(scenario, control, seed=options.seed)


def row(options: Namespace, name: str, inputs: Workload, most_chains: int) -> tuple[object, ...]:
    """Returns a line of the table."""
    file, first_s = TRACES[name]
    spec = f"trace:{require_data(file)},rate={options.rate / options.time_scale},from={first_s}"
    arrivals_s = parse_arrivals(spec).draw(options.hours * HOUR_S, np.random.default_rng(options.seed))
    began_s = time.monotonic()
    played = play(options, inputs, arrivals_s, most_chains)
    figures = played.outcome.figures()
    refused = sum(figures.drops.values())
    late = figures.inputs - refused - figures.in_slo
    in_force = [len(each.placed["plan"]["chains"]) for each in played.plans if each.outcome == "in force"]
    shares = (100 * each / figures.inputs for each in (figures.in_slo, refused, late))
    p99 = None if figures.p99_s is None else figures.p99_s / played.outcome.slo_s
    chains = ", ".join(f"{in_force.count(each)} of {each}" for each in sorted(set(in_force)))
    cost = figures.usd_per_hour, figures.utilisation
    return name, most_chains, figures.inputs, *shares, p99, *cost, len(in_force), chains, time.monotonic() - began_s


def main() -> None:
    """Replays, prints and writes."""
    parser = ArgumentParser(prog="python -m experiments.planning.replay", description=__doc__)
    parser.add_argument("--rate", type=float, default=2500.0, help="mean of a trace, requests of one input per second")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--chains", default="1,3", help="the most that a plan may have")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--time-scale", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    inputs, rows = sst2(), []
    for name in options.traces.split(","):
        for most_chains in map(int, options.chains.split(",")):
            rows.append(row(options, name, inputs, most_chains))
            print(*rows[-1], flush=True)
    show(f"a mean of {options.rate:g}/s", COLUMNS, rows)
    told = {"options": vars(options), "columns": COLUMNS, "rows": rows}
    print(f"written: {keep(told, RUNS / 'planning' / 'replay.json')}")


if __name__ == "__main__":
    main()
