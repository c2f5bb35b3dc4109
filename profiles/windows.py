"""What a window of the live stream says about any set of active ramps and thresholds: unbiased, from all that was seen.

Probes are a uniform sample with complete records; of all other inputs only what the plan ran was seen. What is asked
of an input (where would it leave? would its answer agree?) is often answered by what the plan ran alone: an input
that ramp 3 let out at a confidence of 0.9 tells that it would leave there at 0.8 as well, if ramp 3 were the only one.
So the inputs divide into those whose answer is **known** without a probe and the rest. On which side an input falls is
decided by the plan and the input, *never by whether it was a probe* (of a probe we ask what would have been known had
it been none), so both sides are honest populations of known size:

    estimate = (sum over the known + size of the rest * mean over the probes among the rest) / inputs

The known side is a census, without error. On the other side, given how many probes fell there, they are a uniform
sample, so their mean is unbiased, whatever the true share of probes was; a window with no probe there says nothing.
(Probes come in batches: then the mean is a ratio of two random sums, and its bias falls with the number of batches.)

Rejected. *Probes alone*: unbiased, but blind to the 98 % that saw the ramps asked for. *Horvitz-Thompson* (known 1, the
rest 1 / probe_share): unbiased as well, but its variance grows with the mean square where ours grows with the variance,
and it needs the share. *Every observed score, per ramp*: biased, as whether a ramp was seen depends on earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from profiles.records import ExitRecords, sure_NR
from profiles.stream import UNSEEN, ExitStream, Observations
from profiles.survival_history import SurvivalHistory

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MOST_GUESSED = 0.05
"""Where no probe fell among the rest and it is no larger than this share, the middle of what is possible stands in: at
most 2.5 points wrong, and said in the effective sample size. Above, nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An estimated share of inputs."""

    value: float
    effective_inputs: float
    """Fully recorded inputs, drawn at random, that would give the same variance as a sign of what comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEstimate:
    """A window under one set of active ramps and thresholds; None where the window cannot say."""

    num_inputs: int
    rate_rps: float
    survival: tuple[Share, ...] | None
    """Per block, the share of inputs that would reach it."""
    agreement: Share | None
    """Share that would be answered as by the full model."""
    accuracy: Share | None
    """Share that would be answered right, among inputs whose true label is known."""

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
        """The probes, as exit records: complete and drawn uniformly."""
        probes = self.observations.take(self.observations.probe_N)
        known = len(probes) > 0 and bool((probes.true_labels_N != UNSEEN).all())
        return ExitRecords(
            score=probes.shape.score,
            num_blocks=probes.shape.num_blocks,
            ramps=probes.shape.ramps,
            sample_ids=tuple(f"{self.start_s:.0f}-{row}" for row in np.flatnonzero(self.observations.probe_N)),
            scores_NR=probes.scores_NR,
            labels_NR=probes.labels_NR.astype(np.int64),
            final_labels_N=probes.final_labels_N.astype(np.int64),
            true_labels_N=probes.true_labels_N.astype(np.int64) if known else None,
            times_s_N=probes.times_s_N,
        )

    def estimate(self, thresholds: Mapping[int, float]) -> WindowEstimate:
        """What would happen if exactly the ramps in `thresholds` were active; raises DataError for other ramps."""
        seen = self.observations
        plain = _exits(seen, thresholds, seen.would_see_NR)
        full = _exits(seen, thresholds, seen.would_see_NR | seen.probe_N[:, None])
        to_end_known_N = plain.known_N & (plain.to_end_N | seen.would_end_N)
        label_known_N = plain.known_N & (~plain.to_end_N | seen.would_end_N)
        labelled_N = seen.true_labels_N != UNSEEN
        return WindowEstimate(
            num_inputs=self.num_inputs,
            rate_rps=self.rate_rps,
            survival=_survival(seen, plain, full),
            agreement=_share(full.to_end_N | (full.labels_N == seen.final_labels_N), to_end_known_N, seen.probe_N),
            accuracy=_share(
                (full.labels_N == seen.true_labels_N)[labelled_N], label_known_N[labelled_N], seen.probe_N[labelled_N]
            ),
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
    labels_N: IntArray
    """The answer there; UNSEEN where nobody computed it."""


def _exits(seen: Observations, thresholds: Mapping[int, float], looked_at_NR: BoolArray) -> _Exits:
    ramps = np.array(seen.shape.ramps, dtype=np.int64)
    rows = np.arange(len(seen))
    sure = sure_NR(seen.shape.score, seen.shape.ramps, seen.scores_NR, thresholds) & looked_at_NR
    asked_R = np.array([ramp in thresholds for ramp in seen.shape.ramps], dtype=bool)
    # A column after the ramps stands for the last block, where all leave.
    stop_NR = np.column_stack([sure, np.ones(len(seen), dtype=bool)])
    blind_NR = np.column_stack([asked_R & ~looked_at_NR, np.zeros(len(seen), dtype=bool)])
    column_N = stop_NR.argmax(1)
    first_blind_N = np.where(blind_NR.any(1), blind_NR.argmax(1), len(ramps))
    labels_NR = np.column_stack([seen.labels_NR, seen.final_labels_N]).astype(np.int64)
    blocks = np.append(ramps, seen.shape.num_blocks - 1)
    return _Exits(
        exits_N=blocks[column_N],
        known_N=np.asarray(column_N <= first_blind_N),
        earliest_N=blocks[np.minimum(column_N, first_blind_N)],
        to_end_N=np.asarray(column_N == len(ramps)),
        labels_N=labels_NR[rows, column_N],
    )


def _survival(seen: Observations, plain: _Exits, full: _Exits) -> tuple[Share, ...] | None:
    """One division into known and rest for all blocks, so survival cannot rise."""
    shares = [
        _share(
            full.exits_N >= block,
            plain.known_N,
            seen.probe_N,
            guess_N=((plain.earliest_N >= block) + (plain.exits_N >= block).astype(np.float64)) / 2,
        )
        for block in range(seen.shape.num_blocks)
    ]
    known = tuple(share for share in shares if share is not None)
    return known if len(known) == len(shares) else None


def _share(
    true_N: BoolArray, known_N: BoolArray, probe_N: BoolArray, guess_N: FloatArray | None = None
) -> Share | None:
    """The module's formula; `true_N` is read where known, and of probes. `guess_N` (1/2) stands in as said above."""
    num_inputs, rest_N = len(known_N), ~known_N
    num_rest = int(rest_N.sum())
    if num_inputs == 0:
        return None
    sampled_S = true_N[probe_N & rest_N]
    if len(sampled_S) or not num_rest:
        mean = float(sampled_S.mean()) if num_rest else 0.0
    elif num_rest <= MOST_GUESSED * num_inputs:
        mean = 0.5 if guess_N is None else float(guess_N[rest_N].mean())
    else:
        return None
    value = (float(true_N[known_N].sum()) + num_rest * mean) / num_inputs
    worth = _effective_inputs(value, num_inputs, mean, num_rest, len(sampled_S))
    return Share(value=value, effective_inputs=worth)


def _effective_inputs(value: float, num_inputs: int, mean: float, num_rest: int, num_sampled: int) -> float:
    """Inputs n with value * (1 - value) / n equal to our variance.

    Ours is that of drawing the window's inputs plus that of drawing the probes among the rest without replacement.
    Shares are moved half an input from 0 and 1 (Jeffreys), so that no sample seems to be without error.
    """
    value = (value * num_inputs + 0.5) / (num_inputs + 1)
    mean = (mean * num_sampled + 0.5) / (num_sampled + 1)
    spread = value * (1 - value)
    left_out = 1.0 if num_sampled == 0 else 1 / num_sampled - 1 / num_rest
    sampling = (num_rest / num_inputs) ** 2 * mean * (1 - mean) * left_out if num_rest else 0.0
    return spread / (spread / num_inputs + sampling)


def windows(stream: ExitStream, now_s: float) -> tuple[Window, ...]:
    """The whole windows that the stream keeps, oldest first, without gaps: a period without inputs is one too."""
    return tuple(
        Window(start_s=index * stream.period_s, period_s=stream.period_s, observations=stream.window(index))
        for index in stream.whole_windows(now_s)
    )


def survival_history(estimates: Sequence[WindowEstimate]) -> SurvivalHistory:
    """What a forecast of survival reads; windows that cannot say are missing. Raises DataError where none can."""
    known = [estimate.survival for estimate in estimates if estimate.survival is not None]
    if not known:
        raise DataError("no window says anything about survival: none has a probe, or the ramps asked for")
    missing = tuple(Share(value=np.nan, effective_inputs=np.nan) for _ in known[0])
    rows = [missing if estimate.survival is None else estimate.survival for estimate in estimates]
    return SurvivalHistory(
        survival_WK=np.array([[share.value for share in row] for row in rows]),
        inputs_WK=np.array([[share.effective_inputs for share in row] for row in rows]),
        missing_W=np.array([estimate.survival is None for estimate in estimates]),
    )
