"""The key that a client sends: from a variable or a file, never from the command line, where `ps` shows it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from earlyexit.errors import InputError

KEY_VARIABLE = "OFFRAMP_API_KEY"


def find_api_key(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The file's key, else the variable's, else none; raises InputError for a file that cannot be taken."""
    if file is None:
        return environment.get(KEY_VARIABLE) or None
    from deployments.keys import read_secret

    return read_secret(file).strip()


def key_header(api_key: str | None) -> dict[str, str]:
    """What carries a key; raises InputError for one that no header can, without quoting it."""
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or not api_key.strip():
        raise InputError("the API key is empty or holds what no HTTP header can")
    return {"Authorization": f"Bearer {api_key}"}
