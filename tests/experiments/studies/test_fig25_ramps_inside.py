from __future__ import annotations

import pytest

from experiments.studies.fig25_ramps_inside import AT_ENDS, CHOSEN, cases, compare, variants
from experiments.studies.sides import facing
from optimizer.decision import Planned
from tests.experiments.studies.small_cases import four_blocks, inputs_at


def test_ramps_inside_splits_are_off_and_those_at_their_ends_on() -> None:
    decision = variants(facing(four_blocks(), inputs_at(0.4)))[AT_ENDS]
    assert isinstance(decision, Planned)
    for stage in decision.stages:
        for split in stage.splits:
            assert split.ramps == ((split.end - 1,) if split.end < 4 else ())


def test_chosen_ramps_are_never_worse_than_all_of_them_by_the_cost_model() -> None:
    rates = {}
    for name, decision in variants(facing(four_blocks(), inputs_at(0.4))).items():
        assert isinstance(decision, Planned)
        rates[name] = decision.figures.rate_per_s
    assert rates[CHOSEN] >= max(rates["e3"], rates[AT_ENDS]) * (1 - 1e-9)


def test_the_study_tells_what_ramps_may_bring_at_most() -> None:
    result = compare(four_blocks(), inputs_at(0.4), {}, "quick")
    ours = {each.name: each.ours for each in result.comparisons}
    assert ours[f"{AT_ENDS} / e3, largest"] == ours[f"batch 8: {AT_ENDS} / e3"]
    assert "A ramp takes 0.100 of a block, so that ramps switched off bring at most 10.0% here." in result.notes[0]


def test_ramps_get_dearer_before_anything_else_changes() -> None:
    ours, inputs = four_blocks(), inputs_at(0.4)
    dear, exits, flat_times, at_once = cases(ours, inputs).values()
    assert dear[1] is inputs
    assert exits[0] is dear[0]
    assert flat_times[0] is at_once[0]
    table = dear[0].latency["V100"]
    assert table.ramp_s_EB[0, 0] / table.block_s_NB[0, 0] == pytest.approx(4 * 0.16 / (3 - 1.16))
