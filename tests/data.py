"""The shared data sets, for tests that read them."""

from __future__ import annotations

import os
from pathlib import Path

BERT12_SST2 = "exit_traces/bert12_sst2dev_exit_confidences.csv"
"""Exits of a BERT-base with 12 exits on the 872 sentences of SST-2 dev."""


def data_folder() -> Path | None:
    """Returns the folder that OFFRAMP_DATA names, or None if it does not exist; tests that need it are skipped."""
    folder = Path(os.environ.get("OFFRAMP_DATA", "../shared/data"))
    return folder if folder.is_dir() else None
