"""E3's figures 20 to 26: what planning takes, what a forecast is worth, and what a plan may have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from earlyexit.network.split import Split
from experiments.studies import fig20_planner_overhead as fig20
from experiments.studies import fig21_forecast as fig21
from experiments.studies import fig22_misprediction as fig22
from experiments.studies import fig23_error_tolerance as fig23
from experiments.studies import fig24_slo as fig24
from experiments.studies import fig25_ramps_inside as fig25
from experiments.studies import fig26_no_model_parallelism as fig26
from experiments.studies.fig21_forecast import HISTORY, Kinds, Workload
from experiments.studies.fig22_misprediction import Mistakes
from experiments.studies.picture import Bars, Lines
from experiments.studies.sides import facing
from optimizer.decision import Decision, NoPlan, Planned
from optimizer.evaluate import evaluate
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import PlanProblem, Slo
from tests.experiments.studies.cases import (
    four_blocks,
    four_inputs,
    half_leave,
    inputs_at,
    ours,
    table,
    told,
    two_blocks,
)


def test_20_both_spaces_are_timed_beside_the_papers_seconds() -> None:
    label = "BERT-base, 16 V100"
    rows = fig20.measure({label: two_blocks()}, 1)
    assert rows[label].keys() == {"best", "e3"}
    assert all(row["seconds"] > 0 and row["gap"] == 0 for row in rows[label].values())
    result = fig20.compare({label: {"best": {"seconds": 0.5, "gap": 0.0}, "e3": {"seconds": 0.25, "gap": 0.0}}})
    assert [(each.ours, each.paper) for each in result.comparisons] == [(0.25, 0.87), (0.5, 0.87)]
    (picture,) = result.pictures
    assert isinstance(picture, Bars)
    assert picture.paper == {"e3": (0.87,)}


KINDS = Kinds(easy_K=np.array([0.8, 0.2, 0.0]), hard_K=np.array([0.0, 0.2, 0.8]))
"""Half of each: 1, 0.6 and 0.4 of the inputs reach the three blocks."""
STEADY = Workload(name="steady", easy_W=lambda _: np.full(HISTORY + 10, 0.5), drifts=False)


def test_21_errors_are_in_inputs_of_the_batch() -> None:
    found = fig21.Batches(
        forecast_WC=np.array([[4.0, 2.0], [4.0, 2.0]]),
        last_WC=np.array([[5.0, 2.0], [4.0, 2.0]]),
        true_WC=np.array([[4.5, 2.5], [4.0, 2.0]]),
    )
    assert fig21.errors([found]) == {"forecast": 0.25, "last": 0.25}
    assert fig21.cuts_of(KINDS) == [1, 2], "where a third and a half have left"


def test_21_what_does_not_change_is_forecast_and_a_switch_is_not() -> None:
    result = fig21.compare(KINDS, [STEADY, fig21.TWO_SWITCHES], "quick")
    errors = result.figures["errors"]["probes"]
    # From 240 probes a share scatters by 0.03, so a batch of 8 by 0.25; the history takes most of it off.
    assert errors["steady"]["forecast"] < 0.15 < errors["two switches in ten"]["forecast"]
    usual, last, worst = result.comparisons
    assert (usual.ours, last.ours) == pytest.approx((errors["steady"]["forecast"], errors["steady"]["last"]))
    assert worst.name == "worst workload (two switches in ten), probes"
    (picture,) = result.pictures
    assert isinstance(picture, Lines)
    assert len(picture.x) == 10
    actual = picture.series["before block 1: actual"]
    # 80:20 four times, then 50:50: 8 * (1 - 0.8 * 0.8) and 8 * 0.6 inputs are left.
    assert (actual[0], actual[5]) == pytest.approx((2.88, 4.8), abs=0.1)


def mistake(*goodput_per_s: float, case: str = "batch 8") -> Mistakes:
    return Mistakes(
        case=case,
        strategy="e3",
        direction="sees too few leave",
        errors=(0.0, 0.2, 1.0),
        goodput_per_s=goodput_per_s,
        stock_per_s=500.0,
    )


def test_22_what_is_lost_is_told_of_the_plan_that_knows_the_truth() -> None:
    assert fig22.lost(mistake(1000.0, 900.0, 400.0)) == pytest.approx(10)
    assert fig22.lost(mistake(0.0, 0.0, 0.0)) is None


@pytest.mark.usefixtures("longer_simulations")
def test_22_plans_are_simulated_on_the_true_exits() -> None:
    # However few stock expects to leave: it does two inputs in 2 ms, on three accelerators.
    truth = facing(two_blocks(), half_leave())
    planned = solve(truth, "stock")
    assert isinstance(planned, Planned)
    assert fig22.simulator(truth, half_leave(), "quick")(planned) == pytest.approx(3000, rel=0.1)


def test_22_the_most_and_the_least_that_e3_loses_are_of_recorded_exits_alone() -> None:
    result = fig22.compare(
        [
            mistake(1000.0, 900.0, 400.0),
            mistake(1000.0, 950.0, 400.0, case="batch 4"),
            mistake(1000.0, 500.0, 400.0, case=fig22.AT_ONCE),
        ]
    )
    most, least = result.comparisons[:2]
    assert (most.ours, least.ours) == pytest.approx((10, 5))
    assert (most.paper, least.paper) == (8, 4)
    (picture,) = result.pictures
    assert isinstance(picture, Lines)
    assert picture.x == (0.0, 20.0, 100.0)
    assert picture.series == {"e3 sees too few leave": (1000.0, 900.0, 400.0), "stock": (500.0, 500.0, 500.0)}


def test_23_ramps_that_are_off_change_the_answers_of_those_who_would_have_left_there() -> None:
    changed = [fig23.changed_answers(four_inputs(), off, 0.4) for off in ((), (0,), (1,), (0, 1, 2))]
    # a leaves at ramp 1, with 1 instead of 0; b at ramp 2 with the same answer; without any both get the full model's.
    assert changed == [0, 1, 0, 2]


def test_23_goodput_and_errors_stand_there_at_every_entropy() -> None:
    result = fig23.compare(four_inputs(), inputs_at, four_blocks(), "quick")
    (row,) = result.figures["entropies"]
    # a leaves with 0 instead of 1, b with 1 instead of 0, which is right.
    assert row["entropy"] == 0.5
    assert row["answers"] == {"agreement": 0.5, "accuracy": 0.75, "full_accuracy": 0.75}
    assert result.e3.over_stock is not None
    assert result.e3.over_stock > 1
    assert len(result.pictures) == 2


def largest_batch(decision: Decision) -> int:
    assert isinstance(decision, Planned)
    return max(split.batch for stage in decision.stages for split in stage.splits)


def test_24_a_contender_takes_the_batch_limit_that_serves_it_best() -> None:
    # A batch of 24 has hardly more throughput than one of 8 and takes 236 ms instead of 80 ms.
    problem = four_blocks()
    latency = {"V100": table((1, 8, 24), (0.005, 0.020, 0.059), 4, 0.1)}
    problem = replace(problem, latency=latency, slo=Slo(latency_s=problem.slo.latency_s, slack=0.0))
    found = fig24.by_slo(problem, inputs_at(0.4), (0.375,), ("stock",))
    tuned, planned = found.tuned["375 ms"]["stock"], found.planned["375 ms"]["stock"]
    assert [largest_batch(each.decision) for each in (tuned, planned)] == [8, 24]
    assert tuned.rate_per_s is not None
    assert planned.rate_per_s is not None
    assert tuned.rate_per_s > planned.rate_per_s, "who waits for 24 inputs has no time left to queue"


def test_24_a_strict_slo_leaves_less_goodput_than_a_loose_one_or_none() -> None:
    result = fig24.compare(four_blocks(), inputs_at(0.4), (0.01, 0.4, 2.0), {}, "quick")
    for name in ("stock", "early-exit", "e3"):
        none, strict, loose = (result.figures["tuned"][slo][name] for slo in ("10 ms", "400 ms", "2000 ms"))
        assert none is None
        assert strict["goodput_per_s"] <= loose["goodput_per_s"], name
    assert ours(result)["e3 / early-exit, largest"] == result.e3.over_early_exit
    assert ours(result)["e3 / early-exit, SLO 10 ms"] is None


def test_24_e3s_circumstances_are_one_case() -> None:
    ((problem, inputs),) = fig24.cases(four_blocks()).values()
    assert (inputs.survival_N[2], problem.latency["V100"].block_s_NB[0, 0]) == (0.5, 0.040)


def planned_rates(decisions: dict[str, Decision]) -> dict[str, float]:
    return {name: each.figures.rate_per_s for name, each in decisions.items() if isinstance(each, Planned)}


def test_25_ramps_inside_splits_are_off_and_chosen_ones_are_never_worse_by_the_cost_model() -> None:
    decisions = fig25.variants(facing(four_blocks(), inputs_at(0.4)))
    at_ends = decisions[fig25.AT_ENDS]
    assert isinstance(at_ends, Planned)
    for stage in at_ends.stages:
        for split in stage.splits:
            assert split.ramps == ((split.end - 1,) if split.end < 4 else ())
    rates = planned_rates(decisions)
    assert rates[fig25.CHOSEN] >= max(rates["e3"], rates[fig25.AT_ENDS]) * (1 - 1e-9)


def test_25_the_study_tells_what_ramps_may_bring_at_most() -> None:
    result = fig25.compare(four_blocks(), inputs_at(0.4), {}, "quick")
    assert ours(result)[f"{fig25.AT_ENDS} / e3, largest"] == ours(result)[f"batch 8: {fig25.AT_ENDS} / e3"]
    assert list(told(result).values()) == pytest.approx([0.1, 4 * 0.16 / (3 - 1.16)])


def test_25_ramps_get_dearer_before_anything_else_changes() -> None:
    inputs = inputs_at(0.4)
    dear, exits, flat_times, at_once = fig25.cases(four_blocks(), inputs).values()
    assert dear[1] is inputs
    assert exits[0] is dear[0]
    assert flat_times[0] is at_once[0]
    ramps = dear[0].latency["V100"]
    assert ramps.ramp_s_EB[0, 0] / ramps.block_s_NB[0, 0] == pytest.approx(4 * 0.16 / (3 - 1.16))


def test_26_in_turn_every_accelerator_runs_all_splits_and_fills_batches_more_slowly() -> None:
    first, last = Split(first=0, end=2, batch=8, ramps=(0, 1)), Split(first=2, end=4, batch=8, ramps=(2,))
    stages = tuple(Stage(device="V100", replicas=1, splits=(split,)) for split in (first, last))
    figures = evaluate(four_blocks(), stages)
    halves = Planned(strategy="e3", stages=stages, figures=figures, bound=figures.rate_per_s, gap=0.0)
    turns = fig26.in_turn(four_blocks(), halves)
    assert turns.stages == (Stage(device="V100", replicas=2, splits=(first, last)),)
    # At the same rate; survival is 1: the second split fills two batches instead of one.
    assert turns.figures.splits[1].wait_s > figures.splits[1].wait_s


def test_26_splits_in_turn_do_at_least_what_their_pipeline_does_by_the_cost_model() -> None:
    problem: PlanProblem = facing(four_blocks(), inputs_at(0.4))
    rates = planned_rates(fig26.contenders(problem))
    assert rates[fig26.IN_TURN] >= rates["e3"] * (1 - 1e-9), "no hop, no uneven load"
    hasty = replace(problem, slo=replace(problem.slo, latency_s=0.01))
    assert isinstance(fig26.contenders(hasty)[fig26.IN_TURN], NoPlan)


def test_26_the_study_compares_e3_with_all_readings() -> None:
    result = fig26.compare(four_blocks(), inputs_at(0.4), "quick")
    assert ours(result)[f"e3 / {fig26.IN_TURN}, batch 8"] == pytest.approx(1, abs=0.2)
    assert set(result.figures["rows"]) == {"batch 8", "SLO 40 ms"}
    assert result.figures["rows"]["SLO 40 ms"]["e3"] is None, "four blocks take at least 40 ms"
