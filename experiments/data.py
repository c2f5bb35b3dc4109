"""Where the data of the experiments is."""

from __future__ import annotations

import os
from pathlib import Path

RUNS = Path("runs")
"""Where experiments write; not in the repository."""

DEFAULT = "../shared/data"


def data_folder() -> Path | None:
    """The folder of shared data sets that OFFRAMP_DATA names; None where it is absent."""
    folder = Path(os.environ.get("OFFRAMP_DATA", DEFAULT))
    return folder if folder.is_dir() else None


def require_data(name: str) -> Path:
    """A file of the shared data; ends the experiment with a sentence where it is absent."""
    folder = data_folder()
    if folder is None or not (folder / name).exists():
        raise SystemExit(f"skipped: {name} is not in OFFRAMP_DATA ({os.environ.get('OFFRAMP_DATA', DEFAULT)})")
    return folder / name
