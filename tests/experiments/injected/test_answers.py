"""Ramps from labels beside ramps from the model's own answers, on one injected model."""

from __future__ import annotations

from pathlib import Path

from earlyexit.fingerprint import weights_sha256
from earlyexit.store import load_model
from experiments.injected.answers import Compared, compared
from tests.offramp.jobs.test_injecting import ROWS, injected_into, rows_of


def test_both_learn_on_the_same_blocks_and_the_folder_stays_as_it_is(tmp_path: Path) -> None:
    learned = rows_of(labels=("a", "b", "c"))
    injected_into(tmp_path, learned)
    before = weights_sha256(load_model(tmp_path).ramps)
    found = compared(tmp_path, learned, rows_of(ROWS + 100).select(range(ROWS, ROWS + 100)))
    assert tuple(each.block for each in found) == load_model(tmp_path).ramp_indices
    assert weights_sha256(load_model(tmp_path).ramps) == before
    assert max(each.points for each in found) > 5, "labels by turns say nothing of what the model answers"


def test_differences_are_points_of_agreement() -> None:
    assert round(Compared(block=0, labels=0.98, answers=0.985).points, 6) == 0.5
