"""One study per figure of E3's evaluation (SOSP'24, section 5): what E3 claims, what we get, and why they differ."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from experiments.studies.study import Study

FIGURES: tuple[str, ...] = tuple(sorted(path.stem for path in Path(__file__).parent.glob("fig*.py")))
"""Modules of this folder in the order of the paper; a new study is a module and a Markdown file here."""


def load(name: str) -> Study:
    """The study of a module, of this package where its name has no dot.

    Modules load one by one, so a broken one breaks only its own row of the report.
    """
    study = import_module(name if "." in name else f"{__name__}.{name}").STUDY
    assert isinstance(study, Study), f"{name}.STUDY is no Study"
    return study
