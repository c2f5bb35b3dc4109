"""Models of PAME's experiments: where they are made is where they are sought, and what is absent is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import pame_cases
from experiments.studies.study import StudyResult
from experiments.trained import TRAINED


def test_commands_write_where_studies_look() -> None:
    made = {name for name, each in TRAINED.items() if each.folder == pame_cases.MODELS / name}
    assert made == set(pame_cases.MAKERS) == set(pame_cases.KINDS) - {"sst2"}


def test_a_study_names_the_models_that_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pame_cases, "MODELS", tmp_path)
    (tmp_path / "lsp").mkdir()
    pame_cases.records_file("lsp").touch()
    (table,) = pame_cases.telling_absent(StudyResult(comparisons=()), ("sst2", "cifar10", "lsp")).tables
    assert (table.title, table.rows) == ("Not here", (("cifar10", "python -m experiments.trained cifar10"),))
    assert not pame_cases.telling_absent(StudyResult(comparisons=()), ("sst2", "lsp")).tables
