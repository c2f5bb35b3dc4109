from __future__ import annotations

import numpy as np

from experiments.guarantee import Trial, known_blocks, oracle, summary
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


def test_a_summary_is_the_mean_of_its_trials() -> None:
    trials = [
        Trial(violated=True, saved_blocks=1.0, oracle_blocks=2.0),
        Trial(violated=False, saved_blocks=2.0, oracle_blocks=4.0),
    ]
    means = summary("divided", 7, trials)
    assert (means.violated_share, means.saved_blocks, means.oracle_blocks) == (0.5, 1.5, 3.0)
    assert means.share_of_oracle == 0.5
