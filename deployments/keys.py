"""API keys as they are written down, and what is kept of them: a hash. No message here quotes a key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.access import AccessSettings
from earlyexit.errors import InputError

SHORTEST_KEY = 16
"""Characters. A rate limit binds those who have a key; guesses are held up by the keys' length alone."""
KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What an Authorization header takes as a bearer's token."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key that is known."""

    name: str
    """The owner's, for the rate limit; several keys may share one. The hash's beginning where none was given."""
    digest: bytes


class Keys:
    """All keys that are known."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def owner(self, token: str) -> str | None:
        """Whose key this is. Every key is compared, in full: the time tells neither which, nor how much was right."""
        digest = digest_of(token)
        owner = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                owner = key.name
        return owner


def digest_of(token: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def parse_keys(text: str, where: str) -> Keys:
    """Keys of a file's text: one per line, `#` begins a comment; raises InputError with `where` and the line."""
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        said = line.partition("#")[0].strip()
        if said:
            keys.append(_key(said, f"{where}:{number}"))
    if not keys:
        raise InputError(f"{where}: no key; one `name:key` or `key` per line is needed")
    return Keys(keys)


def _key(said: str, where: str) -> Key:
    name, _, key = said.rpartition(":")
    if not KEY.fullmatch(key):
        raise InputError(f"{where}: a key of letters, digits and ._~+/- is needed")
    if len(key) < SHORTEST_KEY:
        raise InputError(f"{where}: the key has {len(key)} characters; at least {SHORTEST_KEY} are needed")
    if ":" in said and not NAME.fullmatch(name):
        raise InputError(f"{where}: before the colon a name of 1 to 64 letters, digits and ._- is needed")
    digest = digest_of(key)
    return Key(name=name or digest.hex()[:16], digest=digest)


def read_keys(access: AccessSettings, environment: Mapping[str, str] = os.environ) -> Keys | None:
    """The keys that settings point to, None where they point to none.

    Raises InputError for what cannot be read, may be read by anybody, or is malformed.
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
    """A file's text; raises InputError where it cannot be read, or can be by everybody on the machine."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & stat.S_IROTH:
                raise InputError(f"{path}: everybody on this machine may read it; try: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None  # its cause holds the bytes
