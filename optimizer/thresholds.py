"""Thresholds with a guarantee: mean loss against the full model at most the budget, with stated confidence.

Learn-then-Test with fixed-sequence testing, as CALM uses it. The calibration inputs are divided. On the *design* part
one path of threshold vectors is laid, from never to always; on the rest the path is walked while a test rejects "this
loses more than the budget" (`optimizer/risk.py`). The path never sees the inputs it is tested on, so the bound holds
for any path; a good one only makes it cheap.

What is promised holds for *every subset* of the ramps, because planners switch ramps off: an input counts with the
largest loss of all ramps that are sure of it (`ExitRecords.worst_losses_N`). Along the path more and more ramps are
sure, so that loss never falls, and the thresholds sought are those just before the first point where the test fails.

The path: at ramp r a logistic model, fitted on the design part, gives the loss to be expected of the ramp's answer. An
input may leave where that risk is at most `price` times what leaving saves, and `price` grows along the path from 0.
What leaving saves are blocks; where these are of several networks, or not alike, their seconds. The path is not walked
in steps: losses change only where a tested input's score is reached, so those prices are all there is to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from optimizer.risk import Guarantee
from profiles.records import ExitOutcome, ExitRecords, IntArray
from profiles.scores import SCORES, FloatArray, Score

LEAST_DESIGN_SHARE = 0.1
FLATTEST = 1e-3
"""Slope of a ramp whose score says nothing, or the opposite of the truth."""
RIDGE = 0.01
"""Keeps the slope finite where the ramp is never wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Thresholds and what they did on the inputs they were tested on."""

    thresholds: dict[int, float]
    """Per ramp, in the unit of the records' score; no ramps where nothing could be promised."""
    tested: ExitOutcome
    """With all ramps active."""
    worst_loss: float
    """What was held against the budget: the mean over the tested inputs of the worst that a subset of ramps can do."""


def design_rows(num_inputs: int, guarantee: Guarantee, share: float) -> int:
    """Inputs that lay the path: that share, or fewer if only then the test allows a loss.

    A test that allows none ends the path at the first wrong answer; a second one is worth more than a finer path (on
    436 of SST-2's inputs at 1 %, 0.4 of 11 blocks). Not fewer than a tenth.
    """
    forgiving = num_inputs - guarantee.inputs_for(1)
    usual = round(num_inputs * share)
    return min(usual, forgiving) if forgiving >= num_inputs * LEAST_DESIGN_SHARE else usual


def split_rows(num_inputs: int, num_first: int, seed: int) -> tuple[IntArray, IntArray]:
    """Rows of two parts, drawn at random, the first with so many."""
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
    """The boldest thresholds on the path that the test accepts; raises DataError for too few inputs.

    What is kept to is the mean of `losses_NR` and `end_losses_N`, whatever these count. Where the end alone loses more
    than the budget no ramp has a threshold, and `worst_loss` says so. `block_costs` as in `lay_path`. `others`: the
    tested inputs as other plans see them, such as those that leave networks of an ensemble out; an input counts with
    the worst of all.
    """
    if len(tested) < guarantee.least_inputs:
        raise DataError(
            f"{len(tested)} calibration inputs cannot show agreement of {1 - guarantee.budget:.1%} with confidence "
            f"{guarantee.confidence:.0%}; {guarantee.least_inputs} are needed"
        )
    path = lay_path(design, block_costs)
    views = (tested, *others)
    for log_price in _passing(path, views, guarantee):
        thresholds = path.thresholds(log_price)
        total = float(_worst_losses_N(views, thresholds).sum())
        # As policies compare, in float32: a threshold between two scores may round to the wrong one of them.
        if guarantee.holds(total, len(tested), zero_one=tested.zero_one):
            return Calibration(thresholds=thresholds, tested=tested.outcome(thresholds), worst_loss=total / len(tested))
    return Calibration(thresholds={}, tested=tested.outcome({}), worst_loss=float(_worst_losses_N(views, {}).mean()))


def _worst_losses_N(views: Sequence[ExitRecords], thresholds: Mapping[int, float]) -> FloatArray:
    """Per input, the largest loss of any view of it."""
    return np.asarray(np.max([view.worst_losses_N(thresholds) for view in views], axis=0))


def _passing(path: Path, views: Sequence[ExitRecords], guarantee: Guarantee) -> Sequence[float]:
    """Prices before the first at which the test fails, the boldest first; between those at which inputs leave.

    The rest of the path is left out: prices further back only matter where rounding spoils one or two.
    """
    log_prices_NR = np.concatenate([path.log_prices_NR(view) for view in views], axis=1)
    losses_NR = np.concatenate([view.losses_NR for view in views], axis=1)
    prices, totals = worst_totals(log_prices_NR, losses_NR, _worst_losses_N(views, {}))
    allowed = guarantee.most_loss(totals, len(views[0]), zero_one=views[0].zero_one)
    count = int(np.searchsorted(totals, allowed, side="right"))
    # Whatever the ramps say, every input leaves where the price is that of a whole loss.
    upper = [0.0] if count == len(prices) else []
    known = [*prices[max(count - 3, 0) : count + 1].tolist(), *upper]
    return [(low + high) / 2 if high < 0 else high for low, high in pairwise(known)][::-1]


def worst_totals(
    log_prices_NR: FloatArray, losses_NR: FloatArray, end_losses_N: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The prices at which a ramp becomes sure of an input, ascending, and the sum of the worst losses from each on.

    Where no ramp is sure yet an input costs what the end costs.
    """
    order_NR = log_prices_NR.argsort(1)
    prices_NR = np.take_along_axis(log_prices_NR, order_NR, axis=1)
    worst_NR = np.maximum.accumulate(np.take_along_axis(losses_NR, order_NR, axis=1), axis=1)
    rises_NR = np.diff(np.maximum(worst_NR, end_losses_N[:, None]), axis=1, prepend=end_losses_N[:, None])
    prices, group = np.unique(prices_NR, return_inverse=True)
    rises = np.bincount(group.ravel(), weights=rises_NR.ravel(), minlength=len(prices))
    return prices, np.asarray(end_losses_N.sum() + np.cumsum(rises), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskModel:
    """Logistic risk of one ramp: sigmoid(-(slope * x + offset)), x the score's sureness."""

    slope: float
    offset: float
    score: Score

    def log_risk(self, scores: npt.NDArray[np.floating]) -> FloatArray:
        """The logarithm of the loss to be expected."""
        sureness = SCORES[self.score].sureness(scores.astype(np.float64))
        return np.asarray(-np.logaddexp(0, self.slope * sureness + self.offset))

    def threshold(self, log_risk: float) -> float:
        """The score at which the risk has fallen to this; out of reach where no score is that sure."""
        if log_risk >= 0:
            return SCORES[self.score].score_at(-np.inf)
        odds = float(np.log(-np.expm1(log_risk)) - log_risk)
        return SCORES[self.score].score_at((odds - self.offset) / self.slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Threshold vectors from never to always, by the logarithm of the price of what is saved."""

    models: Mapping[int, RiskModel]
    """Per ramp."""
    saved: Mapping[int, float]
    """Per ramp, what leaving there saves: nowhere less than 1."""

    def thresholds(self, log_price: float) -> dict[int, float]:
        """The vector at a price; at 0, a whole loss for 1 of what is saved, every input leaves."""
        return {ramp: model.threshold(log_price + self._log_saved(ramp)) for ramp, model in self.models.items()}

    def log_prices_NR(self, records: ExitRecords) -> FloatArray:
        """From which price on each ramp is sure of each input."""
        columns = [
            model.log_risk(records.scores_NR[:, column]) - self._log_saved(ramp)
            for column, (ramp, model) in enumerate(self.models.items())
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((len(records), 0))

    def _log_saved(self, ramp: int) -> float:
        return float(np.log(self.saved[ramp]))


def lay_path(design: ExitRecords, block_costs: Sequence[float] | None = None) -> Path:
    """The path that the design part suggests.

    `block_costs`: of every block, in seconds or any other unit; None: all cost the same. Raises DataError for others.
    """
    models = {ramp: _fit_risk(design, column) for column, ramp in enumerate(design.ramps)}
    if block_costs is None:
        return Path(models=models, saved={ramp: design.num_blocks - 1 - ramp for ramp in design.ramps})
    return Path(models=models, saved=saved_by_ramp(block_costs, design))


def saved_by_ramp(block_costs: Sequence[float], records: ExitRecords) -> dict[int, float]:
    """Per ramp, what the blocks after it cost, in units of the ramp after which least is left.

    Raises DataError where that many blocks have no costs, or costs are no finite numbers above 0.
    """
    if len(block_costs) != records.num_blocks or not all(0 < cost < np.inf for cost in block_costs):
        raise DataError(f"{records.num_blocks} blocks need as many costs, all finite and above 0")
    left = {ramp: float(sum(block_costs[ramp + 1 :])) for ramp in records.ramps}
    return {ramp: cost / min(left.values()) for ramp, cost in left.items()}


def _fit_risk(design: ExitRecords, column: int) -> RiskModel:
    sureness_N = SCORES[design.score].sureness(design.scores_NR[:, column].astype(np.float64))
    kept_N = 1 - design.losses_NR[:, column]

    def loss(parameters: FloatArray) -> tuple[float, FloatArray]:
        """Cross entropy, which takes losses between 0 and 1 as well, and its gradient."""
        z_N = parameters[0] * sureness_N + parameters[1]
        error_N = np.exp(-np.logaddexp(0, -z_N)) - kept_N
        value = float(np.logaddexp(0, z_N).sum() - kept_N @ z_N + RIDGE * (parameters @ parameters))
        return value, np.array([error_N @ sureness_N, error_N.sum()]) + 2 * RIDGE * parameters

    from scipy.optimize import minimize

    slope, offset = minimize(loss, np.array([1.0, 0.0]), jac=True, method="BFGS").x
    return RiskModel(slope=max(float(slope), FLATTEST), offset=float(offset), score=design.score)
