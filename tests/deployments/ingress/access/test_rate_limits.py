from __future__ import annotations

from collections.abc import Sequence

import pytest

from deployments.api.access import RateLimits, rate_limits
from deployments.keys import AccessSettings
from earlyexit.errors import RateLimitError


def waits(*taken: tuple[float, int], rate_per_s: float = 2.0, burst: float = 3.0) -> Sequence[float]:
    """Takes tokens at some times; returns how long each must wait, 0 for those that were taken."""
    limits, found = RateLimits(rate_per_s, burst), []
    for now_s, tokens in taken:
        try:
            limits.take("alice", tokens, now_s)
            found.append(0.0)
        except RateLimitError as refusal:
            found.append(refusal.retry_after_s)
    return found


def test_a_burst_passes_and_then_the_rate() -> None:
    assert waits(*[(10.0, 1)] * 4, (10.5, 1), (10.5, 1)) == [0.0, 0.0, 0.0, 0.5, 0.0, 0.5]


def test_a_refusal_takes_nothing() -> None:
    assert waits((0.0, 3), (0.0, 2), (0.5, 2), (1.0, 2)) == [0.0, 1.0, 0.5, 0.0]


def test_a_pause_fills_the_bucket_to_its_burst_and_no_further() -> None:
    assert waits((0.0, 3), (1000.0, 3), (1000.0, 1)) == [0.0, 0.0, 0.5]


def test_more_than_a_burst_is_taken_of_a_full_bucket_and_paid_for_afterwards() -> None:
    assert waits((0.0, 7), (0.0, 1), (0.0, 7)) == [0.0, 2.5, 3.5]  # 4 are owed, 1 is asked for, 2 come a second


def test_callers_do_not_take_from_each_other() -> None:
    limits = RateLimits(1.0, 1.0)
    limits.take("alice", 1, 0.0)
    limits.take("bob", 1, 0.0)
    with pytest.raises(RateLimitError, match="too many requests: 1 per second are taken, 1 at once") as refusal:
        limits.take("alice", 1, 0.25)
    assert refusal.value.retry_after_s == 0.75


@pytest.mark.parametrize(
    ("rate_per_s", "burst", "num_ingresses", "share"),
    [
        (10.0, 20.0, 1, (10.0, 20.0)),
        (10.0, 20.0, 4, (2.5, 5.0)),
        (10.0, 20.0, 40, (0.25, 1.0)),
        (10.0, None, 1, (10.0, 10.0)),
        (0.5, None, 1, (0.5, 1.0)),
    ],
)
def test_each_ingress_has_its_share_and_without_a_burst_one_seconds_requests(
    rate_per_s: float, burst: float | None, num_ingresses: int, share: tuple[float, float]
) -> None:
    limits = rate_limits(AccessSettings(rate_per_s=rate_per_s, burst=burst), num_ingresses)
    assert limits is not None
    assert (limits.rate_per_s, limits.burst) == share
    assert rate_limits(AccessSettings(), num_ingresses) is None
