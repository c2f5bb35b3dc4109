"""Helpers that run commands, a problem and a plan for them, and HTTP servers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

from offramp.cli.app import main
from tests.exit_records import exit_records

ROOT = Path(__file__).parents[3]
Captured = pytest.CaptureFixture[str]
COMPILING = "compiling the planner, once on this machine: up to a minute\n"
"""Printed on stderr before a machine's first plan."""
PROBLEM = """\
blocks: 2
ramps: [0]
survival: [1.0, 0.5]
latency:
  V100: {batch: [1, 2, 4], block_s: [[0.001, 0.001, 0.001], [0.001, 0.001, 0.001]], ramp_s: [[0.0, 0.0, 0.0]]}
devices:
  V100: {count: 1, usd_per_hour: 3}
link: {bandwidth_bytes_per_s: 1.0e9}
bytes_per_sample: 0
slo: {latency_s: 0.1, slack: 0.2}
objective: {maximize: rate}
"""
"""A block takes 1 ms at any batch. Without exits 4 inputs take 2 ms: 2000/s on the one device."""
PLAN = """\
stages:
  - {device: V100, replicas: 1, splits: [{first: 0, end: 1, batch: 4, ramps: [0]}, {first: 1, end: 2, batch: 4}]}
policy: {name: entropy, thresholds: 0.4}
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def records(path: Path, *scores: float, num_blocks: int = 2, ramps: tuple[int, ...] = (0,), **facts: Any) -> Path:
    """Entropies of as many inputs, the same at every ramp, which answer 0, 1, 0, 1, ... from ramp to ramp.

    `facts`: changed at last.
    """
    num, labels_R = len(scores), np.arange(len(ramps)) % 2
    scores_NR = np.repeat(np.array(scores)[:, None], len(ramps), axis=1)
    answers_NE = np.column_stack([np.repeat(labels_R[None, :], num, axis=0), np.zeros(num, dtype=np.int64)])
    found = exit_records(scores_NR, answers_NE=answers_NE, score="entropy", num_blocks=num_blocks, ramps=ramps)
    replace(found, **facts).save(path)
    return path


def run(*arguments: object) -> int:
    """Runs a command, and returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def run_alone(*arguments: object, without: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own, which fails if it loads one of these modules."""
    code = (
        "import sys; from offramp.cli.app import main\n"
        f"try: main({list(map(str, arguments))})\n"
        f"finally:\n    loaded = {set(without.split())} & set(sys.modules)\n    assert not loaded, loaded"
    )
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)


def printed(captured: Captured, *arguments: object) -> Any:
    """Runs a command with `--json`, and returns its output."""
    assert run(*arguments, "--json") == 0
    return json.loads(captured.readouterr().out)


def refused(captured: Captured, *arguments: object, status: int = 2) -> str:
    """Runs a command that must fail with one line on stderr, and returns its message."""
    assert run(*arguments) == status
    said = captured.readouterr()
    [line] = said.err.removeprefix(COMPILING).splitlines()
    assert (said.out, line[:9]) == ("", "offramp: ")
    return str(line[9:])


def declined(captured: Captured, *arguments: object) -> str:
    """Runs a command with an invalid option, and returns typer's message without its frame."""
    assert run(*arguments) == 2
    return " ".join(captured.readouterr().err.replace("│", " ").split())


def cells(text: str) -> list[str]:
    """Returns the rows of printed tables without borders."""
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]


def played(captured: Captured, problem: Path, *options: object, arrivals: str = "uniform:100") -> Any:
    """Simulates two seconds, of which the first is the warm-up, and returns the JSON."""
    return printed(captured, "simulate", problem, "--arrivals", arrivals, "--duration", 2, *options)


class Answering(BaseHTTPRequestHandler):
    """Base of servers with JSON bodies and no log."""

    def take(self) -> Any:
        """Reads the request's body; None without one."""
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return json.loads(content) if content else None

    def say(self, document: object, status: int = 200, **headers: str) -> None:
        events = document.get("events") if isinstance(document, dict) else None  # of a stream
        parts = [json.dumps(document)] if events is None else [f"data: {json.dumps(each)}\n\n" for each in events]
        content = "".join(parts).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Writes no log."""


METADATA = {
    "name": "intents",
    "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
    "outputs": [{"name": name} for name in ("label", "score", "exit")],
}

ARRAYS = {**METADATA, "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 8]}]}
IMAGES = {**METADATA, "inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1]}]}


class Always(Answering):
    """A service that answers every prediction; below one path it has moved."""

    answers: ClassVar[Mapping[str, Any]] = {}
    """What it answers instead, by the path."""

    def do_GET(self) -> None:
        place = self.path.split("/")[1]
        if self.path in self.answers:
            self.say(self.answers[self.path])
        elif place == "moved":
            self.say("", 308, Location="https://elsewhere:8443/x")
        elif self.path.endswith("/intents"):
            self.say({"arrays": ARRAYS, "images": IMAGES}.get(place, METADATA))
        else:
            self.say({"models": ["intents"]})

    def do_POST(self) -> None:
        self.take()
        if self.path in self.answers or self.path.startswith("/moved"):
            self.do_GET()
        elif self.path.startswith("/spoilt"):
            self.say({"error": {"kind": "unprocessable_input", "message": "no"}, "request_id": "r"}, status=422)
        else:
            self.say({"label": "bill", "score": 0.9, "exit": 0, "request_id": "r"})

    do_PUT = do_DELETE = do_POST


Listening = TypeVar("Listening", bound=HTTPServer)


def serving(server: Listening) -> Iterator[Listening]:
    """Yields a server while it is listening, for fixtures."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"
