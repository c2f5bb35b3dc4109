"""Servers as processes of this machine: started, waited for, measured, ended; and the peers, one declaration each."""

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
"""An environment variable that every process of a server inherits, whatever its parent is."""
START_S = 120.0
STOP_S = 20.0
"""How long a server may take to end by itself; Ray takes about 4 s."""
POLL_S = 0.1
TAIL_CHARS = 3000
GONE = (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)
PARTS = (("haproxy", "HAProxy"), (":ingress", "ingress"), (":split-", "stages"), (":controller", "controller"))
"""Words of a process' name or command, and what it is called here; whatever else there is, is Ray's."""
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
    """A running server, all of its processes together."""

    url: str
    process: subprocess.Popen[Any]
    """The one that was started."""
    mark: str
    log: Path

    def processes(self) -> list[psutil.Process]:
        """Every process of the server that lives: those with its mark, and whatever descends from them.

        By mark, because some lead sessions of their own or lost their parents; by descent, because a process that
        renames itself may write over the environment that others see.
        """
        alive = [process for process in psutil.process_iter(["ppid", "status"]) if process.info["status"] not in GONE]
        family = {each.pid for each in alive if each.pid == self.process.pid or _has_mark(each, self.mark)}
        while grown := {process.pid for process in alive if process.info["ppid"] in family} - family:
            family |= grown
        return [process for process in alive if process.pid in family]

    def memory_bytes(self) -> int:
        """Memory that the processes hold: each its own pages, and its part of those that it shares (PSS)."""
        return sum(_or(partial(_memory_bytes, process), 0) for process in self.processes())

    def cpu_s(self) -> float:
        """CPU time, user and system, that the living processes have taken since they started."""
        return sum(self.cpu_s_by_part().values())

    def cpu_s_by_part(self) -> dict[str, float]:
        """The same by part of Offramp's service."""
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
    """A server, from its start; afterwards none of its processes is left. `options` are further ones of `Popen`."""
    mark = uuid.uuid4().hex
    log.parent.mkdir(parents=True, exist_ok=True)
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as log_file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log_file, "stderr": log_file}
        told: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **quiet, **environment, MARK: mark}}
        process = subprocess.Popen(command, start_new_session=True, **(told | streams | options))
    server = Server(url, process, mark, log)
    try:
        yield server
    finally:
        _end(server)


@contextmanager
def serving(name: str, options: ServerOptions, *, logs: Path = LOGS, start_s: float = START_S) -> Iterator[Server]:
    """A peer's server, once it answers.

    Raises OfframpError where the port is taken or no request is answered within `start_s`.
    """
    peer = PEERS[name]
    command = [sys.executable, "-m", peer.module]
    with socket.socket() as probe:  # another server there would answer in this one's place
        if probe.connect_ex(("127.0.0.1", options.port)) == 0:
            raise OfframpError(f"port {options.port} is taken: something of an earlier run may still be there")
    told = {VARIABLE: options.model_dump_json(), **threads_of(options.threads), **peer.environment(options)}
    with running(command, f"http://127.0.0.1:{options.port}", logs / f"{name}.log", told) as server:
        wait_until_ready(server, name, start_s)
        yield server


def threads_of(threads: int) -> dict[str, str]:
    """An environment in which tokenizers take no more threads than the model does."""
    return {"TOKENIZERS_PARALLELISM": "false" if threads == 1 else "true", "RAYON_NUM_THREADS": str(threads)}


def part_of(process: psutil.Process) -> str:
    """Which part of a service a process is; raises NoSuchProcess where it has ended."""
    words = f"{process.name()} {' '.join(process.cmdline())}"
    return next((name for word, name in PARTS if word in words), REST)


def _ask_ready(url: str) -> httpx.Response:
    return httpx.post(f"{url}/predict", json={"inputs": "ready?"}, timeout=5.0)


def wait_until_ready(
    server: Server, name: str, start_s: float = START_S, *, ask: Callable[[str], httpx.Response] = _ask_ready
) -> None:
    """Until it answers what it is asked; raises OfframpError where it ends, or does not within `start_s`."""
    until_s = time.monotonic() + start_s
    while time.monotonic() < until_s:
        if server.process.poll() is not None:
            tail = _tail(server.log)
            raise OfframpError(f"{name} ended with {server.process.returncode} before it answered:\n{tail}")
        if _answers(server.url, ask):
            return
        time.sleep(POLL_S)
    raise OfframpError(f"{name} answered no request within {start_s:g} s:\n{_tail(server.log)}")


def _answers(url: str, ask: Callable[[str], httpx.Response]) -> bool:
    try:
        return ask(url).status_code == httpx.codes.OK
    except httpx.TransportError:  # no server listens yet, or one that is not ready
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL_CHARS:]


def _end(server: Server) -> None:
    """Ask, wait, and end what is left, by its id."""
    server.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(STOP_S)
    for left in server.processes():
        _or(left.kill, None)
    server.process.wait()
    psutil.wait_procs(server.processes(), timeout=STOP_S)


def _memory_bytes(process: psutil.Process) -> int:
    full = process.memory_full_info()
    return int(getattr(full, "pss", 0) or full.uss)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    return bool(_or(lambda: process.environ().get(MARK) == mark, False))


def _or(read: Callable[[], Figure], otherwise: Figure) -> Figure:
    """What is read of a process, or `otherwise` where it has ended meanwhile or is not ours to read."""
    try:
        return read()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return otherwise
