"""Calibrations of a chain whose networks answer together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.data.rows import LabelledRows
from earlyexit.errors import DataError
from earlyexit.network.store import read_card
from offramp.commands.calibrate import calibrate
from offramp.commands.calibrated import read_calibration
from offramp.commands.jobs import CalibrateJob
from optimizer.calibration_file import RECORDS_FILE
from profiles.networks import ALONE_FILE, check_weights, of_networks, survival_of, weights_of
from profiles.records import ExitRecords
from tests.offramp.jobs.test_chaining import calibrated, models, rows

__all__ = ["calibrated", "models", "rows"]
"""The fixtures: a chain of two networks of three blocks, whose first ends after block 2."""

JOB = CalibrateJob(budget=0.05, confidence=0.8, ensemble=True, source="data.csv")
SKILLS = {0: 0.5, 2: 1.5, 3: 0.5, 4: 1.5, 5: 1.6}
"""How much more the true label gets, by exit."""


def rows_of(folder: Path, count: int = 4000) -> LabelledRows:
    names = read_card(folder).task["label_names"]
    return LabelledRows.of_texts(texts=map(str, range(count)), labels=(names[k % len(names)] for k in range(count)))


def outputs_of(folder: Path, rows: LabelledRows, skills: Mapping[int, float]) -> dict[int, Tensor]:
    """Every exit leans towards the truth, and errs by itself."""
    names = read_card(folder).task["label_names"]
    generator = torch.Generator().manual_seed(0)
    right_NC = torch.eye(len(names))[torch.tensor([names.index(label) for label in rows.labels])]
    return {
        block: torch.randn(len(rows), len(names), generator=generator) + skill * right_NC
        for block, skill in skills.items()
    }


def test_where_errors_differ_networks_answer_together_and_keep_what_is_promised(models: Path) -> None:
    folder = models / "chain"
    given = rows_of(folder)
    outputs = outputs_of(folder, given, SKILLS)
    card, records = calibrate(folder, given, JOB, outputs=[(range(len(given)), outputs)])
    assert card.weights is not None, card.tested["ensemble"]
    assert set(card.weights) == {2}
    assert 0.05 < card.weights[2] < 0.5
    assert read_calibration(folder).weights == card.weights
    assert card.policy_spec().weights == card.weights
    assert card.tested["ensemble"]["on"]
    assert card.tested["ensemble"]["gain"]["low"] > 0
    assert weights_of(ExitRecords.load(folder / RECORDS_FILE)) == weights_of(records) == card.weights
    alone = ExitRecords.load(folder / ALONE_FILE)
    reference_N = outputs[5].argmax(1).numpy()
    assert records.answers()[:, -1].tolist() == alone.answers()[:, -1].tolist() == reference_N.tolist()
    assert records.end_losses_N is not None
    weight = card.weights[2]
    together_NC = weight * outputs[2].softmax(1) + (1 - weight) * outputs[5].softmax(1)
    assert (records.end_losses_N != (together_NC.argmax(1).numpy() != reference_N)).mean() < 0.01
    truth_N = read_card(folder).task["label_names"].index
    right_N = together_NC.argmax(1).numpy() == [truth_N(label) for label in given.labels]
    assert records.outcome({}).accuracy == pytest.approx(right_N.mean(), abs=0.01), "the mixture's, not the reference's"
    assert np.array_equal(records.scores_NR[:, :2], alone.scores_NR[:, :2])
    assert not np.array_equal(records.scores_NR[:, 2], alone.scores_NR[:, 2])
    chain = read_card(folder).chain
    worst = 1 - card.tested["worst_agreement"]
    assert 0 < worst <= JOB.guarantee.budget
    assert records.outcome(card.thresholds).losses_N.mean() < JOB.guarantee.budget
    large = {ramp: value for ramp, value in card.thresholds.items() if ramp > 2}
    assert of_networks(alone, (1,), chain).outcome(large).losses_N.mean() < JOB.guarantee.budget
    with pytest.raises(DataError, match=r"ended after blocks \[2\] is mixed into what comes after"):
        of_networks(records, (1,), chain)
    survival = survival_of(records, card.thresholds, chain, alone)
    assert survival[0, 1] == records.outcome(card.thresholds).survival
    assert survival[1,] == alone.of_ramps((3, 4)).outcome(large).survival
    check_weights(records, card.weights, "records")
    with pytest.raises(DataError, match=r"exit_records.npz holds what networks say with the weights .*, not of none"):
        check_weights(records, None, "exit_records.npz")


def test_where_nothing_is_gained_nothing_is_mixed_or_left(models: Path) -> None:
    folder = models / "chain"
    given = rows_of(folder)
    outputs = [(range(len(given)), outputs_of(folder, given, SKILLS | {2: 0.0, 5: 9.0}))]
    card, records = calibrate(folder, given, JOB, outputs=outputs)
    plain, alone = calibrate(folder, given, JOB.model_copy(update={"ensemble": False}), outputs=outputs)
    assert card.weights is None
    assert not card.tested["ensemble"]["on"]
    assert "weights" not in json.loads(card.to_json())
    assert not (folder / ALONE_FILE).exists()
    assert card.thresholds == plain.thresholds
    assert weights_of(records) is None
    np.testing.assert_array_equal(records.scores_NR, alone.scores_NR)
    outputs = [(range(len(given)), outputs_of(folder, given, SKILLS))]
    calibrate(folder, given, JOB, outputs=outputs)
    assert (folder / ALONE_FILE).exists()
    calibrate(folder, given, JOB.model_copy(update={"ensemble": False}), outputs=outputs)
    assert not (folder / ALONE_FILE).exists()


def test_an_ensemble_of_one_network_and_one_by_shares_are_refused(models: Path) -> None:
    given = rows_of(models / "small")
    with pytest.raises(DataError, match="small is a single network: an ensemble is of a chain's"):
        calibrate(models / "small", given, JOB)
    outputs = [(range(len(given)), outputs_of(models / "chain", given, SKILLS))]
    with pytest.raises(DataError, match="leave by entropy or confidence, not by share"):
        calibrate(models / "chain", given, JOB.model_copy(update={"policy": "share"}), outputs=outputs)
