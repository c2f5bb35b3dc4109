"""The keys of a running ingress: read again when their file changes, at no cost to requests."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from deployments.access import AccessSettings
from deployments.keys import Keys, read_keys
from earlyexit.errors import InputError

logger = logging.getLogger(f"ray.serve.{__name__}")

LOOK_EVERY_S = 1.0
"""A key that was taken out is refused after a second."""
Stamp = tuple[int, int, int] | None


class KeyRing:
    """The keys that are known now."""

    def __init__(self, access: AccessSettings, environment: Mapping[str, str] = os.environ) -> None:
        """Raises InputError where the settings' keys cannot be read."""
        self._access = access
        self._environment = environment
        self._stamp = self._stamp_now()
        keys = read_keys(access, environment)
        assert keys is not None, "a ring is made for settings that have keys"
        self.keys: Keys = keys

    async def watch(self) -> None:
        """Look after the file for ever; a variable never changes."""
        while self._access.keys_file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the file again if it changed. One that is wrong changes nothing: an error in the log says so, once."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = read_keys(self._access, self._environment)
        except InputError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        assert keys is not None
        self.keys = keys
        logger.warning("API keys were read again: there are %d", len(keys))

    def _stamp_now(self) -> Stamp:
        """What changes when the file does; a file put in another's place has another inode."""
        try:
            found = os.stat(Path(self._access.keys_file)) if self._access.keys_file is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
