from __future__ import annotations

import pytest

from earlyexit.errors import DataError
from experiments.studies.fig18_pabee import compare, decide_with_all_ramps, least_patience, outcome, patient_inputs
from experiments.studies.sides import facing
from optimizer.decision import Planned
from tests.experiments.studies.small_cases import four_blocks, four_inputs


def test_patience_answers_with_the_label_that_was_repeated() -> None:
    found = outcome(four_inputs(), 1)
    # a and b leave at the third ramp with 1, d at the second with 0; c never repeats and takes the full model's 0.
    assert found.agreement == 0.75, "b's full model says 0"
    assert found.accuracy == 1


def test_more_patience_than_ramps_lets_nobody_out() -> None:
    found = outcome(four_inputs(), 3)
    assert (found.agreement, found.accuracy) == (1, 0.75)


def test_the_least_patience_keeps_the_answers() -> None:
    assert least_patience(four_inputs(), 0.75) == 1
    assert least_patience(four_inputs(), 1.0) == 2, "only d leaves, at the third ramp"


def test_answers_that_no_patience_keeps_are_refused() -> None:
    with pytest.raises(DataError, match="no patience below 3 keeps 200%"):
        least_patience(four_inputs(), 2.0)


def test_every_plan_but_stocks_has_all_ramps_active() -> None:
    problem = four_blocks()
    facing_them = facing(problem, patient_inputs(four_inputs(), 1, problem))
    for name, decision in decide_with_all_ramps(facing_them).items():
        assert isinstance(decision, Planned)
        ramps = [ramp for stage in decision.stages for split in stage.splits for ramp in split.ramps]
        assert ramps == ([] if name == "stock" else [0, 1, 2]), name


def test_the_study_gives_every_side_with_quick_effort() -> None:
    result = compare(four_inputs(), four_blocks(), "quick")
    ours = {each.name: each.ours for each in result.comparisons}
    assert ours["e3 / PABEE, batch 8"] == result.e3.over_early_exit
    # Patience 2: only d leaves, after block 3 of 4; three ramps of a tenth look at everybody, so PABEE is below stock.
    assert result.e3.over_stock is not None
    assert result.e3.over_stock < 1.1
    assert result.notes[0].startswith("Patience 2: 100.0% of the answers are the full model's")
