from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.studies.by_batch import Point
from experiments.studies.fig13_mixed_accelerators import cases, compare
from experiments.studies.mixed_types import AtBatch, as_fast_as_dear, better_of, on_type
from optimizer.decision import NoPlan
from optimizer.problem import PlanProblem, Supply
from profiles.table import LatencyTable
from simulator.goodput import Capacity
from tests.experiments.studies.small_cases import four_blocks, inputs_at


def two_types() -> PlanProblem:
    """A V100 and two K80, which take five times as long and cost a quarter."""
    problem = four_blocks()
    table = problem.latency["V100"]
    slow = LatencyTable(batches=table.batches, block_s_NB=5 * table.block_s_NB, ramp_s_EB=5 * table.ramp_s_EB)
    devices = {"V100": Supply(count=1, usd_per_hour=4.0), "K80": Supply(count=2, usd_per_hour=1.0)}
    return replace(problem, latency={"V100": table, "K80": slow}, devices=devices)


def one_type() -> PlanProblem:
    return replace(four_blocks(), devices={"V100": Supply(count=2, usd_per_hour=4.0)})


def test_a_baseline_has_three_readings() -> None:
    at = AtBatch(
        mixed={"e3": 300.0},
        by_type={"V100": {"stock": 100.0}, "K80": {"stock": 20.0}},
        equal={"stock": 150.0},
    )
    assert [at.times("e3", "stock", reading) for reading in ("one type", "all types", "16 V100")] == [3.0, 2.5, 2.0]


def test_a_type_alone_has_no_other_accelerators() -> None:
    alone = on_type(two_types(), "K80")
    assert (list(alone.devices), list(alone.latency)) == (["K80"], ["K80"])


def test_a_type_as_fast_for_its_price_is_slower_by_as_much_as_it_is_cheaper() -> None:
    latency = as_fast_as_dear(two_types(), one_type()).latency
    np.testing.assert_allclose(latency["K80"].block_s_NB, 4 * latency["V100"].block_s_NB)
    np.testing.assert_allclose(latency["V100"].block_s_NB, four_blocks().latency["V100"].block_s_NB)


def test_a_service_stays_with_the_batches_that_serve_it_better() -> None:
    nothing = Point(decision=NoPlan(strategy="stock", binding="latency"), capacity=None)
    capacity = Capacity(rate_per_s=7.0, figures=None, trials=())
    more = Point(decision=nothing.decision, capacity=capacity)
    assert better_of({"stock": 5.0, "early-exit": 5.0}, {"stock": nothing, "early-exit": more}) == {
        "stock": 5.0,
        "early-exit": 7.0,
    }


def test_the_study_compares_with_every_reading() -> None:
    result = compare(two_types(), one_type(), inputs_at(0.4), {}, "quick")
    ours = {each.name: each.ours for each in result.comparisons}
    side_by_side, one = (ours[f"e3 / early-exit on {reading}, largest"] for reading in ("all types", "one type"))
    assert side_by_side is not None
    assert one is not None
    assert side_by_side < one, "a baseline with all types does more"
    assert result.e3.over_early_exit == side_by_side
    assert "a K80 takes 5.0 times as long as a V100 and costs 1/4.0 of it" in result.notes[0]


def test_cases_are_both_clusters_with_what_they_serve() -> None:
    inputs = inputs_at(0.4)
    fast, theirs, both = cases(two_types(), one_type(), inputs).values()
    assert fast[2] is inputs
    assert theirs[2] is both[2]
    assert theirs[0].latency["K80"].block_s_NB[0, 0] > both[0].latency["K80"].block_s_NB[0, 0]
