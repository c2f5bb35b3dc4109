from __future__ import annotations

import pytest

from earlyexit.split import Budget, Split
from experiments.gpu.plans import Plan
from experiments.tokens.budgets import bounded, budget_of, num_batches


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param(None, 2, id="inputs alone"),
        pytest.param(10, 3, id="6 + 4, 12 alone, 1 + 1"),
        pytest.param(9, 4, id="6, 4, 12 alone, 1 + 1"),
    ],
)
def test_batches_are_filled_in_order(tokens: int | None, expected: int) -> None:
    assert num_batches([6, 4, 12, 1, 1], Budget(inputs=3, tokens=tokens)) == expected


def test_the_budget_makes_as_many_batches_as_inputs_do() -> None:
    # Two batches: of 6 + 4 + 12 and 1 + 1 with 22 tokens; with fewer 12 would not fit any more, and then two follow.
    assert budget_of([6, 4, 12, 1, 1], 3) == 14
    assert num_batches([6, 4, 12, 1, 1], Budget(inputs=5, tokens=14)) == 2
    assert num_batches([6, 4, 12, 1, 1], Budget(inputs=5, tokens=13)) == 3


def test_a_plan_is_bounded_split_by_split() -> None:
    plan = Plan(name="p", splits=(Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=4, batch=4)))
    assert bounded(plan, Budget(inputs=64, tokens=512)).splits == (
        Split(first=0, end=1, batch=64, tokens=512, ramps=(0,)),
        Split(first=1, end=4, batch=64, tokens=512),
    )
