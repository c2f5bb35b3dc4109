"""Where the models are that PAME's experiments look at, and which command makes each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.data import RUNS
from experiments.studies.study import StudyResult, Table

MODELS = RUNS / "pame"
"""Calibrated folders of jointly trained models, by the names of `MAKERS`."""
MAKERS: Mapping[str, str] = {
    "cifar10": "python -m experiments.trained.joint_cifar10",
    "lsp": "python -m experiments.trained.vision --case lsp",
    "camvid": "python -m experiments.trained.vision --case camvid",
}
"""The command that trains and calibrates each; all need OFFRAMP_DATA."""


def records_file(name: str) -> Path:
    """A model's exit records, there or not."""
    return MODELS / name / "exit_records.npz"


def require_model(folder: Path, *files: str) -> Path:
    """A model folder that has these files too; ends the experiment with a sentence where one is absent."""
    missing = next((name for name in ("model.json", *files) if not (folder / name).is_file()), None)
    if missing is not None:
        maker = f"; {MAKERS[folder.name]} makes it" if folder.name in MAKERS else ""
        raise SystemExit(f"skipped: {folder / missing} is not there{maker}")
    return folder


def telling_absent(result: StudyResult, names: Sequence[str]) -> StudyResult:
    """A study's result, with the models that it had to leave out, and what makes them."""
    rows = tuple((name, MAKERS[name]) for name in names if name in MAKERS and not records_file(name).is_file())
    if not rows:
        return result
    return replace(result, tables=(*result.tables, Table("Not here", ("", "made by"), rows)))
