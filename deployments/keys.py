"""API keys: read from a file or a variable, and kept as hashes. No message here quotes a key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deployments.choices import Settings
from earlyexit.errors import InputError

KEYS_VARIABLE = "OFFRAMP_API_KEYS"


class AccessSettings(Settings):
    """API keys, rates and origins. Serve shows its applications' settings, so keys are in a file or a variable."""

    keys_file: str | None = None
    """File of API keys, one `name:key` or `key` per line. Every node that runs an ingress must be able to read it.
    None: $OFFRAMP_API_KEYS where `offramp serve` finds it."""
    keys_env: str | None = Field(default=None, min_length=1)
    """Environment variable with the same, separated by commas or lines; every node that runs an ingress must have it.
    With neither, everything is open."""
    rate_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests per second that one key, or all callers where there are no keys, may send. None: no limit."""
    rate_of: Literal["requests", "inputs"] = "requests"
    """Whether requests or inputs are counted; inputs are those of predictions only."""
    burst: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests, or inputs, that may come at once after a pause. None: those of one second, at least 1."""
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Origin, like https://example.org, whose pages browsers let use the service, or *; may be repeated."""

    @property
    def has_keys(self) -> bool:
        """Whether callers must have one."""
        return self.keys_file is not None or self.keys_env is not None

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                words = "{origin} is no origin like https://example.org"
                raise PydanticCustomError("origin", words, {"origin": repr(origin)})
        return origins

    @model_validator(mode="after")
    def _is_one_place(self) -> AccessSettings:
        if self.keys_file is not None and self.keys_env is not None:
            raise PydanticCustomError("keys", "keys_file and keys_env exclude each other: give one of them")
        if self.burst is not None and self.rate_per_s is None:
            raise PydanticCustomError("burst", "a burst goes with rate_per_s")
        return self


SHORTEST_KEY = 16
"""Characters. A rate limit holds for owners of keys; only the keys' length protects against guesses."""
KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What an Authorization header takes as a bearer's token."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Keys(dict[bytes, str]):
    """All known keys: owners' names by hash. Several keys may share a name, for the rate limit."""

    def owner(self, token: str) -> str | None:
        """Returns the name of a key's owner; None for an unknown key.

        Every key is compared in full, so the time tells neither which key nor how much of it was right.
        """
        digest = _digest(token)
        owner = None
        for known, name in self.items():
            if hmac.compare_digest(known, digest):
                owner = name
        return owner


def _digest(token: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def parse_keys(text: str, where: str) -> Keys:
    """Keys of a file's text: one per line, `#` begins a comment; raises InputError with `where` and the line."""
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), start=1))
    keys = Keys(_key(said, f"{where}:{number}") for number, said in lines if said)
    if not keys:
        raise InputError(f"{where}: no key; one `name:key` or `key` per line is needed")
    return keys


def _key(said: str, where: str) -> tuple[bytes, str]:
    """Returns a key's hash and its owner's name, which is the hash's beginning if none is given."""
    name, _, key = said.rpartition(":")
    if not KEY.fullmatch(key):
        raise InputError(f"{where}: a key of letters, digits and ._~+/- is needed")
    if len(key) < SHORTEST_KEY:
        raise InputError(f"{where}: the key has {len(key)} characters; at least {SHORTEST_KEY} are needed")
    if ":" in said and not NAME.fullmatch(name):
        raise InputError(f"{where}: before the colon a name of 1 to 64 letters, digits and ._- is needed")
    digest = _digest(key)
    return digest, name or digest.hex()[:16]


def read_keys(access: AccessSettings, environment: Mapping[str, str] = os.environ) -> Keys | None:
    """The keys that settings point to, None where they point to none.

    Raises InputError for a file that cannot be read, that all users may read, or that is malformed.
    """
    if access.keys_file is not None:
        return parse_keys(read_secret(Path(access.keys_file)), access.keys_file)
    if access.keys_env is None:
        return None
    found = environment.get(access.keys_env)
    if found is None:
        raise InputError(f"the environment variable {access.keys_env}, which should hold API keys, is not set")
    return parse_keys(found.replace(",", "\n"), f"${access.keys_env}")


def read_secret(path: Path) -> str:
    """A file's text; raises InputError if it cannot be read, or if all users of the machine may read it."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & stat.S_IROTH:
                raise InputError(f"{path}: all users of this machine may read it; try: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None  # its cause holds the bytes
