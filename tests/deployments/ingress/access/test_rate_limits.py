from __future__ import annotations

import pytest

from deployments.api.access import Limit, RateLimits, TokenBucket, limit_of
from deployments.keys import AccessSettings
from earlyexit.errors import RateLimitError

TWO_A_SECOND = Limit(rate_per_s=2.0, burst=3.0)


def test_a_burst_passes_and_then_the_rate() -> None:
    bucket = TokenBucket(TWO_A_SECOND, now_s=10.0)
    assert [bucket.take(1, 10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert [bucket.take(1, 10.5), bucket.take(1, 10.5)] == [0.0, 0.5]


def test_a_refusal_takes_nothing() -> None:
    bucket = TokenBucket(TWO_A_SECOND, now_s=0.0)
    assert bucket.take(3, 0.0) == 0.0
    assert [bucket.take(2, 0.0), bucket.take(2, 0.5), bucket.take(2, 1.0)] == [1.0, 0.5, 0.0]


def test_a_pause_fills_the_bucket_to_its_burst_and_no_further() -> None:
    bucket = TokenBucket(TWO_A_SECOND, now_s=0.0)
    bucket.take(3, 0.0)
    assert [bucket.take(3, 1000.0), bucket.take(1, 1000.0)] == [0.0, 0.5]


def test_more_than_a_burst_is_taken_of_a_full_bucket_and_paid_for_afterwards() -> None:
    bucket = TokenBucket(TWO_A_SECOND, now_s=0.0)
    assert bucket.take(7, 0.0) == 0.0
    assert bucket.take(1, 0.0) == 2.5  # 4 are owed, 1 is asked for, 2 come a second
    assert bucket.take(7, 0.0) == 3.5


def test_callers_do_not_take_from_each_other() -> None:
    limits = RateLimits(Limit(rate_per_s=1.0, burst=1.0), "requests")
    limits.take("alice", 1, 0.0)
    limits.take("bob", 1, 0.0)
    with pytest.raises(RateLimitError, match="too many requests: 1 per second are taken, 1 at once") as refusal:
        limits.take("alice", 1, 0.25)
    assert refusal.value.retry_after_s == 0.75


def test_each_of_several_ingresses_has_its_part_and_room_for_one() -> None:
    access = AccessSettings(rate_per_s=10.0, burst=20.0)
    assert limit_of(access, 1) == Limit(rate_per_s=10.0, burst=20.0)
    assert limit_of(access, 4) == Limit(rate_per_s=2.5, burst=5.0)
    assert limit_of(access, 40) == Limit(rate_per_s=0.25, burst=1.0)


def test_without_a_burst_one_seconds_worth_may_come_at_once() -> None:
    assert limit_of(AccessSettings(rate_per_s=10.0), 1) == Limit(rate_per_s=10.0, burst=10.0)
    assert limit_of(AccessSettings(rate_per_s=0.5), 1) == Limit(rate_per_s=0.5, burst=1.0)
    assert limit_of(AccessSettings(), 1) is None
