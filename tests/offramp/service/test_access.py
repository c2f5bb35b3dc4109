from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from deployments.access import AccessSettings
from deployments.settings import ServeSettings
from earlyexit.errors import InputError
from offramp.client.credentials import find_api_key, key_header
from offramp.service.access import access_settings, exposure_notes, with_environment
from offramp.service.paths import at_folder
from optimizer.plan import stock_plan

KEYS = {"OFFRAMP_API_KEYS": "alice:alice-0123456789"}


def test_options_and_environment_say_where_keys_are() -> None:
    assert access_settings(None, None, {}) is None
    assert access_settings(None, 5.0, {}) == AccessSettings(rate_per_s=5.0)
    assert access_settings(None, None, KEYS) == AccessSettings(keys_env="OFFRAMP_API_KEYS")
    assert access_settings(Path("/etc/keys"), 5.0, KEYS) == AccessSettings(keys_file="/etc/keys", rate_per_s=5.0)


def test_the_environments_keys_count_where_a_service_file_names_none() -> None:
    by_file = AccessSettings(keys_file="/etc/keys")
    assert with_environment(None, {}) is None
    assert with_environment(by_file, KEYS) == by_file
    limited = with_environment(AccessSettings(rate_per_s=5.0), KEYS)
    assert limited == AccessSettings(rate_per_s=5.0, keys_env="OFFRAMP_API_KEYS")


def test_settings_hold_where_keys_are_and_no_key() -> None:
    settings = ServeSettings(model="m", plan=stock_plan(1, batch=1), access=access_settings(None, None, KEYS))
    assert "alice" not in settings.model_dump_json()


def test_nodes_find_the_keys_beside_the_model() -> None:
    settings = ServeSettings(model="m", plan=stock_plan(1, batch=1), access=AccessSettings(keys_file="/home/me/keys"))
    access = at_folder(settings, PurePosixPath("/srv/offramp")).access
    assert access == AccessSettings(keys_file="/srv/offramp/keys")


def test_a_client_finds_its_key_in_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("alice-0123456789\n")
    path.chmod(0o600)
    assert find_api_key(None, {}) is None
    assert find_api_key(None, {"OFFRAMP_API_KEY": "bob-012345678901"}) == "bob-012345678901"
    assert find_api_key(path, {"OFFRAMP_API_KEY": "bob-012345678901"}) == "alice-0123456789"
    path.chmod(0o604)
    with pytest.raises(InputError, match="everybody on this machine may read it"):
        find_api_key(path, {})


def test_no_key_is_no_header() -> None:
    assert key_header(None) == {}
    assert key_header("alice-0123456789") == {"Authorization": "Bearer alice-0123456789"}


@pytest.mark.parametrize(
    ("host", "front", "has_keys", "mode", "words"),
    [
        ("127.0.0.1", "proxy", False, "token", []),
        ("0.0.0.0", "proxy", True, "token", []),
        ("0.0.0.0", "proxy", False, "token", ["without API keys"]),
        ("127.0.0.1", "haproxy", True, "token", ["HAProxy's statistics"]),
        ("10.0.0.1", "haproxy", False, "disabled", ["without API keys", "HAProxy's statistics", "Ray's own ports"]),
    ],
)
def test_what_listens_further_than_it_seems_is_told(
    host: str, front: str, has_keys: bool, mode: str, words: list[str]
) -> None:
    notes = exposure_notes(host, front, has_keys=has_keys, environment={"RAY_AUTH_MODE": mode})
    assert [word in note for word, note in zip(words, notes, strict=True)] == [True] * len(words)
