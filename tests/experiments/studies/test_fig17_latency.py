from __future__ import annotations

import numpy as np
import pytest

from experiments.studies.fig17_latency import (
    BATCHES,
    HELD,
    OWN,
    SINGLES,
    Load,
    Spread,
    box_of,
    compare,
    loads,
    spread,
    with_held,
)
from experiments.studies.kit import Box, Boxes
from optimizer.decision import Planned
from optimizer.planner import solve
from tests.experiments.studies.two_blocks import inputs, problem


def box(milliseconds: float) -> Box:
    return Box(
        minimum=milliseconds,
        quartile=milliseconds,
        median=milliseconds,
        third_quartile=milliseconds,
        maximum=milliseconds,
    )


def test_a_box_is_minimum_quartiles_and_maximum() -> None:
    assert box_of(np.array([4.0, 0.0, 1.0, 3.0, 2.0])) == Box(
        minimum=0, quartile=1, median=2, third_quartile=3, maximum=4
    )


def test_batches_come_in_equal_gaps() -> None:
    assert Load(rate_per_s=800.0, batch=8).arrivals_s(0.05, 0).tolist() == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])


def test_single_inputs_come_at_random_at_their_rate() -> None:
    arrivals_s = Load(rate_per_s=1000.0, batch=1).arrivals_s(10.0, 0)
    assert len(arrivals_s) == pytest.approx(10_000, rel=0.05)


def test_an_idle_service_takes_as_long_as_its_blocks() -> None:
    # Pairs every 20 ms on one accelerator: 1 ms for who leaves after the first block, 2 ms for who does not.
    truth = problem(count=1)
    planned = solve(truth, "early-exit")
    assert isinstance(planned, Planned)
    found = spread(truth, planned, inputs(), Load(rate_per_s=100.0, batch=2), 400)
    assert (found.box.minimum, found.box.maximum) == pytest.approx((1, 2))
    # Both of a pair leave early a quarter of the time; only then is the pair done after 1 ms.
    assert found.held.median == pytest.approx(2)
    assert found.in_slo_share == 1


def test_answers_that_are_held_are_told_where_it_makes_a_difference() -> None:
    early = Spread(rate_per_s=1.0, box=box(1.0), held=box(2.0), in_slo_share=1.0)
    stock = Spread(rate_per_s=1.0, box=box(2.0), held=box(2.0), in_slo_share=1.0)
    assert with_held({"stock": stock, "early-exit": early}) == {
        "stock": box(2.0),
        "early-exit": box(1.0),
        HELD: box(2.0),
    }
    assert HELD not in with_held({"early-exit": stock})


def test_every_load_has_a_picture_and_batches_at_one_rate_are_compared() -> None:
    sides = {
        "stock": Spread(rate_per_s=1.0, box=box(20.0), held=box(20.0), in_slo_share=1.0),
        "early-exit": Spread(rate_per_s=1.0, box=box(5.0), held=box(8.0), in_slo_share=1.0),
        "e3": Spread(rate_per_s=1.0, box=box(10.0), held=box(12.0), in_slo_share=1.0),
    }
    result = compare({"1 V100": 5.0}, {load: {"1 V100": sides} for load in (SINGLES, BATCHES, OWN)}, 0.1)
    pictures = [each for each in result.pictures if isinstance(each, Boxes)]
    assert [each.title for each in pictures] == [f"Latency: {load}" for load in (SINGLES, BATCHES, OWN)]
    assert [each.limit for each in pictures] == [100, 100, 100]
    assert {each.name: each.ours for each in result.comparisons[:3]} == {
        "median: e3 / stock, 1 V100": 0.5,
        "median: e3 / early-exit, 1 V100": 2.0,
        f"median: e3 / {HELD}, 1 V100": 1.25,
    }
    assert "1 V100: the one rate is 5 inputs/s." in result.notes


def test_near_its_own_capacity_a_side_is_offered_nine_tenths_of_it_in_batches() -> None:
    assert loads(400.0, 1000.0) == {
        SINGLES: Load(rate_per_s=400.0, batch=1),
        BATCHES: Load(rate_per_s=400.0, batch=8),
        OWN: Load(rate_per_s=900.0, batch=8),
    }
