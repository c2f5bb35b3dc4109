"""Estimates of a window of the live stream, for any set of active ramps and thresholds.

Probes are a uniform sample with complete records. Of other inputs only what the plan ran was seen, and that often
answers the question: an input that left at ramp 3 with a confidence of 0.9 would leave there at 0.8 as well, if ramp 3
were the only one. So inputs divide into the *known*, for which the answer follows from what the plan ran, and the
*rest*. The plan and the input decide the side, *never whether it was a probe*: of a probe we ask what would have been
known had it been none. So both sides are populations of known size:

    estimate = (sum over the known + size of the rest * mean over the probes among the rest) / inputs

The known are a census, without error. The probes among the rest are a uniform sample of it, so that their mean is
unbiased, whatever the share of probes was. (Probes come in batches: the mean is then a ratio of two random sums, and
its bias falls with the number of batches.) Where answered inputs stay and all ramps in question were active, every
input is known, at any thresholds. Of inactive ramps only probes tell. A live window in which inputs began to stay holds
all inputs of its later part, but only the probes of its earlier part.

Limits: a window without a probe among its rest says nothing, or guesses if the rest is tiny (MOST_GUESSED). So pooled
windows of few inputs count the rest too little. Chance decides how many probes fall among the rest; with few, the
estimate can err more than the probes alone (root mean square 0.0081 against 0.0070 for 40 probes among 1,000 inputs, a
tenth of them the rest).

Rejected: *probes alone* are unbiased, but ignore the 98 % of inputs that saw the ramps. *Horvitz-Thompson* (known 1,
the rest 1 / probe_share) is unbiased too, but its variance grows with the mean square where ours grows with the
variance, and it needs the share. *Every observed score, per ramp* is biased: earlier ramps decide what was observed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from profiles.records import ExitRecords, IntArray
from profiles.scores import BoolArray, FloatArray, sure_NR
from profiles.stream import ExitStream, Observations

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalHistory:
    """Survival over past windows (W), oldest first, per block (K); refuses what cannot be."""

    survival_WK: FloatArray
    """Share of a window's inputs that reach block k: 1 at block 0, never rising. Anything where missing."""
    inputs_WK: FloatArray
    """Inputs that each share is worth: their number where all were seen, else the effective sample size."""
    missing_W: BoolArray
    """Windows that nothing is known of."""
    worth_WR: FloatArray | None = None
    """Inputs reaching each ramp (R: one after every block but the last) that the share going on there is worth. None
    where survival is that of one sample of inputs: then those of the sample that reach it. Where one ramp's share is
    counted and the next one's is from probes, no single sample size says both."""

    def __post_init__(self) -> None:
        if self.survival_WK.ndim != 2 or not self.survival_WK.shape[1]:
            raise DataError("survival needs a row per window and a column per block")
        if self.inputs_WK.shape != self.survival_WK.shape or self.missing_W.shape != self.survival_WK.shape[:1]:
            raise DataError("survival, inputs and missing windows must have as many windows and blocks")
        survival_WK, inputs_WK = self.survival_WK[~self.missing_W], self.inputs_WK[~self.missing_W]
        if not (np.isfinite(survival_WK).all() and np.isfinite(inputs_WK).all()):
            raise DataError("survival and inputs must be numbers in every window that is not missing")
        if (inputs_WK < 0).any():
            raise DataError("a window cannot have fewer than no inputs")
        self._check_worth()
        if (np.abs(survival_WK[:, 0] - 1) > ROUNDING).any() or (survival_WK < 0).any():
            raise DataError("survival must be 1 at the first block and at least 0 after it")
        if (np.diff(survival_WK, axis=1) > ROUNDING).any():
            raise DataError("survival rises: more inputs reach a block than the one before it")

    def _check_worth(self) -> None:
        if self.worth_WR is None:
            return
        num_windows, num_blocks = self.survival_WK.shape
        if self.worth_WR.shape != (num_windows, num_blocks - 1):
            raise DataError("the worth of shares needs a row per window and a column per block but the last")
        worth_WR = self.worth_WR[~self.missing_W]
        if not np.isfinite(worth_WR).all() or (worth_WR < 0).any():
            raise DataError("shares must be worth a number of inputs, at least 0, in every window that is not missing")

    @classmethod
    def from_counts(cls, reach_WK: FloatArray) -> SurvivalHistory:
        """From numbers of inputs that reached each block; a window without inputs is missing, as is one of NaN."""
        reach_WK = np.asarray(reach_WK, dtype=np.float64)
        if reach_WK.ndim != 2 or not reach_WK.shape[1]:
            raise DataError("counts need a row per window and a column per block")
        if (reach_WK < 0).any():
            raise DataError("a window cannot have fewer than no inputs")
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
        """Inputs' worth that reach each ramp (R: one after every block but the last); 0 in missing windows."""
        worth_WR = self.inputs_WK[:, 1:] * self.survival_WK[:, :-1] if self.worth_WR is None else self.worth_WR
        return np.where(self.missing_W[:, None], 0.0, worth_WR)

    @property
    def go_on_WR(self) -> FloatArray:
        """The same, of those that do not leave there."""
        before_WR, after_WR = self.survival_WK[:, :-1], self.survival_WK[:, 1:]
        some_WR = ~self.missing_W[:, None] & (before_WR > 0)
        share_WR = np.divide(np.minimum(after_WR, before_WR), before_WR, out=np.zeros_like(before_WR), where=some_WR)
        return np.asarray(self.reach_WR * share_WR)


FALSE_ALARM = 3e-4
"""Chance that sampling alone makes a window of a steady stream differ as much as a jump must."""
COMPARED = 3
"""Windows before, taken together, that a window is compared with: more would take a slow drift for a jump."""
USUAL = 30
"""Windows that say how much the stream differs anyway."""
LEAST_USUAL = 6
"""Fewer cannot tell a jump from a drift: none is then called a jump."""
FEW_USUAL = 12
"""Of fewer the quantile below is too uncertain: the next later windows fill up."""
RARE = 0.9
"""What one window in ten exceeds stands for how far a drift goes, which has fast spells and slow ones."""
BEYOND = 16.0
"""How many times what a drift adds at that quantile a jump must add. One factor whatever the number of ramps, as a
drift moves all of them. Chosen on random walks, lines and cycles of 60 windows: at 4, up to 39 % hold a false break;
at 16, up to 9 %, and mostly none."""


def last_break(reach_WR: FloatArray, go_on_WR: FloatArray) -> int:
    """The window (W) that the last jump came with; 0 where there was none.

    A window jumped where its shares `go_on / reach`, over all ramps (R), differ from those of the windows before it by
    more than sampling can explain (likelihood ratio of binomials, chi-squared with R degrees of freedom), and by far
    more than other windows differ from those before them: under a drift all do, and none is a jump.
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
        # Later windows, after those that are compared with this one, fill up.
        later = from_before_W[window + COMPARED :][: max(0, FEW_USUAL - len(usual))]
        if difference > limit and len(others := usual[-USUAL:] + later) >= LEAST_USUAL:
            drift = max(0.0, float(np.quantile(others, RARE)) - by_chance)
            if difference > limit + BEYOND * drift:
                start = window
                continue
        usual.append(difference)
    return start


def _from_before(reach_WR: FloatArray, go_on_WR: FloatArray, start: int, windows: list[int]) -> list[float]:
    """How each window differs from those before it, none older than `start`: twice the log likelihood ratio."""
    before = [slice(max(start, window - COMPARED), window) for window in windows]
    reach_BR, go_on_BR = (np.array([all_WR[rows].sum(0) for rows in before]) for all_WR in (reach_WR, go_on_WR))
    reach_WR, go_on_WR = reach_WR[windows], go_on_WR[windows]
    apart_WR = _log_likelihood(reach_BR, go_on_BR) + _log_likelihood(reach_WR, go_on_WR)
    together_WR = _log_likelihood(reach_BR + reach_WR, go_on_BR + go_on_WR)
    return [2 * each for each in (apart_WR - together_WR).sum(1).tolist()]


def _log_likelihood(reach_WR: FloatArray, go_on_WR: FloatArray) -> FloatArray:
    """Of binomial counts at their own share; 0 where no input came or all did the same."""
    from scipy.special import xlogy

    leave_WR = reach_WR - go_on_WR
    return np.asarray(xlogy(go_on_WR, go_on_WR) + xlogy(leave_WR, leave_WR) - xlogy(reach_WR, reach_WR))


MOST_GUESSED = 0.01
"""Where no probe fell among the rest and it is no larger than this share, the middle of what is possible stands in: at
most half a point wrong, but in every such window to the same side, which no pooling takes away. The effective sample
size counts it as the widest error there can be. Above, nothing is said."""
HALF = 0.5
"""Of an input: what Jeffreys' prior adds to both outcomes, so that no sample seems to be without error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An estimated share of inputs."""

    value: float
    effective_inputs: float
    """Fully recorded inputs, drawn at random, that would give the same variance as a sign of what comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a share of inputs, of those going on among those reaching, is estimated from."""

    reaching: float
    """Of the known, as is `going`."""
    going: float
    num_rest: int = 0
    num_probes: int = 0
    """Among the rest, as are the next two."""
    probes_reaching: int = 0
    probes_going: float = 0.0

    def effective_inputs(self, rest_share: float | None = None) -> float:
        """Inputs n with share * (1 - share) / n equal to the variance of our estimate of the share.

        The share is a ratio of two estimates: its variance is that of the mean of (goes on - share * reaches), over the
        square of the share that reaches; from drawing the window's inputs, and from drawing the probes among the rest
        without replacement. The share among the rest is `rest_share`, else that of its probes, shrunk by Jeffreys
        *first*; the whole follows from it. So where nothing is known, n is the number of probes that reach, whatever
        they did. (Each shrunk at its own scale, samples in which all did the same would weigh less than the others.)
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
        # Without a probe a guess stands in, which may be as wrong as half of the rest.
        left_out = 1 / self.num_probes - 1 / self.num_rest if self.num_probes else 1.0
        drawing, sampling = share * (1 - share) * reached, self.num_rest**2 * rest_variance * left_out
        return share * (1 - share) * reached**2 / (drawing + sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEstimate:
    """A window under one set of active ramps and thresholds; None where the window cannot say."""

    num_inputs: int
    rate_rps: float
    survival: tuple[Share, ...] | None
    """Per block, the share of inputs that would reach it."""
    go_on: tuple[Counts, ...] | None
    """Per block but the last, what the share that goes on there, survival[k + 1] / survival[k], is estimated from. No
    sample size of survival says what it is worth: the one may be a census and the other a few probes."""
    agreement: Share | None
    """1 - mean loss against the full model; of labels, the share that would be answered as by it."""
    accuracy: Share | None
    """1 - mean loss against the truth, among inputs whose truth is known; of labels, the share answered right."""

    @property
    def mean_blocks(self) -> float | None:
        """Blocks per input: each input runs the blocks that it reaches."""
        return None if self.survival is None else sum(share.value for share in self.survival)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The inputs of one period."""

    start_s: float
    period_s: float
    observations: Observations

    @property
    def num_inputs(self) -> int:
        return len(self.observations)

    @property
    def num_probes(self) -> int:
        return int(self.observations.probe_N.sum())

    @property
    def rate_rps(self) -> float:
        return self.num_inputs / self.period_s

    def records(self) -> ExitRecords:
        """The probes, as exit records: complete and drawn uniformly. Raises DataError where there is none."""
        if not self.num_probes:
            raise DataError(f"the window that began at {self.start_s:g} s has no probe, so no complete record")
        probes = self.observations.take(self.observations.probe_N)
        ids = [f"{self.start_s:.0f}-{row}" for row in np.flatnonzero(self.observations.probe_N)]
        return probes.records(probes.shape.ramps, ids)

    def estimate(self, thresholds: Mapping[int, float]) -> WindowEstimate:
        """What would happen if exactly the ramps in `thresholds` were active.

        Raises DataError for ramps that the stream does not have, and for thresholds that are not numbers.
        """
        seen = self.observations
        plain = _exits(seen, thresholds, seen.would_see_NR)
        full = _exits(seen, thresholds, seen.would_see_NR | seen.probe_N[:, None])
        to_end_known_N = plain.known_N & (plain.to_end_N | seen.would_end_N)
        answer_known_N = plain.known_N & (~plain.to_end_N | seen.would_end_N)
        labelled_N = ~np.isnan(seen.truth_or_nan_NE).all(1)
        labelled = _Division.of(answer_known_N[labelled_N], seen.probe_N[labelled_N])
        division = _Division.of(plain.known_N, seen.probe_N)
        survival = _survival(division, plain, full, seen.shape.num_blocks)
        return WindowEstimate(
            num_inputs=self.num_inputs,
            rate_rps=self.rate_rps,
            survival=survival,
            go_on=None if survival is None else _go_on(division, plain, full, survival, thresholds),
            agreement=_share(1 - _at(full, seen.losses_NE), _Division.of(to_end_known_N, seen.probe_N)),
            accuracy=_share(1 - _at(full, seen.truth_or_nan_NE)[labelled_N], labelled),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exits:
    """Where inputs would leave, as far as some of their scores tell."""

    exits_N: IntArray
    known_N: BoolArray
    """Whether every ramp asked for, up to the exit, was among those scores."""
    earliest_N: IntArray
    """Where they may leave at the earliest: a ramp asked for that was not looked at, if one comes first."""
    to_end_N: BoolArray
    column_N: IntArray
    """Of the ramp; the number of ramps for the end."""


def _exits(seen: Observations, thresholds: Mapping[int, float], looked_at_NR: BoolArray) -> _Exits:
    ramps = np.array(seen.shape.ramps, dtype=np.int64)
    sure = sure_NR(seen.shape.score, seen.shape.ramps, seen.scores_NR, thresholds) & looked_at_NR
    asked_R = np.array([ramp in thresholds for ramp in seen.shape.ramps], dtype=bool)
    # A column after the ramps stands for the last block, where all leave.
    stop_NR = np.column_stack([sure, np.ones(len(seen), dtype=bool)])
    blind_NR = np.column_stack([asked_R & ~looked_at_NR, np.zeros(len(seen), dtype=bool)])
    column_N = stop_NR.argmax(1)
    first_blind_N = np.where(blind_NR.any(1), blind_NR.argmax(1), len(ramps))
    blocks = np.append(ramps, seen.shape.num_blocks - 1)
    return _Exits(
        exits_N=blocks[column_N],
        known_N=np.asarray(column_N <= first_blind_N),
        earliest_N=blocks[np.minimum(column_N, first_blind_N)],
        to_end_N=np.asarray(column_N == len(ramps)),
        column_N=column_N,
    )


def _at(exits: _Exits, losses_NE: npt.NDArray[np.float32]) -> FloatArray:
    """Loss where each input would leave, NaN where not known."""
    return losses_NE[np.arange(len(losses_NE)), exits.column_N].astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """The known and the rest, and the probes among the rest."""

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
        """Of the known and of the probes among the rest; nothing is read of other inputs."""
        return Counts(
            reaching=float(reaching_N[self.known_N].sum()),
            going=float(going_N[self.known_N].sum()),
            num_rest=self.num_rest,
            num_probes=self.num_sampled,
            probes_reaching=int(reaching_N[self.sampled_N].sum()),
            probes_going=float(going_N[self.sampled_N].sum()),
        )

    def settles(self, earliest_N: IntArray, block: int) -> bool:
        """Whether it is known of every input, the rest too, that it reaches the block or not."""
        return bool((earliest_N[~self.known_N] >= block).all())


def _survival(division: _Division, plain: _Exits, full: _Exits, num_blocks: int) -> tuple[Share, ...] | None:
    """One division into known and rest for all blocks, so survival cannot rise."""
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
    division: _Division, plain: _Exits, full: _Exits, survival: tuple[Share, ...], asked: Collection[int]
) -> tuple[Counts, ...]:
    found = []
    for block, (share, after) in enumerate(pairwise(survival)):
        if share.value == 0 or block not in asked or division.settles(plain.earliest_N, block + 1):
            reaching, going = share.value * division.num_inputs, after.value * division.num_inputs
            found.append(Counts(reaching=reaching, going=going))
        else:
            found.append(division.counts(full.exits_N > block, full.exits_N >= block))
    return tuple(found)


def _share(going_N: BoolArray | FloatArray, division: _Division, guess_N: FloatArray | None = None) -> Share | None:
    """The module's formula; `going_N` is read where known, and of probes. `guess_N` (1/2) stands in as said above.

    What goes on is an input or none, or a part of one in [0, 1]: its variance is at most that of yes and no.
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
    """The whole windows that the stream keeps, oldest first, without gaps: a period without inputs is one too."""
    return tuple(
        Window(start_s=index * stream.period_s, period_s=stream.period_s, observations=stream.window(index))
        for index in stream.whole_windows(now_s)
    )


def survival_history(estimates: Sequence[WindowEstimate]) -> SurvivalHistory:
    """What a forecast of survival reads; windows that cannot say are missing. Raises DataError where none can.

    What a share is worth is told by the probes of all windows together: by a window's own, those windows would count
    most whose probes happened to be of one mind, and all windows together would be biased towards them.
    """
    num_blocks = next((len(estimate.survival) for estimate in estimates if estimate.survival is not None), None)
    if num_blocks is None:
        raise DataError("no window says anything about survival: none has a probe, or the ramps asked for")
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
        going = sum(each.probes_going for each in counts.values())
        reaching = sum(each.probes_reaching for each in counts.values())
        rest_share = (going + HALF) / (reaching + 1)
        for window, each in counts.items():
            worth_WR[window, ramp] = each.effective_inputs(rest_share)
    return worth_WR
