"""Studies of Apparate's evaluation, on made-up streams."""

from __future__ import annotations

from experiments import studies
from experiments.studies.record import perform
from tests.experiments.studies.cases import ours

NAMES = [name for name in studies.FIGURES if name.startswith("apparate_")]


def test_tuned_once_a_drifting_stream_loses_more_than_allowed_and_tuned_on_it_does_not() -> None:
    outcome = perform(studies.load("apparate_table1_tuning"), "quick").outcome
    assert outcome.result is not None
    found = ours(outcome.result)
    assert found["vision, initial only: agreement (%)"] < 98
    assert found["vision, continual, guarantee: agreement (%)"] > 99
    assert found["vision, continual: agreement (%)"] > found["vision, initial only: agreement (%)"]
