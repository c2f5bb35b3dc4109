"""Streams of a few inputs, for the tests of tuners: ramps after blocks 0 and 1 of a model of three, by confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from optimizer.calibration.thresholds import Guarantee
from optimizer.cost.batching import Batching
from optimizer.live.tuning.base import NewThresholds, Tuner, TunerSettings
from profiles.scores import SCORES
from profiles.stream import Observations, StreamShape
from profiles.table import LatencyTable

SHAPE = StreamShape(score="confidence", num_blocks=3, ramps=(0, 1))
TIMES = Batching(table=LatencyTable.of_rows((1,), [[1.0]] * 3, [[0.01]] * 2), ramps=(0, 1), size=1)
NEVER = SCORES["confidence"].never
NO_EXITS = {0: NEVER, 1: NEVER}
SURE = (0.9, 0.99)
UNSURE = (0.6, 0.7)


def question(budget: float = 0.1, confidence: float = 0.9) -> TunerSettings:
    return TunerSettings(score="confidence", guarantee=Guarantee(budget=budget, confidence=confidence), batching=TIMES)


def stream(
    scores: Sequence[tuple[float, float]],
    wrong: Sequence[tuple[int, int]],
    thresholds: Mapping[int, float],
    *,
    first_s: float = 0.0,
    whole: bool = True,
) -> Observations:
    """Inputs that arrive a second apart, all whole or none; `wrong` says which ramps answer otherwise than the end."""
    scores_NR, wrong_NR = np.array(scores, dtype=np.float32), np.array(wrong, dtype=np.float32)
    limits_R = np.array([thresholds[ramp] for ramp in (0, 1)], dtype=np.float32)
    sure_NE = np.column_stack([scores_NR >= limits_R, np.ones(len(scores), dtype=bool)])
    exits_N = sure_NE.argmax(1)
    seen_NR = np.full(scores_NR.shape, True) if whole else np.array([0, 1]) <= exits_N[:, None]
    compared_NR = seen_NR & ((exits_N == 2) | whole)[:, None]
    return Observations(
        shape=SHAPE,
        times_s_N=first_s + np.arange(len(scores), dtype=np.float64),
        probe_N=np.full(len(scores), False),
        stayed_N=np.full(len(scores), whole),
        active_NR=np.full(scores_NR.shape, True),
        exits_N=exits_N.astype(np.int16),
        scores_NR=np.where(seen_NR, scores_NR, np.nan),
        losses_NR=np.where(compared_NR, wrong_NR, np.nan),
    )


def mixed(number: int, thresholds: Mapping[int, float], *, first_s: float = 0.0, whole: bool = True) -> Observations:
    """Every other input is confident and right. The others are not confident, and wrong at the first ramp."""
    scores = [SURE if index % 2 else UNSURE for index in range(number)]
    wrong = [(0, 0) if index % 2 else (1, 0) for index in range(number)]
    return stream(scores, wrong, thresholds, first_s=first_s, whole=whole)


def lying(number: int, thresholds: Mapping[int, float], *, first_s: float) -> Observations:
    """All inputs are confident, and wrong at both ramps."""
    return stream([SURE] * number, [(1, 1)] * number, thresholds, first_s=first_s)


def changed(tuner: Tuner, seen: Observations) -> NewThresholds:
    """The new thresholds that a tuner must return for these observations."""
    found = tuner.observe(seen)
    assert found is not None
    return found
