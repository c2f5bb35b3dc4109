from __future__ import annotations

import pytest

from earlyexit.counts import MOST_SPLITS
from earlyexit.split import Split
from earlyexit.times import ObservedTimes

SPLIT = Split(first=0, end=2, batch=8)


def learnt(*observed: tuple[int, float, float]) -> ObservedTimes:
    """From batches of the split: size, seconds until the first answers, seconds in all."""
    times = ObservedTimes()
    for size, first_s, total_s in observed:
        times.observe(SPLIT, size, first_s, total_s)
    return times


@pytest.mark.parametrize(
    ("observed", "size", "expected_s"),
    [
        pytest.param([], 8, 0.0, id="nothing of a split that never ran"),
        pytest.param([(2, 0.1, 1.0), (4, 0.1, 3.0)], 1, 1.0, id="smaller: what the next larger took"),
        pytest.param([(2, 0.1, 1.0), (4, 0.1, 3.0)], 2, 1.0, id="seen"),
        pytest.param([(2, 0.1, 1.0), (4, 0.1, 3.0)], 3, 3.0, id="between: what the next larger took"),
        pytest.param([(2, 0.1, 1.0), (4, 0.1, 3.0)], 4, 3.0, id="the largest"),
        pytest.param([(4, 0.1, 3.0)], 8, 6.0, id="beyond all seen, proportionally"),
        pytest.param([(4, 0.1, 1.0), (4, 0.1, 2.0)], 4, 1.2, id="a newer one moves it by a fifth"),
    ],
)
def test_a_batch_takes_what_such_batches_took(
    observed: list[tuple[int, float, float]], size: int, expected_s: float
) -> None:
    assert learnt(*observed).batch_s(SPLIT, size) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("observed", "expected_s"),
    [
        pytest.param([], 0.0, id="nothing of a split that never ran"),
        pytest.param([(4, 0.5, 1.0), (8, 0.2, 1.0)], 0.2, id="every faster one is followed"),
        pytest.param([(1, 0.25, 1.0), (8, 0.75, 1.0)], 0.25, id="a slow batch of many is not"),
        # 0.25 + 0.2 * (0.5 - 0.25)
        pytest.param([(1, 0.25, 1.0), (1, 9.0, 9.0)], 0.3, id="a slow one alone, by a fifth of at most its own size"),
    ],
)
def test_the_soonest_answer_is_that_of_the_fastest_batch(
    observed: list[tuple[int, float, float]], expected_s: float
) -> None:
    assert learnt(*observed).soonest_s(SPLIT) == pytest.approx(expected_s)


def test_splits_are_learnt_apart() -> None:
    times = learnt((1, 0.5, 1.0))
    assert times.batch_s(Split(first=2, end=4, batch=8), 1) == 0.0


def test_a_split_is_the_same_whoever_names_it_and_whatever_it_is_fused_to() -> None:
    times = ObservedTimes()
    for batch, ramps in ((8, ()), (4, ()), (8, (1,)), (8, ())):
        times.observe(Split(first=0, end=2, batch=batch, ramps=ramps), 1, 0.5, 1.0 + len(ramps))
    assert times.batch_s(Split(first=0, end=2, batch=2), 1) == 1.0
    assert times.batch_s(Split(first=0, end=2, batch=2, ramps=(1,)), 1) == 2.0


def test_the_split_that_has_not_run_for_longest_makes_room_for_a_new_one() -> None:
    times = ObservedTimes()
    splits = [Split(first=0, end=end, batch=8) for end in range(1, MOST_SPLITS + 2)]
    for split in [*splits[:-1], splits[0], splits[-1]]:
        times.observe(split, 8, 0.5, 1.0)
    forgotten = [split for split in splits if not times.batch_s(split, 8) and not times.soonest_s(split)]
    assert forgotten == [splits[1]]
