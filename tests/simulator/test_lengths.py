"""Tests of generated lengths."""

from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import DataError
from simulator.inputs import truncated_normal


@pytest.mark.parametrize("variance", [20.0, 100.0])
def test_lengths_have_the_requested_mean_and_variance_if_the_bounds_are_far(variance: float) -> None:
    lengths = truncated_normal(40_000, mean=50, variance=variance, low=3, high=100, seed=0)
    assert lengths.mean() == pytest.approx(50, abs=0.2)
    assert lengths.var() == pytest.approx(variance, rel=0.03)


def test_lengths_depend_on_their_seed_and_equal_the_mean_without_variance() -> None:
    lengths = truncated_normal(20_000, mean=20, variance=400, low=3, high=100, seed=1)
    assert lengths.dtype == np.int64
    assert lengths.min() == 3
    assert lengths.max() <= 100
    one, same, other = (truncated_normal(50, mean=20, variance=20, low=3, high=100, seed=seed) for seed in (0, 0, 1))
    assert one.tolist() == same.tolist() != other.tolist()
    assert truncated_normal(5, mean=12, variance=0, low=1, high=40, seed=0).tolist() == [12] * 5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num": 0}, "at least one length"),
        ({"mean": float("nan")}, "mean length must be a finite number, not nan"),
        ({"variance": float("inf")}, "not inf"),
    ],
)
def test_numbers_that_no_length_has_are_refused(given: dict[str, float], words: str) -> None:
    asked = {"num": 10, "mean": 20.0, "variance": 20.0, "low": 3, "high": 100, "seed": 0} | given
    with pytest.raises(DataError, match=words):
        truncated_normal(asked.pop("num"), **asked)  # type: ignore[arg-type]
