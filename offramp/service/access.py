"""Who may use a service that is started here: what the command line says, and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from deployments.access import KEYS_VARIABLE, AccessSettings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def access_settings(
    keys_file: Path | None, rate_per_s: float | None, environment: Mapping[str, str] = os.environ
) -> AccessSettings | None:
    """Settings of a service on this machine; None where neither options nor environment ask for any."""
    keys_env = KEYS_VARIABLE if keys_file is None and KEYS_VARIABLE in environment else None
    if (keys_file, keys_env, rate_per_s) == (None, None, None):
        return None
    return AccessSettings(
        keys_file=None if keys_file is None else str(keys_file.resolve()), keys_env=keys_env, rate_per_s=rate_per_s
    )


def with_environment(
    access: AccessSettings | None, environment: Mapping[str, str] = os.environ
) -> AccessSettings | None:
    """A service file's settings; keys of the environment count where the file names none."""
    found = access or AccessSettings()
    if KEYS_VARIABLE not in environment or found.keys_file is not None or found.keys_env is not None:
        return access
    return found.model_copy(update={"keys_env": KEYS_VARIABLE})


def exposure_notes(
    host: str, front: str, *, has_keys: bool, has_grpc: bool = False, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """What of a service can be reached further than its `host` says, or by more than one would think."""
    notes = []
    if host not in LOOPBACK and not has_keys:
        notes.append(f"listening on {host} without API keys: whoever reaches it may use it (--api-keys)")
    if front == "haproxy":
        notes.append("HAProxy's statistics and metrics pages listen on every interface, whatever --host says")
    if has_grpc:
        notes.append("gRPC listens on every interface, whatever --host says")
    if environment.get("RAY_AUTH_MODE", "").lower() == "disabled":
        notes.append("Ray's own ports listen on every interface, and RAY_AUTH_MODE=disabled opens them to all")
    return notes
