"""One Ray for the tests of this folder. Starting Ray takes longer than starting a service, so services take turns."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.settings import ServeSettings
from tests.end_to_end.by_permits import PERMITS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODALITY = ROOT / "examples" / "own_modality"
"""Every process can import the example's modules, and the modules of this folder."""
PORT = 8123
METRICS_PORT, GRPC_PORT, COLLECTOR_PORT = PORT + 1, PORT + 2, PORT + 3
URL = f"http://127.0.0.1:{PORT}"
ORDER_S = 240.0
"""Seconds in which Ray starts, a service replaces another, or a plan replaces another."""
READY_S = 120.0
STOP_S = 120.0
MARK = "OFFRAMP_TEST_RUN"
MAPPED = "::ffff:"
"""Prefix of the addresses of sockets that listen on both protocols."""


class OneRay:
    """A process with a Ray, started at its first use, that serves one service at a time."""

    def __init__(self, folder: Path, first: ServeSettings) -> None:
        """Sets the first service, which must need the most CPUs."""
        self.log = folder / "service.log"
        self.permits = folder / "permits"
        """The permits of `by_permits`."""
        self._mark = uuid.uuid4().hex
        self._first = first.model_dump_json()
        self._settings = folder / "settings.json"
        self._settings.write_text(self._first, encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self._served: str | None = None

    def serve(self, settings: ServeSettings) -> str:
        """Replaces the current service by this one; returns its URL."""
        if self._process is None:
            self._start()
        document = settings.model_dump_json()
        if document != self._served:
            self._served = None
            self.order("serve", json.loads(document))
            self._served = document
        self._wait_until_ready()
        return URL

    def stop(self) -> None:
        """Ends the service, and keeps Ray for the next one."""
        self._served = None
        self.order("stop")

    def order(self, name: str, argument: Any = None) -> Any:
        """Sends an order of `serve_in_turn.ORDERS`; returns its result."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps({name: argument})}\n".encode())
        self._process.stdin.flush()
        return self._answer()

    def listening(self) -> dict[str, set[str]]:
        """Returns the listening addresses of its processes, each with the processes that listen there."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for pid, name in remaining(self._mark, patience_s=0.0).items():
            with suppress(psutil.NoSuchProcess):  # it has ended
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found[connection.laddr.ip.removeprefix(MAPPED)].add(name)
        return found

    def end(self) -> None:
        """Ends Ray and all of its processes. The next service gets another Ray."""
        process, self._process, self._served = self._process, None, None
        if process is None:
            return
        try:
            with process:
                process.communicate(timeout=STOP_S)
            assert process.returncode == 0, self.log.read_text()
            assert remaining(self._mark, patience_s=5.0) == {}
        finally:
            kill_remaining(self._mark)

    def kill(self) -> dict[int, str]:
        """Kills the process by SIGKILL; returns its processes that remain. The next service gets another Ray."""
        process, self._process, self._served = self._process, None, None
        assert process is not None
        with process:
            process.kill()
        try:
            return remaining(self._mark, patience_s=5.0)
        finally:
            kill_remaining(self._mark)

    def _start(self) -> None:
        environment = os.environ | {
            MARK: self._mark,
            "PYTHONPATH": f"{ROOT}:{MODALITY}:{HERE}",  # these sources, even if others are installed
            PERMITS: str(self.permits),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "https_proxy": "http://127.0.0.1:9",  # where nothing listens
            "RAY_metrics_report_interval_ms": "1000",  # instead of ten seconds, because tests wait for metrics
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.1",  # because services start and end often
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "serve_in_turn.py"), str(self._settings), str(PORT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment,
            )
        assert self._answer() == URL
        self._served = self._first

    def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], ORDER_S)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            process, self._process, self._served = self._process, None, None
            process.kill()
            process.wait()
            kill_remaining(self._mark)  # the next service has another Ray
            pytest.fail(f"the service said nothing:\n{self.log.read_text()}")
        return json.loads(line)

    def _wait_until_ready(self) -> None:
        """Serve's proxy learns of a service slightly later than others."""
        until_s = time.monotonic() + READY_S
        while httpx.get(f"{URL}/v2/health/ready", timeout=READY_S).status_code != 200:
            assert time.monotonic() < until_s, self.log.read_text()
            time.sleep(0.1)


def kill_remaining(mark: str) -> None:
    """Ends the processes that inherited the mark."""
    for pid in remaining(mark, patience_s=0.0):
        os.kill(pid, signal.SIGKILL)


def remaining(mark: str, *, patience_s: float) -> dict[int, str]:
    """Returns the processes with the mark that remain after they had time to end."""
    until_s = time.monotonic() + patience_s
    while (found := _marked(mark)) and time.monotonic() < until_s:
        time.sleep(0.1)
    return found


def _marked(mark: str) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        except OSError:  # it has ended, or must not be read
            continue
    return found
