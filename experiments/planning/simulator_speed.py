"""How fast the simulator is: ten million requests through three stages on ten thousand accelerators.

    python -m experiments.planning.simulator_speed [--requests 10000000] [--batch 8] [--sides plain admission ingresses]

E3's V100 and BERT-base, SLO 100 ms; of the plans with three stages, all ramps active and replicas in balance, the one
of the highest rate, under Poisson arrivals at a share of it, seed 0. Sides: *plain*, one ingress without admission;
*admission*, with it; *ingresses*, eight without it. Each runs in a process of its own, on one core. Minutes: about 8.
"""

from __future__ import annotations

import resource
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.split import Split
from experiments.kit import keep
from experiments.studies.sides import NUM_ROWS, equal_cluster, plan_of
from optimizer.evaluate import Evaluation, evaluate
from optimizer.plan import Stage
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit
from simulator.decisions import nested
from simulator.scenario import Scenario
from simulator.simulate import booted, play
from simulator.sustained import poisson_arrivals

SIDES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"admission": False},
    "admission": {"admission": True},
    "ingresses": {"admission": False, "num_ingresses": 8},
}
DEVICE = "V100"
NUM_STAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is simulated."""

    requests: int
    accelerators: int
    batch: int | None
    """The largest that the plan may have; None for the largest that was measured."""
    load: float
    """Share of the plan's rate that is offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What it took."""

    side: str
    requests: int
    seconds: float
    """From an empty service to the last answer."""
    cpu_s: float
    figures_s: float
    """Percentiles and the like, besides."""
    events: int
    """Requests that arrived, and events that were told of."""
    batches: int
    peak_bytes: int
    simulated_s: float
    goodput_per_s: float
    offered_per_s: float
    p99_s: float | None
    fill: tuple[float, ...]
    """By stage."""
    drops: Mapping[str, int]


def problem_of(size: Size) -> PlanProblem:
    """E3's question, for more accelerators."""
    problem = equal_cluster()
    limited = problem if size.batch is None else with_batch_limit(problem, size.batch)
    return replace(limited, devices={DEVICE: replace(limited.devices[DEVICE], count=size.accelerators)})


def three_stages(problem: PlanProblem) -> tuple[tuple[Stage, ...], Evaluation]:
    """The best such plan that keeps the SLO, and what it promises."""
    best: tuple[tuple[Stage, ...], Evaluation] | None = None
    all_cuts = combinations(range(1, problem.num_blocks), NUM_STAGES - 1)
    for cuts, batch in product(all_cuts, problem.latency[DEVICE].batches):
        stages = _balanced(problem, (0, *cuts, problem.num_blocks), batch)
        figures = evaluate(problem, stages)
        if figures.latency_s <= problem.slo.limit_s and (best is None or figures.rate_per_s > best[1].rate_per_s):
            best = stages, figures
    assert best is not None, "no plan of three stages keeps the SLO"
    return best


def _balanced(problem: PlanProblem, bounds: tuple[int, ...], batch: int) -> tuple[Stage, ...]:
    """All ramps active, one batch; replicas by the work of every stage, the rest for the last."""
    supply = problem.devices[DEVICE]
    ramps_of = [tuple(ramp for ramp in problem.ramps if first <= ramp < end) for first, end in pairwise(bounds)]
    splits = [
        Split(first=first, end=end, batch=batch, ramps=ramps)
        for (first, end), ramps in zip(pairwise(bounds), ramps_of, strict=True)
    ]
    alone = [Stage(device=DEVICE, replicas=1, splits=(split,)) for split in splits]
    works_s = [each.work_s for each in evaluate(problem, alone).stages]
    replicas = [max(1, round(supply.count * work_s / sum(works_s))) for work_s in works_s]
    replicas[-1] = supply.count - sum(replicas[:-1])
    return tuple(replace(stage, replicas=number) for stage, number in zip(alone, replicas, strict=True))


def scenario_of(size: Size, side: str) -> Scenario:
    """What a side simulates."""
    problem = problem_of(size)
    stages, figures = three_stages(problem)
    rng = np.random.default_rng(0)
    rate_per_s = size.load * figures.rate_per_s
    duration_s = size.requests / rate_per_s
    return Scenario(
        problem=problem,
        plan=plan_of(stages, rate_per_s=figures.rate_per_s, latency_s=figures.latency_s),
        decisions=nested(problem.survival_N, problem.ramps, rng, num_rows=NUM_ROWS),
        rows_N=rng.permutation(NUM_ROWS),
        arrivals_s=poisson_arrivals(rate_per_s, duration_s, seed=0),
        duration_s=duration_s,
        slo_s=problem.slo.latency_s,
        **SIDES[side],
    )


def measured(size: Size, side: str) -> Speed:
    """One simulation."""
    scenario = scenario_of(size, side)
    started_s, began_s = time.perf_counter(), time.process_time()
    service = booted(scenario)
    outcome = play(service)
    ended_s, cpu_s = time.perf_counter(), time.process_time() - began_s
    figures = outcome.figures()
    return Speed(
        side=side,
        requests=len(scenario.arrivals_s),
        seconds=ended_s - started_s,
        cpu_s=cpu_s,
        figures_s=time.perf_counter() - ended_s,
        events=len(scenario.arrivals_s) + service.events.num_so_far,
        batches=sum(split.batches for split in outcome.splits),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        simulated_s=outcome.ended_s,
        goodput_per_s=figures.goodput_per_s,
        offered_per_s=figures.offered_per_s,
        p99_s=figures.p99_s,
        fill=tuple(split.fill for split in outcome.splits),
        drops=figures.drops,
    )


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = ArgumentParser(prog="python -m experiments.planning.simulator_speed", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000_000)
    parser.add_argument("--accelerators", type=int, default=10_000)
    parser.add_argument("--batch", type=int, help="the largest batch that the plan may have (default: any)")
    parser.add_argument("--load", type=float, default=0.8, help="share of the plan's rate that is offered")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--out", type=Path, default=Path("runs/simulator_speed.json"))
    options = parser.parse_args()
    size = Size(requests=options.requests, accelerators=options.accelerators, batch=options.batch, load=options.load)
    stages, figures = three_stages(problem_of(size))
    print(
        f"{size.requests:,} requests, {size.load:.0%} of the {figures.rate_per_s:,.0f}/s that the plan promises,"
        f" batches of {stages[0].splits[0].batch}, {size.accelerators:,} accelerators: "
        + ", ".join(f"{stage.replicas:,} x blocks {stage.first}-{stage.end - 1}" for stage in stages)
    )
    found = []
    # A process for each, one after the other: the peak memory of a process never falls.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for side in options.sides:
            found.append(pool.submit(measured, size, side).result())
            print(_line(found[-1]), flush=True)
    print(f"kept in {keep({'size': size, 'sides': found}, options.out)}")


def _line(speed: Speed) -> str:
    p99 = "-" if speed.p99_s is None else f"{speed.p99_s * 1e3:.0f} ms"
    fill = " ".join(f"{each:.2f}" for each in speed.fill)
    return (
        f"{speed.side:<10}{speed.seconds:7.1f} s ({speed.cpu_s:.1f} s of CPU)"
        f"{speed.seconds / speed.requests * 1e6:7.2f} us/request{speed.events / speed.seconds:12,.0f} events/s"
        f"{speed.peak_bytes / 1e9:6.2f} GB  goodput {speed.goodput_per_s:,.0f} of {speed.offered_per_s:,.0f}/s,"
        f" p99 {p99}, fill {fill}, drops {sum(speed.drops.values())}; figures {speed.figures_s:.1f} s more"
    )


if __name__ == "__main__":
    main()
