from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from earlyexit.chain import Chain
from earlyexit.reroute import reroute_probability
from experiments.cascades.case import Case, mean_cost
from experiments.cascades.guarantee import (
    GUARANTEE,
    WAYS,
    Trial,
    coins,
    end_losses_N,
    ours,
    parts,
    sets_of_ramps,
    summary,
    tabis,
)
from optimizer.risk import Metric
from optimizer.tabi import cutoffs
from profiles.records import ExitRecords

CHAIN = Chain(names=("small", "large"), lengths=(2, 2), ramps=(0, 1, 2))
COSTS = (0.1, 0.1, 0.5, 0.5)


def case(num_inputs: int, seed: int = 0) -> Case:
    """Exits that are wrong as often as they say; the large network is right of 19 in 20."""
    rng = np.random.default_rng(seed)
    confidence_NR = rng.beta(8, 0.3, (num_inputs, 3))
    wrong_NR = rng.random((num_inputs, 3)) > confidence_NR
    records = ExitRecords.of_answers(
        np.column_stack([wrong_NR, np.zeros(num_inputs)]).astype(np.int64),
        score="entropy",
        num_blocks=4,
        ramps=(0, 1, 2),
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=(1 - confidence_NR).astype(np.float32),
        truth_N=(rng.random(num_inputs) < 0.05).astype(np.int64),
    )
    return Case(name="made up", chain=CHAIN, records=records, confidence_N=confidence_NR[:, 1], costs=COSTS)


def test_blocks_that_are_left_out_cost_nothing() -> None:
    scores_NR = np.array([[0.0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=np.float32)
    known = case(4)
    known = replace(known, records=replace(known.records, scores_NR=scores_NR))
    half = dict.fromkeys((0, 1, 2), 0.5)
    assert mean_cost(known, half, (0, 1)) == pytest.approx((0.1 + 0.2 + 0.7 + 1.2) / 4)
    assert mean_cost(known, {1: 0.5}, (0, 1)) == pytest.approx((0.2 + 3 * 1.2) / 4)
    assert mean_cost(known, {2: 0.5}, (1,)) == pytest.approx((3 * 1.0 + 0.5) / 4)


def test_ways_and_sets_of_ramps_are_switched_on_and_off() -> None:
    found = sets_of_ramps(case(4), np.random.default_rng(0))
    assert found[:5] == [(1,), (0, 1, 2), (2,), (0, 1), (0,)]
    assert len({ramps for ramps in found[5:] if len(ramps) < 3}) > 3


@pytest.mark.parametrize("metric", ["agreement", "harm"])
def test_what_is_promised_is_about_kept_where_tabis_search_goes_on(metric: Metric) -> None:
    calibration, tried = parts(case(8000), "divided", 0)
    assert len(calibration.records) == len(tried.records) == 4000
    found = {way: learn(calibration, tried, metric, 0) for way, learn in WAYS.items()}
    for way in ("all", "end", "picked"):
        assert found[way].loss < 1.2 * GUARANTEE.budget, way  # one division may break it by its noise
        assert 0 < found[way].saved < 1, way
    assert found["picked"].by in ("cascade", "large")
    assert found["Tabi"].loss > 1.5 * GUARANTEE.budget
    assert not found["Tabi"].kept
    assert found["Tabi"].saved > found["end"].saved
    assert found["Tabi, target"].loss <= found["Tabi"].loss


def test_the_end_alone_may_be_bolder_than_with_all_other_ramps() -> None:
    calibration, tried = parts(case(8000, seed=3), "drawn", 1)
    assert len(tried.records) == 8000
    every, end = (ours(calibration, tried, "agreement", 1, ends=ends) for ends in (False, True))
    assert end.saved > every.saved
    assert (end.saved_inside, end.saved_large) == (None, None)


def test_tabis_loss_and_cost_are_what_its_coins_are_expected_to_give() -> None:
    known = case(500)
    truth_NE = known.records.true_losses_NE
    assert truth_NE is not None
    right_NL = 1 - truth_NE[:, [1, 3]]
    c = cutoffs(np.column_stack([known.confidence_N, np.ones(500)]), right_NL)[-1].c
    goes_on_N = reroute_probability(known.confidence_N, c)
    found = tabis(known, known, "agreement", target=False)
    assert found.loss == pytest.approx(((1 - goes_on_N) * known.records.losses_NR[:, 1]).mean())
    assert found.saved == pytest.approx(1 - 0.2 - goes_on_N.mean())


def test_a_band_loses_no_less_than_a_threshold_where_risk_falls_with_the_score() -> None:
    known = case(2000)
    order = np.argsort(known.confidence_N)
    losses_NR = known.records.losses_NR.copy()
    losses_NR[order, 1] = np.arange(2000) < 300  # the least sure are wrong, and nobody else
    falling = replace(known, records=replace(known.records, losses_NR=losses_NR))
    assert end_losses_N(falling, "agreement").sum() == 300
    for row in coins(falling, "agreement"):
        assert float(row["lost_by_threshold"]) <= float(row["lost_by_band"])
    for row in coins(known, "agreement"):
        assert 0 < float(row["returned"]) < 1


def test_a_summary_is_the_mean_of_its_trials_and_leaves_open_what_a_way_has_not() -> None:
    one = Trial(kept=True, bound_kept=None, loss=0.02, saved=0.5, saved_inside=None, saved_large=None)
    found = summary(case(4), "drawn", "harm", "Tabi", [one, replace(one, kept=False, saved=0.7)])
    assert (found["kept"], found["saved"], found["bound_kept"], found["by"]) == (0.5, 0.6, None, None)
    several = [
        replace(one, by="large", plan=0.6),
        replace(one, by="large", plan=0.8),
        replace(one, by="cascade", plan=0.7),
    ]
    found = summary(case(4), "drawn", "harm", "picked", several)
    assert found["by"] == "large 2, cascade 1"
    assert found["plan"] == pytest.approx(0.7)
