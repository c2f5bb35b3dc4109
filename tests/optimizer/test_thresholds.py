from __future__ import annotations

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from earlyexit.errors import DataError
from optimizer.thresholds import Guarantee, RiskModel, divide, learn_then_test, threshold_path
from profiles.records import ExitRecords, Score


def synthetic(num_inputs: int, rng: Generator, *, score: Score = "confidence") -> ExitRecords:
    """Four blocks and three ramps whose confidence is honest: a ramp that says 0.8 agrees with the full model in 80 %.

    Deeper ramps are surer. Entropies are those of a prediction with that confidence in two classes.
    """
    confidence_NR = 1 - rng.random((num_inputs, 3)) * np.array([0.5, 0.3, 0.1])
    agrees_NR = rng.random((num_inputs, 3)) < confidence_NR
    final_N = rng.integers(0, 5, num_inputs)
    rest_NR = np.maximum(1 - confidence_NR, 1e-9)
    entropy_NR = -confidence_NR * np.log(confidence_NR) - rest_NR * np.log(rest_NR)
    return ExitRecords(
        score=score,
        num_blocks=4,
        ramps=(0, 1, 2),
        sample_ids=tuple(f"s{k}" for k in range(num_inputs)),
        scores_NR=(confidence_NR if score == "confidence" else entropy_NR).astype(np.float32),
        labels_NR=np.where(agrees_NR, final_N[:, None], (final_N[:, None] + 1) % 5),
        final_labels_N=final_N,
    )


def constant(num_inputs: int, *, confidence: float, agrees: bool) -> ExitRecords:
    """One ramp that says the same of every input."""
    return ExitRecords(
        score="confidence",
        num_blocks=2,
        ramps=(0,),
        sample_ids=tuple(f"s{k}" for k in range(num_inputs)),
        scores_NR=np.full((num_inputs, 1), confidence, dtype=np.float32),
        labels_NR=np.zeros((num_inputs, 1), dtype=np.int64),
        final_labels_N=np.full(num_inputs, 0 if agrees else 1),
    )


@pytest.mark.parametrize(
    ("budget", "confidence", "disagreements", "num_inputs", "holds"),
    [
        # With a true rate of 1/2: P(none of 3) = 1/8, P(at most 1 of 3) = 4/8, P(at most 1 of 4) = 5/16.
        pytest.param(0.5, 0.875, 0, 3, True, id="none of 3 at 1/8"),
        pytest.param(0.5, 0.9, 0, 3, False, id="none of 3 at 1/10"),
        pytest.param(0.5, 0.9, 0, 4, True, id="none of 4 at 1/10"),
        pytest.param(0.5, 0.5, 1, 3, True, id="1 of 3 at 1/2"),
        pytest.param(0.5, 0.6875, 1, 4, True, id="1 of 4 at 5/16"),
        pytest.param(0.5, 0.7, 1, 4, False, id="1 of 4 at 3/10"),
        # With a true rate of 1/100: 0.99^229 = 0.1001, 0.99^230 = 0.0991.
        pytest.param(0.01, 0.9, 0, 229, False, id="none of 229 at 1 %"),
        pytest.param(0.01, 0.9, 0, 230, True, id="none of 230 at 1 %"),
    ],
)
def test_the_test_is_the_exact_binomial_tail(
    budget: float, confidence: float, disagreements: int, num_inputs: int, holds: bool
) -> None:
    assert Guarantee(budget=budget, confidence=confidence).holds(disagreements, num_inputs) == holds


@pytest.mark.parametrize(
    ("budget", "confidence", "expected"),
    [(0.5, 0.75, 2), (0.5, 0.9, 4), (0.1, 0.9, 22), (0.01, 0.9, 230), (0.01, 0.95, 299)],
)
def test_the_least_inputs_are_those_that_can_show_no_disagreement_at_all(
    budget: float, confidence: float, expected: int
) -> None:
    guarantee = Guarantee(budget=budget, confidence=confidence)
    assert guarantee.least_inputs == expected
    assert guarantee.holds(0, expected)
    assert not guarantee.holds(0, expected - 1)


@pytest.mark.parametrize(("budget", "confidence"), [(0.0, 0.9), (1.0, 0.9), (0.01, 0.0), (0.01, 1.0)])
def test_promises_of_never_and_always_are_refused(budget: float, confidence: float) -> None:
    with pytest.raises(DataError, match="must be between 0 and 1"):
        Guarantee(budget=budget, confidence=confidence)


def test_too_few_inputs_are_refused_with_the_number_needed() -> None:
    records = synthetic(329, default_rng(0))
    design, tested = records.subset(np.arange(100)), records.subset(np.arange(100, 329))
    with pytest.raises(DataError, match=r"229 calibration inputs .* agreement of 99\.0% .* 90%; 230 are needed"):
        learn_then_test(design, tested, Guarantee(budget=0.01, confidence=0.9))


def test_a_division_takes_every_input_once() -> None:
    design, tested = divide(10, 0.3, seed=4)
    assert (len(design), len(tested)) == (3, 7)
    assert sorted([*design, *tested]) == list(range(10))
    assert [*divide(10, 0.3, seed=4)[0]] == [*design]
    assert [*divide(10, 0.3, seed=5)[0]] != [*design]


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_a_bolder_price_lets_more_inputs_leave_earlier(score: Score) -> None:
    records = synthetic(500, default_rng(1), score=score)
    path = threshold_path(records, [1e-4, 0.01, 0.05, 0.1, 0.3])
    blocks = [records.outcome(thresholds).mean_blocks for thresholds in path]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] > 3.5
    assert blocks[-1] < 1.5


def test_earlier_ramps_may_err_more_because_leaving_there_saves_more() -> None:
    model = RiskModel(slope=1.0, offset=0.0, larger_is_surer=True)
    # With slope 1 and offset 0 the risk of a confidence c is 1 - c.
    assert model.threshold(0.1) == pytest.approx(0.9)
    assert model.threshold(0.3) == pytest.approx(0.7)


def test_a_risk_model_of_entropies_falls_with_them() -> None:
    model = RiskModel(slope=1.0, offset=0.0, larger_is_surer=False)
    # With slope 1 and offset 0 the odds of agreement are 1 / entropy: risk 1/10 at entropy 1/9.
    assert model.threshold(0.1) == pytest.approx(1 / 9)


@pytest.mark.parametrize("score", ["confidence", "entropy"])
@pytest.mark.parametrize("budget", [0.02, 0.05, 0.1])
def test_accepted_thresholds_disagree_no_more_than_the_test_allows(score: Score, budget: float) -> None:
    records = synthetic(1500, default_rng(2), score=score)
    guarantee = Guarantee(budget=budget, confidence=0.9)
    calibration = learn_then_test(records.subset(np.arange(500)), records.subset(np.arange(500, 1500)), guarantee)
    assert guarantee.holds(calibration.tested.disagreements, 1000)
    assert calibration.tested.disagreements < budget * 1000
    assert set(calibration.thresholds) == {0, 1, 2}
    assert calibration.tested.mean_blocks < 4.0


def test_a_larger_budget_saves_more_blocks() -> None:
    records = synthetic(1500, default_rng(3))
    design, tested = records.subset(np.arange(500)), records.subset(np.arange(500, 1500))
    blocks = [learn_then_test(design, tested, Guarantee(budget=b)).tested.mean_blocks for b in (0.02, 0.05, 0.1, 0.2)]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] > blocks[-1] + 0.5


def test_a_ramp_that_is_always_right_lets_everyone_leave() -> None:
    records = constant(300, confidence=0.9, agrees=True)
    calibration = learn_then_test(records, records, Guarantee())
    assert calibration.tested.exit_counts == {0: 300}


def test_a_ramp_that_is_always_wrong_lets_nobody_leave() -> None:
    records = constant(300, confidence=0.9, agrees=False)
    calibration = learn_then_test(records, records, Guarantee())
    assert calibration.tested.exit_counts == {1: 300}


def test_where_the_design_misleads_nothing_is_promised() -> None:
    design, tested = constant(300, confidence=0.9, agrees=True), constant(300, confidence=0.9, agrees=False)
    calibration = learn_then_test(design, tested, Guarantee())
    assert calibration.tested.agreement == 1.0


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_a_ramp_whose_score_tells_the_opposite_of_the_truth_breaks_nothing(score: Score) -> None:
    rng = default_rng(5)
    good = synthetic(800, rng, score=score)
    bad = ExitRecords(
        score=score,
        num_blocks=4,
        ramps=good.ramps,
        sample_ids=good.sample_ids,
        scores_NR=good.scores_NR[np.argsort(good.labels_NR[:, 0] == good.final_labels_N)],
        labels_NR=np.where(good.sureness_NR > np.median(good.sureness_NR, 0), 9, good.final_labels_N[:, None]),
        final_labels_N=good.final_labels_N,
    )
    guarantee = Guarantee(budget=0.05)
    calibration = learn_then_test(bad.subset(np.arange(300)), bad.subset(np.arange(300, 800)), guarantee)
    assert guarantee.holds(calibration.tested.disagreements, 500)


def test_the_budget_is_broken_no_more_often_than_promised() -> None:
    population = synthetic(20_000, default_rng(6))
    guarantee = Guarantee(budget=0.05, confidence=0.9)
    rng = default_rng(7)
    broken = 0
    for seed in range(100):
        drawn = population.subset(rng.choice(20_000, 500, replace=False).astype(np.int64))
        design, tested = (drawn.subset(rows) for rows in divide(500, 0.4, seed))
        thresholds = learn_then_test(design, tested, guarantee).thresholds
        broken += 1 - population.outcome(thresholds).agreement > guarantee.budget
    # Promised: 10 of 100 on average; 3 standard deviations of such a count are 9.
    assert broken <= 19
