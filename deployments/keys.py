"""API keys, which are read from a file or an environment variable and kept as hashes. No message quotes a key."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deployments.choices import Settings
from earlyexit.data.strict import StrictDocument
from earlyexit.errors import InputError, raising

KEYS_VARIABLE = "OFFRAMP_API_KEYS"


class AccessSettings(StrictDocument, Settings):
    """API keys, rates and origins. Keys are in a file or a variable, because Serve shows applications' settings."""

    keys_file: str | None = None
    """File of API keys, one `name:key` or `key` per line, relative to the service file's folder. Every node that runs
    an ingress must be able to read it. None: $OFFRAMP_API_KEYS, if `offramp serve` finds it."""
    keys_env: str | None = Field(default=None, min_length=1)
    """Environment variable with API keys, separated by commas or lines; every node that runs an ingress must have it.
    Without a file or a variable, no key is needed."""
    rate_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests per second that each key, or without keys all callers together, may send. None: no limit."""
    burst: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests that may come at once after a pause. None: those of one second, at least 1."""
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Origin, such as https://example.org, whose pages may call the service, or * for all; may be repeated."""

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return self.keys_file is not None or self.keys_env is not None

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                message = "{origin} is not an origin such as https://example.org"
                raise PydanticCustomError("origin", message, {"origin": repr(origin)})
        return origins

    @model_validator(mode="after")
    def _check_consistent(self) -> AccessSettings:
        if self.keys_file is not None and self.keys_env is not None:
            raise PydanticCustomError("keys", "keys_file and keys_env exclude each other: set one of them")
        if self.burst is not None and self.rate_per_s is None:
            raise PydanticCustomError("burst", "burst needs rate_per_s")
        return self


SHORTEST_KEY = 16
"""Fewest characters of a key. Only the length protects against guesses, because rate limits apply to known keys."""
KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""The syntax of a bearer token in an Authorization header."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Keys(dict[bytes, str]):
    """The names of the owners of all keys, by the key's hash. Keys with the same name share a rate limit."""

    def owner(self, token: str) -> str | None:
        """Returns the name of a key's owner; None for an unknown key.

        The duration gives no hint about the keys, because a caller cannot choose the hash of a guess.
        """
        return self.get(_digest(token))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def parse_keys(text: str, where: str) -> Keys:
    """Parses keys, one per line; `#` starts a comment. Raises InputError, whose message has `where` and the line."""
    keys = Keys()
    for number, line in enumerate(text.splitlines(), start=1):
        if not (entry := line.partition("#")[0].strip()):
            continue
        at, (name, _, key) = f"{where}:{number}", entry.rpartition(":")
        if not KEY.fullmatch(key):
            raise InputError(f"{at}: a key must consist of letters, digits and ._~+/-")
        if len(key) < SHORTEST_KEY:
            raise InputError(f"{at}: a key must have at least {SHORTEST_KEY} characters (got {len(key)})")
        if ":" in entry and not NAME.fullmatch(name):
            raise InputError(f"{at}: the name before the colon must be 1 to 64 letters, digits and ._-")
        digest = _digest(key)
        keys[digest] = name or digest.hex()[:16]  # the owner's name is the beginning of the hash by default
    if not keys:
        raise InputError(f"{where}: no key; each line must be `name:key` or `key`")
    return keys


def read_keys(access: AccessSettings, environment: Mapping[str, str] = os.environ) -> Keys | None:
    """Returns the keys of the settings; None if they name neither a file nor a variable.

    Raises InputError if the keys are malformed, or if the file cannot be read or may be read by all users.
    """
    if access.keys_file is not None:
        return parse_keys(read_secret(Path(access.keys_file)), access.keys_file)
    if access.keys_env is None:
        return None
    text = environment.get(access.keys_env)
    if text is None:
        raise InputError(f"the environment variable {access.keys_env}, which should hold API keys, is not set")
    return parse_keys(text.replace(",", "\n"), f"${access.keys_env}")


def read_secret(path: Path) -> str:
    """Returns a file's text; raises InputError if it cannot be read, or if all users of the machine may read it."""
    try:
        with raising(InputError, f"{path}", OSError), path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                raise InputError(f"{path}: all users of this machine may read it; try: chmod 600 {path}")
            return file.read()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None  # the cause would quote the bytes
