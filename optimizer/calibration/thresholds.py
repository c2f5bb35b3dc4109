"""Thresholds with a guarantee: with stated confidence, the mean loss against the full model is within the budget.

The method is Learn-then-Test with fixed-sequence testing, as in CALM. The calibration inputs are divided into two
parts. The *design* part determines a path of threshold vectors, from "never leave" to "always leave". On the *tested*
part, the path is followed as long as a test rejects "the loss exceeds the budget".
The path does not depend on the tested inputs, so the guarantee holds for any path. A good path saves more computation.

The guarantee holds for *every subset* of the ramps, because planners switch ramps off. Each input therefore counts with
the largest loss of all ramps at which it may leave (`ExitRecords.worst_losses_N`). This loss never falls along the
path. The result is the last threshold vector before the first one at which the test fails.

The path: for each ramp, a logistic model is fitted on the design part. It predicts the loss (the *risk*) of the ramp's
answer. An input may leave if its risk is at most `price` times the saved computation, and `price` grows along the path.
The saved computation is a number of blocks, or their seconds if blocks differ. Losses change only at the prices at
which a tested input may first leave, so only these prices are examined.

For generated text, the path and the test are the same, with the bounded loss of each sequence as the loss: a bound on
the mean share of tokens that differ from the full model's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from profiles.records import ExitOutcome, ExitRecords, IntArray
from profiles.scores import SCORES, FloatArray, Score

Metric = Literal["agreement", "harm", "sequences"]
"""The bounded loss. `agreement`: disagreement with the full model. `harm`: wrong answers where the full model is right,
by labels. `sequences`: mean share of tokens that differ from the full model's sequences."""
LEAST_DESIGN_SHARE = 0.1
FLATTEST = 1e-3
"""Least slope of a risk model, used if the score is uninformative or misleading."""
RIDGE = 0.01
"""Weight of the ridge penalty, which keeps the slope finite if the ramp is never wrong."""
LOG_PRICES = np.linspace(-12.0, 0.0, 200)
"""Logarithms of the prices at which thresholds for sequences are tested. At the first one, hardly any token leaves."""
ROUNDING = 1e-9
"""Tolerance above an integer below which a sum of losses is not rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """A bound on the mean loss, and its confidence."""

    budget: float = 0.01
    """Largest mean loss. For labels and the metric `agreement`, it is the largest share of different answers."""
    confidence: float = 0.90
    """Probability, over the draw of the calibration inputs, that the budget is kept."""
    num_calibrations: int = 1
    """Number of calibrations that are tested on the same inputs, of which one is selected. Each test gets an equal part
    of the error probability (Bonferroni)."""

    def __post_init__(self) -> None:
        for name, share in (("budget", self.budget), ("confidence", self.confidence)):
            if not 0 < share < 1:
                raise DataError(f"the {name} must be between 0 and 1, not {share}")

    @property
    def error_probability(self) -> float:
        """Probability that a test may accept thresholds that break the budget."""
        return (1 - self.confidence) / self.num_calibrations

    @property
    def least_inputs(self) -> int:
        """Number of inputs that a test needs to accept thresholds without any loss."""
        return int(np.ceil(np.log(self.error_probability) / np.log(1 - self.budget)))

    @cache  # noqa: B019 # there are few guarantees, and the search is expensive
    def inputs_for(self, lost: int) -> int:
        """Returns how many inputs a test needs to accept `lost` inputs with a loss of 1, if losses are 0 or 1."""
        numbers = range(self.least_inputs, 2**50)
        return numbers[bisect_left(numbers, True, key=lambda number: self.holds(lost, number))]

    def holds(self, total_loss: float, num_inputs: int, *, zero_one: bool = True) -> bool:
        """Returns whether the total loss of the inputs rejects the hypothesis of a mean loss above the budget."""
        return p_value(total_loss, num_inputs, self.budget, zero_one=zero_one) <= self.error_probability


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Thresholds, and their results on the tested inputs."""

    thresholds: dict[int, float]
    """By ramp, in the unit of the records' score. Empty if no thresholds passed the test."""
    tested: ExitOutcome
    """The outcome on the tested inputs, with all ramps active."""
    worst_loss: float
    """The loss that was compared with the budget: the mean of each tested input's worst loss over subsets of ramps."""


def design_rows(num_inputs: int, guarantee: Guarantee, share: float) -> int:
    """Returns the number of design inputs: a share of the inputs, or fewer if the test can then allow one loss.

    A test that allows no loss ends the path at the first wrong answer, which costs more than a coarser path. At least a
    tenth of the inputs are design inputs.
    """
    most_forgiving = num_inputs - guarantee.inputs_for(1)
    usual = round(num_inputs * share)
    return min(usual, most_forgiving) if most_forgiving >= num_inputs * LEAST_DESIGN_SHARE else usual


def split_rows(num_inputs: int, num_first: int, seed: int) -> tuple[IntArray, IntArray]:
    """Divides rows at random into two parts, of which the first has `num_first` rows."""
    order = np.random.default_rng(seed).permutation(num_inputs).astype(np.int64)
    return order[:num_first], order[num_first:]


def learn_then_test(
    design: ExitRecords,
    tested: ExitRecords,
    guarantee: Guarantee,
    block_costs: Sequence[float] | None = None,
    *,
    others: Sequence[ExitRecords] = (),
) -> Calibration:
    """Returns the last thresholds on the path that the test accepts; none for fewer inputs than the test needs.

    The guarantee bounds the mean of `losses_NR` and `end_losses_N`, whatever they measure, or of the bounded losses of
    sequences (CALM, section 4). If the full model alone exceeds the budget, no ramp gets a threshold, and `worst_loss`
    is its loss. `block_costs` are those of `lay_path`. `others` are further views of the tested inputs, such as those
    of plans without some networks of an ensemble. An input counts with its largest loss over all views.
    """
    path, views = lay_path(design, block_costs), (tested, *others)
    losses_of: Callable[[ExitRecords, Mapping[int, float]], FloatArray]
    if tested.sequences_N is not None:
        losses_of, prices, zero_one = bounded_losses, LOG_PRICES, False
    else:
        # The prices at which the loss may change. At a price of 1, the price of a whole loss, every input leaves.
        changes = np.append(np.unique([path.log_prices_NR(view) for view in views]), 0.0)
        prices = np.where(changes[1:] < 0, (changes[:-1] + changes[1:]) / 2, changes[1:])
        losses_of, zero_one = ExitRecords.worst_losses_N, tested.zero_one

    def worst_losses(thresholds: Mapping[int, float]) -> FloatArray:
        return np.asarray(np.max([losses_of(view, thresholds) for view in views], axis=0))

    def fails(log_price: float) -> bool:
        losses = worst_losses(path.thresholds(log_price))
        return not guarantee.holds(float(losses.sum()), len(losses), zero_one=zero_one)

    passed = bisect_left(prices, True, key=fails)  # losses never fall along the path
    thresholds = path.thresholds(float(prices[passed - 1])) if passed else {}
    worst_loss = float(worst_losses(thresholds).mean())
    return Calibration(thresholds=thresholds, tested=tested.outcome(thresholds), worst_loss=worst_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdPath:
    """Threshold vectors from "never leave" to "always leave", indexed by the logarithm of the price.

    The risk of a ramp is the logistic model sigmoid(-(slope * x + offset)), where x is the sureness of the score.
    """

    score: Score
    ramps: tuple[int, ...]
    slope_R: FloatArray
    offset_R: FloatArray
    saved_R: FloatArray
    """The computation that leaving saves, at least 1."""

    def thresholds(self, log_price: float) -> dict[int, float]:
        """Returns the threshold vector at a price. At a logarithm of 0, every input leaves."""
        log_risk_R = np.minimum(log_price + np.log(self.saved_R), 0.0)
        with np.errstate(divide="ignore"):  # a risk of 1 has odds of 0
            log_odds_R = np.log(-np.expm1(log_risk_R)) - log_risk_R
        sureness_R = (log_odds_R - self.offset_R) / self.slope_R
        return dict(zip(self.ramps, map(SCORES[self.score].score_at, sureness_R.tolist()), strict=True))

    def log_prices_NR(self, records: ExitRecords) -> FloatArray:
        """Returns the least price at which each input may leave at each ramp, as logarithms."""
        sureness_NR = SCORES[self.score].sureness(records.scores_NR.astype(np.float64))
        log_risk_NR = -np.logaddexp(0, self.slope_R * sureness_NR + self.offset_R)
        return np.asarray(log_risk_NR - np.log(self.saved_R))


def lay_path(design: ExitRecords, block_costs: Sequence[float] | None = None) -> ThresholdPath:
    """Fits the path on the design part.

    `block_costs` holds the cost of each block in any unit; None: all blocks cost the same. Raises DataError unless
    there is one finite, positive cost per block.
    """
    risks = [_fit_risk(design, column) for column in range(len(design.ramps))]
    slope_R, offset_R = np.array(risks).reshape(-1, 2).T
    saved_R = design.num_blocks - 1.0 - np.array(design.ramps)
    if block_costs is not None:
        if len(block_costs) != design.num_blocks or not all(0 < cost < np.inf for cost in block_costs):
            raise DataError(f"{design.num_blocks} blocks need as many costs, all finite and above 0")
        left_R = np.array([float(sum(block_costs[ramp + 1 :])) for ramp in design.ramps])
        saved_R = left_R / left_R.min(initial=np.inf)  # relative to the least
    return ThresholdPath(score=design.score, ramps=design.ramps, slope_R=slope_R, offset_R=offset_R, saved_R=saved_R)


def _fit_risk(design: ExitRecords, column: int) -> tuple[float, float]:
    """Returns the slope and the offset of a ramp's risk model."""
    sureness_N = SCORES[design.score].sureness(design.scores_NR[:, column].astype(np.float64))
    kept_N = 1 - design.losses_NR[:, column]

    def loss(parameters: FloatArray) -> tuple[float, FloatArray]:
        """Returns the cross entropy, which also accepts losses between 0 and 1, and its gradient."""
        z_N = parameters[0] * sureness_N + parameters[1]
        error_N = np.exp(-np.logaddexp(0, -z_N)) - kept_N
        value = float(np.logaddexp(0, z_N).sum() - kept_N @ z_N + RIDGE * (parameters @ parameters))
        return value, np.array([error_N @ sureness_N, error_N.sum()]) + 2 * RIDGE * parameters

    from scipy.optimize import minimize

    slope, offset = minimize(loss, np.array([1.0, 0.0]), jac=True, method="BFGS").x
    return max(float(slope), FLATTEST), float(offset)


def sequences_of(records: ExitRecords) -> list[IntArray]:
    """Returns the rows of each sequence, in order; raises DataError if they do not lie one after the other."""
    assert records.sequences_N is not None, "the records are of sequences"
    starts_S = np.flatnonzero(np.diff(records.sequences_N, prepend=records.sequences_N[0] - 1))
    if len(set(records.sequences_N[starts_S].tolist())) != len(starts_S):
        raise DataError("the tokens of a sequence must lie one after the other")
    return np.split(np.arange(len(records)), starts_S[1:])


def bounded_losses(records: ExitRecords, thresholds: Mapping[int, float]) -> FloatArray:
    """Returns the bounded loss of each sequence, (S,): the share of tokens from the first different answer on.

    Exit records are of the full model's generations, with all ramps evaluated. If skipped keys and values are computed
    by the full model (fill `compute`), an early-exit generation equals the full one up to the first token that leaves
    at a ramp with another answer. All later tokens may differ, and count as different. So the loss needs no new
    generation per threshold, never falls along the path, and is valid for every subset of the ramps. It is not valid
    for the fill `copy`.
    """
    wrong_N = records.worst_losses_N(thresholds) > 0
    return np.array([np.logical_or.accumulate(wrong_N[rows]).mean() for rows in sequences_of(records)])


LEAST_GAIN = 0.25
"""Share of the mean cost that an additional ramp must save on the design rows. The margin is large because the best of
many ramps looks better on few rows than it is on others."""


def few_ramps(
    design: ExitRecords,
    guarantee: Guarantee,
    num_tested: int,
    always: Sequence[int],
    *,
    first: int = 0,
    block_costs: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Returns the ramps in `always` and, by greedy selection, those that reduce the mean cost most; at least one.

    A guarantee holds for every subset of the ramps that are tested together. Each additional ramp therefore makes the
    thresholds of the others stricter, and pays only if it saves more than that. The tested rows have no part in the
    selection, so the guarantee stays valid.

    Inputs enter at block `first`. Their cost is estimated with the thresholds that the test would accept if the
    `num_tested` rows were like the design rows. `block_costs` are those of `lay_path`. Raises DataError as it does.
    """
    costs = tuple(block_costs or [1.0] * design.num_blocks)
    spent, end_losses_N = np.cumsum(costs[first:]), design.worst_losses_N({})
    all_log_prices_NR = lay_path(design, costs).log_prices_NR(design)

    def mean_cost(ramps: Sequence[int]) -> float:
        """Returns the mean cost of the blocks that an input runs if these ramps are calibrated and active."""
        columns = [design.ramps.index(ramp) for ramp in sorted(ramps)]
        log_prices_NR = all_log_prices_NR[:, columns]
        losses_NR, prices = design.losses_NR[:, columns], np.unique(log_prices_NR)

        def fails(price: float) -> bool:
            worst_N = np.where(log_prices_NR <= price, losses_NR, 0.0).max(1, initial=0.0)
            as_tested = float(np.maximum(worst_N, end_losses_N).sum()) * (num_tested / len(design))
            return not guarantee.holds(as_tested, num_tested, zero_one=design.zero_one)

        passing = bisect_left(prices, True, key=fails)
        max_price = prices[passing - 1] if passing else -np.inf
        leaves_NE = np.column_stack([log_prices_NR <= max_price, np.ones(len(design), dtype=bool)])
        cost_E = np.array([*(spent[design.ramps[column] - first] for column in columns), spent[-1]])
        return float(cost_E[leaves_NE.argmax(axis=1)].mean())

    chosen, cost = tuple(always), mean_cost(always)
    while others := [ramp for ramp in design.ramps if ramp not in chosen]:
        by_ramp = {ramp: mean_cost((*chosen, ramp)) for ramp in others}
        best = min(others, key=by_ramp.__getitem__)
        if chosen and by_ramp[best] > cost * (1 - LEAST_GAIN):
            break
        chosen, cost = (*chosen, best), by_ramp[best]
    return tuple(sorted(chosen))


ShareArray = npt.NDArray[np.float32]

LEVELS: ShareArray = np.array([*np.arange(1, 100) / 100, 0.995, 0.999], dtype=np.float32)
"""Recorded confidence levels. They are denser near 1, because fully trained networks are very confident."""
NUM_CONFIDENCES = 10
"""Candidates per ramp, as in PAME."""


def choose_confidences(shares_DRL: ShareArray, losses_DR: FloatArray, budget: float) -> list[int]:
    """Returns, per ramp, the index in `LEVELS` of the confidence whose score lets most inputs leave within the budget.

    `shares_DRL` holds the share of principal values above each level, by design input and ramp. PAME (sections 5.3 and
    6.2) searches ten confidences together with ten thresholds of the count, for each exit alone. Here the count is the
    score `share`, whose threshold is calibrated afterwards, and the confidence is a setting of that score. It is
    selected on the design part, so that it does not depend on the tested inputs.
    """
    return [
        max(candidates(shares_DL), key=lambda level: _worth(shares_DL[:, level], losses_D, budget))
        for shares_DL, losses_D in zip(shares_DRL.transpose(1, 0, 2), losses_DR.T, strict=True)
    ]


def candidates(shares_DL: ShareArray) -> list[int]:
    """Returns the indices of up to ten levels at evenly spaced quantiles of the principal values."""
    quantiles = (np.arange(NUM_CONFIDENCES) + 0.5) / NUM_CONFIDENCES
    above_L = shares_DL.mean(0)
    return sorted({int(np.abs(above_L - quantile).argmin()) for quantile in quantiles})


def _worth(score_D: ShareArray, losses_D: FloatArray, budget: float) -> tuple[int, float]:
    """Returns the number of inputs that can leave within the budget, surest first; then the smallest total loss."""
    order = np.argsort(-score_D, kind="stable")
    ends = np.flatnonzero(np.diff(score_D[order], append=-np.inf))  # inputs with equal scores leave together
    lost = np.cumsum(losses_D[order])[ends]
    within = ends[lost <= budget * len(losses_D)]
    weights = np.diff(ends, prepend=-1)
    return int(within[-1]) + 1 if len(within) else 0, -float(weights @ lost)
