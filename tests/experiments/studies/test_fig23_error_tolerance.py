from __future__ import annotations

import pytest

from experiments.studies.fig23_error_tolerance import answers, changed_answers, compare
from tests.experiments.studies.small_cases import four_blocks, four_inputs, inputs_at


def test_answers_are_those_of_the_ramps() -> None:
    found = answers(four_inputs(), 0.4)
    # a leaves with 0 instead of 1, b with 1 instead of 0, which is right.
    assert (found.agreement, found.accuracy, found.full_accuracy) == (0.5, 0.75, 0.75)


def test_ramps_that_are_off_change_the_answers_of_those_who_would_have_left_there() -> None:
    records = four_inputs()
    assert changed_answers(records, (), 0.4) == 0
    assert changed_answers(records, (0,), 0.4) == 1, "a leaves at ramp 1, with 1 instead of 0"
    assert changed_answers(records, (1,), 0.4) == 0, "b leaves at ramp 2 with the same answer"
    assert changed_answers(records, (0, 1, 2), 0.4) == 2, "a and b get the full model's"


def test_the_study_gives_goodput_and_errors_at_every_entropy() -> None:
    result = compare(four_inputs(), inputs_at, four_blocks(), "quick")
    (row,) = result.figures["entropies"]
    assert row["entropy"] == 0.5
    assert row["answers"]["agreement"] == pytest.approx(0.5)
    assert result.e3.over_stock is not None
    assert result.e3.over_stock > 1
    assert len(result.pictures) == 2
