from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlyexit.engine.engine import ObservedTimes, bucket_end
from earlyexit.network.boundary import Split

SPLIT = Split(first=0, end=2, batch=8)


def learnt(*observed: tuple[int, int, float, float]) -> ObservedTimes:
    """Returns times learned from batches: (size, tokens, seconds until the first answers, total seconds)."""
    times = ObservedTimes()
    for each in observed:
        times.observe(SPLIT, *each)
    return times


TWO = learnt((2, 2, 0.1, 1.0), (4, 4, 0.1, 3.0))
OF_TOKENS = learnt((2, 33, 1.0, 1.0), (9, 125, 3.5, 3.5), (3, 128, 6.0, 6.0))


@pytest.mark.parametrize(
    ("times", "tokens", "expected_s"),
    [
        pytest.param(learnt(), 8, 0.0, id="nothing of a split that never ran"),
        pytest.param(TWO, 1, 1.0, id="smaller: what the next larger took"),
        pytest.param(TWO, 2, 1.0, id="seen"),
        pytest.param(TWO, 3, 3.0, id="between: what the next larger took"),
        pytest.param(TWO, 8, 6.0, id="beyond all seen, proportionally"),
        pytest.param(learnt((4, 4, 0.1, 1.0), (4, 4, 0.1, 2.0)), 4, 1.2, id="a newer one moves it by a fifth"),
        pytest.param(OF_TOKENS, 20, 1.0, id="fewer tokens: what the next larger took"),
        pytest.param(OF_TOKENS, 34, 1.0, id="in the bucket"),
        pytest.param(OF_TOKENS, 37, 4.0, id="behind it"),
        pytest.param(OF_TOKENS, 128, 4.0, id="two batches of one bucket: 3.5 + 0.2 * (6 - 3.5)"),
        pytest.param(OF_TOKENS, 256, 8.0, id="more tokens than ever, proportionally"),
        pytest.param(learnt((8, 56, 1.0, 1.0), (8, 400, 9.0, 9.0)), 8 * 7.000000000000001, 1.0, id="a rounded mean"),
    ],
)
def test_the_expected_time_of_a_batch_is_the_average_of_its_bucket(
    times: ObservedTimes, tokens: float, expected_s: float
) -> None:
    assert times.batch_s(SPLIT, tokens) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("times", "tokens", "expected_s"),
    [
        pytest.param(learnt(), 8, 0.0, id="nothing of a split that never ran"),
        pytest.param(learnt((4, 4, 0.5, 1.0), (8, 8, 1.0, 2.0)), 8, 1.0, id="those of such a batch"),
        pytest.param(learnt((4, 4, 0.5, 1.0), (8, 8, 1.0, 2.0)), 2, 0.5, id="and of a smaller one"),
        pytest.param(learnt((4, 4, 0.5, 1.0), (8, 8, 0.25, 1.0)), 4, 0.25, id="no more than a larger one took"),
        pytest.param(learnt((4, 4, 0.5, 1.0), (4, 4, 1.0, 1.0)), 4, 0.6, id="a newer one moves it by a fifth"),
    ],
)
def test_the_expected_time_of_first_answers_is_the_least_of_larger_buckets(
    times: ObservedTimes, tokens: float, expected_s: float
) -> None:
    assert times.first_s(SPLIT, tokens) == pytest.approx(expected_s)


@given(size=st.integers(1, 64), tokens=st.integers(65, 10**6))
def test_a_bucket_ends_at_most_an_eighth_above_its_batch(size: int, tokens: int) -> None:
    end = bucket_end(size, tokens)
    assert tokens <= end <= tokens * 9 / 8
    assert (bucket_end(size, end), bucket_end(size, size), bucket_end(8, 1000)) == (end, size, 1024)


def test_equal_splits_share_the_times_and_lengths_of_recent_batches() -> None:
    assert ObservedTimes().mean_tokens(SPLIT) == 1.0
    assert learnt((4, 4, 1.0, 1.0), (1, 1, 1.0, 1.0)).mean_tokens(SPLIT) == 1.0
    assert learnt((8, 80, 1.0, 1.0)).mean_tokens(SPLIT) == 10.0
    # (80 + 0.2 * (300 - 80)) / (8 + 0.2 * (3 - 8))
    assert learnt((8, 80, 1.0, 1.0), (3, 300, 1.0, 1.0)).mean_tokens(SPLIT) == pytest.approx(124 / 7)
    times = ObservedTimes()
    for batch, ramps in ((8, ()), (4, ()), (8, (1,)), (8, ())):
        times.observe(Split(first=0, end=2, batch=batch, ramps=ramps), 1, 1, 0.5, 1.0 + len(ramps))
    assert times.batch_s(Split(first=0, end=2, batch=2), 1) == 1.0
    assert times.batch_s(Split(first=0, end=2, batch=2, ramps=(1,)), 1) == 2.0
