"""When requests arrive: endless streams of seconds from one arrival to the next."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice, repeat

import numpy as np


def poisson(rate_rps: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield the gaps of a Poisson process: many independent users, arriving in bursts and lulls."""
    while True:
        yield float(rng.exponential(1.0 / rate_rps))


def constant(rate_rps: float) -> Iterator[float]:
    """Yield equal gaps: one metronome, the kindest load of its rate."""
    return repeat(1.0 / rate_rps)


def schedule_s(gaps: Iterator[float], num_requests: int) -> list[float]:
    """Turn gaps into the send times of the first `num_requests`, in seconds after the start."""
    return list(accumulate(islice(gaps, num_requests)))
