"""Plans take turns on one service of this machine: the same load for each, twice, and what each made of it."""

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
from rich.table import Table

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ControlSettings, ServeSettings
from deployments.wire.controller_link import call_controller
from offramp.client.client import Client
from offramp.load.generator import LoadConfig, run_load
from offramp.load.processes import Poisson
from offramp.load.report import RequestRecord
from optimizer.plan import Plan, PolicySpec
from optimizer.plan_file import plan_document
from optimizer.problem import PlanProblem

APPLY_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 120.0
NEVER_S = 1e9
"""A planning period that does not end."""


def hand_control(problem: PlanProblem, policy: PolicySpec, state: Path) -> ControlSettings:
    """A controller that observes as always and never plans: plans come by `RunningService.apply`, held.

    It remembers nothing of earlier runs.
    """
    state.parent.mkdir(parents=True, exist_ok=True)
    for leftover in state.parent.glob(f"{state.name}*"):  # with its journals
        leftover.unlink()
    return ControlSettings(problem=problem, policy=policy, state=str(state.resolve()), period_s=NEVER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """A running service, and the controller that is told its plans."""

    url: str
    app: str = "offramp"

    async def apply(self, plan: Plan, *, hold: bool = False) -> None:
        """Put a plan in force, until something better is found or for good; returns when the old one has drained."""
        asked = "apply", plan_document(plan), hold
        await asyncio.to_thread(call_controller, self.app, *asked, timeout_s=APPLY_TIMEOUT_S)


@contextmanager
def served(settings: ServeSettings, plan: Plan, cluster: LocalCluster) -> Iterator[RunningService]:
    """The service on this machine, ready, its plan in force; everything ends with the block.

    A controller that plans takes over from there, one that never does holds the plan.
    """
    with serving(settings, cluster) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=READY_TIMEOUT_S)
        service = RunningService(url=url, app=settings.app)
        if settings.control is not None:
            asyncio.run(service.apply(plan, hold=settings.control.period_s == NEVER_S))
        yield service


ROUNDS = 2
KEPT = 0.99
"""Share of the requests that the chosen load lets the planned service answer in time."""
STEP, MOST_STEPS = 0.88, 5
"""From one load that is tried to the next, and how many are tried."""
LATE = 0.5
"""Share of the SLO: a run whose requests were sent so late, since no process had the processors, is made again once."""
Counts = Mapping[int, tuple[int, int]]
"""By a split's first block: batches and their inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, again and again from the first text."""

    texts: Sequence[str]
    keys: Sequence[str] | None
    """Ids by which recorded exits are looked up; None where exits are computed."""
    full_model: Sequence[str]
    """The full model's label of every text."""
    slo_s: float
    seconds: float
    """Of what is counted."""
    warm_s: float
    """Sent before it at the same rate."""
    inputs_per_request: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one plan made of the load."""

    plan: Plan
    in_time: float
    """Share of the requests that were answered within the SLO."""
    in_time_per_s: float
    """Inputs."""
    p50_s: float
    p99_s: float
    """NaN without an answer."""
    cpu_per_answer_s: float
    """Processor time of all processes of the service."""
    batch_at_block: tuple[float, ...]
    """Mean number of inputs in a batch as it runs through each block."""
    mean_blocks: float
    agreement: float
    """Share of the answers that are the full model's."""
    load_late_s: float
    """By how much a request was sent too late at most: the load's fault, or the machine's, not the service's."""


def take_turns(
    service: RunningService, plans: Mapping[str, Plan], load: Load, start_per_s: float, console: Console
) -> tuple[float, dict[str, Ran]]:
    """Find a load that `planned` keeps, then give it to every plan in turns; the load, and means over the turns."""
    following: str | None = None

    def one(name: str, load: Load, seed: int, tries: int = 2) -> Ran:
        nonlocal following
        is_new, following = name != following, name
        ran = asyncio.run(run(service, plans[name], load, rate_per_s, seed, is_new=is_new))
        if ran.load_late_s <= LATE * load.slo_s or tries == 1:
            return ran
        console.print(f"{name}: the machine stood still, requests were sent {1e3 * ran.load_late_s:.0f} ms late; again")
        return one(name, load, seed, tries - 1)

    rate_per_s = start_per_s
    for _ in range(MOST_STEPS):
        tried = one("planned", replace(load, seconds=load.seconds / 2), 0)
        console.print(f"planned at {rate_per_s:.0f} inputs/s: {tried.in_time:.1%} in time")
        if tried.in_time >= KEPT:
            break
        rate_per_s *= STEP
    found: dict[str, list[Ran]] = {name: [] for name in plans}
    for turn in range(ROUNDS):
        for name in list(plans)[:: -1 if turn % 2 else 1]:
            found[name].append(one(name, load, turn + 1))
    return rate_per_s, {name: mean(each) for name, each in found.items()}


async def run(service: RunningService, plan: Plan, load: Load, rate_per_s: float, seed: int, *, is_new: bool) -> Ran:
    """Put the plan in force and send the load at this rate, in inputs per second.

    `is_new`: another plan was in force. Replicas count batches anew with the first call of a plan.
    """
    await service.apply(plan, hold=True)
    process = Poisson(rate_per_s=rate_per_s / load.inputs_per_request)
    times_s = process.draw(load.warm_s + load.seconds, np.random.default_rng(seed)).tolist()
    config = LoadConfig(
        url=service.url,
        inputs=load.texts,
        keys=load.keys,
        num_requests=len(times_s),
        send_times_s=times_s,
        inputs_per_request=load.inputs_per_request,
        truncate=True,
        timeout_s=4 * load.slo_s,
        slo_s=load.slo_s,
        seed=seed,
    )
    counts, spent_s = {} if is_new else batch_counts(service.url), children_cpu_s()
    records = (await run_load(config)).records
    spent_s = children_cpu_s() - spent_s
    after = batch_counts(service.url)
    since = {first: tuple(np.subtract(after[first], counts.get(first, (0, 0))).tolist()) for first in after}
    return summarized(plan, load, records, defaultdict(lambda: (0, 0), since), spent_s)


def summarized(plan: Plan, load: Load, records: Sequence[RequestRecord], counts: Counts, spent_s: float) -> Ran:
    """Figures of one run; latencies are of requests that were due after the warm-up."""
    counted = [record for record in records if record.scheduled_s >= load.warm_s]
    latencies_s = [record.latency_s for record in counted if record.error is None] or [float("nan")]
    in_time = sum(each_s <= load.slo_s for each_s in latencies_s)
    answers = [pair for record in records for pair in zip(record.input_indices, record.predictions, strict=False)]
    exits = Counter[int](answer.exit for _, answer in answers)
    p50_s, p99_s = np.percentile(latencies_s, (50, 99)).tolist()
    return Ran(
        plan=plan,
        in_time=in_time / max(1, len(counted)),
        in_time_per_s=in_time * load.inputs_per_request / load.seconds,
        p50_s=p50_s,
        p99_s=p99_s,
        cpu_per_answer_s=spent_s / max(1, len(answers)),
        batch_at_block=batch_at_block(plan, counts, exits),
        mean_blocks=sum((block + 1) * count for block, count in exits.items()) / max(1, len(answers)),
        agreement=sum(answer.label == load.full_model[index] for index, answer in answers) / max(1, len(answers)),
        load_late_s=max((record.lateness_s for record in records), default=0.0),
    )


def mean(ran: Sequence[Ran]) -> Ran:
    """Figures averaged over turns of one plan."""
    names = {each.name for each in fields(Ran)} - {"plan", "batch_at_block"}
    figures = {name: fmean(getattr(each, name) for each in ran) for name in names}
    batches = tuple(map(fmean, zip(*(each.batch_at_block for each in ran), strict=True)))
    return Ran(plan=ran[0].plan, batch_at_block=batches, **figures)


def batch_at_block(plan: Plan, counts: Counts, exits: Mapping[int, int]) -> tuple[float, ...]:
    """Mean batch at every block: what a split began with, times the share of it that its ramps have left."""
    reach = [sum(count for exit_block, count in exits.items() if exit_block >= at) for at in range(plan.num_blocks)]
    return tuple(
        inputs / max(1, batches) * reach[block] / max(1, reach[split.first])
        for split in plan.splits
        for batches, inputs in [counts[split.first]]
        for block in range(split.first, split.end)
    )


def batch_counts(url: str) -> dict[int, tuple[int, int]]:
    """Batches and inputs of all replicas so far."""
    stats: dict[str, Any] = httpx.get(f"{url}/stats", timeout=30.0).raise_for_status().json()
    found: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for replicas in stats["stages"]:
        for split in (split for replica in replicas for split in replica["splits"]):
            batches, inputs = found[split["first"]]
            found[split["first"]] = (batches + split["batches"], inputs + split["inputs"])
    return found


def children_cpu_s() -> float:
    """Processor seconds of all processes that this one has started, and of theirs: of the service, not of the load."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended meanwhile
            total_s += sum(process.cpu_times()[:2])
    return total_s


def table_of(title: str, ran: Mapping[str, Ran], *, time_scale: float = 1.0) -> Table:
    """A row per plan; latencies in milliseconds, of emulated accelerators emulated ones.

    Processor time is told only where the processors are what computes.
    """
    processors = time_scale == 1.0
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))  # 80 characters
    blocks = range(1, len(next(iter(ran.values())).batch_at_block))
    spent = ("CPU\nms per\nanswer",) if processors else ()
    batches = ("batch,\nblock\n0", *(f"\n\n{block}" for block in blocks))
    columns = ("plan", "in\ntime", "in\ntime\nper s", "p50\nms", "p99\nms", *spent, "as\nfull\nmodel", *batches)
    for column in columns:
        table.add_column(column, justify="left" if column == "plan" else "right")
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
