"""Compares plans on one running service: the plans take turns, and each gets the same load."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Column, Table

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ControlSettings, ServeSettings
from deployments.wire.controller_link import apply_plan
from offramp.client.client import Client
from offramp.load.arrivals import Poisson
from offramp.load.generator import LoadConfig, RequestRecord, run_load
from optimizer.plans.plan import Plan, PolicySpec
from optimizer.plans.plan_file import plan_document
from optimizer.problems.problem import PlanProblem

TIMEOUT_S = 120.0
NEVER_S = 1e9
"""A planning period that never ends."""


def manual_control(problem: PlanProblem, policy: PolicySpec, state: Path) -> ControlSettings:
    """Returns the settings of a controller that makes no plans, and deletes its state of earlier runs.

    Plans are set by `apply`.
    """
    state.parent.mkdir(parents=True, exist_ok=True)
    for file in state.parent.glob(f"{state.name}*"):  # SQLite's file and its journals
        file.unlink()
    return ControlSettings(problem=problem, policy=policy, state=str(state.resolve()), period_s=NEVER_S)


async def apply(plan: Plan, *, hold: bool = True, app: str = "offramp") -> None:
    """Switches a running service to a plan, and returns when the old one has drained.

    `hold`: the controller may not replace the plan.
    """
    await asyncio.to_thread(apply_plan, app, plan_document(plan), hold=hold, timeout_s=TIMEOUT_S)


@contextmanager
def served(settings: ServeSettings, plan: Plan, cluster: LocalCluster) -> Iterator[str]:
    """Starts a service on this machine and yields its URL when it runs the plan; stops the service at the end.

    A controller that makes plans may replace the plan later.
    """
    with serving(settings, cluster) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=TIMEOUT_S)
        if settings.control is not None:
            asyncio.run(apply(plan, hold=settings.control.period_s == NEVER_S, app=settings.app))
        yield url


ROUNDS = 2
KEPT = 0.99
"""Share of the requests that `planned` must answer in time at the chosen load."""
STEP, MAX_STEPS = 0.88, 5
"""Factor from a tried load to the next, and the maximum number of tries."""
LATE = 0.5
"""Lateness of the client, as a share of the SLO, above which a run is repeated once."""
Counts = Mapping[int, tuple[int, int]]
"""Numbers of batches and of their inputs, by the first block of a split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The texts of a load, which are repeated, and its duration."""

    texts: Sequence[str]
    keys: Sequence[str] | None
    """Ids of recorded exits; None if exits are computed."""
    full_model: Sequence[str]
    """The full model's label of every text."""
    slo_s: float
    seconds: float
    """Duration of the measurement."""
    warm_s: float
    """Duration of the warm-up before it, at the same rate."""
    inputs_per_request: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRun:
    """The results of one plan under a load."""

    plan: Plan
    in_time: float
    """Share of the requests that were answered within the SLO."""
    in_time_per_s: float
    """Inputs per second that were answered within the SLO."""
    p50_s: float
    p99_s: float
    """NaN without an answer."""
    cpu_per_answer_s: float
    """Processor time of all processes of the service per answer."""
    batch_at_block: tuple[float, ...]
    """Mean batch size at each block."""
    mean_blocks: float
    agreement: float
    """Share of the answers that equal the full model's."""
    load_late_s: float = 0.0
    """Largest lateness of the client, which the service does not cause."""


def compare_plans(
    url: str, plans: Mapping[str, Plan], load: Load, start_per_s: float, console: Console
) -> tuple[float, dict[str, PlanRun]]:
    """Finds a rate that `planned` sustains, and measures each plan at it; returns the rate and the mean results."""

    def measure(name: str, load: Load, seed: int, tries: int = 2) -> PlanRun:
        result = asyncio.run(run(url, plans[name], load, rate_per_s, seed))
        if result.load_late_s <= LATE * load.slo_s or tries == 1:
            return result
        late_ms = 1e3 * result.load_late_s
        console.print(f"{name}: the machine was busy, and requests were sent {late_ms:.0f} ms late; repeating")
        return measure(name, load, seed, tries - 1)

    rate_per_s = start_per_s
    for _ in range(MAX_STEPS):
        trial = measure("planned", replace(load, seconds=load.seconds / 2), 0)
        console.print(f"planned at {rate_per_s:.0f} inputs/s: {trial.in_time:.1%} in time")
        if trial.in_time >= KEPT:
            break
        rate_per_s *= STEP
    results: dict[str, list[PlanRun]] = {name: [] for name in plans}
    for turn in range(ROUNDS):
        for name in list(plans)[:: -1 if turn % 2 else 1]:  # every second turn in reverse order
            results[name].append(measure(name, load, turn + 1))
    return rate_per_s, {name: mean(runs) for name, runs in results.items()}


async def run(url: str, plan: Plan, load: Load, rate_per_s: float, seed: int) -> PlanRun:
    """Switches to the plan and sends the load at this rate, in inputs per second.

    Replicas reset the counts of their batches with the first call of another plan.
    """
    await apply(plan)
    process = Poisson(rate_per_s=rate_per_s / load.inputs_per_request)
    times_s = process.draw(load.warm_s + load.seconds, np.random.default_rng(seed)).tolist()
    config = LoadConfig(
        url=url,
        inputs=load.texts,
        keys=load.keys,
        send_times_s=times_s,
        inputs_per_request=load.inputs_per_request,
        truncate=True,
        timeout_s=4 * load.slo_s,
        seed=seed,
    )
    before_s = children_cpu_s()
    records = await run_load(config)
    spent_s = children_cpu_s() - before_s
    return summarize(plan, load, records, batch_counts(url), spent_s)


def summarize(plan: Plan, load: Load, records: Sequence[RequestRecord], counts: Counts, spent_s: float) -> PlanRun:
    """Returns the results of one run. Latencies are those of requests that were scheduled after the warm-up."""
    counted = [record for record in records if record.scheduled_s >= load.warm_s]
    latencies_s = [record.latency_s for record in counted if record.error is None] or [float("nan")]
    in_time = sum(each_s <= load.slo_s for each_s in latencies_s)
    answers = [pair for record in records for pair in zip(record.input_indices, record.predictions, strict=False)]
    exits, num_answers = Counter[int](answer.exit for _, answer in answers), max(1, len(answers))
    p50_s, p99_s = np.percentile(latencies_s, (50, 99)).tolist()
    return PlanRun(
        plan=plan,
        in_time=in_time / max(1, len(counted)),
        in_time_per_s=in_time * load.inputs_per_request / load.seconds,
        p50_s=p50_s,
        p99_s=p99_s,
        cpu_per_answer_s=spent_s / num_answers,
        batch_at_block=batch_at_block(plan, counts, exits),
        mean_blocks=sum((block + 1) * count for block, count in exits.items()) / num_answers,
        agreement=sum(answer.label == load.full_model[index] for index, answer in answers) / num_answers,
        load_late_s=max((record.lateness_s for record in records), default=0.0),
    )


def mean(ran: Sequence[PlanRun]) -> PlanRun:
    """Returns the means over several runs of one plan."""
    names = {each.name for each in fields(PlanRun)} - {"plan", "batch_at_block"}
    figures = {name: fmean(getattr(each, name) for each in ran) for name in names}
    batches = tuple(map(fmean, zip(*(each.batch_at_block for each in ran), strict=True)))
    return PlanRun(plan=ran[0].plan, batch_at_block=batches, **figures)


def batch_at_block(plan: Plan, counts: Counts, exits: Mapping[int, int]) -> tuple[float, ...]:
    """Returns the mean batch at every block: the batch of its split, times the share of inputs that reach the block."""
    reach = [sum(count for exit_block, count in exits.items() if exit_block >= at) for at in range(plan.num_blocks)]
    means: list[float] = []
    for split in plan.splits:
        batches, inputs = counts.get(split.first, (0, 0))
        mean, entering = inputs / max(1, batches), max(1, reach[split.first])
        means += [mean * reach[block] / entering for block in range(split.first, split.end)]
    return tuple(means)


def batch_counts(url: str) -> dict[int, tuple[int, int]]:
    """Returns the number of batches and inputs of all replicas, by the first block of a split."""
    stats: dict[str, Any] = httpx.get(f"{url}/stats", timeout=30.0, trust_env=False).raise_for_status().json()
    counts: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for replicas in stats["stages"]:
        for split in (split for replica in replicas for split in replica["splits"]):
            batches, inputs = counts[split["first"]]
            counts[split["first"]] = (batches + split["batches"], inputs + split["inputs"])
    return counts


def children_cpu_s() -> float:
    """Returns the processor time of all descendants of this process, which are the service, not the load generator."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process has just ended
            total_s += sum(process.cpu_times()[:2])
    return total_s


def results_table(title: str, ran: Mapping[str, PlanRun], *, time_scale: float = 1.0) -> Table:
    """Returns a table with a row per plan. Latencies are in milliseconds, divided by `time_scale`.

    Processor time is shown only if nothing is emulated (`time_scale` 1).
    """
    processors = time_scale == 1.0
    blocks = range(1, len(next(iter(ran.values())).batch_at_block))
    spent = ("CPU\nms per\nanswer",) if processors else ()
    batches = ("batch,\nblock\n0", *(f"\n\n{block}" for block in blocks))
    numbers = ("in\ntime", "in\ntime\nper s", "p50\nms", "p99\nms", *spent, "as\nfull\nmodel", *batches)
    columns = (Column(each, justify="right") for each in numbers)
    table = Table("plan", *columns, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))  # 80 characters
    for name, each in ran.items():
        table.add_row(
            name,
            f"{each.in_time:.1%}",
            f"{time_scale * each.in_time_per_s:,.0f}",
            *(f"{1e3 * seconds / time_scale:.0f}" for seconds in (each.p50_s, each.p99_s)),
            *((f"{1e3 * each.cpu_per_answer_s:.2f}",) if processors else ()),
            f"{each.agreement:.1%}",
            *(f"{batch:.1f}" for batch in each.batch_at_block),
        )
    return table
