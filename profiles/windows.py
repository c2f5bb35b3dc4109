"""Estimates for a window of the live stream, for any set of active ramps and thresholds.

Probes are a uniform sample with complete observations. For other inputs, only the ramps that the plan ran were
observed, which is often enough: an input that left at ramp 3 with a confidence of 0.9 would also leave there with a
threshold of 0.8, if ramp 3 were the only one. Inputs are divided into the *known*, whose exit follows from the ramps
that the plan ran, and the *rest*. The division depends on the plan and the input, but *not on whether the input is a
probe*: for a probe, only the ramps that the plan would have run count. Thus both groups have known sizes:

    estimate = (sum over the known + size of the rest * mean over the probes among the rest) / inputs

The sum over the known has no sampling error. The probes among the rest are a uniform sample of the rest, so that their
mean is unbiased for any share of probes. (Probes come in batches. The mean is then a ratio of two random sums, whose
bias falls with the number of batches.) If answered inputs stay, and all ramps in question were active, every input is
known, for any thresholds. Inactive ramps are estimated from probes only. A window in which inputs began to stay has all
inputs of its later part, but only the probes of its earlier part.

Limits: without a probe among the rest, a window has no estimate, or a guess if the rest is tiny (MOST_GUESSED). Pooled
windows of few inputs therefore give too little weight to the rest. The number of probes among the rest is random. If it
is small, the estimate can have a larger error than the mean over all probes.

Rejected alternatives: the mean over *all probes* is unbiased, but ignores most observations. *Horvitz-Thompson*
(weight 1 for the known, 1 / probe_share for the rest) is unbiased too, but its variance grows with the mean square
rather than with the variance, and it needs the share. *All observed scores of each ramp* are biased, because earlier
ramps decide which inputs a ramp observes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from earlyexit.errors import DataError
from profiles.records import ExitRecords, IntArray
from profiles.scores import BoolArray, FloatArray, sure_NR
from profiles.stream import ExitStream, Observations

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalHistory:
    """Survival per block (K) over past windows (W), oldest first. Raises DataError for impossible values."""

    survival_WK: FloatArray
    """Share of a window's inputs that reach each block: 1 at block 0, never rising. Arbitrary in missing windows."""
    inputs_WK: FloatArray
    """Effective sample size of each share: the number of inputs if all were observed."""
    missing_W: BoolArray
    """Windows without an estimate."""
    worth_WR: FloatArray | None = None
    """Effective number of inputs that reach each ramp (R: one after every block but the last), for the share that
    continues there. None if survival is from one sample: then the inputs of the sample that reach the ramp. Otherwise,
    one ramp's share may be counted and another's estimated from probes, which have different sample sizes."""

    def __post_init__(self) -> None:
        if self.survival_WK.ndim != 2 or not self.survival_WK.shape[1]:
            raise DataError("survival needs a row per window and a column per block")
        if self.inputs_WK.shape != self.survival_WK.shape or self.missing_W.shape != self.survival_WK.shape[:1]:
            raise DataError("survival, inputs and missing windows must have the same number of windows and blocks")
        survival_WK, inputs_WK = self.survival_WK[~self.missing_W], self.inputs_WK[~self.missing_W]
        if not (np.isfinite(survival_WK).all() and np.isfinite(inputs_WK).all()):
            raise DataError("survival and inputs must be numbers in every window that is not missing")
        if (inputs_WK < 0).any():
            raise DataError("the number of inputs in a window must be at least 0")
        self._check_worth()
        if (np.abs(survival_WK[:, 0] - 1) > ROUNDING).any() or (survival_WK < 0).any():
            raise DataError("survival must be 1 at the first block and at least 0 after it")
        if (rises_W := (np.diff(self.survival_WK, axis=1) > ROUNDING).any(1) & ~self.missing_W).any():
            raise DataError(f"survival must not rise from block to block, as it does in window {rises_W.argmax()}")

    def _check_worth(self) -> None:
        if self.worth_WR is None:
            return
        num_windows, num_blocks = self.survival_WK.shape
        if self.worth_WR.shape != (num_windows, num_blocks - 1):
            raise DataError("effective inputs of ramps need a row per window and a column per block but the last")
        worth_WR = self.worth_WR[~self.missing_W]
        if not np.isfinite(worth_WR).all() or (worth_WR < 0).any():
            raise DataError("effective inputs of ramps must be finite and at least 0 in windows that are not missing")

    @classmethod
    def from_counts(cls, reach_WK: FloatArray) -> SurvivalHistory:
        """Returns the history of counts of inputs that reached each block. Windows of 0 inputs or NaN are missing."""
        reach_WK = np.asarray(reach_WK, dtype=np.float64)
        if reach_WK.ndim != 2 or not reach_WK.shape[1]:
            raise DataError("counts need a row per window and a column per block")
        if (reach_WK < 0).any():
            raise DataError("the number of inputs in a window must be at least 0")
        missing_W = np.isnan(reach_WK).all(1) | (reach_WK[:, 0] == 0)
        inputs_W1 = np.where(missing_W, 1.0, reach_WK[:, 0])[:, None]
        return cls(
            survival_WK=reach_WK / inputs_W1,
            inputs_WK=np.where(missing_W[:, None], 0.0, np.broadcast_to(inputs_W1, reach_WK.shape)),
            missing_W=missing_W,
        )

    def __len__(self) -> int:
        return len(self.missing_W)

    @property
    def num_blocks(self) -> int:
        return int(self.survival_WK.shape[1])

    @property
    def reach_WR(self) -> FloatArray:
        """Effective number of inputs that reach each ramp (R: one after every block but the last); 0 if missing."""
        worth_WR = self.inputs_WK[:, 1:] * self.survival_WK[:, :-1] if self.worth_WR is None else self.worth_WR
        return np.where(self.missing_W[:, None], 0.0, worth_WR)

    @property
    def go_on_WR(self) -> FloatArray:
        """Effective number of inputs that reach each ramp and do not leave there; 0 if missing."""
        before_WR, after_WR = self.survival_WK[:, :-1], self.survival_WK[:, 1:]
        some_WR = ~self.missing_W[:, None] & (before_WR > 0)
        share_WR = np.divide(np.minimum(after_WR, before_WR), before_WR, out=np.zeros_like(before_WR), where=some_WR)
        return np.asarray(self.reach_WR * share_WR)


FALSE_ALARM = 3e-4
"""Probability that sampling noise alone makes a window differ by more than the limit for a jump."""
COMPARED = 3
"""Number of pooled previous windows with which a window is compared. With more, a slow drift looks like a jump."""
USUAL = 30
"""Number of windows from which the usual difference is estimated."""
LEAST_USUAL = 6
"""Minimum of these windows. With fewer, a jump cannot be distinguished from a drift, and no jump is detected."""
FEW_USUAL = 12
"""If there are fewer previous windows, later windows are used too, because the quantile would be too uncertain."""
RARE = 0.9
"""Quantile of the differences that represents the speed of a drift, which is not constant."""
BEYOND = 16.0
"""Factor by which a jump must exceed the drift at that quantile. It does not depend on the number of ramps, because a
drift moves all of them. On simulated drifts of 60 windows, 16 gives a false break in at most 9 % of the histories, and
4 in up to 39 %."""


def last_break(reach_WR: FloatArray, go_on_WR: FloatArray) -> int:
    """Returns the window (W) with which the last jump began; 0 if there was none.

    A window is a jump if its shares `go_on / reach`, over all ramps (R), differ from those of the previous windows by
    more than sampling noise explains (likelihood ratio of binomials, chi-squared with R degrees of freedom), and by
    much more than the usual difference between windows. Under a drift, all windows differ, and none is a jump.
    """
    from scipy.stats import chi2

    num_windows, num_ramps = reach_WR.shape
    if num_ramps == 0 or num_windows < 2:
        return 0
    limit, by_chance = float(chi2.isf(FALSE_ALARM, num_ramps)), float(chi2.ppf(RARE, num_ramps))
    from_before_W = _from_before(reach_WR, go_on_WR, 0, [*range(1, num_windows)])
    usual: list[float] = []
    start = 0
    for window, difference in enumerate(from_before_W, 1):
        if start > max(0, window - COMPARED):
            [difference] = _from_before(reach_WR, go_on_WR, start, [window])
        # Windows whose comparison does not include this one.
        later = from_before_W[window + COMPARED :][: max(0, FEW_USUAL - len(usual))]
        others = usual[-USUAL:] + later
        if difference > limit and len(others) >= LEAST_USUAL:
            drift = max(0.0, float(np.quantile(others, RARE)) - by_chance)
            if difference > limit + BEYOND * drift:
                start = window
                continue
        usual.append(difference)
    return start


def _from_before(reach_WR: FloatArray, go_on_WR: FloatArray, start: int, windows: list[int]) -> list[float]:
    """Returns twice the log likelihood ratio between each window and the previous ones, none older than `start`."""
    before = [slice(max(start, window - COMPARED), window) for window in windows]
    reach_BR, go_on_BR = (np.array([all_WR[rows].sum(0) for rows in before]) for all_WR in (reach_WR, go_on_WR))
    reach_WR, go_on_WR = reach_WR[windows], go_on_WR[windows]
    separate_WR = _log_likelihood(reach_BR, go_on_BR) + _log_likelihood(reach_WR, go_on_WR)
    pooled_WR = _log_likelihood(reach_BR + reach_WR, go_on_BR + go_on_WR)
    return [2 * ratio for ratio in (separate_WR - pooled_WR).sum(1).tolist()]


def _log_likelihood(reach_WR: FloatArray, go_on_WR: FloatArray) -> FloatArray:
    """Returns the maximum log likelihood of binomial counts; 0 without inputs, and if all inputs did the same."""
    from scipy.special import xlogy

    leave_WR = reach_WR - go_on_WR
    return np.asarray(xlogy(go_on_WR, go_on_WR) + xlogy(leave_WR, leave_WR) - xlogy(reach_WR, reach_WR))


MOST_GUESSED = 0.01
"""Largest share of the rest for which the middle of the possible values is used if there is no probe among the rest.
Its error is at most half a point, but has the same sign in all such windows, so that pooling does not reduce it. The
effective sample size accounts for the largest possible error. Above this share, there is no estimate."""
HALF = 0.5
"""Inputs that Jeffreys' prior adds to both outcomes, so that no sample has an estimated error of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An estimated share of inputs."""

    value: float
    effective_inputs: float
    """Effective sample size: inputs of a random sample with the same variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts for the estimate of a share: the inputs that continue among those that reach a ramp."""

    reaching: float
    """Known inputs that reach the ramp."""
    going: float
    """Known inputs that continue there."""
    num_rest: int = 0
    num_probes: int = 0
    """Probes among the rest."""
    probes_reaching: int = 0
    probes_going: float = 0.0

    def effective_inputs(self, rest_share: float | None = None) -> float:
        """Returns n such that share * (1 - share) / n is the variance of the estimate of the share.

        The share is a ratio of two estimates. Its variance is that of the mean of (continues - share * reaches), over
        the square of the share that reaches. It has two parts: from drawing the window's inputs, and from drawing the
        probes among the rest without replacement. `rest_share`: the share among the rest; None for the share of its
        probes. Jeffreys' prior is applied to the share of the rest, and the whole share follows. Thus if nothing is
        known, n is the number of probes that reach the ramp, regardless of their exits.
        """
        if rest_share is None or not self.num_probes:
            rest_share = (self.probes_going + HALF) / (self.probes_reaching + 1)
        rest_reaches = max(self.probes_reaching, HALF) / self.num_probes if self.num_probes else 1.0
        reached = self.reaching + self.num_rest * rest_reaches
        if reached == 0:
            return 0.0
        least = HALF / (reached + 1)
        share = min(max((self.going + self.num_rest * rest_reaches * rest_share) / reached, least), 1 - least)
        square = rest_reaches * (rest_share * (1 - share) ** 2 + (1 - rest_share) * share**2)
        rest_variance = square - (rest_reaches * (rest_share - share)) ** 2
        # Without a probe, the estimate is a guess, whose error may be half of the rest.
        per_probe = 1 / self.num_probes - 1 / self.num_rest if self.num_probes else 1.0
        drawing, sampling = share * (1 - share) * reached, self.num_rest**2 * rest_variance * per_probe
        return share * (1 - share) * reached**2 / (drawing + sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEstimate:
    """Estimates for a window under one set of active ramps and thresholds; None if there is no estimate."""

    num_inputs: int
    survival: tuple[Share, ...] | None
    """The share of inputs that would reach each block."""
    go_on: tuple[Counts, ...] | None
    """For each block but the last, the counts for the share that continues, survival[k + 1] / survival[k]. Its
    effective sample size does not follow from survival, whose entries may be counts or estimates from few probes."""
    agreement: Share | None
    """1 - mean loss against the full model; for labels, the share of inputs with the full model's label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The observations of one period."""

    start_s: float
    observations: Observations

    @property
    def num_inputs(self) -> int:
        return len(self.observations)

    @property
    def num_probes(self) -> int:
        return int(self.observations.probe_N.sum())

    def records(self) -> ExitRecords:
        """Returns the exit records of the probes. Raises DataError if there are none."""
        if not self.num_probes:
            raise DataError(f"the window that began at {self.start_s:g} s has no probes, which exit records need")
        probes = self.observations.take(self.observations.probe_N)
        ids = [f"{self.start_s:.0f}-{row}" for row in np.flatnonzero(self.observations.probe_N)]
        return probes.records(probes.shape.ramps, ids)

    def estimate(self, thresholds: Mapping[int, float]) -> WindowEstimate:
        """Returns estimates for the case that exactly the ramps in `thresholds` are active.

        Raises DataError for ramps that the stream does not have, and for thresholds that are not numbers.
        """
        seen = self.observations
        plain = _exits(seen, thresholds, seen.would_see_NR)
        full = _exits(seen, thresholds, seen.would_see_NR | seen.probe_N[:, None])
        to_end_known_N = plain.known_N & (plain.to_end_N | seen.would_end_N)
        division = _Division.of(plain.known_N, seen.probe_N)
        survival = _survival(division, plain, full, seen.shape.num_blocks)
        losses_N = seen.losses_NE[np.arange(len(seen)), full.column_N].astype(np.float64)  # NaN if unknown
        return WindowEstimate(
            num_inputs=self.num_inputs,
            survival=survival,
            go_on=None if survival is None else _go_on(division, plain, full, survival, thresholds),
            agreement=_share(1 - losses_N, _Division.of(to_end_known_N, seen.probe_N)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exits:
    """Exits of inputs, from a part of their scores."""

    exits_N: IntArray
    """The exit if the scores that are not in this part do not let the input leave."""
    known_N: BoolArray
    """Whether the part has the scores of all active ramps up to the exit, so that the exit is certain."""
    earliest_N: IntArray
    """The earliest possible exit: the first active ramp whose score is not in the part, or the exit."""
    to_end_N: BoolArray
    column_N: IntArray
    """The column of the exit's ramp; the number of ramps for the end."""


def _exits(seen: Observations, thresholds: Mapping[int, float], observed_NR: BoolArray) -> _Exits:
    ramps = np.array(seen.shape.ramps, dtype=np.int64)
    sure = sure_NR(seen.shape.score, seen.shape.ramps, seen.scores_NR, thresholds) & observed_NR
    active_R = np.array([ramp in thresholds for ramp in seen.shape.ramps], dtype=bool)
    # A column after the ramps stands for the last block, where all inputs leave.
    leaves_NE = np.column_stack([sure, np.ones(len(seen), dtype=bool)])
    unobserved_NE = np.column_stack([active_R & ~observed_NR, np.zeros(len(seen), dtype=bool)])
    column_N = leaves_NE.argmax(1)
    first_unobserved_N = np.where(unobserved_NE.any(1), unobserved_NE.argmax(1), len(ramps))
    blocks = np.append(ramps, seen.shape.num_blocks - 1)
    return _Exits(
        exits_N=blocks[column_N],
        known_N=np.asarray(column_N <= first_unobserved_N),
        earliest_N=blocks[np.minimum(column_N, first_unobserved_N)],
        to_end_N=np.asarray(column_N == len(ramps)),
        column_N=column_N,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """The division of inputs into the known and the rest, and the probes among the rest."""

    known_N: BoolArray
    sampled_N: BoolArray
    num_rest: int
    num_sampled: int

    @classmethod
    def of(cls, known_N: BoolArray, probe_N: BoolArray) -> _Division:
        sampled_N, num_rest = probe_N & ~known_N, int((~known_N).sum())
        return cls(known_N=known_N, sampled_N=sampled_N, num_rest=num_rest, num_sampled=int(sampled_N.sum()))

    @property
    def num_inputs(self) -> int:
        return len(self.known_N)

    def counts(self, going_N: BoolArray | FloatArray, reaching_N: BoolArray) -> Counts:
        """Returns the counts of the known, and of the probes among the rest. Values of other inputs are not used."""
        return Counts(
            reaching=float(reaching_N[self.known_N].sum()),
            going=float(going_N[self.known_N].sum()),
            num_rest=self.num_rest,
            num_probes=self.num_sampled,
            probes_reaching=int(reaching_N[self.sampled_N].sum()),
            probes_going=float(going_N[self.sampled_N].sum()),
        )

    def settles(self, earliest_N: IntArray, block: int) -> bool:
        """Returns whether all inputs of the rest certainly reach the block, so that survival there is a count."""
        return bool((earliest_N[~self.known_N] >= block).all())


def _survival(division: _Division, plain: _Exits, full: _Exits, num_blocks: int) -> tuple[Share, ...] | None:
    """Returns survival, with the same division for all blocks, so that it cannot rise. None if there is no estimate."""
    shares = []
    for block in range(num_blocks):
        guess_N = ((plain.earliest_N >= block) + (plain.exits_N >= block).astype(np.float64)) / 2
        share = _share(full.exits_N >= block, division, guess_N)
        if share is None:
            return None
        settled = division.settles(plain.earliest_N, block)
        shares.append(replace(share, effective_inputs=float(division.num_inputs)) if settled else share)
    return tuple(shares)


def _go_on(
    division: _Division, plain: _Exits, full: _Exits, survival: tuple[Share, ...], active: Collection[int]
) -> tuple[Counts, ...]:
    counts = []
    for block, (share, after) in enumerate(pairwise(survival)):
        if share.value == 0 or block not in active or division.settles(plain.earliest_N, block + 1):
            reaching, going = share.value * division.num_inputs, after.value * division.num_inputs
            counts.append(Counts(reaching=reaching, going=going))
        else:
            counts.append(division.counts(full.exits_N > block, full.exits_N >= block))
    return tuple(counts)


def _share(going_N: BoolArray | FloatArray, division: _Division, guess_N: FloatArray | None = None) -> Share | None:
    """Returns the estimate of the mean of `going_N` by the module's formula; None if there is no estimate.

    `going_N` has values in [0, 1], whose variance is at most that of 0 and 1. Only known inputs and probes are used.
    `guess_N`: values for the rest if it has no probe and is tiny; None for 1/2.
    """
    if division.num_inputs == 0:
        return None
    counts = division.counts(going_N, np.ones(division.num_inputs, dtype=bool))
    if division.num_sampled or not division.num_rest:
        mean = counts.probes_going / max(division.num_sampled, 1)
    elif division.num_rest <= MOST_GUESSED * division.num_inputs:
        mean = HALF if guess_N is None else float(guess_N[~division.known_N].mean())
    else:
        return None
    value = (counts.going + division.num_rest * mean) / division.num_inputs
    return Share(value=value, effective_inputs=counts.effective_inputs())


def windows(stream: ExitStream, now_s: float) -> tuple[Window, ...]:
    """Returns the complete windows of a stream, oldest first, including windows without inputs."""
    return tuple(
        Window(start_s=index * stream.period_s, observations=stream.window(index))
        for index in stream.whole_windows(now_s)
    )


def survival_history(estimates: Sequence[WindowEstimate]) -> SurvivalHistory:
    """Returns the history for a forecast. Windows without an estimate are missing; DataError if all are.

    Effective sample sizes are computed from the probes of all windows. With a window's own probes, the windows whose
    probes agree by chance would get the largest weights, and the pooled estimate would be biased towards them.
    """
    num_blocks = next((len(estimate.survival) for estimate in estimates if estimate.survival is not None), None)
    if num_blocks is None:
        raise DataError("no window has an estimate of survival: none has probes, or observed the active ramps")
    missing = (Share(value=np.nan, effective_inputs=np.nan),) * num_blocks
    rows = [estimate.survival or missing for estimate in estimates]
    return SurvivalHistory(
        survival_WK=np.array([[share.value for share in row] for row in rows]),
        inputs_WK=np.array([[share.effective_inputs for share in row] for row in rows]),
        missing_W=np.array([estimate.survival is None for estimate in estimates]),
        worth_WR=_worth_WR([estimate.go_on for estimate in estimates], num_blocks - 1),
    )


def _worth_WR(counts_W: Sequence[tuple[Counts, ...] | None], num_ramps: int) -> FloatArray:
    worth_WR = np.full((len(counts_W), num_ramps), np.nan)
    for ramp in range(num_ramps):
        counts = {window: counts_R[ramp] for window, counts_R in enumerate(counts_W) if counts_R is not None}
        going = sum(of_window.probes_going for of_window in counts.values())
        reaching = sum(of_window.probes_reaching for of_window in counts.values())
        rest_share = (going + HALF) / (reaching + 1)
        for window, of_window in counts.items():
            worth_WR[window, ramp] = of_window.effective_inputs(rest_share)
    return worth_WR
