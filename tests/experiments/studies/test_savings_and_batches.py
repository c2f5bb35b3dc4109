"""E3's figures 2 to 18: what exits save, and goodput by batch size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from earlyexit.errors import DataError
from experiments.studies import batch_limits, distilled_bert
from experiments.studies import fig03_shrinking as fig03
from experiments.studies import fig13_mixed_accelerators as fig13
from experiments.studies import fig17_latency as fig17
from experiments.studies import fig18_pabee as fig18
from experiments.studies.distilled_bert import ImdbRun
from experiments.studies.e3_case import exits_at_once
from experiments.studies.picture import Box, Boxes
from experiments.studies.record import missing_data
from experiments.studies.side_by_side import Point
from experiments.studies.sides import facing
from optimizer.decision import NoPlan, Planned
from optimizer.planner import solve
from optimizer.problem import PlanProblem, Supply
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.sustained import Capacity
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

needs_records = partial(pytest.mark.skipif, reason="needs the recorded exits of OFFRAMP_DATA")

# Everybody reaches block 3, half of the inputs block 4 and the rest.
RUN = ImdbRun(requests_per_s=30, is_plain=True, num_inputs=200, exits={2: 100}, agreement=0.97, saving=0.2)


def test_2_the_accuracy_lost_is_the_full_models_less_that_of_early_answers() -> None:
    outcome = four_inputs().outcome({0: 0.4})
    # The first input leaves with a wrong answer; the full model is right on all but the second.
    assert outcome.full_accuracy == 0.75
    assert distilled_bert.lost_N(outcome).tolist() == [1, 0, 0, 0]
    chance = distilled_bert.chance_of_loss(outcome, np.random.default_rng(0), 2000)
    assert chance == pytest.approx((0.25 * 0.75 / 4) ** 0.5, rel=0.1)  # of a share of 4 draws, 1 in 4 of which counts


def test_2_both_models_are_compared() -> None:
    six_blocks = table((1,), (1.0,), 6, 0.1)
    result = distilled_bert.fig02_compare(four_inputs(), four_blocks().latency["V100"], [RUN, RUN], six_blocks, 10)
    found = ours(result)
    # Inputs take 1, 2, 3 and 4 of 4 blocks.
    assert found["BERT: compute saved (%)"] == pytest.approx(37.5)
    assert RUN.survival_N == pytest.approx((1, 1, 1, 0.5, 0.5, 0.5))
    assert found["DistilBERT: compute saved (%)"] == pytest.approx(25)
    assert result.figures["distilbert"] == {
        "compute": 0.25,
        "latency": pytest.approx((1.5 - 0.1 * (3 + 0.5 + 0.5)) / 6),
        "printed": 0.2,
        "disagreement": pytest.approx(0.03),
        "spread": 0,
    }
    assert told(result)["DistilBERT: ramps active, by what Apparate printed"] == pytest.approx(0.05 / (0.1 / 6))
    assert len(result.pictures) == 2


@needs_records(bool(missing_data(distilled_bert.FIG02_STUDY.about.needs)))
def test_2_on_recorded_exits_bert_saves_more_than_the_distilled_model() -> None:
    found = ours(distilled_bert.fig02_run("quick"))
    distilled = found["DistilBERT: latency saved, as Apparate printed it (%)"] or 0.0
    assert (found["BERT: latency saved (%)"] or 0.0) > distilled > 0


# A second for up to two inputs, two for four; eight blocks.
UP_TO_TWO = table((1, 2, 4, 16), (1.0, 1.0, 2.0, 8.0), 8)


def eight_inputs() -> ExitRecords:
    """Input k leaves after block k + 1."""
    scores_NR = np.where(np.arange(7) >= np.arange(8)[:, None], 0.1, 0.6)
    return ExitRecords.of_answers(
        np.zeros((8, 8), dtype=np.int64),
        score="entropy",
        num_blocks=8,
        ramps=tuple(range(7)),
        sample_ids=tuple(map(str, range(8))),
        scores_NR=scores_NR.astype(np.float32),
    )


def test_3_utilisation_is_throughput_over_that_of_a_full_batch() -> None:
    # Of four, two leave after block 4 and one after block 7: per second, then, as many; and at last half as many.
    found = fig03.shrinking(np.array([[3, 3, 6, 7]]), UP_TO_TWO)
    assert found.inside_N == pytest.approx((4, 4, 4, 4, 2, 2, 2, 1))
    assert found.utilisation_N == pytest.approx((1, 1, 1, 1, 1, 1, 1, 0.5))
    assert found.rest == pytest.approx((2 + 1) / (2 + 2)), "of blocks 7 and 8: 3 inputs in 2 s, 2 a second when full"
    assert found.left_share == 0.5


def test_3_a_batch_that_is_gone_takes_no_time() -> None:
    found = fig03.shrinking(np.array([[0, 0, 0, 0], [7, 7, 7, 7]]), UP_TO_TWO)
    assert found.inside_N == pytest.approx((4, 2, 2, 2, 2, 2, 2, 2))
    assert found.utilisation_N == pytest.approx((1,) * 8), "either full or gone"


def test_3_mixes_have_their_share_of_easy_inputs_and_are_compared_at_two_batch_sizes() -> None:
    found = fig03.mixes(eight_inputs(), np.random.default_rng(0), 4000)
    assert list(found) == ["80:20", "50:50", "20:80", fig03.RECORDED]
    easy = [float((last_N < 4).mean()) for last_N in found.values()]
    assert easy == pytest.approx([0.8, 0.5, 0.2, 0.5], abs=0.03)
    result = fig03.compare(eight_inputs(), UP_TO_TWO, 500)
    assert list(result.figures) == ["8", "16"]
    # Above 2 inputs throughput is 2 per second here, whatever the batch: only what is left of 8 can fall below that.
    assert (ours(result)["utilisation lost after ramp 6 (%), 50:50, batch 8"] or 0.0) > 0
    assert ours(result)["inputs that have left by ramp 6 (%), as recorded"] == pytest.approx(75, abs=3)


@needs_records(bool(missing_data(fig03.STUDY.about.needs)))
def test_3_of_recorded_batches_larger_ones_lose_less() -> None:
    of = "utilisation lost after ramp 6 (%), 50:50, batch"
    eight, sixteen = (ours(fig03.run("quick"))[f"{of} {batch}"] or 0.0 for batch in (8, 16))
    assert eight > sixteen > 0


def test_7_e3s_circumstances_are_added_one_after_the_other() -> None:
    problem = four_blocks()
    exits, flat_times, dear_ramps, at_once = batch_limits.fig07_cases(problem).values()
    assert exits[0] is problem
    assert flat_times[1] is exits[1], "the same inputs"
    flat, dearer = flat_times[0].latency["V100"], dear_ramps[0].latency["V100"]
    assert (flat.block_s_NB[:, 0] == flat.block_s_NB[:, 1]).all()
    assert (dearer.ramp_s_EB > flat.ramp_s_EB).all()
    assert at_once[1].words == exits_at_once(problem).words


def test_7_quick_effort_gives_the_figure_without_other_cases() -> None:
    result = batch_limits.fig07_compare(four_blocks(), inputs_at(0.4), {}, "quick")
    assert ours(result)["e3 / early-exit, batch 8"] == result.e3.over_early_exit
    assert ours(result)["e3 / stock, batch 8"] == result.e3.over_stock
    assert result.e3.over_early_exit is not None
    assert len(result.pictures) == 1
    assert batch_limits.FIG07_STUDY.about.paper.over_early_exit == 1.44


def test_9_the_run_is_apparates_own_with_most_exits() -> None:
    more, others = replace(RUN, exits={2: 110}), replace(RUN, exits={2: 120}, is_plain=False)
    assert distilled_bert.most_exits([RUN, more, others]) is more


def test_9_every_side_stands_there_with_quick_effort() -> None:
    inputs = inputs_at(0.4)
    result = distilled_bert.fig09_compare(four_blocks(), inputs, inputs, "quick")
    assert all(each is not None for each in ours(result).values())
    # Inputs take 1, 2, 3 and 4 of 4 blocks, and 1 + 0.75 + 0.5 ramps of a tenth.
    assert ours(result)["full batches throughout / stock, batch 8"] == pytest.approx(4 / (2.5 + 0.225))
    assert result.best.over_stock is not None
    assert result.best.over_stock > 1


def two_types() -> PlanProblem:
    """A V100 and two K80, which take five times as long and cost a quarter."""
    problem = four_blocks()
    fast = problem.latency["V100"]
    slow = LatencyTable(batches=fast.batches, block_s_NB=5 * fast.block_s_NB, ramp_s_EB=5 * fast.ramp_s_EB)
    devices = {"V100": Supply(count=1, usd_per_hour=4.0), "K80": Supply(count=2, usd_per_hour=1.0)}
    return replace(problem, latency={"V100": fast, "K80": slow}, devices=devices)


def one_type() -> PlanProblem:
    return replace(four_blocks(), devices={"V100": Supply(count=2, usd_per_hour=4.0)})


def test_13_a_baseline_has_three_readings() -> None:
    by_type = {"V100": {"stock": 100.0}, "K80": {"stock": 20.0}}
    at = fig13.AtBatch(mixed={"e3": 300.0}, by_type=by_type, equal={"stock": 150.0})
    assert [at.times("e3", "stock", reading) for reading in ("one type", "all types", "16 V100")] == [3.0, 2.5, 2.0]


def test_13_a_type_stands_alone_or_is_as_fast_as_it_is_dear() -> None:
    alone = fig13.on_type(two_types(), "K80")
    assert (list(alone.devices), list(alone.latency)) == (["K80"], ["K80"])
    latency = fig13.as_fast_as_dear(two_types(), one_type()).latency
    np.testing.assert_allclose(latency["K80"].block_s_NB, 4 * latency["V100"].block_s_NB)
    np.testing.assert_allclose(latency["V100"].block_s_NB, four_blocks().latency["V100"].block_s_NB)


def test_13_a_service_stays_with_the_batches_that_serve_it_better() -> None:
    nothing = Point(decision=NoPlan(strategy="stock", binding="latency"), capacity=None)
    more = Point(decision=nothing.decision, capacity=Capacity(rate_per_s=7.0, figures=None, trials=()))
    before = {"stock": 5.0, "early-exit": 5.0}
    assert fig13.better_of(before, {"stock": nothing, "early-exit": more}) == {"stock": 5.0, "early-exit": 7.0}


def test_13_the_study_compares_with_every_reading() -> None:
    result = fig13.compare((two_types(), one_type(), inputs_at(0.4)), {}, "quick")
    all_types, one = (ours(result)[f"e3 / early-exit on {each}, largest"] for each in ("all types", "one type"))
    assert all_types is not None
    assert one is not None
    assert all_types < one, "a baseline with all types does more"
    assert result.e3.over_early_exit == all_types
    assert told(result)["K80: time over a V100's, at every batch"] == pytest.approx(5)
    assert told(result)["K80: price over a V100's"] == 0.25


def test_13_cases_are_both_clusters_with_what_they_serve() -> None:
    inputs = inputs_at(0.4)
    fast, theirs, both = fig13.cases(two_types(), one_type(), inputs).values()
    assert fast[2] is inputs
    assert theirs[2] is both[2]
    assert theirs[0].latency["K80"].block_s_NB[0, 0] > both[0].latency["K80"].block_s_NB[0, 0]


def spread(own_ms: float, held_ms: float) -> fig17.Spread:
    """All inputs alike."""
    return fig17.Spread(rate_per_s=1.0, box=Box(*[own_ms] * 5), held=Box(*[held_ms] * 5), in_slo_share=1.0)


def test_17_a_load_is_single_inputs_at_random_or_batches_in_equal_gaps() -> None:
    loads = fig17.loads(400.0, 1000.0)
    assert loads == {fig17.SINGLES: (400.0, 1), fig17.BATCHES: (400.0, 8), fig17.OWN: (900.0, 8)}
    assert fig17.arrivals_s((800.0, 8), 0.05).tolist() == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert len(fig17.arrivals_s((1000.0, 1), 10.0)) == pytest.approx(10_000, rel=0.05)
    assert fig17.box_of(np.array([4.0, 0.0, 1.0, 3.0, 2.0])) == Box(0, 1, 2, 3, 4)


def test_17_an_idle_service_takes_as_long_as_its_blocks() -> None:
    # Pairs every 20 ms on one accelerator: 1 ms for who leaves after the first block, 2 ms for who does not.
    truth = two_blocks(count=1)
    planned = solve(truth, "early-exit")
    assert isinstance(planned, Planned)
    found = fig17.spread(truth, planned, half_leave(), (100.0, 2), 400)
    assert (found.box.minimum, found.box.maximum) == pytest.approx((1, 2))
    # Both of a pair leave early a quarter of the time; only then is the pair done after 1 ms.
    assert found.held.median == pytest.approx(2)
    assert found.in_slo_share == 1


def test_17_every_load_has_a_picture_and_batches_at_one_rate_are_compared() -> None:
    sides = {"stock": spread(20.0, 20.0), "early-exit": spread(5.0, 8.0), "e3": spread(10.0, 12.0)}
    loads = (fig17.SINGLES, fig17.BATCHES, fig17.OWN)
    result = fig17.compare({"1 V100": 5.0}, {load: {"1 V100": sides} for load in loads}, 0.1)
    pictures = [each for each in result.pictures if isinstance(each, Boxes)]
    assert [(each.title, each.limit) for each in pictures] == [(f"Latency: {load}", 100) for load in loads]
    assert {name: value for name, value in ours(result).items() if name.startswith("median")} == {
        "median: e3 / stock, 1 V100": 0.5,
        "median: e3 / early-exit, 1 V100": 2.0,
        f"median: e3 / {fig17.HELD}, 1 V100": 1.25,
    }
    assert fig17.HELD not in fig17.with_held({"early-exit": spread(5.0, 5.0)}), "where it makes no difference"


def test_18_patience_answers_with_the_label_that_was_repeated() -> None:
    found = fig18.outcome(four_inputs(), 1)
    # a and b leave at the third ramp with 1, d at the second with 0; c never repeats and takes the full model's 0.
    assert (found.agreement, found.accuracy) == (0.75, 1), "b's full model says 0"
    assert fig18.outcome(four_inputs(), 3) == fig18.Patience(patience=3, agreement=1, accuracy=0.75), "nobody leaves"


def test_18_the_least_patience_keeps_the_answers() -> None:
    assert fig18.least_patience(four_inputs(), 0.75) == 1
    assert fig18.least_patience(four_inputs(), 1.0) == 2, "only d leaves, at the third ramp"
    with pytest.raises(DataError, match="no patience below 3 keeps 200%"):
        fig18.least_patience(four_inputs(), 2.0)


def test_18_every_plan_but_stocks_has_all_ramps_active() -> None:
    problem = facing(four_blocks(), fig18.patient_inputs(four_inputs(), 1, four_blocks()))
    decisions = fig18.decide_with_all_ramps(problem)
    ramps = {name: Point(decision=decision, capacity=None).ramps for name, decision in decisions.items()}
    assert ramps.pop("stock") == ()
    assert set(ramps.values()) == {(0, 1, 2)}


def test_18_every_side_stands_there_with_quick_effort() -> None:
    result = fig18.compare(four_inputs(), four_blocks(), "quick")
    assert ours(result)["e3 / PABEE, batch 8"] == result.e3.over_early_exit
    # Patience 2: only d leaves, after block 3 of 4; three ramps of a tenth look at everybody, so PABEE is below stock.
    assert result.e3.over_stock is not None
    assert result.e3.over_stock < 1.1
    assert result.tables[0].rows[0][:2] == (2, 100)
