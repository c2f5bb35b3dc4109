"""The first hour as docs/running.md tells it: its own commands, from the clone to answers.

By default the environment that runs the tests stands for `make setup`, which takes minutes; with OFFRAMP_TEST_INSTALL=1
the reader makes one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.documented import Reader, normalised, read_steps
from tests.end_to_end.tiny_service import MARK, remaining

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("interruptible")]

ROOT = Path(__file__).parents[2]
PORT = 8254
NEWCOMER = "From a clone to your own CSV"
MOST_COMMANDS = 10
MOST_S = 600.0
INSTALLS = os.environ.get("OFFRAMP_TEST_INSTALL") == "1"
ROWS_PER_LABEL = 80
"""Of which the calibration gets a few more than the 306 rows that it needs."""


def change(command: str) -> str | None:
    """Port and front that disturb nobody, few rows, and nothing that installs."""
    if command.startswith("git clone"):
        return f"git clone --quiet --local --no-hardlinks {ROOT} offramp"
    if command == "make setup" or command.startswith("source"):
        return command if INSTALLS else None
    if command.startswith("offramp serve"):
        return f"{command} --front proxy --port {PORT}" if ".yaml" not in command else f"{command} --port {PORT}"
    if command.startswith("offramp predict"):
        return f"{command} --url http://127.0.0.1:{PORT}"
    if command.startswith("offramp doctor"):
        return f"{command} --json --port {PORT} || true"  # what is wrong with this machine is not the document's
    if command.startswith("export PYTHONPATH="):
        return f"{command}:$PYTHONPATH"
    if "make_csv.py" in command:
        return f"{command} {ROWS_PER_LABEL}"
    return command


@contextmanager
def reader(folder: Path) -> Iterator[Reader]:
    """Somebody with the environment that runs the tests, whose processes are all ended."""
    mark = folder.name
    environment = os.environ | {
        MARK: mark,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "COLUMNS": "120",
    }
    if not INSTALLS:
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment["PYTHONPATH"] = str(folder / "offramp")
    try:
        yield Reader(folder=folder, environment=environment, change=change)
    finally:
        for pid in remaining(mark, patience_s=0.0):
            os.kill(pid, signal.SIGKILL)


def test_a_newcomer_serves_a_csv_with_few_commands_in_few_minutes(tmp_path: Path) -> None:
    steps = read_steps(ROOT / "docs" / "running.md", NEWCOMER)
    assert len(steps) <= MOST_COMMANDS
    with reader(tmp_path) as newcomer:
        newcomer.follow(steps)
        assert "stopped" in newcomer.stop()
    for command, seconds in newcomer.seconds.items():
        print(f"{seconds:6.1f} s  {command}")  # noqa: T201 - pytest -s shows it
    assert sum(newcomer.seconds.values()) < MOST_S


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout with the CSV's model, as the examples expect it."""
    subprocess.run(
        ["git", "clone", "--quiet", "--local", "--no-hardlinks", str(ROOT), str(tmp_path / "offramp")], check=True
    )
    return tmp_path


def test_the_examples_commands_do_what_they_say(clone: Path) -> None:
    examples = ROOT / "examples"
    own_csv = [step for step in read_steps(examples / "own_csv/README.md") if "serve" not in step.command]
    made = [step for step in own_csv if "predict" not in step.command]
    with reader(clone) as somebody:
        somebody.remembered.append("cd offramp")
        somebody.follow(made)
        somebody.follow(read_steps(examples / "own_accelerator/README.md"))
        somebody.follow(read_steps(examples / "own_network/README.md"))
        somebody.stop()
    assert (clone / "offramp/runs/words/answers.csv").is_file()


def test_a_commands_output_is_compared_without_its_numbers() -> None:
    assert normalised("│ 576 of 1440 │  2.5e-3 s") == normalised("12 of 1 1.5 s")
    assert normalised("exits 0: 5, 1: 7, 2: 3; end") == normalised("exits 5: 12; end")
