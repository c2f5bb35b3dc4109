"""Replays request traces against the live controller, which plans every two minutes: one chain and several chains.

    OFFRAMP_DATA=... python -m experiments.planning.replay [--problem resnet50_hetero] [--rate 8000] [--chains 1,3]

Runs on virtual time: a problem of examples/problems with exits drawn to its survival, at the least cost for the upper
end of the forecast rate. The time scale multiplies times of accelerators, network and SLO and divides the rate; trace,
controller and starts of replicas are not scaled. Writes runs/planning/replay.json. Minutes: 10.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace

import numpy as np

from experiments.controlled import Control, Controlled, simulate_controlled
from experiments.data import RUNS, require_data
from experiments.kit import print_table, write_json
from experiments.problems import ENTROPY, PROBLEMS, stretched
from experiments.recorded_exits import drawn_exits
from experiments.studies.fig19_bursts import AZURE, BURSTY_HOUR_S, HOUR_S, TWITTER
from experiments.studies.following import PERIOD_S
from experiments.studies.sides import with_slo
from offramp.load.arrivals import parse_arrivals
from optimizer.cost.evaluate import predictions
from optimizer.plans.plan import Plan, PolicySpec
from optimizer.problems.problem import IN_TIME, Link, MinimizeCost, PlanProblem
from optimizer.problems.problem_file import read_problem
from optimizer.search.decision import NoPlan
from optimizer.search.planner import solve
from simulator.inputs import recorded
from simulator.scenario import Scenario

TRACES = {"Twitter": (TWITTER, BURSTY_HOUR_S + 1200), "Azure Functions": (AZURE, 0)}
"""File, and the second at which the replay begins."""
NUM_INPUTS, PROBE_SHARE = 5000, 0.005
COLUMNS = (
    *("trace", "most chains", "requests", "in time (%)", "refused (%)", "late (%)", "p99 (SLO)", "usd_per_hour"),
    *("busy", "plans", "chains of plans", "took_s"),
)


def problem_of(options: Namespace, most_chains: int) -> PlanProblem:
    """Returns the controller's plan problem, at first for the mean rate."""
    times, shipped = options.time_scale, read_problem(PROBLEMS / f"{options.problem}.yaml").problem
    link = Link(bandwidth_bytes_per_s=shipped.link.bandwidth_bytes_per_s / times, delay_s=shipped.link.delay_s * times)
    slower = replace(with_slo(stretched(shipped, times), shipped.slo.latency_s * times), link=link)
    objective = MinimizeCost(rate_per_s=options.rate / times, in_time=options.in_time)
    return replace(slower, objective=objective, most_chains=most_chains)


def play(options: Namespace, name: str, most_chains: int) -> Controlled:
    """Serves a trace, with plans of at most this number of chains."""
    (file, first_s), seconds = TRACES[name], options.hours * HOUR_S
    spec = f"trace:{require_data(file)},rate={options.rate / options.time_scale},from={first_s}"
    problem = problem_of(options, most_chains)
    planned = solve(problem)
    assert not isinstance(planned, NoPlan), planned.binding
    rng = np.random.default_rng(options.seed)
    records = drawn_exits(problem.survival_N, num_inputs=NUM_INPUTS, rng=rng)
    scenario = Scenario(
        problem=problem,
        plan=Plan(
            stages=planned.stages,
            shares=planned.figures.shares,
            policy=PolicySpec(name="entropy", thresholds=ENTROPY),
            predicted=predictions(problem, planned.figures),
        ),
        decisions=recorded(records, dict.fromkeys(records.ramps, ENTROPY)),
        rows_N=rng.permutation(NUM_INPUTS),
        arrivals_s=parse_arrivals(spec)[0].draw(seconds, rng),
        duration_s=seconds,
        slo_s=problem.slo.latency_s,
    )
    settings = {"period_s": PERIOD_S}
    control = Control(settings=settings, problem=problem, records=records, probe_share=PROBE_SHARE)
    return simulate_controlled(scenario, control, seed=options.seed)


def row(options: Namespace, name: str, most_chains: int) -> tuple[object, ...]:
    """Returns a row of the table."""
    began_s = time.monotonic()
    played = play(options, name, most_chains)
    figures = played.outcome.figures()
    refused = sum(figures.drops.values())
    shares = (100 * each / figures.inputs for each in (figures.in_slo, refused, figures.answered - figures.in_slo))
    in_force = [len(each["placed"]["plan"]["chains"]) for each in played.plans if each["outcome"] == "in force"]
    chains = ", ".join(f"{in_force.count(each)} of {each}" for each in sorted(set(in_force)))
    p99 = None if figures.p99_s is None else figures.p99_s / played.outcome.slo_s
    cost = figures.usd_per_hour, figures.utilisation
    return name, most_chains, figures.inputs, *shares, p99, *cost, len(in_force), chains, time.monotonic() - began_s


def main() -> None:
    """Replays, prints and writes."""
    parser = ArgumentParser(prog="python -m experiments.planning.replay", description=__doc__)
    parser.add_argument("--problem", default="resnet50_hetero", help="name of a file in examples/problems")
    parser.add_argument("--rate", type=float, default=8_000.0, help="mean requests per second of a trace")
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--chains", default="1,3", help="largest numbers of chains in a plan")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--time-scale", type=float, default=32.0)
    parser.add_argument("--in-time", type=float, default=IN_TIME, help="share of Poisson arrivals that must be in time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for name in options.traces.split(","):
        for most_chains in map(int, options.chains.split(",")):
            rows.append(row(options, name, most_chains))
            print(*rows[-1], flush=True)
    print_table(f"{options.problem}, a mean of {options.rate:g}/s", COLUMNS, rows)
    document = {"options": vars(options), "columns": COLUMNS, "rows": rows}
    print(f"written: {write_json(document, RUNS / 'planning' / 'replay.json')}")


if __name__ == "__main__":
    main()
