"""Locates the data of the experiments."""

from __future__ import annotations

import os
from pathlib import Path

RUNS = Path("runs")
"""Output folder of experiments, which is not in the repository."""

DEFAULT = "../shared/data"


def data_folder() -> Path | None:
    """Returns the folder of shared data sets that OFFRAMP_DATA names, or None if it does not exist."""
    folder = Path(os.environ.get("OFFRAMP_DATA", DEFAULT))
    return folder if folder.is_dir() else None


def require_data(name: str) -> Path:
    """Returns a file of the shared data; exits the process with a message if the file is missing."""
    folder = data_folder()
    if folder is None or not (folder / name).exists():
        raise SystemExit(f"skipped: {name} is not in OFFRAMP_DATA ({os.environ.get('OFFRAMP_DATA', DEFAULT)})")
    return folder / name
