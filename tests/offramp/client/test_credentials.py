from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.errors import InputError
from offramp.client.protocol import find_api_key, key_header


def test_a_client_finds_its_key_in_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("alice-0123456789\n")
    path.chmod(0o600)
    assert find_api_key(None, {}) is None
    assert find_api_key(None, {"OFFRAMP_API_KEY": "bob-012345678901"}) == "bob-012345678901"
    assert find_api_key(path, {"OFFRAMP_API_KEY": "bob-012345678901"}) == "alice-0123456789"
    path.chmod(0o604)
    with pytest.raises(InputError, match="all users of this machine may read it"):
        find_api_key(path, {})


def test_no_key_is_no_header() -> None:
    assert key_header(None) == {}
    assert key_header("alice-0123456789") == {"Authorization": "Bearer alice-0123456789"}
