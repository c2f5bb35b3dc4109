from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from optimizer.calibration.ensemble import fit_weights, gain, held_out_gain, likeliest_weight, mix_networks
from profiles.records import IntArray
from profiles.scores import BoolArray, FloatArray

ENDS = (5, 11)


def of(*rows: list[float]) -> FloatArray:
    return np.array(rows, dtype=np.float64)


def flags(text: str) -> BoolArray:
    return np.array([letter == "1" for letter in text])


def random_networks(seed: int, count: int, skills: tuple[float, ...]) -> tuple[list[FloatArray], IntArray]:
    """Returns probabilities of networks that favor the true label, each with independent noise."""
    rng = np.random.default_rng(seed)
    truth_N = rng.integers(0, 4, count)
    said = []
    for skill in skills:
        logits = rng.normal(size=(count, 4)) + skill * np.eye(4)[truth_N]
        said.append(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
    return said, truth_N


def test_a_gain_counts_what_was_fixed_and_what_was_spoilt() -> None:
    found = gain(flags("1100011111"), flags("1111101111"))
    assert (found.num_inputs, found.fixed, found.spoilt) == (10, 3, 1)
    assert found.after - found.before == pytest.approx(0.2)
    found = gain(flags("1101"), flags("1101"))
    assert (found.low, found.high, found.is_sure) == (0, 0, False)


@pytest.mark.parametrize(("fixed", "spoilt"), [(5, 0), (6, 0), (9, 2), (10, 2), (20, 8), (0, 7)])
def test_the_interval_contains_0_where_mcnemars_exact_test_does_not_reject(fixed: int, spoilt: int) -> None:
    before = flags("0" * fixed + "1" * spoilt + "1" * 50)
    after = flags("1" * fixed + "0" * spoilt + "1" * 50)
    found = gain(before, after)
    rejects = binomtest(fixed, fixed + spoilt).pvalue <= 0.05
    assert (found.low > 0 or found.high < 0) == rejects
    assert found.is_sure == (rejects and fixed > spoilt)
    assert found.low - 1e-9 <= found.after - found.before <= found.high + 1e-9


def test_an_ensemble_is_the_weighted_mean_of_its_networks() -> None:
    said = [of([1.0, 0.0]), of([0.0, 1.0]), of([0.5, 0.5])]
    assert mix_networks(said, {5: 0.4, 11: 0.5}, ENDS) == pytest.approx(of([0.45, 0.55]))  # .2 of the first, .3, .5
    assert mix_networks(said, {5: 0.4}, ENDS) == pytest.approx(of([0.5, 0.5]))


def test_weights_are_of_maximum_likelihood() -> None:
    truth_N = np.zeros(3, dtype=np.int64)
    small, large = of([0.9, 0.1], [0.2, 0.8], [0.5, 0.5]), of([0.2, 0.8], [0.9, 0.1], [0.6, 0.4])
    weight = likeliest_weight(small, large, truth_N)
    slopes = (small - large)[:, 0] / ((1 - weight) * large + weight * small)[:, 0]
    assert slopes.sum() == pytest.approx(0, abs=1e-6)


def test_a_network_that_adds_nothing_gets_no_weight() -> None:
    truth_N = np.zeros(4, dtype=np.int64)
    useless, large = of(*[[0.1, 0.9]] * 4), of(*[[0.8, 0.2]] * 4)
    assert likeliest_weight(useless, large, truth_N) == 0


def test_each_end_is_fitted_on_the_inputs_that_continue_there() -> None:
    said, truth_N = random_networks(1, 400, (1.0, 1.5, 2.0))
    goes_on = np.column_stack([np.arange(400) < 300, np.arange(400) < 100])
    found = fit_weights(said, truth_N, goes_on, ENDS)
    assert found[5] == likeliest_weight(said[0][:300], said[1][:300], truth_N[:300])
    some = [each[:100] for each in said]
    assert found[11] == likeliest_weight(mix_networks(some[:2], found, ENDS[:1]), some[2], truth_N[:100])
    assert fit_weights(said, truth_N, np.zeros((400, 2), dtype=bool), ENDS) == {5: 0.0, 11: 0.0}


def test_equally_accurate_networks_with_independent_errors_gain_as_an_ensemble() -> None:
    said, truth_N = random_networks(2, 4000, (1.5, 1.5))
    found = held_out_gain(said, truth_N, np.ones((4000, 1), dtype=bool), ENDS[:1])
    assert found is not None
    assert found.is_sure
    assert found.after - found.before > 0.05
    said, truth_N = random_networks(3, 50, (1.0, 2.0))
    assert held_out_gain(said, truth_N, np.zeros((50, 1), dtype=bool), ENDS[:1]) is None


def test_overfitted_weights_have_no_held_out_gain() -> None:
    sure = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        truth_N = rng.integers(0, 2, 60)
        noise, large = (np.column_stack([share, 1 - share]) for share in rng.random((2, 60)))
        found = held_out_gain([noise, large], truth_N, np.ones((60, 1), dtype=bool), ENDS[:1])
        assert found is not None
        sure += found.is_sure
    assert sure <= 2
