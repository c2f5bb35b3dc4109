from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from experiments.guarantee import HOWS, Case, How, trial, worst_subset_loss
from profiles.records import ExitRecords


def records() -> ExitRecords:
    """Four inputs, ramps after blocks 0 and 1 of a model of three blocks; the second ramp is always right."""
    return ExitRecords.of_answers(
        np.column_stack([np.array([[1, 1], [1, 1], [1, 1], [0, 1]]), np.array([1, 1, 1, 0])]),
        score="entropy",
        num_blocks=3,
        ramps=(0, 1),
        sample_ids=("a", "b", "c", "d"),
        scores_NR=np.array([[0.1, 0.0], [0.2, 0.0], [0.3, 0.0], [0.4, 0.0]], dtype=np.float32),
    )


def many(num_inputs: int, seed: int) -> ExitRecords:
    """Ramps after blocks 0 and 1 that are right as often as they are sure."""
    rng = np.random.default_rng(seed)
    confidence_NR = rng.beta(4, 1, (num_inputs, 2))
    wrong_NR = rng.random((num_inputs, 2)) > confidence_NR
    return ExitRecords.of_answers(
        np.column_stack([wrong_NR, np.zeros(num_inputs)]).astype(np.int64),
        score="confidence",
        num_blocks=3,
        ramps=(0, 1),
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=confidence_NR.astype(np.float32),
    )


def test_the_worst_subset_is_found_among_all_of_them() -> None:
    found, thresholds = many(50, 3), {0: 0.7, 1: 0.6}
    subsets = [subset for size in range(3) for subset in combinations((0, 1), size)]
    each = [1 - found.outcome({ramp: thresholds[ramp] for ramp in subset}).agreement for subset in subsets]
    assert worst_subset_loss(found, thresholds) == pytest.approx(max(each))


@pytest.mark.parametrize("how", HOWS)
def test_thresholds_keep_an_easy_budget_and_save_something(how: How) -> None:
    found = trial(Case(name="", records=many(4000, 5), budget=0.1, num_inputs=400, how=how), 0)
    assert found.loss < 0.12
    assert found.blocks < 2.9
    assert not found.empty
    assert found.worst_loss >= found.loss
