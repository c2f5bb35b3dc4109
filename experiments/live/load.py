"""Load in phases whose mix and rate change while it runs, what the machine spends, and the figures of its records."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import numpy as np
import psutil

from earlyexit.clock import MonotonicClock
from experiments.live.model import TEXT
from offramp.load.connections import connected
from offramp.load.generator import Generator, LoadConfig
from offramp.load.report import RequestRecord
from profiles.records import ExitRecords
from profiles.scores import SCORES

# What the machine spends, and which of our processes does what.

OK_SHARE = 0.6
"""Of the CPU; above it emulated accelerators are late because the machine is, not because they are."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Shares of all cores of the machine."""

    machine: float
    """Everything that ran, ours or not."""
    ours: float
    """This process and all that it started; of those that ended meanwhile nothing is known."""
    client: float
    """This process: the load's client, and Ray's driver."""

    def told(self) -> str:
        """For the reader to judge by whether the emulation was disturbed."""
        verdict = "undisturbed" if self.machine < OK_SHARE else "DISTURBED: use a larger --time-scale"
        return (
            f"CPU: machine {self.machine:.0%}, of which ours {self.ours:.0%}, its client {self.client:.0%}: {verdict}"
        )


class Meter:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._machine = psutil.cpu_times()
        self._processes = {process: _cpu_s(process) for process in _family()}

    def read(self) -> Usage:
        """Shares since then."""
        machine = psutil.cpu_times()
        total_s = max(1e-9, (time.monotonic() - self._since_s) * (psutil.cpu_count() or 1))
        idle_s = (machine.idle + machine.iowait) - (self._machine.idle + self._machine.iowait)
        spent_s = {each: max(0.0, _cpu_s(each) - self._processes.get(each, 0.0)) for each in _family()}
        return Usage(
            machine=max(0.0, 1 - idle_s / total_s),
            ours=sum(spent_s.values()) / total_s,
            client=spent_s[psutil.Process()] / total_s,
        )


def replica_pids(app: str) -> dict[str, list[int]]:
    """Processes of this process's services, by deployment: Ray names every replica's process after it."""
    prefix = f"ray::ServeReplica:{app}:"
    found: dict[str, list[int]] = {}
    for process in psutil.Process().children(recursive=True):
        title = _of(process, lambda each: " ".join(each.cmdline()), "")
        if title.startswith(prefix):
            deployment = title.removeprefix(prefix).partition(".")[0].split()[0]
            found.setdefault(deployment, []).append(process.pid)
    return found


def _family() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    return _of(process, lambda each: float(sum(each.cpu_times()[:2])), 0.0)


def _of(process: psutil.Process, what: Callable[[psutil.Process], T], otherwise: T) -> T:
    """What a process says of itself; something else where it ended meanwhile."""
    try:
        return what(process)
    except psutil.Error:
        return otherwise


# Load in phases whose mix and rate change while it runs, sent by the product's own generator.

INPUTS_PER_REQUEST = 8
TIMEOUT_SLOS = 4.0
"""A client's patience, in SLOs."""
PAUSE_SLOS = 0.1
"""What a worker of a closed loop waits after a refusal, in SLOs: it must not ask again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """So many seconds of one mix; exactly one of `rate_per_s` and `workers` is set."""

    name: str
    seconds: float
    keys: tuple[str, ...]
    """Sample ids, sent in turn."""
    rate_per_s: float | None = None
    """Inputs per second, open loop, Poisson arrivals of requests."""
    workers: int | None = None
    """Requests in flight, closed loop; as many in all phases."""

    def __post_init__(self) -> None:
        assert (self.rate_per_s is None) != (self.workers is None), "an open loop or a closed one"
        assert self.seconds > 0, "a phase lasts"
        assert self.keys, "a phase sends something"


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What became of every request; times are seconds after the start."""

    phases: tuple[Phase, ...]
    slo_s: float
    keys: tuple[str, ...]
    """By the records' `input_indices`."""
    records: tuple[RequestRecord, ...]
    num_sent: int
    usage: Usage
    began_s: float = 0.0
    """When, by the wall's clock: for what others tell of the same time."""

    @property
    def seconds(self) -> float:
        """Of all phases together."""
        return sum(phase.seconds for phase in self.phases)


async def drive(
    url: str, phases: Sequence[Phase], *, slo_s: float, seed: int = 0, inputs_per_request: int = INPUTS_PER_REQUEST
) -> Driven:
    """Send all phases; returns when every request has its outcome. All are open loops, or all are closed ones."""
    (workers,) = {phase.workers for phase in phases}
    meter, clock, records = Meter(), MonotonicClock(), list[RequestRecord]()
    send_s, keys = (
        ((), closed_keys(phases)) if workers else open_schedule(phases, np.random.default_rng(seed), inputs_per_request)
    )
    config = LoadConfig(
        url=url,
        inputs=(TEXT,) * len(keys),
        keys=keys,
        num_requests=max(1, len(keys) // inputs_per_request),
        concurrency=workers or 1,
        inputs_per_request=inputs_per_request,
        timeout_s=TIMEOUT_SLOS * slo_s,
        slo_s=slo_s,
        seed=seed,
    )
    async with connected(url) as post:
        generator = Generator(config=config, post=post, rng=random.Random(seed), clock=clock)
        num_sent, began_s = len(send_s), time.time()
        if workers:
            sent, start_s = list[int](), clock.now_s()
            turns = closed_turns(phases, lambda: clock.now_s() - start_s, sent)
            await generator.closed_loop(turns, records.append, pause_s=PAUSE_SLOS * slo_s)
            num_sent = len(sent)
        else:
            await generator.open_loop(send_s, records.append)
    return Driven(
        phases=tuple(phases),
        slo_s=slo_s,
        keys=keys,
        records=tuple(sorted(records, key=lambda record: record.scheduled_s)),
        num_sent=num_sent,
        usage=meter.read(),
        began_s=began_s,
    )


def starts_of(phases: Sequence[Phase]) -> tuple[float, ...]:
    """When each phase begins."""
    return tuple(np.cumsum([0.0, *(phase.seconds for phase in phases[:-1])]).tolist())


def open_schedule(
    phases: Sequence[Phase], rng: np.random.Generator, inputs_per_request: int = INPUTS_PER_REQUEST
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """When every request is sent, and what all inputs are, request by request.

    Poisson arrivals at every phase's own rate; keys go on where an earlier phase of the same mix stopped.
    """
    send_s: list[float] = []
    keys: list[str] = []
    turns: dict[tuple[str, ...], Iterator[int]] = {}
    for start_s, phase in zip(starts_of(phases), phases, strict=True):
        assert phase.rate_per_s is not None
        turn = turns.setdefault(phase.keys, count())
        num_requests = int(rng.poisson(phase.seconds * phase.rate_per_s / inputs_per_request))
        send_s.extend(np.sort(start_s + rng.random(num_requests) * phase.seconds).tolist())
        keys.extend(phase.keys[next(turn) % len(phase.keys)] for _ in range(num_requests * inputs_per_request))
    return tuple(send_s), tuple(keys)


def closed_keys(phases: Sequence[Phase]) -> tuple[str, ...]:
    """All inputs of a closed loop, phase after phase."""
    (size,) = {len(phase.keys) for phase in phases}
    assert size % INPUTS_PER_REQUEST == 0, "whole requests"
    return tuple(key for phase in phases for key in phase.keys)


def closed_turns(phases: Sequence[Phase], elapsed_s: Callable[[], float], sent: list[int]) -> Iterator[int]:
    """Requests of the phase of the moment, until the last ends, also noted in `sent`; each phase has its own."""
    starts_s, end_s = starts_of(phases), sum(phase.seconds for phase in phases)
    turns = [count() for _ in phases]
    per_phase = len(phases[0].keys) // INPUTS_PER_REQUEST
    while (now_s := elapsed_s()) < end_s:
        index = int(np.searchsorted(starts_s, now_s, side="right")) - 1
        sent.append(index * per_phase + next(turns[index]) % per_phase)
        yield sent[-1]


# From request records to figures: windows, goodput over time, and whether every answer is right.

LOST = ("timeout", "connection")
"""Errors that no server explained."""
Span = tuple[float, float]
"""From one second up to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """A window of a run. Rates count inputs that were answered in the window, the rest requests that were due in it."""

    seconds: float
    requests: int
    answered: int
    """Requests."""
    in_slo: int
    """Requests."""
    answers_per_s: float
    goodput_per_s: float
    p50_s: float | None
    p99_s: float | None
    errors: Mapping[str, int]

    @property
    def lost(self) -> int:
        """Requests without an answer and without a word why."""
        return sum(self.errors.get(kind, 0) for kind in LOST)


def figures(driven: Driven, *spans: Span) -> WindowFigures:
    """Of several windows together; what they share counts once."""
    apart = united(spans)
    due = [record for record in driven.records if _within(record.scheduled_s, apart)]
    done = [record for record in driven.records if record.error is None and _within(record.done_s, apart)]
    latencies_s = [record.latency_s for record in due if record.error is None]
    p50_s, p99_s = np.percentile(latencies_s, [50, 99]).tolist() if latencies_s else (None, None)
    seconds = sum(until_s - since_s for since_s, until_s in apart)
    return WindowFigures(
        seconds=seconds,
        requests=len(due),
        answered=len(latencies_s),
        in_slo=sum(latency_s <= driven.slo_s for latency_s in latencies_s),
        answers_per_s=sum(len(record.predictions) for record in done) / seconds,
        goodput_per_s=sum(len(record.predictions) for record in done if record.latency_s <= driven.slo_s) / seconds,
        p50_s=p50_s,
        p99_s=p99_s,
        errors=dict(Counter(record.error for record in due if record.error is not None)),
    )


def united(spans: Sequence[Span]) -> list[Span]:
    """The same seconds in windows that do not overlap."""
    apart: list[Span] = []
    for since_s, until_s in sorted(spans):
        if apart and since_s <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(apart[-1][1], until_s))
        else:
            apart.append((since_s, until_s))
    return apart


def goodput_bins(driven: Driven, bin_s: float) -> list[float]:
    """Goodput per second in bins of so many seconds, whole ones only, up to the end of the last phase."""
    counts = np.zeros(int(driven.seconds / bin_s))
    for record in driven.records:
        index = int(record.done_s / bin_s)
        if record.error is None and record.latency_s <= driven.slo_s and index < len(counts):
            counts[index] += len(record.predictions)
    return [float(count) / bin_s for count in counts]


def back_at_s(bins: Sequence[float], bin_s: float, since_s: float, goodput_per_s: float) -> float | None:
    """Seconds from `since_s` to the start of the first later bin that reaches a goodput; None where none does."""
    first = int(np.ceil(since_s / bin_s))
    return next((k * bin_s - since_s for k in range(first, len(bins)) if bins[k] >= goodput_per_s), None)


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
    ids = [record.request_id for record in driven.records]
    row_of = {sample_id: row for row, sample_id in enumerate(records.sample_ids)}
    wrong = []
    for record in driven.records:
        for index, answer in zip(record.input_indices, record.predictions, strict=False):
            label = label_names.index(answer.label)
            said = fault(records, row_of[driven.keys[index]], answer.exit, label, thresholds)
            if said is not None:
                wrong.append(f"{driven.keys[index]}: {said}")
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


def _within(at_s: float, spans: Sequence[Span]) -> bool:
    return any(since_s <= at_s < until_s for since_s, until_s in spans)
