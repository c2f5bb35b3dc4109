"""PAME's search for thresholds, one exit after the other."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.pame_cases import ThresholdSearch
from optimizer.cost.batching import Batching
from optimizer.live.tuning.pame import TEN_CONFIDENCES
from optimizer.search.pame import Candidate, find_exits
from profiles.scores import FloatArray
from tests.optimizer.pame.test_thresholds import TABLE, records

AGREEMENT = np.column_stack([records().losses_NR, np.zeros(10)])


def searched(losses_NE: FloatArray, kept: float) -> tuple[Candidate, ThresholdSearch]:
    """Searches for the exit of the ten inputs, whose losses at the ramp and at the end are given."""
    search = ThresholdSearch(records(), TEN_CONFIDENCES, losses_NE, kept)
    found = find_exits(Batching(table=TABLE, ramps=(0, 1), size=1), (0,), 10, search)
    return found[0].candidates[0], search


@pytest.mark.parametrize(("kept", "threshold", "leaving"), [(0.95, 0.65, 0.7), (0.85, 0.6, 0.8), (0.6, 0.5, 1.0)])
def test_the_threshold_by_which_most_leave_keeps_the_precision(kept: float, threshold: float, leaving: float) -> None:
    """At threshold 0.50, all ten inputs leave, and three are wrong."""
    found, search = searched(AGREEMENT, kept)
    assert search.thresholds == search.alone == {0: threshold}
    assert found.leaving == pytest.approx(leaving)
    assert 1 - AGREEMENT[~found.inside_N, 0].sum() / 10 > kept


def test_precision_is_relative_to_the_full_models() -> None:
    truth_NE = records(truth=True).true_losses_NE
    assert truth_NE is not None
    found, search = searched(truth_NE, 0.99)
    assert (found.leaving, search.thresholds) == (1.0, {0: 0.5})  # the full model errs on one of ten
