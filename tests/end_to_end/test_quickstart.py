"""Runs the commands of docs/quickstart.md in order, from the clone to answers.

The environment of the tests replaces `make setup`, which takes minutes. OFFRAMP_TEST_INSTALL=1 runs `make setup`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import IO, Any

import psutil
import pytest

from offramp.client.client import Client
from tests.end_to_end.one_ray import MARK, kill_remaining, remaining

KEPT = ("cd ", "export ", "source ")
"""Commands whose effect a shell keeps. They are repeated before every later command."""
ELIDED = "..."
START_S = 300.0
"""A service that is not ready by then hangs. An idle machine takes 20 s; two slow cores, beside other tests, 120 s."""
COMMAND_S = 600.0
STOP_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, and the output that the document shows."""

    command: str
    shown: tuple[str, ...]


def read_steps(document: Path, title: str | None = None) -> list[Step]:
    """Returns the commands of the console blocks below a heading, or of the whole document, in order."""
    text = document.read_text(encoding="utf-8")
    if title is not None:
        found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
        assert found is not None, f"no section {title!r}"
        text = found[1]
    blocks = re.findall(r"^```console\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    starts = [*(index for index, line in enumerate(lines) if line.startswith("$ ")), len(lines)]
    return [
        Step(command=lines[start][2:], shown=tuple(line for line in lines[start + 1 : end] if line.strip() != ELIDED))
        for start, end in pairwise(starts)
    ]


def normalised(line: str) -> str:
    """Returns a line without its varying parts: numbers, lengths of lists, and widths of tables.

    Backend, dispatch and the splits of a chosen plan depend on measured times, so they are removed too.
    """
    line = re.sub(r"(0: 0, )+0: 0", "0: 0", re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line))
    line = re.sub(r"(blocks? 0( to 0)? in batches of 0, )+", "splits, ", re.sub(r"(0, )+0", "0", line))
    line = re.sub(r"by (torch|onnx), (filling|work-conserving)\b", "by its backend", line).replace("threads", "thread")
    return " ".join(line.replace("│", " ").replace("…", " ").split())


@dataclass
class Reader:
    """Runs the commands, one after the other, in a folder."""

    folder: Path
    environment: dict[str, str]
    change: Callable[[str], str | None]
    """Returns the command to run in place of a command; None to skip it."""
    remembered: list[str] = field(default_factory=list)
    service: subprocess.Popen[str] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def follow(self, steps: list[Step]) -> None:
        """Runs all commands that have not run yet; a service runs until `stop`."""
        for step in steps:
            typed = self.change(step.command)
            if typed is None or step.command in self.seconds:
                continue
            began_s = time.monotonic()
            if typed.startswith(KEPT):
                self.remembered.append(typed)
                output = self._done("true")
            elif typed.startswith("offramp serve"):
                output = self._served(typed)
            else:
                output = self._done(typed)
            self.seconds[step.command] = time.monotonic() - began_s
            _check(step, output)

    def stop(self, by: signal.Signals = signal.SIGINT) -> str:
        """Ends the service by Ctrl-C or by a signal to its process group; returns its last output."""
        assert self.service is not None
        ending, self.service = self.service, None
        os.killpg(ending.pid, by)
        rest, _ = ending.communicate(timeout=STOP_S)
        return rest

    def _shell(self, command: str) -> list[str]:
        return ["bash", "-c", "\n".join(["set -e", *self.remembered, command])]

    @property
    def _options(self) -> dict[str, Any]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"cwd": self.folder, "env": self.environment, **streams}

    def _done(self, command: str) -> str:
        done = subprocess.run(self._shell(command), **self._options, check=False, timeout=COMMAND_S)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return str(done.stdout)

    def _served(self, command: str) -> str:
        """Waits until the service prints that it is ready."""
        if self.service is not None:
            self.stop()
        self.service = subprocess.Popen(self._shell(f"exec {command}"), **self._options, start_new_session=True)
        return self._until_asked_for()

    def lose_head(self) -> str:
        """Kills Ray's head under the service, which restarts; returns the output until it is ready again."""
        assert self.service is not None
        [head] = [each for each in psutil.Process(self.service.pid).children() if each.name() == "gcs_server"]
        head.kill()
        return self._until_asked_for()

    def _until_asked_for(self) -> str:
        assert self.service is not None
        assert self.service.stdout is not None
        silence = Timer(START_S, os.killpg, (self.service.pid, signal.SIGINT))
        silence.start()
        try:
            return _until(self.service.stdout, "try: offramp predict")
        finally:
            silence.cancel()


def _until(file: IO[str], wanted: str) -> str:
    """Returns the output up to a line."""
    output: list[str] = []
    for line in file:
        output.append(line)
        if wanted in line:
            return "".join(output)
    pytest.fail(f"no {wanted!r} was said:\n{''.join(output)}")


def _check(step: Step, output: str) -> None:
    """Checks that every line of the document was printed, apart from numbers."""
    lines = {normalised(line) for line in output.splitlines()}
    missing = [line for line in step.shown if normalised(line) not in lines]
    assert missing == [], f"$ {step.command}\nsaid:\n{output}"


pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("interruptible")]

ROOT = Path(__file__).parents[2]
PORT = 8254
NEWCOMER = "From a clone to your own CSV"
MOST_COMMANDS = 10
SERVING = ("offramp serve", "offramp predict")
READY_S, END_S = 20.0, 5.0
INSTALLS = os.environ.get("OFFRAMP_TEST_INSTALL") == "1"
ROWS_PER_LABEL = {"runs/mine.csv": 80, "runs/words.csv": 30}
"""Few rows, but for calibration more than the 306 rows that it needs."""


def change(command: str) -> str | None:
    """Changes commands to a port and a front of their own and few rows, and skips installations."""
    if command.startswith("git clone"):
        return f"git clone --quiet --local --no-hardlinks {ROOT} offramp"
    if command == "make setup" or command.startswith("source"):
        return command if INSTALLS else None
    if command.startswith("offramp serve"):
        with_front = "" if ".yaml" in command else "--front proxy "
        return f"{command} {with_front}--port {PORT} --restart"
    if command.startswith("offramp predict"):
        return f"{command} --url http://127.0.0.1:{PORT}"
    if command.startswith("offramp doctor"):
        return f"{command} --json --port {PORT} || true"  # the document does not depend on problems of this machine
    if command.startswith("export PYTHONPATH="):
        return f"{command}:$PYTHONPATH"
    if "make_csv.py" in command:
        return f"{command} {ROWS_PER_LABEL[command.split()[-1]]}"
    return command


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Returns a reader in the environment of the tests; ends all of its processes."""
    folder = tmp_path_factory.mktemp("reader")
    mark = str(folder)
    environment = os.environ | {
        MARK: mark,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "COLUMNS": "120",
    }
    if not INSTALLS:
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    try:
        yield Reader(folder=folder, environment=environment, change=change)
    finally:
        kill_remaining(mark)


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return read_steps(ROOT / "docs" / "quickstart.md", NEWCOMER)


def test_the_first_commands_train_and_calibrate_a_model(reader: Reader, steps: list[Step]) -> None:
    assert len(steps) <= MOST_COMMANDS
    reader.follow([step for step in steps if not step.command.startswith(SERVING)])


def test_the_model_is_served_and_answers_the_csv(reader: Reader, steps: list[Step]) -> None:
    reader.follow(steps)


def test_a_lost_head_only_interrupts_the_service_and_sigterm_ends_all_of_it(reader: Reader, steps: list[Step]) -> None:
    reader.follow(steps)
    assert "was killed by SIGKILL" in reader.lose_head()
    with Client(f"http://127.0.0.1:{PORT}") as client:
        client.wait_until_ready(timeout_s=READY_S)
    assert "stopped" in reader.stop(signal.SIGTERM)
    assert remaining(str(reader.folder), patience_s=END_S) == {}


@pytest.mark.slow
def test_the_commands_of_the_examples_work(reader: Reader) -> None:
    """Runs in the newcomer's clone; commands that ran before are skipped."""
    examples = ROOT / "examples"
    reader.follow(read_steps(ROOT / "docs" / "quickstart.md", NEWCOMER))
    reader.follow(read_steps(examples / "own_accelerator/README.md"))
    reader.follow(read_steps(examples / "own_network/README.md"))
    reader.stop()
    for command, seconds in reader.seconds.items():
        print(f"{seconds:6.1f} s  {command}")  # noqa: T201 - shown by pytest -s
    assert (reader.folder / "offramp/runs/words/answers.csv").is_file()


def test_a_commands_output_is_compared_without_its_numbers() -> None:
    assert normalised("│ 576 of 1440 │  2.5e-3 s") == normalised("12 of 1 1.5 s")
    plans = (
        "block 0 in batches of 16, blocks 1 to 5 in batches of 8, exits after 0, 3",
        "blocks 0 to 5 in batches of 4, exits after 2",
    )
    assert normalised(plans[0]) == normalised(plans[1])
    assert normalised("2 of 1 thread by onnx, filling") == normalised("1 of 2 threads by torch, work-conserving")
    assert normalised("exits after 1") != normalised("no exits")
    assert normalised("exits 0: 5, 1: 7, 2: 3; end") == normalised("exits 5: 12; end")
