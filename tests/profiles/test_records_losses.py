"""What records promise: losses at the end, harm, and what is left of some ramps."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest

from profiles.records import ExitRecords

# Two ramps; the full model answers 0, 1, 2, 2 where 0, 1, 0, 1 is right.
RECORDS = ExitRecords.of_answers(
    np.column_stack([np.array([[0, 1], [0, 1], [0, 2], [1, 0]]), np.array([0, 1, 2, 2])]),
    score="confidence",
    num_blocks=6,
    ramps=(1, 3),
    sample_ids=("a", "b", "c", "d"),
    scores_NR=np.array([[0.9, 0.95], [0.5, 0.8], [0.75, 0.6], [0.2, 0.3]], dtype=np.float32),
    truth_N=np.array([0, 1, 0, 1]),
)
WITH_END = replace(RECORDS, end_losses_N=np.array([0.0, 1.0, 1.0, 0.0]))


def test_harm_is_to_be_wrong_where_the_full_model_is_right() -> None:
    harmed = RECORDS.of_harm()
    # Of a and b the full model is right; c and d are another's answers there, which harm nobody.
    assert harmed.losses_NR.tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]
    assert RECORDS.losses_NR.tolist() == [[0, 1], [1, 0], [1, 0], [1, 1]]
    assert (harmed.losses_NR <= RECORDS.losses_NR).all()
    assert harmed.worst_losses_N({1: 0.0, 3: 0.0}).tolist() == [1, 1, 0, 0]


def test_harm_of_losses_in_between_is_what_is_lost_beyond_the_full_model() -> None:
    truth_NE = np.array([[0.5, 0.2, 0.3], [0.1, 0.4, 0.4]])
    records = replace(RECORDS.subset(np.array([0, 1])), zero_one=False, true_losses_NE=truth_NE)
    assert records.of_harm().losses_NR == pytest.approx(np.array([[0.2, 0.0], [0.0, 0.0]]))


def test_who_goes_to_the_end_pays_what_the_end_costs() -> None:
    assert WITH_END.outcome({1: 0.75}).losses_N.tolist() == [0, 1, 1, 0]  # a and c leave; b pays the end, d's is free
    assert RECORDS.outcome({1: 0.75}).losses_N.tolist() == [0, 0, 1, 0]


def test_the_end_harms_only_where_the_full_model_is_right() -> None:
    harmed = WITH_END.of_harm()
    assert harmed.end_losses_N is not None
    assert harmed.end_losses_N.tolist() == [0, 1, 0, 0]


def test_the_worst_of_all_subsets_counts_the_end() -> None:
    thresholds = {1: 0.6, 3: 0.6}
    each = [
        WITH_END.outcome({ramp: thresholds[ramp] for ramp in subset}).losses_N
        for subset in chain.from_iterable(combinations((1, 3), size) for size in range(3))
    ]
    assert WITH_END.worst_losses_N(thresholds).tolist() == np.max(each, axis=0).tolist() == [1, 1, 1, 0]


def test_losses_at_the_end_stay_with_their_inputs(tmp_path: Path) -> None:
    WITH_END.subset(np.array([2, 3])).save(tmp_path / "r.npz")
    loaded = ExitRecords.load(tmp_path / "r.npz").end_losses_N
    assert loaded is not None
    assert loaded.tolist() == [1, 0]


def test_records_of_some_ramps_are_those_of_a_model_without_the_others() -> None:
    shares = replace(RECORDS, score="share", confidences={1: 0.5, 3: 0.6}, tallies_NE=np.arange(24).reshape(4, 3, 2))
    left = shares.of_ramps({3})
    assert (left.ramps, left.confidences, left.num_blocks) == ((3,), {3: 0.6}, 6)
    assert left.scores_NR.tolist() == shares.scores_NR[:, [1]].tolist()
    assert left.answers().tolist() == shares.answers()[:, [1, 2]].tolist()
    assert left.tallies_NE is not None
    assert left.tallies_NE[0].tolist() == [[2, 3], [4, 5]]
    for thresholds in ({}, {3: 0.7}):
        assert left.outcome(thresholds).exits_N.tolist() == shares.outcome(thresholds).exits_N.tolist()
        assert left.outcome(thresholds).accuracy == shares.outcome(thresholds).accuracy
    assert shares.of_ramps(()).outcome({}).mean_blocks == 6
