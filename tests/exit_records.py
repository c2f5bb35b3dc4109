"""Builds exit records for tests from only the values that matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.calibration.calibration_file import CalibrationCard
from profiles.records import ExitRecords


def exit_records(
    scores_NR: npt.ArrayLike,
    losses_NR: npt.ArrayLike | None = None,
    *,
    answers_NE: npt.NDArray[Any] | None = None,
    **facts: Any,
) -> ExitRecords:
    """Returns records with confidences of ramps after the first blocks, of which one more follows; `facts` override.

    By default no answer is wrong.
    """
    scores_NR = np.array(scores_NR, dtype=np.float32)
    num_inputs, num_ramps = scores_NR.shape
    plain = {"score": "confidence", "num_blocks": num_ramps + 1, "ramps": tuple(range(num_ramps))}
    facts = {**plain, "sample_ids": tuple(map(str, range(num_inputs))), "scores_NR": scores_NR, **facts}
    if answers_NE is not None:
        return ExitRecords.of_answers(answers_NE, **facts)
    losses_NR = np.zeros(scores_NR.shape) if losses_NR is None else np.array(losses_NR, dtype=np.float64)
    return ExitRecords(losses_NR=losses_NR, **facts)


def calibration_card(thresholds: dict[int, float], **changes: Any) -> CalibrationCard:
    """Returns a calibration by entropies for a budget of 1 %; `changes` override fields."""
    facts: dict[str, Any] = {"policy": "entropy", "budget": 0.01, "confidence": 0.9, "tested": {}, "provenance": {}}
    return CalibrationCard(thresholds=thresholds, **facts | changes)


def share_card(second: float) -> CalibrationCard:
    """Returns a calibration by the score `share` with two ramps; `second` is the confidence of the second one."""
    return calibration_card({0: 0.5, 1: 0.5}, policy="share", confidences={0: 0.7, 1: second}, budget=0.05)
