"""Starts, measures and ends servers as processes of this machine, and declares the peers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from earlyexit.errors import OfframpError
from experiments.peers.client import ROOT
from experiments.peers.stock import VARIABLE, ServerOptions

LOGS = ROOT / "runs" / "peers" / "logs"
MARK = "OFFRAMP_PEER_RUN"
"""The environment variable that every process of a server inherits, whatever its parent is."""
START_S = 120.0
STOP_S = 20.0
"""Seconds in which a server may end by itself; Ray takes about 4 s."""
POLL_S = 0.1
TAIL_CHARS = 3000
GONE = (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)
PARTS = (("haproxy", "HAProxy"), (":ingress", "ingress"), (":split-", "stages"), (":controller", "controller"))
"""Substrings of a process's name or command, and the part of the service. All other processes belong to Ray."""
REST = "Ray itself"

Figure = TypeVar("Figure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How a peer is started."""

    module: str
    environment: Callable[[ServerOptions], dict[str, str]] = lambda _: {}


PEERS: Mapping[str, Peer] = {
    "ray-serve": Peer(module="experiments.peers.serve_batch"),
    "litserve": Peer(module="experiments.peers.litserve_server"),
    "mosec": Peer(
        module="experiments.peers.mosec_server",
        environment=lambda options: {
            "MOSEC_ADDRESS": "127.0.0.1",
            "MOSEC_PORT": str(options.port),
            "MOSEC_CAPACITY": str(options.max_queued),
            "MOSEC_TIMEOUT": "60000",
            "MOSEC_LOG_LEVEL": "warning",
        },
    ),
}


@dataclass(slots=True)
class Server:
    """A running server with all of its processes."""

    url: str
    process: subprocess.Popen[Any]
    """The process that was started."""
    mark: str
    log: Path

    def processes(self) -> list[psutil.Process]:
        """Returns every living process of the server: those with its mark, and their descendants.

        The mark finds processes that lead their own sessions or have lost their parents. Descent finds processes that
        rename themselves, because this may overwrite the environment that others read.
        """
        alive = [process for process in psutil.process_iter(["ppid", "status"]) if process.info["status"] not in GONE]
        family = {each.pid for each in alive if each.pid == self.process.pid or _has_mark(each, self.mark)}
        while grown := {process.pid for process in alive if process.info["ppid"] in family} - family:
            family |= grown
        return [process for process in alive if process.pid in family]

    def memory_bytes(self) -> int:
        """Returns the memory of the processes: their own pages, and their part of shared pages (PSS)."""
        return sum(_read_or(partial(_memory_bytes, process), 0) for process in self.processes())

    def cpu_s(self) -> float:
        """Returns the user and system CPU time of the living processes since their start."""
        return sum(self.cpu_s_by_part().values())

    def cpu_s_by_part(self) -> dict[str, float]:
        """Returns the CPU time by part of Offramp's service."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = process.cpu_times()
                seconds[part_of(process)] += times.user + times.system
        return seconds


@contextmanager
def running(
    command: Sequence[str], url: str, log: Path, environment: Mapping[str, str], **options: Any
) -> Iterator[Server]:
    """Runs a server until the end of the block, then ends all of its processes; `options` are passed to `Popen`."""
    mark = uuid.uuid4().hex
    log.parent.mkdir(parents=True, exist_ok=True)
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as log_file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log_file, "stderr": log_file}
        process_options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **quiet, **environment, MARK: mark}}
        process = subprocess.Popen(command, start_new_session=True, **(process_options | streams | options))
    server = Server(url, process, mark, log)
    try:
        yield server
    finally:
        _end(server)


@contextmanager
def serving(name: str, options: ServerOptions, *, logs: Path = LOGS, start_s: float = START_S) -> Iterator[Server]:
    """Runs a peer's server; yields when it answers.

    Raises OfframpError if the port is taken or no request is answered within `start_s`.
    """
    peer = PEERS[name]
    command = [sys.executable, "-m", peer.module]
    with socket.socket() as probe:  # a server of another run would answer in place of this one
        if probe.connect_ex(("127.0.0.1", options.port)) == 0:
            raise OfframpError(f"port {options.port} is taken, perhaps by a server of an earlier run")
    process_options = {VARIABLE: options.model_dump_json(), **threads_of(options.threads), **peer.environment(options)}
    with running(command, f"http://127.0.0.1:{options.port}", logs / f"{name}.log", process_options) as server:
        wait_until_ready(server, name, start_s)
        yield server


def threads_of(threads: int) -> dict[str, str]:
    """Returns an environment in which tokenizers use no more threads than the model."""
    return {"TOKENIZERS_PARALLELISM": "false" if threads == 1 else "true", "RAYON_NUM_THREADS": str(threads)}


def part_of(process: psutil.Process) -> str:
    """Returns the part of the service that a process belongs to; raises NoSuchProcess if it has ended."""
    words = f"{process.name()} {' '.join(process.cmdline())}"
    return next((name for word, name in PARTS if word in words), REST)


def wait_until_ready(server: Server, name: str, start_s: float) -> None:
    """Waits for the first answer; raises OfframpError if the server ends, or does not answer within `start_s`."""
    until_s = time.monotonic() + start_s
    while time.monotonic() < until_s:
        if server.process.poll() is not None:
            tail = _tail(server.log)
            raise OfframpError(f"{name} ended with {server.process.returncode} before it answered:\n{tail}")
        if _answers(server.url):
            return
        time.sleep(POLL_S)
    raise OfframpError(f"{name} answered no request within {start_s:g} s:\n{_tail(server.log)}")


def _answers(url: str) -> bool:
    try:
        return httpx.post(f"{url}/predict", json={"inputs": "ready?"}, timeout=5.0).is_success
    except httpx.TransportError:  # no server listens yet, or it is not ready
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL_CHARS:]


def _end(server: Server) -> None:
    """Terminates the server, waits, and kills the remaining processes by their ids."""
    server.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(STOP_S)
    for left in server.processes():
        _read_or(left.kill, None)
    server.process.wait()
    psutil.wait_procs(server.processes(), timeout=STOP_S)


def _memory_bytes(process: psutil.Process) -> int:
    full = process.memory_full_info()
    return int(getattr(full, "pss", 0) or full.uss)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    return bool(_read_or(lambda: process.environ().get(MARK) == mark, False))


def _read_or(read: Callable[[], Figure], otherwise: Figure) -> Figure:
    """Returns what `read` returns, or `otherwise` if the process has ended or must not be read."""
    try:
        return read()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return otherwise
