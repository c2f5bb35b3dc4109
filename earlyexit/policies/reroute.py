"""Tabi's dispatch rule (EuroSys'23, section 4.1, equation 4): which inputs continue. Does not import torch."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError

FloatArray = npt.NDArray[np.float64]

SLOPE = 10.0
"""Default k, which the paper does not name. The probability to continue then falls from 0.993 just above c to 0.007 at
confidence 1, which is close to both ends of the curve in figure 6."""
ATTEMPT = re.compile(r"\.\d+$")
MANTISSA_BITS = 53


def check_rule(c: float, k: float) -> None:
    """Raises PlanError unless c is a probability and k is finite and not negative."""
    if not 0 <= c <= 1:
        raise PlanError(f"c, the confidence up to which every input continues, must be from 0 to 1, not {c}")
    if not 0 <= k < np.inf:
        raise PlanError(f"k, the slope above c, must be finite and at least 0, not {k}")


def reroute_probability(confidence_N: npt.NDArray[np.floating], c: float, k: float = SLOPE) -> FloatArray:
    """Returns the probability to continue, (N,): 1 up to confidence c, above c 1/(1+exp(k((con-c)/(1-c)-1/2))).

    It never rises with confidence. At c = 1 all inputs continue. `check_rule` must accept c and k.
    """
    confidence_N = np.asarray(confidence_N, dtype=np.float64)
    if c == 1:
        return np.ones_like(confidence_N)
    within_N = np.clip((confidence_N - c) / (1 - c), 0.0, 1.0)
    above_c_N = np.exp(-np.logaddexp(0.0, k * (within_N - 0.5)))  # logaddexp does not overflow for a large k
    return np.asarray(np.where(confidence_N > c, above_c_N, 1.0), dtype=np.float64)


def coin(sample_id: str, ramp: int) -> float:
    """Returns a pseudo-random number in [0, 1): a hash of the ramp and the sample id.

    Retries and replays of an input get the same number: the hash omits the attempt that the ingress appends to the id.
    """
    key, mark, tail = sample_id.rpartition("#")
    without_attempt = f"{key}{mark}{ATTEMPT.sub('', tail)}" if mark else sample_id
    digest = hashlib.blake2b(f"{ramp} {without_attempt}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - MANTISSA_BITS)) / (1 << MANTISSA_BITS)
