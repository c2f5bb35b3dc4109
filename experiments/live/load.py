"""A load on an emulated service, with events beside it; its figures, and whether every answer is right."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import numpy as np
import psutil

from deployments.local_ray.cluster import LocalCluster
from deployments.settings import ControlSettings
from earlyexit.clock import MonotonicClock
from earlyexit.network.store import read_card
from experiments.kit import show
from experiments.live.emulation import Bench
from experiments.live.model import TEXT
from offramp.demo.service import RunningService, served
from offramp.load.arrivals import Poisson
from offramp.load.connections import connected
from offramp.load.generator import Generator, LoadConfig
from offramp.load.report import RequestRecord, percentile
from optimizer.plan import Plan
from profiles.records import ExitRecords
from profiles.scores import SCORES

INPUTS_PER_REQUEST = 8
TIMEOUT_SLOS = 4.0
"""A client's patience, in SLOs."""
OK_SHARE = 0.6
"""Of the CPU; above it emulated accelerators are late because the machine is, not because they are."""
LOST = ("timeout", "connection")
"""Errors that no server explained."""
COLUMNS = ("", "requests", "answered", "lost", "p50 ms", "p99 ms", "in SLO", "goodput/s", "errors")

Event = Callable[[RunningService], Awaitable[Any]]
"""What happens to a service while its load runs; gives what is to be told of it."""
Span = tuple[float, float]
"""From one second up to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """So many seconds of load; exactly one of `rate_per_s` and `workers` is set."""

    name: str
    seconds: float
    keys: tuple[str, ...]
    """Sample ids, sent in turn."""
    rate_per_s: float | None = None
    """Inputs per second, open loop, Poisson arrivals of requests."""
    workers: int | None = None
    """Requests in flight, closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What became of every request; times are seconds after the start."""

    phase: Phase
    slo_s: float
    records: tuple[RequestRecord, ...]
    num_sent: int
    machine: float
    """Share of the machine's processors that was busy."""

    def told(self) -> str:
        """For the reader to judge by whether the emulation was disturbed."""
        verdict = "undisturbed" if self.machine < OK_SHARE else "DISTURBED: use a larger --time-scale"
        return f"CPU {self.machine:.0%}: {verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a scenario gave."""

    driven: Driven
    meanwhile: Any = None
    """What the event told."""
    after: Any = None
    """What was asked of the service after the load."""


def played(
    on: Bench,
    plan: Plan,
    phase: Phase,
    control: ControlSettings | None = None,
    *,
    event: Event | None = None,
    after: Event | None = None,
) -> Played:
    """A load on a service of its own, from its start to its end."""
    settings = on.emulation.settings(on.model, plan, control)
    with served(settings, plan, LocalCluster(port=on.options.port, front=on.options.front)) as service:
        return asyncio.run(play(on, service, phase, event=event, after=after))


async def play(
    on: Bench, service: RunningService, phase: Phase, *, event: Event | None = None, after: Event | None = None
) -> Played:
    """The load on a running service, with an event beside it; `after` is asked when all requests have an outcome."""
    load = drive(service.url, phase, slo_s=on.emulation.wall_slo_s, seed=on.options.seed)
    driven, *meanwhile = await asyncio.gather(load, *([] if event is None else [event(service)]))
    told = None if after is None else await after(service)
    return Played(driven=driven, meanwhile=meanwhile[0] if meanwhile else None, after=told)


async def drive(url: str, phase: Phase, *, slo_s: float, seed: int = 0) -> Driven:
    """Send all; returns when every request has its outcome."""
    clock, records = MonotonicClock(), list[RequestRecord]()
    times_s: list[float] = []
    if phase.rate_per_s is not None:
        process = Poisson(rate_per_s=phase.rate_per_s / INPUTS_PER_REQUEST)
        times_s = process.draw(phase.seconds, np.random.default_rng(seed)).tolist()
    config = LoadConfig(
        url=url,
        inputs=(TEXT,) * len(phase.keys),
        keys=phase.keys,
        num_requests=max(1, len(times_s)),
        concurrency=phase.workers or 1,
        inputs_per_request=INPUTS_PER_REQUEST,
        timeout_s=TIMEOUT_SLOS * slo_s,
        slo_s=slo_s,
        seed=seed,
    )
    psutil.cpu_percent()
    async with connected(url) as post:
        generator = Generator(config=config, post=post, rng=random.Random(seed), clock=clock)
        if phase.workers is None:
            await generator.open_loop(times_s, records.append)
        else:
            until_s = clock.now_s() + phase.seconds
            await generator.closed_loop(takewhile(lambda _: clock.now_s() < until_s, count()), records.append)
    return Driven(
        phase=phase,
        slo_s=slo_s,
        records=tuple(sorted(records, key=lambda record: record.scheduled_s)),
        num_sent=len(times_s) if phase.workers is None else len(records),
        machine=psutil.cpu_percent() / 100,
    )


def replica_pids(app: str) -> dict[str, list[int]]:
    """Processes of this process's services, by deployment: Ray names every replica's process after it."""
    prefix = f"ray::ServeReplica:{app}:"
    found: dict[str, list[int]] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:  # it ended meanwhile
            continue
        if title.startswith(prefix):
            deployment = title.removeprefix(prefix).partition(".")[0].split()[0]
            found.setdefault(deployment, []).append(process.pid)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """A window of a run. Rates count inputs that were answered in the window, the rest requests that were due in it."""

    requests: int
    answered: int
    """Requests."""
    in_slo: int
    """Requests."""
    goodput_per_s: float
    p50_s: float | None
    p99_s: float | None
    errors: Mapping[str, int]

    @property
    def lost(self) -> int:
        """Requests without an answer and without a word why."""
        return sum(self.errors.get(kind, 0) for kind in LOST)


def figures(driven: Driven, span: Span) -> WindowFigures:
    """Of one window."""
    since_s, until_s = span
    due = [record for record in driven.records if since_s <= record.scheduled_s < until_s]
    answered = [record for record in driven.records if record.error is None]
    good = [each for each in answered if since_s <= each.done_s < until_s and each.latency_s <= driven.slo_s]
    latencies_s = [record.latency_s for record in due if record.error is None]
    return WindowFigures(
        requests=len(due),
        answered=len(latencies_s),
        in_slo=sum(latency_s <= driven.slo_s for latency_s in latencies_s),
        goodput_per_s=sum(len(record.predictions) for record in good) / (until_s - since_s),
        p50_s=percentile(latencies_s, 50),
        p99_s=percentile(latencies_s, 99),
        errors=dict(Counter(record.error for record in due if record.error is not None)),
    )


def back_at_s(driven: Driven, since_s: float, goodput_per_s: float) -> float | None:
    """Seconds from `since_s` to the first later whole second with that goodput; None where none has it."""
    for second in range(int(np.ceil(since_s)), int(driven.phase.seconds)):
        if figures(driven, (second, second + 1)).goodput_per_s >= goodput_per_s:
            return second - since_s
    return None


def longest_silence_s(records: Sequence[RequestRecord], since_s: float, until_s: float) -> float:
    """The longest stretch of a window in which nothing was answered."""
    answered_s = [r.done_s for r in records if r.error is None and since_s <= r.done_s < until_s]
    return float(np.diff([since_s, *sorted(answered_s), until_s]).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Whether everything sent has exactly one outcome, and every answer is one that the records can give."""

    sent: int
    outcomes: int
    twice: int
    """Request ids with two outcomes."""
    wrong: tuple[str, ...]
    """Answers that no plan's ramps could have given, in words."""

    @property
    def hold(self) -> bool:
        return self.sent == self.outcomes and not self.twice and not self.wrong


def check(driven: Driven, records: ExitRecords, thresholds: Mapping[int, float], label_names: Sequence[str]) -> Checks:
    """Check a run; `thresholds` are the loosest of all plans that were in force."""
    ids, keys = [record.request_id for record in driven.records], driven.phase.keys
    row_of = {sample_id: row for row, sample_id in enumerate(records.sample_ids)}
    wrong = []
    for record in driven.records:
        for index, answer in zip(record.input_indices, record.predictions, strict=False):
            label = label_names.index(answer.label)
            said = fault(records, row_of[keys[index]], answer.exit, label, thresholds)
            if said is not None:
                wrong.append(f"{keys[index]}: {said}")
    return Checks(sent=driven.num_sent, outcomes=len(ids), twice=len(ids) - len(set(ids)), wrong=tuple(wrong))


def fault(records: ExitRecords, row: int, left_after: int, label: int, thresholds: Mapping[int, float]) -> str | None:
    """What is wrong with an answer, by the records; None where some set of active ramps gives it."""
    if left_after == records.num_blocks - 1:
        right = int(records.answers()[row, -1])
        return None if label == right else f"label {label} after the whole model, not {right}"
    if left_after not in records.ramps or left_after not in thresholds:
        return f"left after block {left_after}, where no ramp is"
    column = records.ramps.index(left_after)
    limit = np.float32(thresholds[left_after] * SCORES[records.score].direction)  # as policies compare
    if records.sureness_NR[row, column] < limit:
        return f"left after block {left_after}, unsure"
    right = int(records.answers()[row, column])
    return None if label == right else f"label {label} after block {left_after}, not {right}"


def judged(on: Bench, driven: Driven, windows: Mapping[str, Span], title: str) -> dict[str, Any]:
    """Print figures of windows, and whether every answer was right; gives them as plain data."""
    of = {name: figures(driven, span) for name, span in windows.items()}
    show(title, COLUMNS, [_row(name, each) for name, each in of.items()])
    checks = check(driven, on.records, on.thresholds, read_card(on.model).label_names)
    print(
        f"sent {checks.sent}, outcomes {checks.outcomes}, twice {checks.twice}, wrong answers {len(checks.wrong)}: "
        f"every answer right and once: {checks.hold}\n{driven.told()}"
    )
    return {"windows": of, "checks": checks, "holds": checks.hold, "machine": driven.machine}


def _row(name: str, each: WindowFigures) -> tuple[object, ...]:
    return (
        name,
        str(each.requests),
        str(each.answered),
        str(each.lost),
        *("-" if seconds is None else f"{seconds * 1000:.0f}" for seconds in (each.p50_s, each.p99_s)),
        f"{each.in_slo / each.requests if each.requests else 0.0:.2%}",
        f"{each.goodput_per_s:.0f}",
        ", ".join(f"{kind} {number}" for kind, number in each.errors.items()) or "none",
    )
