"""A model of four blocks that every test file can create, and matching exit records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from earlyexit.network.checkpoint import random_model
from earlyexit.network.store import save_model
from earlyexit.tasks.label import LabelTask
from profiles.scores import Score
from tests.exit_records import exit_records

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_blocks": 4,
    "num_heads": 2,
    "intermediate_size": 16,
    "max_length": 8,
}


def save_small_model(folder: Path) -> None:
    """Saves a model with ramps after blocks 0, 1 and 2, and two labels."""
    save_model(random_model(SIZES, task=LabelTask(("yes", "no")), seed=1), folder)


def save_records(folder: Path, score: Score, scores_NR: Sequence[Sequence[float]]) -> None:
    """Saves records of inputs a, b, ... whose answer is always the first label."""
    num = len(scores_NR)
    answers_NE, sample_ids = np.zeros((num, 4), dtype=np.int64), tuple("abcdefgh"[:num])
    records = exit_records(scores_NR, answers_NE=answers_NE, score=score, sample_ids=sample_ids)
    records.save(folder / "records.npz")
