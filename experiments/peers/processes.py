"""A peer's server as processes of this machine: started, waited for, measured, ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from earlyexit.errors import OfframpError
from experiments.peers.options import ServerOptions

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "runs" / "peers" / "logs"
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
MARK = "OFFRAMP_PEER_RUN"
"""An environment variable that every process of a server inherits, whoever its parent is."""
START_S = 120.0
STOP_S = 20.0
"""How long a server may take to end by itself; Ray takes about 4 s."""
POLL_S = 0.1
AWAY_S = 2.0
DRAIN_S = 8.0
SETTLE_S = 0.25
IDLE_CORES = 0.4
"""Below this many cores, a server counts as idle; Ray's and LitServe's processes are never quite."""
TAIL_CHARS = 3000
BODY = {"inputs": "ready?"}
GONE = (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)

Figure = TypeVar("Figure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a peer's server is, and in which environment it runs."""

    module: str
    beside_offramp: bool
    """Whether it runs in this environment; else in the peers'."""


PEERS: Mapping[str, Peer] = {
    "ray-serve": Peer(module="experiments.peers.serve_batch", beside_offramp=True),
    "litserve": Peer(module="experiments.peers.litserve_server", beside_offramp=False),
    "mosec": Peer(module="experiments.peers.mosec_server", beside_offramp=False),
    "bentoml": Peer(module="experiments.peers.bentoml_server", beside_offramp=False),
}


class PeerProcess:
    """A running server, all of its processes together."""

    def __init__(self, url: str, pid: int, mark: str) -> None:
        self.url = url
        self.pid = pid
        self._mark = mark
        self._paused: list[psutil.Process] = []

    def processes(self) -> list[psutil.Process]:
        """Every process of the server that lives: those with its mark, and whatever descends from them.

        By mark, because some lead sessions of their own or lost their parents; by descent, because a process that
        renames itself may write over the environment that others see.
        """
        alive = [process for process in psutil.process_iter(["ppid", "status"]) if process.info["status"] not in GONE]
        family = {process.pid for process in alive if process.pid == self.pid or _has_mark(process, self._mark)}
        while grown := {process.pid for process in alive if process.info["ppid"] in family} - family:
            family |= grown
        return [process for process in alive if process.pid in family]

    def pause(self) -> None:
        """Stop every process where it is, so that it takes nothing from whoever is measured meanwhile.

        What it still works on, it first ends: after an overload that may take seconds.
        """
        until_s = time.monotonic() + DRAIN_S
        before_s = self.cpu_s()
        while time.monotonic() < until_s:
            time.sleep(SETTLE_S)
            now_s = self.cpu_s()
            if now_s - before_s < IDLE_CORES * SETTLE_S:
                break
            before_s = now_s
        self._paused = self.processes()
        for process in self._paused:
            _or(process.suspend, None)

    def resume(self) -> None:
        """Let those that were stopped go on, and find that they have been away: Ray misses its heartbeats."""
        for process in self._paused:
            _or(process.resume, None)
        if self._paused:
            time.sleep(AWAY_S)
        self._paused = []

    def memory_bytes(self) -> int:
        """Memory that the processes hold: each its own pages, and its part of those that it shares (PSS)."""
        return sum(_or(partial(_memory_bytes, process), 0) for process in self.processes())

    def cpu_s(self) -> float:
        """CPU time, user and system, that the living processes have taken since they started."""
        return sum(_or(partial(_cpu_s, process), 0.0) for process in self.processes())


@contextmanager
def serving(name: str, options: ServerOptions, *, logs: Path = LOGS, start_s: float = START_S) -> Iterator[PeerProcess]:
    """A peer's server, once it answers; afterwards none of its processes is left.

    Raises SystemExit where the peers' environment is missing, OfframpError where the port is taken or no request is
    answered within `start_s`.
    """
    peer = PEERS[name]
    python = interpreter(peer)
    _check_port(options.port)
    mark = uuid.uuid4().hex
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [str(python), "-m", peer.module, options.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(options, mark),
            start_new_session=True,
        )
    server = PeerProcess(f"http://127.0.0.1:{options.port}", process.pid, mark)
    try:
        _wait_until_ready(server.url, process, name, log, start_s)
        yield server
    finally:
        end(server, process)


def interpreter(peer: Peer) -> Path:
    """The Python that runs a peer; SystemExit says how to make the one that is missing."""
    if peer.beside_offramp:
        return Path(sys.executable)
    if not PEERS_PYTHON.is_file():
        raise SystemExit(f"{PEERS_PYTHON.relative_to(ROOT)} is missing: `make peers` makes the peers' environment")
    return PEERS_PYTHON


def environment(options: ServerOptions, mark: str) -> dict[str, str]:
    """The environment of a server: ours, and the mark; tokenizers take no more threads than the model does."""
    return os.environ | {
        MARK: mark,
        "TOKENIZERS_PARALLELISM": "false" if options.threads == 1 else "true",
        "RAYON_NUM_THREADS": str(options.threads),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _check_port(port: int) -> None:
    """Another server there would answer in this one's place."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise OfframpError(f"port {port} is taken: something of an earlier run may still be there")


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], name: str, log: Path, start_s: float) -> None:
    until_s = time.monotonic() + start_s
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise OfframpError(f"{name} ended with {process.returncode} before it answered:\n{_tail(log)}")
        if _answers(url):
            return
        time.sleep(POLL_S)
    raise OfframpError(f"{name} answered no request within {start_s:g} s:\n{_tail(log)}")


def _answers(url: str) -> bool:
    try:
        return httpx.post(f"{url}/predict", json=BODY, timeout=5.0).status_code == httpx.codes.OK
    except httpx.TransportError:  # nobody listens yet, or somebody who is not ready
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL_CHARS:]


def end(server: PeerProcess, process: subprocess.Popen[Any]) -> None:
    """Ask, wait, and end what is left, by its id."""
    server.resume()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for left in server.processes():
        _or(left.kill, None)
    process.wait()
    psutil.wait_procs(server.processes(), timeout=STOP_S)


def _memory_bytes(process: psutil.Process) -> int:
    full = process.memory_full_info()
    return int(getattr(full, "pss", 0) or full.uss)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    return bool(_or(lambda: process.environ().get(MARK) == mark, False))


def _or(read: Callable[[], Figure], otherwise: Figure) -> Figure:
    """What is read of a process, or `otherwise` where it has ended meanwhile or is not ours to read."""
    try:
        return read()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return otherwise
