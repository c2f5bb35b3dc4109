from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from profiles.windows import SurvivalHistory

# Two windows of three blocks; the second is missing.
SURVIVAL_WK = np.array([[1.0, 0.5, 0.1], [np.nan] * 3])
INPUTS_WK = np.array([[1000.0, 200.0, 40.0], [np.nan] * 3])
MISSING_W = np.array([False, True])


def history(**changes: Any) -> SurvivalHistory:
    return SurvivalHistory(**({"survival_WK": SURVIVAL_WK, "inputs_WK": INPUTS_WK, "missing_W": MISSING_W} | changes))


def test_a_ramp_is_reached_by_the_inputs_of_the_block_after_it() -> None:
    found = history()
    # Survival of block 1 is worth 200 inputs, and all reach ramp 0; that of block 2 40, and half reach ramp 1.
    assert found.reach_WR.tolist() == [[200, 20], [0, 0]]
    assert found.go_on_WR.tolist() == [[100, pytest.approx(4)], [0, 0]]


def test_a_worth_that_is_given_counts_instead() -> None:
    found = history(worth_WR=np.array([[1000.0, 24.0], [np.nan, np.nan]]))
    assert found.reach_WR.tolist() == [[1000, 24], [0, 0]]
    assert found.go_on_WR.tolist() == [[500, pytest.approx(24 * 0.2)], [0, 0]]
