from __future__ import annotations

import numpy as np
import pytest

from experiments.studies.cascades import Answering, cocktail, infaas

TRUTH_N = np.array([0, 0, 1, 1])
QUICK = Answering(name="quick", latency_s=1.0, answers_N=np.array([0, 1, 1, 1]))
OTHER = Answering(name="other", latency_s=2.0, answers_N=np.array([0, 0, 0, 1]))
THIRD = Answering(name="third", latency_s=3.0, answers_N=np.array([1, 0, 1, 1]))
RIGHT = Answering(name="right", latency_s=9.0, answers_N=TRUTH_N)
ALL = (QUICK, OTHER, THIRD, RIGHT)


@pytest.mark.parametrize(("accuracy", "name"), [(0.75, "quick"), (0.76, "right")])
def test_infaas_takes_the_quickest_that_is_accurate_enough(accuracy: float, name: str) -> None:
    found = infaas(ALL, TRUTH_N, accuracy)
    assert found is not None
    assert found.models == (name,)
    assert infaas(ALL, TRUTH_N, 1.1) is None


def test_cocktail_votes_until_enough_is_right_with_the_least_latency() -> None:
    found = cocktail(ALL, TRUTH_N, 1.0)
    assert found is not None
    # Each of the three is wrong once, never two of them together; the slowest takes 3 s, and all work.
    assert (found.models, found.latency_s, found.work_s) == (("quick", "other", "third"), 3.0, 6.0)
    assert cocktail(ALL[:1], TRUTH_N, 0.1) is None


def test_of_equal_votes_the_more_accurate_models_answer_stands() -> None:
    found = cocktail((OTHER, RIGHT), TRUTH_N, 1.0)
    assert found is not None
    assert found.accuracy == 1.0
