from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from experiments.tuning.guarantee import WAYS, Case, Trial, known_blocks, oracle, summary, trials_of, worst_subset_loss
from optimizer.risk import Guarantee
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


def test_a_model_that_ends_at_its_deepest_ramp_answers_as_that_ramp_does() -> None:
    known = known_blocks(records())
    assert (known.num_blocks, known.ramps) == (2, (0,))
    assert known.answers()[:, -1].tolist() == [1, 1, 1, 1]


def test_the_oracle_takes_the_boldest_threshold_within_the_budget() -> None:
    known = known_blocks(records())
    # At 0.3 three of four leave and agree; at 0.4 the fourth leaves too and disagrees.
    assert oracle(known, 0.0, [0.1, 0.3, 0.4]).mean_blocks == 1 + 1 / 4
    assert oracle(known, 0.25, [0.1, 0.3, 0.4]).mean_blocks == 1


def test_the_oracle_lets_nobody_leave_when_every_threshold_breaks_the_budget() -> None:
    assert oracle(known_blocks(records()), 0.0, [0.4]).mean_blocks == 2


def test_the_worst_subset_is_found_among_all_of_them() -> None:
    found, thresholds = many(50, 3), {0: 0.7, 1: 0.6}
    subsets = [subset for size in range(3) for subset in combinations((0, 1), size)]
    each = [1 - found.outcome({ramp: thresholds[ramp] for ramp in subset}).agreement for subset in subsets]
    assert worst_subset_loss(found, thresholds) == pytest.approx(max(each))


@pytest.mark.parametrize("learnt", WAYS)
def test_every_way_to_learn_keeps_an_easy_budget_and_saves_something(learnt: str) -> None:
    thresholds = WAYS[learnt](many(400, 4), Guarantee(budget=0.1), 0)
    outcome = many(4000, 5).outcome(thresholds)
    assert outcome.agreement > 0.88
    assert outcome.mean_blocks < 2.9


def test_drawn_inputs_are_tried_on_all_records_and_divided_ones_on_the_rest() -> None:
    for how in ("divided", "drawn"):
        case = Case(name="", records=many(300, 6), budget=0.1, num_inputs=150, how=how)
        assert set(trials_of(case, 0, case.records.outcome({}))) == set(WAYS)


def test_a_summary_is_the_mean_of_its_trials() -> None:
    trials = [
        Trial(empty=True, blocks=3.0, loss=0.2, worst_loss=0.2, oracle_blocks=2.0),
        Trial(empty=False, blocks=2.0, loss=0.1, worst_loss=0.3, oracle_blocks=1.0),
    ]
    case = Case(name="", records=many(10, 7), budget=0.15, num_inputs=5, how="drawn")
    means = summary(case, "before", trials)
    assert (means["empty_share"], means["blocks"], means["oracle_blocks"]) == (0.5, 2.5, 1.5)
    assert (means["broken_share"], means["broken_worst_share"]) == (0.5, 1.0)
