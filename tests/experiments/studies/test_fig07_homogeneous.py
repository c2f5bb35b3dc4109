from __future__ import annotations

from functools import partial

import pytest

from experiments.studies.e3_case import exits_at_once
from experiments.studies.fig07_homogeneous import STUDY, cases, compare
from experiments.studies.side_by_side import by_batch_limit, times
from experiments.studies.sides import decide
from tests.experiments.studies.small_cases import four_blocks, inputs_at


def test_e3s_circumstances_are_added_one_after_the_other() -> None:
    ours = four_blocks()
    exits, flat_times, dear_ramps, at_once = cases(ours).values()
    assert exits[0] is ours
    assert flat_times[1] is exits[1], "the same inputs"
    table, dearer = flat_times[0].latency["V100"], dear_ramps[0].latency["V100"]
    assert (table.block_s_NB[:, 0] == table.block_s_NB[:, 1]).all()
    assert (dearer.ramp_s_EB > table.ramp_s_EB).all()
    assert at_once[1].words == exits_at_once(ours).words


def test_a_batch_of_one_loses_nothing_by_shrinking() -> None:
    rows = by_batch_limit(
        four_blocks(), inputs_at(0.4), (1,), partial(decide, strategies=("stock", "early-exit")), "quick"
    )
    # The four inputs leave after 1, 2, 3 and 4 blocks: 10 blocks and 9 ramps of a tenth, instead of 16 blocks.
    assert times(rows["batch 1"], "early-exit", "stock") == pytest.approx(16 / 10.9, rel=0.03)


def test_quick_effort_gives_the_figure_without_other_cases() -> None:
    result = compare(four_blocks(), inputs_at(0.4), {}, "quick")
    ours = {each.name: each.ours for each in result.comparisons}
    assert ours["e3 / early-exit, batch 8"] == result.e3.over_early_exit
    assert ours["e3 / stock, batch 8"] == result.e3.over_stock
    assert result.e3.over_early_exit is not None
    assert len(result.pictures) == 1
    assert STUDY.paper.over_early_exit == 1.44
