"""What is promised of thresholds, and the tests by which a promise may be made."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from earlyexit.errors import DataError
from profiles.scores import FloatArray

Metric = Literal["agreement", "harm", "sequences"]
"""What is promised: agreement with the full model; harm, by labels: how often it is wrong where that is right; of
sequences, agreement with the full model's own: the mean share of their tokens that differs."""

ROUNDING = 1e-9
"""A sum of losses this far above a whole number is that number: of 7 losses of 1 it must not become 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """A bound on the mean loss, and how sure it is."""

    budget: float = 0.01
    """Largest mean loss against the full model's answers; of labels, the largest share answered otherwise. Of harm the
    largest mean harm."""
    confidence: float = 0.90
    """Probability, over the draw of the calibration inputs, that the budget is kept."""
    among: int = 1
    """How many calibrations the same inputs test, of which one is picked by what these inputs say of it: each may fail
    with so small a part of the probability that all of them together keep theirs (Bonferroni)."""

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1:
            raise DataError(f"the budget must be between 0 and 1, not {self.budget}")
        if not 0 < self.confidence < 1:
            raise DataError(f"the confidence must be between 0 and 1, not {self.confidence}")
        if self.among < 1:
            raise DataError(f"there is at least 1 calibration, not {self.among}")

    @property
    def may_fail(self) -> float:
        """Probability that a test may accept thresholds that break the budget."""
        return (1 - self.confidence) / self.among

    @property
    def least_inputs(self) -> int:
        """Inputs that a test needs to accept even no loss at all."""
        return int(np.ceil(np.log(self.may_fail) / np.log(1 - self.budget)))

    @cache  # noqa: B019 # few promises are made, and their number of rows is searched row by row
    def inputs_for(self, lost: int) -> int:
        """Inputs that a test needs to accept so many inputs lost, losses being 0 or 1."""
        known = range(self.least_inputs, 2**50)
        return known[bisect_left(known, True, key=lambda number: self.holds(lost, number))]

    def holds(self, total_loss: float, num_inputs: int, *, zero_one: bool = True) -> bool:
        """Whether so little loss, a sum over the inputs, rejects a true mean above the budget."""
        return p_value(total_loss, num_inputs, self.budget, zero_one=zero_one) <= self.may_fail

    def most_loss(self, totals: FloatArray, num_inputs: int, *, zero_one: bool) -> float:
        """The largest of ascending sums that is accepted; -1 where none is."""
        fails = bisect_right(
            range(len(totals)), False, key=lambda at: not self.holds(float(totals[at]), num_inputs, zero_one=zero_one)
        )
        return float(totals[fails - 1]) if fails else -1.0


def p_value(total_loss: float, num_inputs: int, budget: float, *, zero_one: bool) -> float:
    """Probability of so small a sum of losses if the true mean were the budget.

    Exact for losses of 0 or 1: the binomial tail. For losses in between a bound, Hoeffding's or Bentkus's, whichever is
    smaller (Angelopoulos et al., Learn then Test, proposition 3): with mean r and budget b the least of
    exp(-n h(min(r, b), b)) and e P(Bin(n, b) <= ceil(n r)), h(a, b) = a ln(a/b) + (1-a) ln((1-a)/(1-b)).
    """
    from scipy.stats import binom  # takes a second, and reading a calibration imports this module

    if zero_one:
        return float(binom.cdf(round(total_loss), num_inputs, budget))
    mean = min(total_loss / num_inputs, budget)
    below = mean * np.log(mean / budget) if mean > 0 else 0.0  # 0 ln 0 = 0
    hoeffding = np.exp(-num_inputs * (below + (1 - mean) * np.log((1 - mean) / (1 - budget))))
    bentkus = np.e * binom.cdf(np.ceil(total_loss - ROUNDING), num_inputs, budget)
    return float(min(hoeffding, bentkus, 1.0))
