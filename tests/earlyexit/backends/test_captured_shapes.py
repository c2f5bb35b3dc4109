from __future__ import annotations

import numpy as np
import pytest

from earlyexit.backends.captured import MOST_TOKENS, shape_of, shapes_within
from earlyexit.network.boundary import Budget


@pytest.mark.parametrize(
    ("lengths", "max_length", "expected"),
    [
        pytest.param([1] * 9, 1, (9, 9, 1, False), id="images, nearly every number"),
        pytest.param([1] * 17, 1, (18, 18, 1, False), id="and every second beyond sixteen"),
        pytest.param([32] * 3, 32, (96, 3, 32, False), id="texts of the full length"),
        pytest.param([11], 32, (16, 2, 16, True), id="a short text, and a row for what is nobody's"),
        pytest.param([5, 17, 30], 32, (56, 5, 32, True), id="mixed lengths"),
        pytest.param([100] * 3, 512, (320, 5, 128, True), id="a quarter more at most"),
    ],
)
def test_the_smallest_shape_is_taken(lengths: list[int], max_length: int, expected: tuple[int, int, int, bool]) -> None:
    shape = shape_of(np.array(lengths, dtype=np.int32), max_length)
    assert (shape.num_tokens, shape.num_rows, shape.longest, shape.mixed) == expected


@pytest.mark.parametrize("max_length", [1, 4, 20, 32, 100, 512])
@pytest.mark.parametrize("budget", [Budget(inputs=1), Budget(inputs=11), Budget(inputs=16, tokens=200)], ids=str)
def test_whatever_a_batch_shrinks_to_has_a_shape_that_was_captured(max_length: int, budget: Budget) -> None:
    rng = np.random.default_rng(0)
    shapes = shapes_within(budget, max_length)
    for _ in range(500):
        lengths_B = rng.integers(1, max_length + 1, rng.integers(1, budget.inputs + 1))
        if budget.tokens is not None and len(lengths_B) > 1 and lengths_B.sum() > budget.tokens:
            lengths_B = lengths_B[:1]
        shape = shape_of(lengths_B.astype(np.int32), max_length)
        assert shape in shapes or shape.num_tokens > MOST_TOKENS
        assert int(lengths_B.sum()) <= shape.num_tokens
        assert lengths_B.max() <= shape.longest
        assert len(lengths_B) + shape.mixed <= shape.num_rows
