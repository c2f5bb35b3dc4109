"""Weights of an ensemble of a chain's networks (Tabi, section 4.3), fitted on inputs that were rerouted, and its gain.

Every end of a network that is not the last has one weight: what the mixture up to it counts in what comes after it
(`earlyexit/network/chain.py`). It is fit_weights on the inputs that go on there, since no others meet it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from earlyexit.network.chain import proportional
from profiles.records import IntArray
from profiles.scores import BoolArray, FloatArray

MOST = 0.99
"""Of a fitted weight: the network at hand counts for something."""
LEAST_PROBABILITY = 1e-12
"""The least probability of a true label: a label that every network rules out costs much, but its loss is finite."""
FOLDS = 5
"""Parts of the inputs, each answered by weights that the others fitted."""
MOST_STEPS = 60
"""Of a search that leaves a third of its interval out each time: a weight to 1e-9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a change of answers is worth on N inputs, paired."""

    num_inputs: int
    before: float
    """Accuracy without."""
    after: float
    fixed: int
    """Inputs that were answered wrongly, and rightly now."""
    spoilt: int
    """The other way round."""
    low: float
    high: float
    """Of the difference, an exact interval (McNemar's test): given how many answers changed for better or worse, that
    of the share that became right (Clopper and Pearson). It contains 0 where chance could have done as much."""

    @property
    def is_sure(self) -> bool:
        """Whether the interval lies above 0."""
        return self.low > 0


def gain(right_before_N: BoolArray, right_after_N: BoolArray, *, confidence: float = 0.95) -> Gain:
    """What the answers after are worth beside those before; raises DataError for no inputs."""
    if not len(right_before_N) or len(right_before_N) != len(right_after_N):
        raise DataError("a gain needs inputs, and each judged before and after")
    fixed = int((~right_before_N & right_after_N).sum())
    spoilt = int((right_before_N & ~right_after_N).sum())
    low, high = _share_interval(fixed, fixed + spoilt, confidence)
    changed = (fixed + spoilt) / len(right_before_N)
    return Gain(
        num_inputs=len(right_before_N),
        before=float(right_before_N.mean()),
        after=float(right_after_N.mean()),
        fixed=fixed,
        spoilt=spoilt,
        low=changed * (2 * low - 1),
        high=changed * (2 * high - 1),
    )


def mix_networks(probabilities: Sequence[FloatArray], weights: Mapping[int, float], ends: Sequence[int]) -> FloatArray:
    """What the last of some networks says with those before it, (N, C); `ends`: of all but the last."""
    said_NC = probabilities[0]
    for end, own_NC in zip(ends, probabilities[1:], strict=True):
        weight = weights.get(end, 0.0)
        said_NC = (1 - weight) * own_NC + weight * said_NC
    return said_NC


Rule = Callable[[Sequence[FloatArray], FloatArray, IntArray], float]
"""Probabilities of the networks up to the one after an end, the mixture up to the end, and the truth -> its weight."""


def by_accuracy(probabilities: Sequence[FloatArray], _before_NC: FloatArray, truth_N: IntArray) -> float:
    """Every network in proportion to its accuracy on these inputs, as Tabi has it."""
    *earlier, last = (float((each_NC.argmax(1) == truth_N).mean()) for each_NC in probabilities)
    if not last:
        return 0.0  # no proportion is one: nothing is mixed
    weights = proportional(dict(enumerate(earlier)), last)
    return min(weights[len(earlier) - 1], MOST)


def by_likelihood(probabilities: Sequence[FloatArray], before_NC: FloatArray, truth_N: IntArray) -> float:
    """The weight that makes the true labels likeliest; the mean logarithm of a mixture has one peak only."""
    rows = np.arange(len(truth_N))
    before_N, own_N = before_NC[rows, truth_N], probabilities[-1][rows, truth_N]

    def likelihood(weight: float) -> float:
        return float(np.log(np.maximum((1 - weight) * own_N + weight * before_N, LEAST_PROBABILITY)).mean())

    low, high = 0.0, MOST
    for _ in range(MOST_STEPS):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if likelihood(left) < likelihood(right) else (low, right)
    return low if likelihood(low) > likelihood(0.0) else 0.0


def best_accuracy(probabilities: Sequence[FloatArray], before_NC: FloatArray, truth_N: IntArray) -> float:
    """The weight of hundredths with which most answers are right, of several the least."""
    weights = np.arange(0, 100) / 100
    own_NC = probabilities[-1]
    right = [(((1 - weight) * own_NC + weight * before_NC).argmax(1) == truth_N).sum() for weight in weights]
    return float(weights[int(np.argmax(right))])


RULES: Mapping[str, Rule] = {"accuracy": by_accuracy, "likelihood": by_likelihood, "best": best_accuracy}
"""How weights are found, by name: in proportion to accuracy (Tabi), the likeliest, the most accurate."""


def fit_weights(
    probabilities: Sequence[FloatArray],
    truth_N: IntArray,
    goes_on_NE: BoolArray,
    ends: Sequence[int],
    rule: Rule,
) -> dict[int, float]:
    """A weight for every end, first to last, each on the inputs that go on there; 0 where none does.

    `probabilities` are the networks' calibrated ones, each (N, C); `goes_on_NE`: whether an input goes on at an end.
    """
    weights: dict[int, float] = {}
    for column, end in enumerate(ends):
        rows = np.flatnonzero(goes_on_NE[:, column])
        some = [each_NC[rows] for each_NC in probabilities[: column + 2]]
        before_NC = mix_networks(some[:-1], weights, ends[:column])
        weights[end] = rule(some, before_NC, truth_N[rows]) if len(rows) else 0.0
    return weights


def held_out_gain(
    probabilities: Sequence[FloatArray],
    truth_N: IntArray,
    goes_on_NE: BoolArray,
    ends: Sequence[int],
    rule: Rule,
) -> Gain | None:
    """What the ensemble is worth beside the last network alone, on the inputs that go on at every end.

    No input is answered by weights that it helped to fit. None where no input goes on.
    """
    rows = np.flatnonzero(goes_on_NE.all(1))
    if not len(rows):
        return None
    fold_N = np.random.default_rng(0).permutation(len(truth_N)) % FOLDS
    alone_NC, right_N = probabilities[-1], truth_N[rows]
    said_NC = np.empty_like(alone_NC)
    for fold in range(FOLDS):
        others, mine = np.flatnonzero(fold_N != fold), np.flatnonzero(fold_N == fold)
        parts = [each_NC[others] for each_NC in probabilities]
        weights = fit_weights(parts, truth_N[others], goes_on_NE[others], ends, rule)
        said_NC[mine] = mix_networks([each_NC[mine] for each_NC in probabilities], weights, ends)
    return gain(alone_NC[rows].argmax(1) == right_N, said_NC[rows].argmax(1) == right_N)


def _share_interval(count: int, total: int, confidence: float) -> tuple[float, float]:
    """Clopper and Pearson's exact interval of a share; of nothing, anything."""
    from scipy.stats import beta  # takes a second, and reading a calibration may import this module

    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return low, high
