"""One study per figure or table of the papers' evaluations: claims, what we get, why they differ."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from experiments.studies.study import Study

FIGURES: tuple[str, ...] = tuple(
    path.stem
    for of in ("fig", "apparate_", "pame_", "tcb_", "tabi_")
    for path in sorted(Path(__file__).parent.glob(f"{of}*.py"))
)
"""Modules of this folder in the order of the papers, E3's first; a new study is a module and a Markdown file here."""


def load(name: str) -> Study:
    """The study of a module, of this package where its name has no dot.

    Modules load one by one, so a broken one breaks only its own row of the report.
    """
    study = import_module(name if "." in name else f"{__name__}.{name}").STUDY
    assert isinstance(study, Study), f"{name}.STUDY is no Study"
    return study
