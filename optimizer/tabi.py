"""Tabi's selection of a cascade (EuroSys'23, section 5), as a baseline.

It profiles each model alone, and combines the recorded answers. Its result has no guarantee, because c is selected on
the inputs on which it is evaluated. Random rerouting (`earlyexit/policies/reroute.py`) is not sampled: shares are exact
expectations.
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
"""Candidates are kept if their 75th percentile latency is within 1.5 times the latency of their slowest model."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutoff:
    """One setting of the rule, with the same c at every network but the last, and its results on profiled inputs."""

    c: float
    accuracy: float
    """Expected accuracy over all inputs."""
    answered_L: tuple[float, ...]
    """Share of all inputs that each network answers; the shares sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledModel:
    """The answers of a model on N profiled inputs, which are the same for all models."""

    name: str
    latency_s: float
    confidence_N: FloatArray
    """Calibrated confidence: the temperature-scaled probability of the answer."""
    right_N: FloatArray
    """1 if the answer is right, else 0, compared with the truth or with a reference's answers."""

    @property
    def accuracy(self) -> float:
        return float(self.right_N.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class TabiCandidate:
    """A cascade of models with the rule between them."""

    models: tuple[str, ...]
    c: float | None
    """None for a single model."""
    accuracy: float
    mean_latency_s: float
    tail_latency_s: float
    """75th percentile, for single inputs on idle devices, as in the paper."""


def reaching(confidence_NL: FloatArray, c: float, k: float = SLOPE) -> FloatArray:
    """Returns the probability with which each input reaches each network, (N, L); 1 for the first network.

    The confidences of the last network are not used.
    """
    goes_on_NL = np.ones_like(confidence_NL, dtype=np.float64)
    for column in range(1, confidence_NL.shape[1]):
        goes_on_NL[:, column] = reroute_probability(confidence_NL[:, column - 1], c, k)
    return np.asarray(np.cumprod(goes_on_NL, axis=1), dtype=np.float64)


def at_cutoff(confidence_NL: FloatArray, right_NL: FloatArray, c: float, k: float = SLOPE) -> Cutoff:
    """Returns the results of the rule at one c. `right_NL` may contain the answers of an ensemble at later networks."""
    reaching_NL = reaching(confidence_NL, c, k)
    answered_NL = reaching_NL - np.column_stack([reaching_NL[:, 1:], np.zeros(len(reaching_NL))])
    accuracy = float((answered_NL * right_NL).sum(1).mean())
    return Cutoff(c=c, accuracy=accuracy, answered_L=tuple(answered_NL.mean(0).tolist()))


def cutoffs(confidence_NL: FloatArray, right_NL: FloatArray, k: float = SLOPE) -> Iterator[Cutoff]:
    """Yields settings with c from 0.95 down in steps of 0.05, while the accuracy is at least the models' mean."""
    for step in range(round(FIRST_CUTOFF / CUTOFF_STEP) + 1):
        cutoff = at_cutoff(confidence_NL, right_NL, max(0.0, round(FIRST_CUTOFF - step * CUTOFF_STEP, 10)), k)
        if cutoff.accuracy < right_NL.mean() - ROUNDING:
            return
        yield cutoff


def candidates(models: Sequence[ProfiledModel], k: float = SLOPE) -> Iterator[TabiCandidate]:
    """Yields single models, and cascades of two or more models in ascending order of accuracy, at each searched c.

    Cascades whose 75th percentile latency exceeds 1.5 times that of their slowest model are left out.
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


def select(cascades: Sequence[TabiCandidate], accuracy: float) -> TabiCandidate | None:
    """Returns the candidate with the least mean latency among those that reach an accuracy, or None."""
    accurate = [candidate for candidate in cascades if candidate.accuracy >= accuracy - ROUNDING]
    return min(accurate, key=lambda candidate: (candidate.mean_latency_s, len(candidate.models)), default=None)


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
