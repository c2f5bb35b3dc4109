"""Weights of an ensemble of a chain's networks (Tabi, section 4.3), and the ensemble's gain in accuracy.

The end of each network except the last has one weight: the weight of the mixture of the networks up to this end in the
answer of the next network (`earlyexit/network/chain.py`). It is fitted on the inputs that continue after this end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiles.records import IntArray
from profiles.scores import BoolArray, FloatArray

MAX_WEIGHT = 0.99
"""Limit of fitted weights, so that the network itself always counts."""
MIN_PROBABILITY = 1e-12
"""Lower limit of the true label's probability, which keeps the likelihood finite."""
FOLDS = 5
"""Folds of the cross-validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Paired comparison of the accuracy before and after a change, on the same inputs."""

    num_inputs: int
    before: float
    """Accuracy before the change."""
    after: float
    fixed: int
    """Inputs whose answer changed from wrong to right."""
    spoilt: int
    """Inputs whose answer changed from right to wrong."""
    low: float
    high: float
    """Exact 95 % confidence interval of the difference in accuracy (McNemar's test): the Clopper-Pearson interval of
    the share of fixed among the changed answers. It contains 0 if the difference may be due to chance."""

    @property
    def is_sure(self) -> bool:
        """Whether the interval is above 0."""
        return self.low > 0


def gain(right_before_N: BoolArray, right_after_N: BoolArray) -> Gain:
    """Compares the correctness of answers to at least one input before and after a change."""
    fixed = int((~right_before_N & right_after_N).sum())
    spoilt = int((right_before_N & ~right_after_N).sum())
    low, high = 0.0, 1.0
    if fixed + spoilt:
        from scipy.stats import binomtest  # as in `likeliest_weight`

        low, high = binomtest(fixed, fixed + spoilt).proportion_ci(0.95)
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
    """Returns the last network's probabilities, mixed with those of the earlier networks, (N, C).

    `ends` holds the ends of all networks but the last.
    """
    mixed_NC = probabilities[0]
    for end, own_NC in zip(ends, probabilities[1:], strict=True):
        weight = weights.get(end, 0.0)
        mixed_NC = (1 - weight) * own_NC + weight * mixed_NC
    return mixed_NC


def likeliest_weight(before_NC: FloatArray, own_NC: FloatArray, truth_N: IntArray) -> float:
    """Returns the weight of the mixture up to an end in the next network's answer that makes the labels most likely.

    The mean log-likelihood of a mixture is concave in the weight. Tabi weights networks by their accuracy instead.
    """
    rows = np.arange(len(truth_N))
    before_N, own_N = before_NC[rows, truth_N], own_NC[rows, truth_N]

    def likelihood(weight: float) -> float:
        return float(np.log(np.maximum((1 - weight) * own_N + weight * before_N, MIN_PROBABILITY)).mean())

    from scipy.optimize import minimize_scalar  # slow to import, and only ensembles need it

    found = minimize_scalar(
        lambda weight: -likelihood(weight), bounds=(0.0, MAX_WEIGHT), method="bounded", options={"xatol": 1e-10}
    )
    best = float(found.x)
    return best if likelihood(best) > likelihood(0.0) else 0.0


def fit_weights(
    probabilities: Sequence[FloatArray], truth_N: IntArray, goes_on_NE: BoolArray, ends: Sequence[int]
) -> dict[int, float]:
    """Returns a weight for each end, fitted in order on the inputs that continue there; 0 if no input continues.

    `probabilities` are the calibrated probabilities of each network, (N, C). `goes_on_NE` says whether an input
    continues after an end.
    """
    weights: dict[int, float] = {}
    for column, end in enumerate(ends):
        rows = np.flatnonzero(goes_on_NE[:, column])
        *earlier, own_NC = (each_NC[rows] for each_NC in probabilities[: column + 2])
        before_NC = mix_networks(earlier, weights, ends[:column])
        weights[end] = likeliest_weight(before_NC, own_NC, truth_N[rows]) if len(rows) else 0.0
    return weights


def held_out_gain(
    probabilities: Sequence[FloatArray], truth_N: IntArray, goes_on_NE: BoolArray, ends: Sequence[int]
) -> Gain | None:
    """Returns the cross-validated gain of the ensemble over the last network alone, or None without inputs.

    It is computed on the inputs that continue after every end, with weights from the other folds.
    """
    rows = np.flatnonzero(goes_on_NE.all(1))
    if not len(rows):
        return None
    fold_N = np.random.default_rng(0).permutation(len(truth_N)) % FOLDS
    alone_NC, right_N = probabilities[-1], truth_N[rows]
    mixed_NC = np.empty_like(alone_NC)
    for fold in range(FOLDS):
        fitting, held_out = np.flatnonzero(fold_N != fold), np.flatnonzero(fold_N == fold)
        known = [each_NC[fitting] for each_NC in probabilities]
        weights = fit_weights(known, truth_N[fitting], goes_on_NE[fitting], ends)
        mixed_NC[held_out] = mix_networks([each_NC[held_out] for each_NC in probabilities], weights, ends)
    return gain(alone_NC[rows].argmax(1) == right_N, mixed_NC[rows].argmax(1) == right_N)
