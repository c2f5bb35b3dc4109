"""Weights of an ensemble of a chain's networks (Tabi, section 4.3, equation 6). Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from math import isfinite

from earlyexit.errors import PlanError

Weights = Mapping[int, float]
"""By the block after which a network ends that is not the last: the share, in what comes after it, of what the networks
up to it say together; the next network has the rest. So of three networks with w1 and w2 the last exit says
(1 - w2) p3 + w2 ((1 - w1) p2 + w1 p1), which can be any weighted mean."""


def check_weights(weights: Weights) -> None:
    """Raise PlanError for a weight that is no number from 0 to below 1: at 1 a later network would not count."""
    for end, weight in weights.items():
        if not 0 <= weight < 1:
            raise PlanError(
                f"weights: after block {end} the networks before count {weight}; a weight must be at least 0, below 1"
            )


def check_ends(weights: Weights, networks: tuple[int, ...]) -> None:
    """Raise PlanError for a weight of what no network's end says; `networks`: one past each one's last block."""
    ends = [bound - 1 for bound in networks[:-1]]
    others = sorted(set(weights) - set(ends))
    if others and not ends:
        raise PlanError(f"weights {dict(weights)} are of a chain's networks, and the model is a single one")
    if others:
        raise PlanError(f"weights after blocks {others}; the networks that are not the last end after {ends}")


def proportional(parts: Mapping[int, float], last: float) -> dict[int, float]:
    """The weights by which every network counts in proportion to a number of its own, `last` the last network's.

    `parts` is by the block after which the others end. Raises PlanError where there is nothing to divide by.
    """
    ends = sorted(parts)
    counts = [*(parts[end] for end in ends), last]
    if not all(map(isfinite, counts)) or min(counts) < 0 or counts[0] + counts[1] <= 0:
        raise PlanError(f"weights in proportion to {counts}: these must be numbers from 0 on, and not all be 0")
    totals = list(accumulate(counts))
    weights = {end: before / after for end, before, after in zip(ends, totals[:-1], totals[1:], strict=True)}
    check_weights(weights)
    return weights
