"""Scores: how sure an exit is of its answer, by names that fix the unit and the direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError

Score = Literal["entropy", "confidence", "share", "foreseen", "similar"]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SMALLEST = 1e-7
"""Of an entropy, and of what a confidence leaves to be sure: keeps the sureness of certainty finite."""
SUREST = float(-np.log(SMALLEST)) + 1e-3
"""Above every sureness of a score."""
EVEN_SHARE = 0.01
"""What a share of all or nothing leaves open: of few counted values, all are no certainty."""
LEAST_SURE = -80.0
"""Below them; the entropy there is finite in float32."""


def _log_odds(confidence: FloatArray) -> FloatArray:
    clipped = np.clip(confidence, SMALLEST, 1 - SMALLEST)
    return np.asarray(np.log(clipped) - np.log1p(-clipped))


def _shrunk_log_odds(share: FloatArray) -> FloatArray:
    return np.asarray(np.log(share + EVEN_SHARE) - np.log(1 - share + EVEN_SHARE))


def _share_of(sureness: float) -> float:
    odds = float(np.exp(sureness))
    return (odds * (1 + EVEN_SHARE) - EVEN_SHARE) / (1 + odds)


def _minus_log(entropy: FloatArray) -> FloatArray:
    return np.asarray(-np.log(np.maximum(entropy, SMALLEST)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreKind:
    """What a score's name says of it."""

    larger_is_surer: bool
    lowest: float
    highest: float
    """Of what exits can say; inclusive."""
    sureness: Callable[[FloatArray], FloatArray]
    """On a scale where larger is surer, and on which the risk of a loss is close to logistic."""
    score_of: Callable[[float], float]
    """The score of a sureness."""
    never: float
    """A threshold that no score reaches."""

    def score_at(self, sureness: float) -> float:
        """The score of a sureness: of more than any exit can say, one out of reach; of less, one that all reach."""
        return self.never if sureness > SUREST else self.score_of(max(sureness, LEAST_SURE))

    @property
    def direction(self) -> float:
        """Times this, larger is surer."""
        return 1.0 if self.larger_is_surer else -1.0


_LIKELIHOOD = ScoreKind(
    larger_is_surer=True,
    lowest=0.0,
    highest=1.0,
    sureness=_log_odds,
    score_of=lambda sureness: float(1 / (1 + np.exp(-sureness))),
    never=1 + 1e-6,  # another number in float32 too
)

SCORES: Mapping[Score, ScoreKind] = {
    "entropy": ScoreKind(
        larger_is_surer=False,
        lowest=0.0,
        highest=np.inf,
        sureness=_minus_log,
        score_of=lambda sureness: float(np.exp(-sureness)),
        never=-SMALLEST,
    ),
    "confidence": _LIKELIHOOD,
    "share": ScoreKind(
        larger_is_surer=True,
        lowest=0.0,
        highest=1.0,
        sureness=_shrunk_log_odds,
        score_of=_share_of,
        never=1 + 1e-6,
    ),
    "foreseen": _LIKELIHOOD,
    "similar": _LIKELIHOOD,
}
"""Entropy in nats, of label tasks; confidence of any task, as `Task.score` gives it; share: that of an exit's principal
values that lie above the ramp's confidence (PAME section 5.3); foreseen and similar: before there are outputs, what
the ramp's classifier says, and how alike the states before and after its block are (CALM section 3.4)."""


def check_score(score: str) -> None:
    """Raise DataError for an unknown score, whose direction is unknown too."""
    if score not in SCORES:
        raise DataError(f"a score is one of {', '.join(SCORES)}, not {score!r}")


def check_recorded(ramps: Sequence[int], asked: Iterable[int]) -> None:
    """Raise DataError where ramps are asked for that were not recorded."""
    unknown = sorted(set(asked) - set(ramps))
    if unknown:
        raise DataError(f"no records of ramps {unknown}; recorded are {list(ramps)}")


def sure_NR(
    score: Score, ramps: tuple[int, ...], scores_NR: npt.NDArray[np.float32], thresholds: Mapping[int, float]
) -> BoolArray:
    """Which scores let an input out, of ramps without a threshold none.

    Raises DataError for thresholds of other ramps, and for those that are not numbers.
    """
    check_recorded(ramps, thresholds)
    unset = sorted(ramp for ramp, threshold in thresholds.items() if np.isnan(threshold))
    if unset:
        raise DataError(f"the thresholds of ramps {unset} are not numbers: they would never let an input out")
    asked_R = np.array([ramp in thresholds for ramp in ramps], dtype=bool)
    limits_R = np.array([thresholds.get(ramp, 0.0) for ramp in ramps], dtype=np.float32)
    # By the mask alone a ramp is off: no threshold is out of reach of a score that is infinite.
    larger = SCORES[score].larger_is_surer
    return np.asarray((scores_NR >= limits_R if larger else scores_NR <= limits_R) & asked_R)
