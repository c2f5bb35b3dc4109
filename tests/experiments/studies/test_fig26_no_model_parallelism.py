from __future__ import annotations

from dataclasses import replace

import pytest

from earlyexit.split import Split
from experiments.studies.fig26_no_model_parallelism import IN_TURN, compare, contenders, in_turn
from experiments.studies.sides import facing
from optimizer.decision import NoPlan, Planned
from optimizer.evaluate import evaluate
from optimizer.plan import Stage
from tests.experiments.studies.small_cases import four_blocks, inputs_at


def halves() -> Planned:
    """Two blocks on each of the two accelerators."""
    first, last = Split(first=0, end=2, batch=8, ramps=(0, 1)), Split(first=2, end=4, batch=8, ramps=(2,))
    stages = tuple(Stage(device="V100", replicas=1, splits=(split,)) for split in (first, last))
    figures = evaluate(four_blocks(), stages)
    return Planned(strategy="e3", stages=stages, figures=figures, bound=figures.rate_per_s, gap=0.0)


def test_in_turn_every_accelerator_runs_all_splits() -> None:
    (stage,) = in_turn(four_blocks(), halves()).stages
    assert stage.replicas == 2
    assert [(split.first, split.end, split.batch, split.ramps) for split in stage.splits] == [
        (0, 2, 8, (0, 1)),
        (2, 4, 8, (2,)),
    ]


def test_in_turn_batches_fill_more_slowly() -> None:
    apart = halves()
    # At the same rate; survival is 1: the second split fills two batches instead of one.
    assert in_turn(four_blocks(), apart).figures.splits[1].wait_s > apart.figures.splits[1].wait_s


def test_no_plan_of_e3_leaves_none_in_turn() -> None:
    hasty = replace(four_blocks(), slo=replace(four_blocks().slo, latency_s=0.01))
    assert isinstance(contenders(hasty)[IN_TURN], NoPlan)


def test_splits_in_turn_do_at_least_what_their_pipeline_does_by_the_cost_model() -> None:
    found = contenders(facing(four_blocks(), inputs_at(0.4)))
    e3, turns = found["e3"], found[IN_TURN]
    assert isinstance(e3, Planned)
    assert isinstance(turns, Planned)
    assert turns.figures.rate_per_s >= e3.figures.rate_per_s * (1 - 1e-9), "no hop, no uneven load"


def test_the_study_compares_e3_with_all_readings() -> None:
    result = compare(four_blocks(), inputs_at(0.4), "quick")
    ours = {each.name: each.ours for each in result.comparisons}
    assert ours[f"e3 / {IN_TURN}, batch 8"] == pytest.approx(1, abs=0.2)
    assert set(result.figures["rows"]) == {"batch 8", "SLO 40 ms"}
    assert result.figures["rows"]["SLO 40 ms"]["e3"] is None, "four blocks take at least 40 ms"
