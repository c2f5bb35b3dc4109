"""One study per figure of E3's evaluation (SOSP'24, section 5): what E3 claims, what we get, and why they differ."""

from __future__ import annotations

from importlib import import_module

from experiments.studies.study import Study

FIGURES: tuple[str, ...] = (
    "fig02_savings",
    "fig03_shrinking",
    "fig07_homogeneous",
    "fig09_distilbert",
    "fig13_mixed_accelerators",
    "fig14_gpus_needed",
    "fig15_cost",
    "fig16_adaptation",
    "fig17_latency",
    "fig18_pabee",
    "fig19_bursts",
    "fig20_planner_overhead",
    "fig21_forecast",
    "fig22_misprediction",
    "fig23_error_tolerance",
    "fig24_slo",
    "fig25_ramps_inside",
    "fig26_no_model_parallelism",
)
"""Modules of this folder in the order of the paper; a new study is one line here."""


def load(name: str) -> Study:
    """The study of a module; modules load one by one, so a broken one breaks only its own row of the report."""
    study = import_module(f"{__name__}.{name}").STUDY
    assert isinstance(study, Study), f"{name}.STUDY is no Study"
    assert study.name == name, f"{name}.STUDY is named {study.name}"
    return study
