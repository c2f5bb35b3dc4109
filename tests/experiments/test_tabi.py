from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.tabi import ProfiledModel, candidates, cascade, cutoffs, select

STEEP = 1e6
"""With this slope, the band is a threshold in its middle."""


def model(name: str, latency_s: float, confidence: list[float], right: list[int]) -> ProfiledModel:
    return ProfiledModel(
        name=name, latency_s=latency_s, confidence_N=np.array(confidence), right_N=np.array(right, dtype=float)
    )


SMALL = model("small", 7.0, [0.99, 0.99, 0.92, 0.6], [1, 1, 1, 0])
LARGE = model("large", 26.0, [0.99, 0.99, 0.99, 0.9], [1, 1, 1, 1])


def test_shares_and_accuracy_of_a_cascade_are_expectations() -> None:
    right_N = np.array([1.0, 1.0, 0.0, 0.0])  # the first two of four inputs are answered by the small network
    assert cascade([replace(SMALL, right_N=right_N), replace(LARGE, right_N=1 - right_N)], 0.9, STEEP).accuracy == 1
    found = cascade([SMALL, LARGE], 0.5, 0.0)
    assert found.answered_L == (0.5, 0.5)
    assert found.accuracy == pytest.approx((0.5 * 3 + 0.5 * 4) / 4)


def test_c_is_lowered_until_the_cascade_is_worse_than_its_models_on_average_or_to_0() -> None:
    small = model("small", 1.0, [0.99, 0.89, 0.71, 0.55], [1, 0, 0, 0])
    found = list(cutoffs([small, replace(small, right_N=np.ones(4))], STEEP))
    # On average 5 of 8 are right. An input returns once (c + 1) / 2 is below it: the second, wrong, at c = 0.75, the
    # third at 0.4, where 2 of 4 are right.
    assert [each.c for each in found] == [pytest.approx(0.95 - 0.05 * n) for n in range(11)]
    assert [each.accuracy for each in found] == [1] * 4 + [0.75] * 7
    found = list(cutoffs([model("equal", 1.0, [0.5, 0.5], [1, 1])] * 2))
    assert len(found) == 20
    assert found[-1].c == 0


def test_the_fastest_accurate_candidate_without_a_heavy_tail_is_selected() -> None:
    slow = model("slow", 20.0, [0.9] * 4, [1, 1, 1, 0])  # reroutes all at 0.95: 46 > 1.5 x 26
    found = list(candidates([slow, LARGE], STEEP))
    assert all(each.tail_latency_s <= 1.5 * 26 for each in found)
    assert [each.models for each in found[:2]] == [("slow",), ("large",)]
    assert all(each.c is not None and each.c < 0.85 for each in found[2:])
    found = list(candidates([LARGE, SMALL], STEEP))
    chosen = select(found, 1.0)
    assert chosen is not None
    assert chosen.models == ("small", "large")
    assert chosen.mean_latency_s == pytest.approx(7 + 26 / 4)
    assert select(found, 1.01) is None
    single = select(found, 0.75)
    assert single is not None
    assert single.models == ("small",)
    middle = model("middle", 12.0, [0.99] * 4, [1, 1, 1, 0])
    found = list(candidates([LARGE, middle, SMALL], STEEP))
    assert {each.models for each in found if len(each.models) == 3} <= {("small", "middle", "large")}
    assert not any(each.models[0] == "large" for each in found if len(each.models) > 1)
