from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.studies.by_batch import Point, by_batch
from experiments.studies.flat import flat, with_flat_times
from experiments.studies.sides import decide
from tests.experiments.studies.small_cases import four_blocks, inputs_at


def test_flat_times_are_those_of_the_largest_batch() -> None:
    table = flat(four_blocks(), 8).latency["V100"]
    assert table.batches == (1, 8)
    np.testing.assert_allclose(table.block_s_NB, 0.040)
    np.testing.assert_allclose(table.ramp_s_EB, 0.004)


def test_flat_times_are_left_out_with_quick_effort() -> None:
    assert with_flat_times(four_blocks(), inputs_at(0.4), 8, "quick") == ()


def test_sides_stand_beside_each_other_batch_by_batch() -> None:
    found = by_batch(four_blocks(), inputs_at(0.4), (1, 8), "quick", lambda limited: decide(limited, ("stock",)))
    ((one, eight),) = found.rates.values()
    assert one is not None
    assert eight is not None
    # Two replicas: 2 / 40 ms one by one, 2 * 8 / 160 ms in full batches.
    assert 40 < one < 52
    assert 80 < eight < 104
    assert found.bars("both").labels == ("1", "8")


def test_a_point_knows_its_active_ramps() -> None:
    decisions = decide(four_blocks(), ("stock", "early-exit"))
    ramps = [Point(decision=decision, capacity=None).ramps for decision in decisions.values()]
    assert ramps == [(), (0, 1, 2)]


def test_a_side_without_a_plan_has_no_goodput() -> None:
    problem = four_blocks()
    hasty = replace(problem, slo=replace(problem.slo, latency_s=0.01))
    found = by_batch(hasty, inputs_at(0.4), (1,), "quick")
    assert found.rates["stock"] == (None,)
    assert found.points["stock"][0].document() is None
