"""Guarantees on the mean loss of thresholds, and the statistical tests behind them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from earlyexit.errors import DataError

Metric = Literal["agreement", "harm", "sequences"]
"""The bounded loss. `agreement`: disagreement with the full model. `harm`: wrong answers where the full model is right,
by labels. `sequences`: mean share of tokens that differ from the full model's sequences."""

ROUNDING = 1e-9
"""Tolerance above an integer below which a sum of losses is not rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """A bound on the mean loss, and its confidence."""

    budget: float = 0.01
    """Largest mean loss. For labels and the metric `agreement`, it is the largest share of different answers."""
    confidence: float = 0.90
    """Probability, over the draw of the calibration inputs, that the budget is kept."""
    among: int = 1
    """Number of calibrations that are tested on the same inputs, of which one is selected. Each test gets an equal part
    of the error probability (Bonferroni)."""

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1:
            raise DataError(f"the budget must be between 0 and 1, not {self.budget}")
        if not 0 < self.confidence < 1:
            raise DataError(f"the confidence must be between 0 and 1, not {self.confidence}")

    @property
    def may_fail(self) -> float:
        """Probability that a test may accept thresholds that break the budget."""
        return (1 - self.confidence) / self.among

    @property
    def least_inputs(self) -> int:
        """Number of inputs that a test needs to accept thresholds without any loss."""
        return int(np.ceil(np.log(self.may_fail) / np.log(1 - self.budget)))

    @cache  # noqa: B019 # there are few guarantees, and the search is expensive
    def inputs_for(self, lost: int) -> int:
        """Returns how many inputs a test needs to accept `lost` inputs with a loss of 1, if losses are 0 or 1."""
        numbers = range(self.least_inputs, 2**50)
        return numbers[bisect_left(numbers, True, key=lambda number: self.holds(lost, number))]

    def holds(self, total_loss: float, num_inputs: int, *, zero_one: bool = True) -> bool:
        """Returns whether the total loss of the inputs rejects the hypothesis of a mean loss above the budget."""
        return p_value(total_loss, num_inputs, self.budget, zero_one=zero_one) <= self.may_fail


def p_value(total_loss: float, num_inputs: int, budget: float, *, zero_one: bool) -> float:
    """Returns the probability of so small a total loss if the true mean were the budget.

    It is exact for losses of 0 or 1 (binomial tail). Otherwise it is an upper bound, the smaller one of Hoeffding's and
    Bentkus's (Angelopoulos et al., Learn then Test, proposition 3): with mean r and budget b, the smaller of
    exp(-n h(min(r, b), b)) and e P(Bin(n, b) <= ceil(n r)), where h(a, b) = a ln(a/b) + (1-a) ln((1-a)/(1-b)).
    """
    from scipy.stats import binom  # takes a second, and reading a calibration imports this module

    if zero_one:
        return float(binom.cdf(round(total_loss), num_inputs, budget))
    mean = min(total_loss / num_inputs, budget)
    below = mean * np.log(mean / budget) if mean > 0 else 0.0  # 0 ln 0 = 0
    hoeffding = np.exp(-num_inputs * (below + (1 - mean) * np.log((1 - mean) / (1 - budget))))
    bentkus = np.e * binom.cdf(np.ceil(total_loss - ROUNDING), num_inputs, budget)
    return float(min(hoeffding, bentkus, 1.0))
