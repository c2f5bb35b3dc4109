"""Tabi's dispatch rule (EuroSys'23, section 4.1, equation 4): which inputs go on to the next network. No torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError

FloatArray = npt.NDArray[np.float64]

SLOPE = 10.0
"""The paper names no k. At 10 the band begins at 0.993 just above the cut-off and ends at 0.007 where an exit is
certain, so that it is close to the curve of figure 6 at both ends."""
ATTEMPT = re.compile(r"\.\d+$")
MANTISSA_BITS = 53


def check_rule(c: float, k: float) -> None:
    """Raise PlanError for a cut-off that is no probability, or a slope that would favour unsure inputs."""
    if not 0 <= c <= 1:
        raise PlanError(f"c, the confidence below which every input goes on, must be from 0 to 1, not {c}")
    if not 0 <= k < np.inf:
        raise PlanError(f"k, the slope of the band above c, must be finite and at least 0, not {k}")


def reroute_probability(confidence_N: npt.NDArray[np.floating], c: float, k: float = SLOPE) -> FloatArray:
    """Returns the probability to go on, (N,): 1 up to confidence c, above it 1/(1+exp(k((con-c)/(1-c)-1/2))).

    It never rises with confidence; at c = 1 all inputs go on. Raises PlanError as `check_rule` does.
    """
    check_rule(c, k)
    confidence_N = np.asarray(confidence_N, dtype=np.float64)
    if c == 1:
        return np.ones_like(confidence_N)
    within_N = np.clip((confidence_N - c) / (1 - c), 0.0, 1.0)
    return np.asarray(
        np.where(confidence_N > c, np.exp(-np.logaddexp(0.0, k * (within_N - 0.5))), 1.0), dtype=np.float64
    )


def reroutes(
    confidence_N: npt.NDArray[np.floating], sample_ids: Sequence[str], ramp: int, c: float, k: float = SLOPE
) -> npt.NDArray[np.bool_]:
    """Returns whether each input goes on, bool (N,): its coin at that ramp is below its probability."""
    probability_N = reroute_probability(confidence_N, c, k)
    coins_N = np.array([coin(sample_id, ramp) for sample_id in sample_ids], dtype=np.float64)
    return np.asarray(coins_N < probability_N)


def coin(sample_id: str, ramp: int) -> float:
    """Returns a number in [0, 1) that an input keeps at a ramp, so that another attempt or a replay decides alike.

    It is a hash of the ramp and the sample id, without the attempt that the ingress appends to the id.
    """
    key, mark, tail = sample_id.rpartition("#")
    known = f"{key}{mark}{ATTEMPT.sub('', tail)}" if mark else sample_id
    digest = hashlib.blake2b(f"{ramp} {known}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - MANTISSA_BITS)) / (1 << MANTISSA_BITS)
