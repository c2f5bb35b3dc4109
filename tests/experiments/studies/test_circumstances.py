"""Workloads, made-up circumstances, and contenders side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from earlyexit.errors import DataError
from experiments.data import data_folder
from experiments.studies.distilled_bert import (
    DISTILBERT_IMDB,
    RAMPS,
    ImdbRun,
    cut,
    distilled_cluster,
    half_of,
    imdb,
    read_imdb_runs,
)
from experiments.studies.e3_case import even_exits, exits_at_once, first_ramp, flat, like_e3, ramp_share, with_ramps_of
from experiments.studies.side_by_side import (
    COLUMNS,
    Point,
    Row,
    batch_bars,
    by_batch,
    document,
    document_by_side,
    plans,
    series_of,
    simulated,
    times,
    with_flat_times,
)
from experiments.studies.sides import decide, equal_cluster, savings
from optimizer.decision import NoPlan
from optimizer.problem import PlanProblem
from simulator.inputs import NOWHERE
from simulator.sustained import Capacity
from tests.experiments.studies.cases import four_blocks, four_inputs, inputs_at

NO_PLAN = NoPlan(strategy="e3", binding="latency")


def row_of(**rates: float) -> Row:
    """Contenders that do so much, whatever their plan."""
    return {
        name: Point(decision=NO_PLAN, capacity=Capacity(rate_per_s=rate, figures=None, trials=()))
        for name, rate in rates.items()
    }


def hasty() -> PlanProblem:
    """An SLO that no plan keeps."""
    return replace(four_blocks(), slo=replace(four_blocks().slo, latency_s=0.01))


def test_who_leaves_saves_the_blocks_after_and_pays_the_ramps_before() -> None:
    found = savings((1.0, 0.5, 0.5, 0.0), four_blocks().latency["V100"], (0, 1, 2))
    assert found.compute == pytest.approx(0.5)
    assert found.latency == pytest.approx(0.5 - 0.1 * (1 + 0.5 + 0.5) / 4)
    assert found.most_times == pytest.approx(1 / 0.55)


def test_ramps_that_let_nobody_out_cost_more_than_nothing() -> None:
    found = savings((1.0, 1.0, 1.0, 1.0), four_blocks().latency["V100"], (0, 1, 2), batch=8)
    assert (found.compute, found.latency) == pytest.approx((0, -0.3 / 4))


def test_made_up_inputs_leave_evenly_or_at_once_and_are_the_same_each_time() -> None:
    assert even_exits(four_blocks()).survival_N == pytest.approx((1, 0.75, 0.5, 0.25))
    assert exits_at_once(four_blocks()).survival_N == pytest.approx((1, 1, 0.5, 0.5))
    np.testing.assert_array_equal(even_exits(four_blocks()).rows_N, even_exits(four_blocks()).rows_N)


def test_flat_times_are_those_of_the_largest_batch() -> None:
    table = flat(four_blocks(), 8).latency["V100"]
    assert table.batches == (1, 8)
    np.testing.assert_allclose(table.block_s_NB, 0.040)
    np.testing.assert_allclose(table.ramp_s_EB, 0.004)


def test_a_ramp_takes_its_share_of_the_block_before_it() -> None:
    dearer = with_ramps_of(four_blocks(), 0.5)
    np.testing.assert_allclose(dearer.latency["V100"].ramp_s_EB, [[0.005, 0.020]] * 3)
    np.testing.assert_allclose(dearer.latency["V100"].block_s_NB, four_blocks().latency["V100"].block_s_NB)
    assert (first_ramp(four_blocks()), first_ramp(dearer)) == pytest.approx((0.1, 0.5))


def test_the_share_of_a_ramp_follows_from_what_leaving_ramps_out_gains() -> None:
    # 4 blocks and 3 ramps of x, or 4 blocks and 1 ramp of x: (4 + 3 x) / (4 + x) = 1.2 for x = 4 / 9.
    assert ramp_share(four_blocks(), gain=1.2, num_splits=2) == pytest.approx(4 / 9)
    table = like_e3(four_blocks()).latency["V100"]
    np.testing.assert_allclose(table.block_s_NB, 0.040)
    np.testing.assert_allclose(table.ramp_s_EB, 0.040 * ramp_share(four_blocks()))


def test_even_exits_save_what_e3_says_its_exits_save_at_batch_one() -> None:
    problem = equal_cluster()
    saved = savings(even_exits(problem).survival_N, problem.latency["V100"], problem.ramps)
    assert saved.latency == pytest.approx(0.427, abs=0.01), "E3, figure 2"


def test_equal_plans_are_simulated_once() -> None:
    decision = decide(four_blocks(), ("stock",))["stock"]
    row = simulated(four_blocks(), {"one": decision, "other": decision}, inputs_at(0.4), "quick")
    assert row["one"].capacity is row["other"].capacity


@pytest.mark.usefixtures("longer_simulations")
def test_sides_stand_beside_each_other_batch_by_batch() -> None:
    inputs = inputs_at(0.4)
    rows = by_batch(four_blocks(), inputs, (1, 8), "quick", lambda limited: decide(limited, ("stock", "early-exit")))
    one, eight = series_of(rows)["stock"]
    assert one is not None
    assert eight is not None
    # Two replicas: 2 / 40 ms one by one, 2 * 8 / 160 ms in full batches.
    assert 40 < one < 56
    assert 80 < eight < 112
    # The four inputs leave after 1, 2, 3 and 4 blocks: 10 blocks and 9 ramps of a tenth, instead of 16 blocks.
    assert times(rows["batch 1"], "early-exit", "stock") == pytest.approx(16 / 10.9, rel=0.03)
    assert batch_bars("both", rows).labels == ("1", "8")
    assert [point.ramps for point in rows["batch 8"].values()] == [(), (0, 1, 2)]
    label, side, goodput, over, splits, batch, worst_ms, *_ = plans(rows).rows[2]
    assert (label, side, goodput, splits, batch) == ("batch 8", "stock", eight, 1, 8)
    assert over == pytest.approx(eight / 100)
    assert worst_ms == pytest.approx(80 + 160), "8 inputs at 100/s, and their batch"
    assert all(len(row) == len(COLUMNS) for row in plans(rows).rows)
    by_side = document_by_side(inputs, rows)
    assert (by_side["batches"], by_side["sides"]["stock"][1]) == ([1, 8], document(rows)["batch 8"]["stock"])


def test_who_has_no_plan_has_no_goodput() -> None:
    row = simulated(hasty(), decide(hasty(), ("stock",)), inputs_at(0.4), "quick")
    assert (row["stock"].rate_per_s, row["stock"].ramps) == (None, ())
    assert document({"SLO 10 ms": row}) == {"SLO 10 ms": {"stock": None}}
    assert plans({"SLO 10 ms": row}).rows == (("SLO 10 ms", "stock", "no plan", *[None] * 6),)


def test_ratios_and_series_have_gaps_where_somebody_is_missing() -> None:
    row = {**row_of(e3=300.0, stock=200.0), "best": Point(decision=NO_PLAN, capacity=None)}
    assert [times(row, one, "stock") for one in ("e3", "best", "serial")] == [1.5, None, None]
    assert series_of({"batch 1": row_of(e3=1.0), "batch 8": row_of(e3=2.0, best=3.0)}) == {
        "e3": (1.0, 2.0),
        "best": (None, 3.0),
    }


def test_flat_times_are_left_out_with_quick_effort() -> None:
    assert with_flat_times(four_blocks(), inputs_at(0.4), 8, "quick") == ()


def test_runs_of_another_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="holds no runs of Apparate"):
        read_imdb_runs(path)
    path.write_text('{"runs": []}', encoding="utf-8")
    with pytest.raises(DataError, match="holds other runs of Apparate"):
        read_imdb_runs(path)


def test_the_counts_of_apparates_runs_give_the_shares_that_it_printed() -> None:
    folder = data_folder()
    if folder is None or not (folder / DISTILBERT_IMDB).is_file():
        pytest.skip("needs Apparate's runs of OFFRAMP_DATA")
    printed = json.loads((folder / DISTILBERT_IMDB).read_text(encoding="utf-8"))
    whole_ms = printed["vanilla_total_ms"]
    for run, shares in zip(read_imdb_runs(folder / DISTILBERT_IMDB), printed["runs"], strict=True):
        agreement = {int(ramp): share for ramp, share in shares["ramp_accuracy"].items() if int(ramp) in RAMPS}
        wrong = {ramp: run.exits[ramp] * (1 - share) for ramp, share in agreement.items()}
        assert run.exits.keys() == agreement.keys()
        assert [abs(each - round(each)) for each in wrong.values()] == pytest.approx([0] * len(wrong), abs=1e-6)
        assert sum(run.exits.values()) / run.num_inputs == pytest.approx(shares["exit_rate"], rel=1e-12)
        # The full model agrees with itself: whoever disagrees has left.
        assert sum(wrong.values()) / run.num_inputs == pytest.approx(1 - run.agreement, rel=1e-9)
        assert run.survival_N[-1] == pytest.approx(1 - shares["exit_rate"])
        saved_ms = sum(run.exits.get(ramp, 0) * (whole_ms - printed["ramps"][ramp][0]) for ramp in RAMPS)
        over_printed = saved_ms / run.num_inputs / whole_ms - run.saving
        # About one ramp was active at a time; it takes 0.84 % of the model.
        assert 0.5 < over_printed / (printed["ramps"][0][1] / whole_ms) < 1.1


def test_the_distilled_model_has_the_first_half_of_berts_blocks() -> None:
    half = cut(four_blocks(), 2)
    assert (half.num_blocks, half.ramps, half.latency["V100"].block_s_NB.shape) == (2, (0,), (2, 2))
    problem = distilled_cluster()
    assert problem.ramps == RAMPS
    # TensorRT's 1.23 ms at batch 1, 6.5 times slower, half of it.
    assert float(problem.latency["V100"].block_s_NB[:, 0].sum()) == pytest.approx(1.23e-3 * 6.5 / 2)


def test_inputs_of_the_distilled_model_leave_as_in_the_run_or_at_every_second_ramp() -> None:
    run = ImdbRun(requests_per_s=30, is_plain=True, num_inputs=100, exits={1: 25}, agreement=0.99, saving=0.1)
    assert imdb(run).survival_N == pytest.approx((1, 1, 0.75, 0.75, 0.75, 0.75))
    decisions = half_of(four_inputs(), 0.4)
    assert decisions.ramps == (0,), "ramp 1 of four blocks, which sits after the second, ends the first of two"
    # Ramp 1 lets a and b out.
    np.testing.assert_array_equal(decisions.leaves_N((0,), (0,)), [0, 0, NOWHERE, NOWHERE])
