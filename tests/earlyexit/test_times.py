from __future__ import annotations

import pytest

from earlyexit.counts import MOST_SPLITS
from earlyexit.split import Split
from earlyexit.times import ObservedTimes

SPLIT = Split(first=0, end=2, batch=8)


def test_nothing_is_expected_of_a_split_that_never_ran() -> None:
    times = ObservedTimes()
    assert (times.batch_s(SPLIT, 8), times.soonest_s(SPLIT)) == (0.0, 0.0)


def test_an_unseen_size_takes_what_the_next_larger_one_took() -> None:
    times = ObservedTimes()
    times.observe(SPLIT, 2, 0.1, 1.0)
    times.observe(SPLIT, 4, 0.1, 3.0)
    assert [times.batch_s(SPLIT, size) for size in (1, 2, 3, 4)] == [1.0, 1.0, 3.0, 3.0]


def test_a_size_beyond_all_seen_takes_proportionally_longer() -> None:
    times = ObservedTimes()
    times.observe(SPLIT, 4, 0.1, 3.0)
    assert times.batch_s(SPLIT, 8) == 6.0


def test_a_newer_observation_moves_the_expectation_by_a_fifth() -> None:
    times = ObservedTimes()
    times.observe(SPLIT, 4, 0.1, 1.0)
    times.observe(SPLIT, 4, 0.1, 2.0)
    assert times.batch_s(SPLIT, 4) == pytest.approx(1.2)


def test_the_soonest_answer_follows_every_faster_one() -> None:
    times = ObservedTimes()
    times.observe(SPLIT, 4, 0.5, 1.0)
    times.observe(SPLIT, 8, 0.2, 1.0)
    assert times.soonest_s(SPLIT) == 0.2


def test_a_slow_batch_of_many_does_not_make_the_soonest_answer_later() -> None:
    times = ObservedTimes()
    times.observe(SPLIT, 1, 0.25, 1.0)
    times.observe(SPLIT, 8, 0.75, 1.0)
    assert times.soonest_s(SPLIT) == 0.25


def test_a_slow_batch_of_one_moves_the_soonest_answer_by_a_fifth_of_at_most_its_own_size() -> None:
    times = ObservedTimes()
    times.observe(SPLIT, 1, 0.25, 1.0)
    times.observe(SPLIT, 1, 9.0, 9.0)
    assert times.soonest_s(SPLIT) == pytest.approx(0.3)  # 0.25 + 0.2 * (0.5 - 0.25)


def test_splits_are_learnt_apart() -> None:
    times = ObservedTimes()
    times.observe(SPLIT, 1, 0.5, 1.0)
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
