"""Scores, which express how sure an exit is of its answer: their units, directions, and transformations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from earlyexit.policies import Score as Score

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

SMALLEST = 1e-7
"""Lower bound of an entropy, and of 1 - confidence, so that every sureness is finite."""
SUREST = float(-np.log(SMALLEST)) + 1e-3
"""A sureness above every score's."""
EVEN_SHARE = 0.01
"""Shrinks shares towards 1/2, because a share of 1 of few values is not a certainty."""
LEAST_SURE = -80.0
"""A sureness below every score's. The corresponding entropy is finite in float32."""


def _log_odds(confidence: FloatArray) -> FloatArray:
    clipped = np.clip(confidence, SMALLEST, 1 - SMALLEST)
    return np.asarray(np.log(clipped) - np.log1p(-clipped))


def _shrunk_log_odds(share: FloatArray) -> FloatArray:
    clipped = np.clip(share, 0.0, 1.0)
    return np.asarray(np.log(clipped + EVEN_SHARE) - np.log(1 - clipped + EVEN_SHARE))


def _share_of(sureness: float) -> float:
    odds = float(np.exp(sureness))
    return (odds * (1 + EVEN_SHARE) - EVEN_SHARE) / (1 + odds)


def _minus_log(entropy: FloatArray) -> FloatArray:
    return np.asarray(-np.log(np.clip(entropy, SMALLEST, np.exp(-LEAST_SURE))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreKind:
    """The properties of a kind of score."""

    larger_is_surer: bool
    highest: float
    """The largest score; the smallest is 0."""
    sureness: Callable[[FloatArray], FloatArray]
    """Maps scores to a scale where larger is surer, and the risk of a loss is approximately logistic."""
    score_of: Callable[[float], float]
    """The inverse of `sureness`."""
    never: float
    """A threshold that no score reaches."""

    def score_at(self, sureness: float) -> float:
        """Returns the threshold of a sureness. Beyond the range of scores, no score or all scores reach it."""
        return self.never if sureness > SUREST else self.score_of(max(sureness, LEAST_SURE))

    @property
    def direction(self) -> float:
        """Factor by which scores are multiplied to make larger surer."""
        return 1.0 if self.larger_is_surer else -1.0


_LIKELIHOOD = ScoreKind(
    larger_is_surer=True,
    highest=1.0,
    sureness=_log_odds,
    score_of=lambda sureness: float(score) if (score := 1 / (1 + np.exp(-sureness))) > SMALLEST else 0.0,
    never=1 + 1e-6,  # differs from 1 also in float32
)

SCORES: Mapping[Score, ScoreKind] = {
    "entropy": ScoreKind(
        larger_is_surer=False,
        highest=np.inf,
        sureness=_minus_log,
        score_of=lambda sureness: float(np.exp(-sureness)),
        never=-SMALLEST,
    ),
    "confidence": _LIKELIHOOD,
    "share": replace(_LIKELIHOOD, sureness=_shrunk_log_odds, score_of=_share_of),
    "foreseen": _LIKELIHOOD,
    "similar": _LIKELIHOOD,
}
"""entropy: in nats, for labels. confidence: `Task.score`, for any task. share: the share of an exit's principal values
above the ramp's confidence (PAME section 5.3). Scores before outputs are computed (CALM section 3.4): foreseen, the
probability of the ramp's classifier; similar, the cosine similarity of the states before and after the ramp's block."""


def check_score(score: str) -> None:
    """Raises DataError for an unknown kind of score."""
    if score not in SCORES:
        raise DataError(f"the score must be one of {', '.join(SCORES)}, not {score!r}")


def check_recorded(ramps: Sequence[int], requested: Iterable[int]) -> None:
    """Raises DataError if a requested ramp is not among the recorded `ramps`."""
    if unknown := sorted(set(requested) - set(ramps)):
        raise DataError(f"no records of ramps {unknown}; recorded are {list(ramps)}")


def sure_NR(
    score: Score, ramps: tuple[int, ...], scores_NR: npt.NDArray[np.float32], thresholds: Mapping[int, float]
) -> BoolArray:
    """Returns which scores pass the threshold of their ramp, bool (N, R). At ramps without a threshold, none does.

    Raises DataError for thresholds of other ramps, and for NaN.
    """
    check_recorded(ramps, thresholds)
    if unset := sorted(ramp for ramp, threshold in thresholds.items() if np.isnan(threshold)):
        raise DataError(f"the thresholds of ramps {unset} are not numbers, so that no input would leave there")
    active_R = np.array([ramp in thresholds for ramp in ramps], dtype=bool)
    with np.errstate(over="ignore"):  # as in policies, a threshold beyond the range of float32 is infinite
        limits_R = np.array([thresholds.get(ramp, 0.0) for ramp in ramps], dtype=np.float32)
    # Ramps are switched off by the mask, because no threshold excludes an infinite score.
    larger = SCORES[score].larger_is_surer
    return np.asarray((scores_NR >= limits_R if larger else scores_NR <= limits_R) & active_R)
