"""How others choose models for a service: one by a rule (INFaaS, ATC'21), or a vote of several (Cocktail, NSDI'22).

As Tabi compares with them (EuroSys'23, section 7.1): one input at a time on idle devices. Its own choice is
`optimizer.tabi`. None of them makes a plan: they say which models run, for every input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answering:
    """A model, and what it answers to N profiled inputs."""

    name: str
    latency_s: float
    answers_N: IntArray

    def accuracy(self, truth_N: IntArray) -> float:
        return float((self.answers_N == truth_N).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Models that answer every input, all of them."""

    models: tuple[str, ...]
    accuracy: float
    latency_s: float
    """Of the slowest: they run side by side."""
    work_s: float
    """Of all together: what an input costs."""


def infaas(models: Sequence[Answering], truth_N: IntArray, accuracy: float) -> Choice | None:
    """The quickest single model that is accurate enough; None where none is."""
    enough = [each for each in models if each.accuracy(truth_N) >= accuracy]
    if not enough:
        return None
    best = min(enough, key=lambda each: each.latency_s)
    return Choice(models=(best.name,), accuracy=best.accuracy(truth_N), latency_s=best.latency_s, work_s=best.latency_s)


def cocktail(models: Sequence[Answering], truth_N: IntArray, accuracy: float) -> Choice | None:
    """Votes of several models, weighted by accuracy, that are accurate enough: the least latency, then the least work.

    Among equal votes the most accurate model's answer stands. Single models are no votes; None where none is enough.
    """
    found = [
        choice
        for size in range(2, len(models) + 1)
        for some in combinations(models, size)
        if (choice := _vote(some, truth_N)).accuracy >= accuracy
    ]
    return min(found, key=lambda choice: (choice.latency_s, choice.work_s), default=None)


def _vote(models: Sequence[Answering], truth_N: IntArray) -> Choice:
    ordered = sorted(models, key=lambda each: each.accuracy(truth_N), reverse=True)
    answers_NL = np.column_stack([each.answers_N for each in ordered])
    weights_L = np.array([each.accuracy(truth_N) for each in ordered])
    classes_C = np.unique(answers_NL)
    votes_NC = np.stack([(answers_NL == each) @ weights_L for each in classes_C], axis=1)
    first_N = votes_NC[np.arange(len(truth_N)), np.searchsorted(classes_C, answers_NL[:, 0])]
    voted_N = np.where(first_N >= votes_NC.max(1), answers_NL[:, 0], classes_C[votes_NC.argmax(1)])
    return Choice(
        models=tuple(each.name for each in models),
        accuracy=float((voted_N == truth_N).mean()),
        latency_s=max(each.latency_s for each in models),
        work_s=sum(each.latency_s for each in models),
    )
