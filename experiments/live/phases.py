"""What a load sends when: phases of one mix and rate, as an open or a closed loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

INPUTS_PER_REQUEST = 8


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
    """Requests in flight, closed loop."""

    def __post_init__(self) -> None:
        assert (self.rate_per_s is None) != (self.workers is None), "an open loop or a closed one"
        assert self.seconds > 0, "a phase lasts"
        assert self.keys, "a phase sends something"


def starts_of(phases: Sequence[Phase]) -> tuple[float, ...]:
    """When each phase begins."""
    return tuple(np.cumsum([0.0, *(phase.seconds for phase in phases[:-1])]).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An open loop: when every request is sent, and what all inputs are, request by request."""

    send_s: tuple[float, ...]
    keys: tuple[str, ...]


def open_schedule(phases: Sequence[Phase], rng: np.random.Generator) -> Schedule:
    """Poisson arrivals at every phase's own rate; keys go on where an earlier phase of the same mix stopped."""
    send_s: list[float] = []
    keys: list[str] = []
    turns: dict[tuple[str, ...], Iterator[int]] = {}
    for start_s, phase in zip(starts_of(phases), phases, strict=True):
        assert phase.rate_per_s is not None
        turn = turns.setdefault(phase.keys, count())
        num_requests = int(rng.poisson(phase.seconds * phase.rate_per_s / INPUTS_PER_REQUEST))
        send_s.extend(np.sort(start_s + rng.random(num_requests) * phase.seconds).tolist())
        keys.extend(phase.keys[next(turn) % len(phase.keys)] for _ in range(num_requests * INPUTS_PER_REQUEST))
    return Schedule(send_s=tuple(send_s), keys=tuple(keys))


def request_index(phase_index: int, turn: int, num_keys: int) -> int:
    """Of the `turn`-th request of a phase, where every phase has `num_keys` inputs of its own, one after the other."""
    per_phase = num_keys // INPUTS_PER_REQUEST
    return phase_index * per_phase + turn % per_phase


def workers_of(phase: Phase) -> int:
    """Of a closed loop's phase."""
    assert phase.workers is not None
    return phase.workers


def phase_at(phases: Sequence[Phase], now_s: float) -> int | None:
    """Which phase is on at that second; None after the last."""
    begun = [index for index, start_s in enumerate(starts_of(phases)) if now_s >= start_s]
    ended = now_s >= starts_of(phases)[-1] + phases[-1].seconds
    return None if ended else begun[-1]


def closed_keys(phases: Sequence[Phase]) -> tuple[str, ...]:
    """All inputs of a closed loop, phase after phase."""
    sizes = {len(phase.keys) for phase in phases}
    assert len(sizes) == 1, "all phases of a closed loop have as many keys"
    assert next(iter(sizes)) % INPUTS_PER_REQUEST == 0, "whole requests"
    return tuple(key for phase in phases for key in phase.keys)
