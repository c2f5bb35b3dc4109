"""Thresholds for sequences: all tokens from the first wrong early answer on count as different."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.calibration.thresholds import Guarantee, bounded_losses, lay_path, learn_then_test, sequences_of
from profiles.records import ExitRecords
from tests.exit_records import exit_records


def records_of(scores: list[list[float]], losses: list[list[int]], sequences: list[int]) -> ExitRecords:
    return exit_records(scores, losses, score="foreseen", num_blocks=4, sequences_N=np.array(sequences))


THREE = records_of(
    [[0.9, 0.9], [0.2, 0.8], [0.1, 0.1], [0.9, 0.9], [0.6, 0.1], [0.7, 0.9], [0.3, 0.2]],
    [[0, 0], [1, 0], [1, 1], [0, 0], [1, 1], [0, 1], [1, 0]],
    [5, 5, 5, 2, 2, 2, 9],
)


@pytest.mark.parametrize(
    ("thresholds", "losses"),
    [
        ({0: 0.8, 1: 0.8}, [0, 1 / 3, 0]),
        ({0: 0.6, 1: 0.8}, [0, 2 / 3, 0]),
        ({0: 0.2}, [2 / 3, 2 / 3, 1]),
        ({1: 0.1}, [1 / 3, 2 / 3, 0]),
        ({}, [0, 0, 0]),
    ],
    ids=str,
)
def test_all_tokens_from_the_first_wrong_one_on_are_lost(thresholds: dict[int, float], losses: list[float]) -> None:
    assert bounded_losses(THREE, thresholds).tolist() == pytest.approx(losses)


def test_sequences_are_selected_as_a_whole() -> None:
    assert [rows.tolist() for rows in sequences_of(THREE)] == [[0, 1, 2], [3, 4, 5], [6]]


def of_sequences(records: ExitRecords, chosen: range) -> ExitRecords:
    rows = sequences_of(records)
    return records.subset(np.concatenate([rows[k] for k in chosen]))


def generations(num_sequences: int, seed: int, length: int = 20) -> ExitRecords:
    """Returns records of two ramps whose confidence is calibrated."""
    rng = np.random.default_rng(seed)
    sure_NR = 1 - rng.beta(0.3, 6.0, size=(num_sequences * length, 2))
    return records_of(
        sure_NR.tolist(),
        (rng.random(sure_NR.shape) > sure_NR).astype(int).tolist(),
        np.repeat(np.arange(num_sequences), length).tolist(),
    )


def test_the_share_that_differs_is_within_the_budget_and_grows_along_the_path() -> None:
    everything, guarantee = generations(2000, seed=0), Guarantee(budget=0.2, confidence=0.9)
    kept = tokens = 0
    for seed in range(20):
        calibrated = generations(150, seed=1 + seed)
        design, tested = of_sequences(calibrated, range(50)), of_sequences(calibrated, range(50, 150))
        thresholds = learn_then_test(design, tested, guarantee).thresholds
        kept += bounded_losses(everything, thresholds).mean() <= guarantee.budget
        tokens += everything.outcome(thresholds).mean_blocks < everything.num_blocks
        assert bounded_losses(tested, thresholds).mean() <= guarantee.budget
    assert kept >= 18
    assert tokens == 20
    design = generations(40, seed=7)
    path = lay_path(design)
    totals = [bounded_losses(design, path.thresholds(log_price)).sum() for log_price in np.linspace(-12, 0, 30)]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]
