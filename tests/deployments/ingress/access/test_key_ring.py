from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from deployments.api.access import KeyRing
from deployments.keys import AccessSettings
from earlyexit.errors import InputError

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


def test_a_changed_file_is_read_again(path: Path) -> None:
    ring = KeyRing(AccessSettings(keys_file=str(path)))
    put(path, f"bob:{BOB}\n")
    ring.look()
    assert (ring.keys.owner(ALICE), ring.keys.owner(BOB)) == (None, "bob")


def test_a_file_that_stayed_as_it_was_is_not_read(path: Path) -> None:
    ring = KeyRing(AccessSettings(keys_file=str(path)))
    before = ring.keys
    ring.look()
    assert ring.keys is before


@pytest.mark.parametrize("text", [f"bob:{BOB[:5]}\n", "", None], ids=["short", "empty", "gone"])
def test_a_file_that_went_wrong_changes_nothing_and_is_told_once_without_its_text(
    path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(AccessSettings(keys_file=str(path)))
    if text is None:
        os.unlink(path)
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
