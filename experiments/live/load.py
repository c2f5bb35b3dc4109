"""Load in phases whose mix and rate change while it runs, sent by the product's own generator.

A request carries many inputs, to spare HTTP's cost, and is answered when its last input is. The server's deadline of a
request is the smaller of its timeout and the SLO; the timeout here is longer, so that whatever fails says why.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from earlyexit.clock import MonotonicClock
from experiments.live.meter import Meter, Usage
from experiments.live.model import TEXT
from offramp.load.connections import connected
from offramp.load.generator import Generator
from offramp.load.report import RequestRecord
from offramp.load.workload import LoadConfig

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
    def starts_s(self) -> tuple[float, ...]:
        """When each phase began."""
        return starts_of(self.phases)

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
