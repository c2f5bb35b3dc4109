"""A model of four blocks, small enough to be made anew by every test file."""

from __future__ import annotations

from pathlib import Path

from earlyexit.checkpoint import random_model
from earlyexit.store import save_model
from earlyexit.tasks.label import LabelTask

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_blocks": 4,
    "num_heads": 2,
    "intermediate_size": 16,
    "max_length": 8,
}


def save_small_model(folder: Path) -> None:
    """With ramps after 0, 1 and 2, and two labels."""
    save_model(random_model(SIZES, task=LabelTask(("yes", "no")), seed=1), folder)
