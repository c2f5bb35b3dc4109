"""Keys that are read again, and rates: what the gate goes by."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deployments.api.access import KeyRing, RateLimits, rate_limits
from deployments.keys import AccessSettings
from earlyexit.errors import InputError, RateLimitError

ALICE, BOB = "alice-0123456789", "bob-012345678901"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    put(path, f"alice:{ALICE}\n")
    return path


def put(path: Path, text: str) -> None:
    """As an editor saves it: another file in its place."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)


def test_a_changed_file_is_read_again_and_one_that_stayed_as_it_was_is_not(path: Path) -> None:
    ring = KeyRing(AccessSettings(keys_file=str(path)))
    before = ring.keys
    ring.look()
    assert ring.keys is before
    put(path, f"bob:{BOB}\n")
    ring.look()
    assert (ring.keys.owner(ALICE), ring.keys.owner(BOB)) == (None, "bob")


@pytest.mark.parametrize("text", [f"bob:{BOB[:5]}\n", "", None], ids=["short", "empty", "gone"])
def test_a_file_that_went_wrong_changes_nothing_and_is_told_once_without_its_text(
    path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(AccessSettings(keys_file=str(path)))
    if text is None:
        path.unlink()
    else:
        put(path, text)
    ring.look()
    ring.look()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("the API keys stay as they were: ")
    assert BOB[:5] not in record.getMessage()
    assert ring.keys.owner(ALICE) == "alice"


def test_a_ring_without_keys_to_read_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        KeyRing(AccessSettings(keys_file=str(tmp_path / "none")))


async def test_a_variable_is_read_once_and_never_watched() -> None:
    ring = KeyRing(AccessSettings(keys_env="KEYS"), {"KEYS": ALICE})
    await ring.watch()
    assert ring.keys.owner(ALICE) is not None


# Two tokens come a second, three fit. At which second how many are taken, and how long that must wait.
WAITS = {
    "a burst passes, then the rate": ([(10.0, 1)] * 4 + [(10.5, 1)] * 2, [0.0, 0.0, 0.0, 0.5, 0.0, 0.5]),
    "a refusal takes nothing": ([(0.0, 3), (0.0, 2), (0.5, 2), (1.0, 2)], [0.0, 1.0, 0.5, 0.0]),
    "a pause fills the bucket and no more": ([(0.0, 3), (1000.0, 3), (1000.0, 1)], [0.0, 0.0, 0.5]),
    "more than a burst is owed": ([(0.0, 7), (0.0, 1), (0.0, 7)], [0.0, 2.5, 3.5]),  # 4 are owed, 1 is asked for
}


@pytest.mark.parametrize(("taken", "waits_s"), WAITS.values(), ids=WAITS)
def test_a_rate_is_kept_and_a_refusal_says_how_long_to_wait(
    taken: list[tuple[float, int]], waits_s: list[float]
) -> None:
    limits, found = RateLimits(2.0, 3.0), []
    for now_s, tokens in taken:
        try:
            limits.take("alice", tokens, now_s)
            found.append(0.0)
        except RateLimitError as refusal:
            found.append(refusal.retry_after_s)
    assert found == waits_s


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
