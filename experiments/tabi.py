"""Tabi's selection of a cascade (EuroSys'23, section 5), as a baseline.

It profiles each model alone, and combines the recorded answers. Its result has no guarantee, because c is selected on
the inputs on which it is evaluated. Random rerouting (`earlyexit/policies/reroute.py`) is not sampled: shares are exact
expectations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from earlyexit.policies.reroute import SLOPE, FloatArray, reroute_probability

FIRST_CUTOFF, CUTOFF_STEP = 0.95, 0.05
TAIL = 0.75
TAIL_OVER_SLOWEST = 1.5
"""Candidates are kept if their 75th percentile latency is within 1.5 times the latency of their slowest model."""
ROUNDING = 1e-9


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
    """A cascade of models with the rule between them, and its expected results on the profiled inputs."""

    models: tuple[str, ...]
    c: float | None
    """The same for every model but the last. None for a single model."""
    accuracy: float
    answered_L: tuple[float, ...]
    """Share of all inputs that each model answers; the shares sum to 1."""
    mean_latency_s: float
    tail_latency_s: float
    """75th percentile, for single inputs on idle devices, as in the paper."""


def cascade(models: Sequence[ProfiledModel], c: float, k: float = SLOPE) -> TabiCandidate:
    """Returns the expected results of a cascade at one c."""
    reaching = [np.ones(len(models[0].right_N))]
    for model in models[:-1]:
        reaching.append(reaching[-1] * reroute_probability(model.confidence_N, c, k))
    answered_NL = -np.diff(np.column_stack([*reaching, np.zeros(len(reaching[0]))]), axis=1)
    right_NL = np.column_stack([model.right_N for model in models])
    answered_L, until_L = answered_NL.mean(0), np.cumsum([model.latency_s for model in models])
    return TabiCandidate(
        models=tuple(model.name for model in models),
        c=c,
        accuracy=float((answered_NL * right_NL).sum(1).mean()),
        answered_L=tuple(answered_L.tolist()),
        mean_latency_s=float(until_L @ answered_L),
        tail_latency_s=float(until_L[np.searchsorted(np.cumsum(answered_L), TAIL - ROUNDING)]),
    )


def cutoffs(models: Sequence[ProfiledModel], k: float = SLOPE) -> Iterator[TabiCandidate]:
    """Yields cascades with c from 0.95 down in steps of 0.05, while the accuracy is at least the models' mean."""
    least = np.mean([model.accuracy for model in models]) - ROUNDING
    for step in range(round(FIRST_CUTOFF / CUTOFF_STEP) + 1):
        found = cascade(models, max(0.0, round(FIRST_CUTOFF - step * CUTOFF_STEP, 10)), k)
        if found.accuracy < least:
            return
        yield found


def candidates(models: Sequence[ProfiledModel], k: float = SLOPE) -> Iterator[TabiCandidate]:
    """Yields single models, and cascades of two or more models in ascending order of accuracy, at each searched c.

    Cascades whose 75th percentile latency exceeds 1.5 times that of their slowest model are left out.
    """
    by_accuracy = sorted(models, key=lambda model: (model.accuracy, model.latency_s))
    yield from (replace(cascade([model], 1.0), c=None) for model in by_accuracy)
    for number in range(2, len(models) + 1):
        for chosen in combinations(by_accuracy, number):
            most_s = TAIL_OVER_SLOWEST * max(model.latency_s for model in chosen) + ROUNDING
            yield from (each for each in cutoffs(chosen, k) if each.tail_latency_s <= most_s)


def select(cascades: Sequence[TabiCandidate], accuracy: float) -> TabiCandidate | None:
    """Returns the candidate with the least mean latency among those that reach an accuracy, or None."""
    accurate = [candidate for candidate in cascades if candidate.accuracy >= accuracy - ROUNDING]
    return min(accurate, key=lambda candidate: (candidate.mean_latency_s, len(candidate.models)), default=None)
