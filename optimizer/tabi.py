"""Tabi's own choice of a cascade (EuroSys'23, section 5), as a baseline: a search for c, and a list of candidates.

It profiles the models alone, and rearranges what they said. Nothing is promised of what it finds: c is chosen on the
inputs it is judged by. Shares are expectations over the coins of the band (`earlyexit/policies/reroute.py`),
which are exact and need no draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from earlyexit.policies.reroute import SLOPE, FloatArray, reroute_probability

FIRST_CUTOFF, CUTOFF_STEP = 0.95, 0.05
TAIL = 0.75
TAIL_OVER_SLOWEST = 1.5
"""Candidates are kept whose 75th percentile is within 1.5 times the latency of the slowest model they use."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutoff:
    """One setting of the rule, the same c at every network but the last, and what it does to the profiled inputs."""

    c: float
    accuracy: float
    """Mean of what is right, wherever inputs are answered."""
    answered_L: tuple[float, ...]
    """Per network, the share of all inputs that it answers; adds up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledModel:
    """What a model said of N profiled inputs, the same of every model."""

    name: str
    latency_s: float
    confidence_N: FloatArray
    """Calibrated: a temperature-scaled probability of its answer."""
    right_N: FloatArray
    """1 where its answer is right, 0 where not; against the truth, or against a reference's answers."""

    @property
    def accuracy(self) -> float:
        return float(self.right_N.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class TabiCandidate:
    """Models one after the other with the rule between them."""

    models: tuple[str, ...]
    c: float | None
    """None of a single model."""
    accuracy: float
    mean_latency_s: float
    tail_latency_s: float
    """75th percentile, one input at a time on idle devices, as the paper measures."""


def reaching(confidence_NL: FloatArray, c: float, k: float = SLOPE) -> FloatArray:
    """How likely each input is to reach every network, (N, L), of the confidences of all L; that of the last is unread.

    The first is reached by all.
    """
    goes_on_NL = np.ones_like(confidence_NL, dtype=np.float64)
    for column in range(1, confidence_NL.shape[1]):
        goes_on_NL[:, column] = reroute_probability(confidence_NL[:, column - 1], c, k)
    return np.asarray(np.cumprod(goes_on_NL, axis=1), dtype=np.float64)


def at_cutoff(confidence_NL: FloatArray, right_NL: FloatArray, c: float, k: float = SLOPE) -> Cutoff:
    """What the rule does at one c; `right_NL`: what answering there is worth, of a later network with the ensemble."""
    reaching_NL = reaching(confidence_NL, c, k)
    answered_NL = reaching_NL - np.column_stack([reaching_NL[:, 1:], np.zeros(len(reaching_NL))])
    accuracy = float((answered_NL * right_NL).sum(1).mean())
    return Cutoff(c=c, accuracy=accuracy, answered_L=tuple(answered_NL.mean(0).tolist()))


def cutoffs(confidence_NL: FloatArray, right_NL: FloatArray, k: float = SLOPE) -> Iterator[Cutoff]:
    """Settings as they are tried: c from 0.95 down by 0.05, while no less accurate than the models on average."""
    for step in range(round(FIRST_CUTOFF / CUTOFF_STEP) + 1):
        found = at_cutoff(confidence_NL, right_NL, max(0.0, round(FIRST_CUTOFF - step * CUTOFF_STEP, 10)), k)
        if found.accuracy < right_NL.mean() - ROUNDING:
            return
        yield found


def candidates(models: Sequence[ProfiledModel], k: float = SLOPE) -> Iterator[TabiCandidate]:
    """Single models, and every combination of two or more in ascending order of accuracy at every c of its search.

    Kept are those whose 75th percentile is within 1.5 times the slowest model they use.
    """
    by_accuracy = sorted(models, key=lambda model: (model.accuracy, model.latency_s))
    for model in by_accuracy:
        alone_s = model.latency_s
        yield TabiCandidate(
            models=(model.name,), c=None, accuracy=model.accuracy, mean_latency_s=alone_s, tail_latency_s=alone_s
        )
    for number in range(2, len(models) + 1):
        for chosen in combinations(by_accuracy, number):
            yield from _candidates_of(chosen, k)


def select(found: Sequence[TabiCandidate], accuracy: float) -> TabiCandidate | None:
    """The candidate of least mean latency that is accurate enough; None where none is."""
    enough = [candidate for candidate in found if candidate.accuracy >= accuracy - ROUNDING]
    return min(enough, key=lambda candidate: (candidate.mean_latency_s, len(candidate.models)), default=None)


def _candidates_of(models: Sequence[ProfiledModel], k: float) -> Iterator[TabiCandidate]:
    confidence_NL = np.column_stack([model.confidence_N for model in models])
    right_NL = np.column_stack([model.right_N for model in models])
    until_L = np.cumsum([model.latency_s for model in models])
    slowest_s = max(model.latency_s for model in models)
    for cutoff in cutoffs(confidence_NL, right_NL, k):
        tail_s = float(until_L[np.searchsorted(np.cumsum(cutoff.answered_L), TAIL - ROUNDING)])
        if tail_s <= TAIL_OVER_SLOWEST * slowest_s + ROUNDING:
            yield TabiCandidate(
                models=tuple(model.name for model in models),
                c=cutoff.c,
                accuracy=cutoff.accuracy,
                mean_latency_s=float(until_L @ np.array(cutoff.answered_L)),
                tail_latency_s=tail_s,
            )
