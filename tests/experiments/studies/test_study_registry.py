from __future__ import annotations

import ast
from pathlib import Path

import pytest

from experiments import studies

FOLDER = Path(studies.__file__).parent
SOURCES = sorted(FOLDER.glob("fig*.py"))
each_study = pytest.mark.parametrize("name", studies.FIGURES)


def test_every_study_of_the_folder_is_in_the_registry_once() -> None:
    assert sorted(studies.FIGURES) == [path.stem for path in SOURCES]


def test_studies_stand_in_the_order_of_the_paper() -> None:
    assert list(studies.FIGURES) == sorted(studies.FIGURES)


@each_study
def test_a_study_says_its_name_and_its_command(name: str) -> None:
    study = studies.load(name)
    assert study.name == name
    assert study.differs
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert study.command in (ast.get_docstring(ast.parse(source)) or "")
    assert "command(STUDY)" in source
