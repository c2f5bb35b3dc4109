from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad

from earlyexit.policies.reroute import coin, reroute_probability, reroutes

CONFIDENCES = np.linspace(0, 1, 1001)


def test_at_c_1_everything_goes_on() -> None:
    assert (reroute_probability(CONFIDENCES, 1.0) == 1).all()
    assert reroutes(CONFIDENCES, [f"{n}" for n in range(1001)], 5, 1.0).all()


@pytest.mark.parametrize("c", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("k", [0.0, 1.0, 10.0, 1e4])
def test_the_surer_an_input_the_less_likely_it_goes_on(c: float, k: float) -> None:
    probability = reroute_probability(CONFIDENCES, c, k)

    assert (np.diff(probability) <= 0).all()
    assert (probability[np.less_equal(CONFIDENCES, c)] == 1).all()
    assert ((probability >= 0) & (probability <= 1)).all()


def test_the_band_is_equation_4() -> None:
    c, k, con = 0.9, 8.0, 0.93

    [found] = reroute_probability(np.array([con]), c, k)

    assert found == pytest.approx(1 / (1 + math.exp(k * ((con - c) / (1 - c) - 0.5))), rel=1e-12)


@pytest.mark.parametrize(("c", "k"), [(0.9, 10.0), (0.5, 3.0)])
def test_the_share_that_goes_on_is_the_mean_of_the_band(c: float, k: float) -> None:
    confidence = c + (1 - c) * (np.arange(100_000) + 0.5) / 100_000
    expected, _ = quad(lambda con: float(reroute_probability(np.array([con]), c, k)[0]) / (1 - c), c, 1)

    share = reroutes(confidence, [f"{n}" for n in range(100_000)], 2, c, k).mean()

    assert share == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(100_000))


def test_another_attempt_has_the_same_coin() -> None:
    assert coin("tweet#ingress-1.17.0", 5) == coin("tweet#ingress-1.17.12", 5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("tweet#ingress-1.17.0", 5), ("tweet#ingress-1.18.0", 5)),
        (("tweet#ingress-1.17.0", 5), ("tweet#ingress-1.17.0", 11)),
        (("row.1", 5), ("row.2", 5)),
        (("a#1.2.3", 5), ("b#1.2.3", 5)),
    ],
    ids=["another input", "another ramp", "ids without attempts", "another caller's id"],
)
def test_others_have_a_coin_of_their_own(one: tuple[str, int], other: tuple[str, int]) -> None:
    assert coin(*one) != coin(*other)


def test_coins_are_the_same_in_every_process() -> None:
    assert coin("tweet#ingress-1.17.0", 5) == 0.0428821056667833


def test_coins_are_uniform() -> None:
    coins = np.sort([coin(f"#i.{n}.0", 0) for n in range(20_000)])

    assert np.abs(coins - (np.arange(20_000) + 0.5) / 20_000).max() < 1.63 / math.sqrt(20_000)
