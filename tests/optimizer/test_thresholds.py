from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from earlyexit.tasks.regression import RegressionTask
from optimizer.calibration.thresholds import (
    Guarantee,
    ThresholdPath,
    design_rows,
    few_ramps,
    lay_path,
    learn_then_test,
    split_rows,
)
from profiles.records import ExitRecords
from profiles.scores import SCORES, Score
from tests.exit_records import exit_records


def synthetic(num_inputs: int, rng: Generator, *, score: Score = "confidence") -> ExitRecords:
    """Four blocks and three ramps whose confidence is honest: a ramp that says 0.8 agrees with the full model in 80 %.

    Deeper ramps are surer. Entropies are those of a prediction with that confidence in two classes.
    """
    confidence_NR = 1 - rng.random((num_inputs, 3)) * np.array([0.5, 0.3, 0.1])
    agrees_NR = rng.random((num_inputs, 3)) < confidence_NR
    final_N = rng.integers(0, 5, num_inputs)
    rest_NR = np.maximum(1 - confidence_NR, 1e-9)
    entropy_NR = -confidence_NR * np.log(confidence_NR) - rest_NR * np.log(rest_NR)
    answers_NE = np.column_stack([np.where(agrees_NR, final_N[:, None], (final_N[:, None] + 1) % 5), final_N])
    return exit_records(confidence_NR if score == "confidence" else entropy_NR, answers_NE=answers_NE, score=score)


def constant(num_inputs: int, *, confidence: float, agrees: bool) -> ExitRecords:
    """Returns records of one ramp with the same score for every input."""
    answers_NE = np.column_stack([np.zeros(num_inputs, dtype=np.int64), np.full(num_inputs, 0 if agrees else 1)])
    return exit_records(np.full((num_inputs, 1), confidence), answers_NE=answers_NE)


def test_a_division_takes_every_input_once() -> None:
    design, tested = split_rows(10, 3, seed=4)
    assert (len(design), len(tested)) == (3, 7)
    assert sorted([*design, *tested]) == list(range(10))
    assert [[*split_rows(10, 3, seed=seed)[0]] == [*design] for seed in (4, 5)] == [True, False]


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_a_bolder_price_lets_more_inputs_leave_earlier_from_never_to_always(score: Score) -> None:
    records = synthetic(500, default_rng(1), score=score)
    path = lay_path(records)
    blocks = [records.outcome(path.thresholds(np.log(price))).mean_blocks for price in (1e-4, 0.01, 0.05, 0.1, 0.3)]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] > 3.5
    assert blocks[-1] < 1.5
    records = synthetic(300, default_rng(8), score=score)
    certain = 1.0 if score == "confidence" else 0.0
    records = replace(records, scores_NR=np.where(records.scores_NR < 0.6, records.scores_NR, certain))
    path = lay_path(records)
    assert records.outcome(path.thresholds(-1e3)).exit_counts == {3: 300}  # an input that is certain stays as well
    assert records.outcome(path.thresholds(0.0)).exit_counts == {0: 300}


def test_a_threshold_has_the_risk_of_its_price() -> None:
    one = np.ones(1)
    path = ThresholdPath(score="confidence", ramps=(0,), slope_R=one, offset_R=0 * one, saved_R=one)
    # With slope 1 and offset 0 the risk of a confidence c is 1 - c.
    assert path.thresholds(np.log(0.1))[0] == pytest.approx(0.9)
    assert path.thresholds(np.log(0.3))[0] == pytest.approx(0.7)
    path = replace(path, score="entropy")
    # With slope 1 and offset 0 the odds of agreement are 1 / entropy: risk 1/10 at entropy 1/9.
    assert path.thresholds(np.log(0.1))[0] == pytest.approx(1 / 9)


@pytest.mark.parametrize(("before", "agrees"), [(True, True), (False, False), (True, False)])
def test_inputs_leave_only_at_a_ramp_that_is_right(before: bool, agrees: bool) -> None:
    design, tested = (constant(300, confidence=0.9, agrees=each) for each in (before, agrees))
    found = learn_then_test(design, tested, Guarantee())
    assert (found.tested.exit_counts, found.tested.agreement, found.worst_loss) == ({0 if agrees else 1: 300}, 1, 0)
    assert bool(found.thresholds) == agrees


def test_a_path_ends_where_the_test_fails() -> None:
    # 230 inputs may lose none at 1 %: of ascending confidences one is wrong, the 40th from above.
    tested = never_wrong(230)
    losses_NR = np.zeros((230, 1))
    losses_NR[190] = 1.0
    found = learn_then_test(never_wrong(50), replace(tested, losses_NR=losses_NR), Guarantee())
    assert found.tested.exit_counts == {0: 39, 1: 191}


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_a_ramp_whose_score_is_reversed_is_harmless(score: Score) -> None:
    rng = default_rng(5)
    good = synthetic(800, rng, score=score)
    full_N = good.answers()[:, -1]
    sureness_NR = SCORES[score].direction * good.scores_NR
    early_NR = np.where(sureness_NR > np.median(sureness_NR, 0), 9, full_N[:, None])
    scores_NR = good.scores_NR[np.argsort(1 - good.losses_NR[:, 0])]
    bad = exit_records(scores_NR, answers_NE=np.column_stack([early_NR, full_N]), score=score)
    guarantee = Guarantee(budget=0.05)
    calibration = learn_then_test(bad.subset(np.arange(300)), bad.subset(np.arange(300, 800)), guarantee)
    assert guarantee.holds(calibration.worst_loss * 500, 500)


def learned(population: ExitRecords, rng: Generator, design: int) -> list[dict[int, float]]:
    """Returns the thresholds of 100 calibrations on 500 inputs, and asserts that few of them exceed a budget of 5 %."""
    guarantee, found = Guarantee(budget=0.05, confidence=0.9), []
    for seed in range(100):
        drawn = population.subset(rng.choice(20_000, 500, replace=False).astype(np.int64))
        laid, tested = (drawn.subset(rows) for rows in split_rows(500, design, seed))
        found.append(learn_then_test(laid, tested, guarantee).thresholds)
    # Guaranteed are 10 of 100 on average; 3 standard deviations of this count are 9.
    assert sum(population.worst_losses_N(each).mean() > guarantee.budget for each in found) <= 19
    return found


def never_wrong(num_inputs: int, *, zero_one: bool = True) -> ExitRecords:
    """Returns records of one ramp, half of whose answers are certain."""
    return exit_records(np.linspace(0, 1, num_inputs, dtype=np.float32)[:, None], zero_one=zero_one)


def test_the_number_of_design_rows_leaves_the_test_one_allowed_loss() -> None:
    guarantee = Guarantee(budget=0.01, confidence=0.9)
    assert guarantee.inputs_for(1) == 388
    assert design_rows(3000, guarantee, 0.25) == 750  # enough tested rows remain
    assert design_rows(436, guarantee, 0.25) == 436 - 388
    assert design_rows(400, guarantee, 0.25) == 100  # only 12 design rows would remain, too few for a path
    assert design_rows(436, guarantee, 0.05) == 22  # never more than the requested share


def small(seed: int, *, zero_one: bool) -> tuple[ExitRecords, dict[int, float]]:
    """Returns records of twelve inputs and four ramps, and random thresholds."""
    rng = default_rng(seed)
    losses_NR = rng.integers(0, 2, (12, 4)) if zero_one else rng.random((12, 4)) * rng.integers(0, 2, (12, 4))
    records = exit_records(rng.random((12, 4)), losses_NR, num_blocks=6, ramps=(0, 1, 2, 4), zero_one=zero_one)
    return records, {ramp: float(rng.random()) for ramp in records.ramps}


@pytest.mark.parametrize("zero_one", [True, False], ids=["labels", "bounded"])
def test_no_subset_of_ramps_loses_more_than_what_is_tested(zero_one: bool) -> None:
    for seed in range(20):
        records, thresholds = small(seed, zero_one=zero_one)
        worst_N = records.worst_losses_N(thresholds)
        reached_N = np.zeros(12)
        for subset in chain.from_iterable(combinations(records.ramps, size) for size in range(5)):
            losses_N = records.outcome({ramp: thresholds[ramp] for ramp in subset}).losses_N
            assert (losses_N <= worst_N).all(), seed
            reached_N = np.maximum(reached_N, losses_N)
        assert reached_N.tolist() == worst_N.tolist(), seed  # each input reaches its worst loss in some subset


@given(seed=st.integers(0, 10_000), kind=st.sampled_from([None, "entropy", "confidence"]), budget=st.floats(0.02, 0.4))
@settings(max_examples=60, deadline=None)
def test_accepted_thresholds_pass_and_larger_budgets_save_no_less(seed: int, kind: Score | None, budget: float) -> None:
    rng, zero_one = default_rng(seed), kind is not None
    records = bounded(260, rng) if kind is None else synthetic(260, rng, score=kind)
    design, tested = records.subset(np.arange(60)), records.subset(np.arange(60, 260))
    guarantee, larger = Guarantee(budget=budget), Guarantee(budget=min(2 * budget, 0.9))
    first, second = (learn_then_test(design, tested, each) for each in (guarantee, larger))
    total = float(tested.worst_losses_N(first.thresholds).sum())
    assert first.worst_loss == pytest.approx(total / 200)
    assert guarantee.holds(total, 200, zero_one=zero_one)
    assert second.tested.mean_blocks <= first.tested.mean_blocks
    assert (tested.worst_losses_N(second.thresholds) >= tested.worst_losses_N(first.thresholds)).all()


def bounded(num_inputs: int, rng: Generator) -> ExitRecords:
    """A regression whose ramps know how far off they are: at a confidence c the loss is (1 - c) / 2 on average."""
    confidence_NR = 1 - rng.random((num_inputs, 3)) * np.array([0.5, 0.3, 0.1])
    full_N = rng.normal(size=num_inputs)
    early_NR = full_N[:, None] + (1 - confidence_NR) * rng.random((num_inputs, 3))
    return exit_records(
        confidence_NR,
        answers_NE=np.column_stack([early_NR, full_N]),
        loss=RegressionTask(scale=1.0).loss,
        zero_one=RegressionTask.zero_one,
    )


def test_the_budget_is_broken_no_more_often_than_promised() -> None:
    assert any(learned(synthetic(20_000, default_rng(6)), default_rng(7), 200))
    population = bounded(20_000, default_rng(9))
    thresholds = learned(population, default_rng(10), 100)  # the bound is loose, so far fewer break it
    assert np.mean([population.outcome(each).mean_blocks for each in thresholds]) < 3


def test_a_risk_model_of_losses_in_between_knows_the_mean_loss() -> None:
    records = bounded(5000, default_rng(11))
    path = lay_path(records)
    risk_NR = np.exp(path.log_prices_NR(records)) * np.array([3, 2, 1])
    sure_N = np.abs(records.scores_NR[:, 0] - 0.8) < 0.05
    assert risk_NR[sure_N, 0].mean() == pytest.approx(0.1, abs=0.02)  # (1 - 0.8) / 2


def test_with_block_costs_inputs_leave_where_most_seconds_are_saved() -> None:
    # The first ramp is a small network's end: what follows costs eight times as much a block.
    records = synthetic(1500, default_rng(12))
    by_blocks, by_seconds = lay_path(records), lay_path(records, (1.0, 8.0, 8.0, 8.0))
    assert by_blocks.saved_R.tolist() == [3, 2, 1]
    assert by_seconds.saved_R.tolist() == [3, 2, 1]  # what was run before a ramp is not saved by leaving there
    uneven = lay_path(records, (1.0, 1.0, 6.0, 2.0))
    assert uneven.saved_R.tolist() == [9 / 2, 8 / 2, 1]
    plain, found = (path.thresholds(np.log(0.01)) for path in (by_blocks, uneven))
    assert found[2] == plain[2]
    assert found[1] < plain[1]  # more is saved there, so less sure ones may leave


def test_the_loss_of_the_full_model_is_part_of_the_budget() -> None:
    records = synthetic(1500, default_rng(14))
    design, tested = records.subset(np.arange(500)), records.subset(np.arange(500, 1500))
    guarantee = Guarantee(budget=0.05)
    pruned = replace(tested, end_losses_N=(default_rng(15).random(1000) < 0.02).astype(np.float64))
    plain, dearer = (learn_then_test(design, each, guarantee) for each in (tested, pruned))
    assert guarantee.holds(dearer.worst_loss * 1000, 1000)
    assert dearer.worst_loss == pytest.approx(pruned.worst_losses_N(dearer.thresholds).mean())
    assert dearer.tested.mean_blocks > plain.tested.mean_blocks
    spent = replace(tested, end_losses_N=(np.arange(1000) < 100).astype(np.float64))
    found = learn_then_test(design, spent, guarantee)
    assert (found.thresholds, found.worst_loss) == ({}, 0.1)


def test_inputs_count_with_their_largest_loss_over_all_views() -> None:
    rng = np.random.default_rng(5)
    answers = np.column_stack([rng.random(900) < 0.9, np.ones(900)]).astype(np.int64)
    scores = np.where(answers[:, :1] == 1, rng.random((900, 1)) * 0.5, 0.2 + rng.random((900, 1)) * 0.8)
    other_answers = np.where(rng.random((900, 2)) < 0.05, 0, answers)
    records, worse = (
        exit_records(scores, answers_NE=each, score="entropy", num_blocks=3) for each in (answers, other_answers)
    )
    design, tested = records.subset(np.arange(300)), records.subset(np.arange(300, 900))
    guarantee = Guarantee(budget=0.1, confidence=0.9)
    alone = learn_then_test(design, tested, guarantee)
    same = learn_then_test(design, tested, guarantee, others=[tested])
    assert (same.thresholds, same.worst_loss) == (alone.thresholds, alone.worst_loss)
    other = worse.subset(np.arange(300, 900))
    both = learn_then_test(design, tested, guarantee, others=[other])
    assert both.thresholds[0] < alone.thresholds[0]
    union_N = np.maximum(tested.worst_losses_N(both.thresholds), other.worst_losses_N(both.thresholds))
    assert both.worst_loss == union_N.mean()


BUDGET = Guarantee(budget=0.1, confidence=0.9)
ROWS = 400


def records(sure: Mapping[int, float], wrong: Mapping[int, float]) -> ExitRecords:
    """Six blocks; by ramp the share of inputs that it is sure of, and of these, spread evenly, the share it gets wrong.

    It errs in half of the others. No two ramps err on the same inputs among those that both are sure of.
    """
    ramps = tuple(sure)
    scores_NR, losses_NR = np.ones((ROWS, len(ramps))), np.zeros((ROWS, len(ramps)))
    for column, ramp in enumerate(ramps):
        known = round(sure[ramp] * ROWS)
        scores_NR[:known, column] = 0.0
        losses_NR[known::2, column] = 1.0
        number = round(wrong[ramp] * known)
        losses_NR[column : column + number * len(ramps) : len(ramps), column] = 1.0
    return exit_records(scores_NR, losses_NR, score="entropy", num_blocks=6, ramps=ramps)


@pytest.mark.parametrize(
    ("sure", "wrong", "chosen"),
    [
        pytest.param({0: 0.8, 2: 0.8}, {0: 0.0, 2: 0.0}, (0, 2), id="an earlier one that errs nowhere"),
        pytest.param({0: 0.3, 2: 0.8}, {0: 0.0, 2: 0.0}, (2,), id="it saves too little"),
        pytest.param({0: 0.8, 2: 0.8}, {0: 0.12, 2: 0.06}, (2,), id="both together lose too much"),
        pytest.param({0: 0.8, 2: 0.8}, {0: 0.03, 2: 0.03}, (0, 2), id="both together lose little"),
    ],
)
def test_a_ramp_is_selected_if_it_saves_much_beside_the_others(
    sure: dict[int, float], wrong: dict[int, float], chosen: tuple[int, ...]
) -> None:
    assert few_ramps(records(sure, wrong), BUDGET, ROWS, (2,)) == chosen


def test_a_single_network_gets_the_ramp_that_is_best_for_its_block_costs() -> None:
    known = records({3: 0.05, 4: 0.1}, {3: 0.0, 4: 0.0})
    assert few_ramps(known, BUDGET, ROWS, (), first=3) == (3,)
    known = records({2: 0.8}, {2: 0.06})
    assert few_ramps(known, BUDGET, ROWS, ()) == (2,)
    [alone] = few_ramps(known, BUDGET, BUDGET.least_inputs, ())
    assert alone == 2, "one at least"
    known = records({3: 0.5, 4: 0.8}, {3: 0.0, 4: 0.0})
    dear, cheap = ((1.0, 1.0, 1.0, 1.0, seconds, 1.0) for seconds in (9.0, 0.1))
    assert few_ramps(known, BUDGET, ROWS, (), first=3, block_costs=dear) == (3,)
    assert few_ramps(known, BUDGET, ROWS, (), first=3, block_costs=cheap) == (4,)
