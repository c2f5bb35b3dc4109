"""The first hour as docs/quickstart.md tells it: its own commands, from the clone to answers.

By default the environment that runs the tests stands for `make setup`, which takes minutes; with OFFRAMP_TEST_INSTALL=1
the reader makes one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offramp.client.client import Client
from tests.end_to_end.documented import Reader, Step, normalised, read_steps
from tests.end_to_end.one_ray import MARK, kill_remaining, remaining

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("interruptible")]

ROOT = Path(__file__).parents[2]
PORT = 8254
NEWCOMER = "From a clone to your own CSV"
MOST_COMMANDS = 10
SERVING = ("offramp serve", "offramp predict")
READY_S, END_S = 20.0, 5.0
INSTALLS = os.environ.get("OFFRAMP_TEST_INSTALL") == "1"
ROWS_PER_LABEL = {"runs/mine.csv": 80, "runs/words.csv": 30}
"""Of the first the calibration gets a few more than the 306 rows that it needs."""


def change(command: str) -> str | None:
    """A port and a front that disturb no other process, few rows, and nothing that installs."""
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
        return f"{command} --json --port {PORT} || true"  # what is wrong with this machine is not the document's
    if command.startswith("export PYTHONPATH="):
        return f"{command}:$PYTHONPATH"
    if "make_csv.py" in command:
        return f"{command} {ROWS_PER_LABEL[command.split()[-1]]}"
    return command


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader with the environment that runs the tests, all of whose processes are ended."""
    folder = tmp_path_factory.mktemp("reader")
    mark = str(folder)
    environment = os.environ | {
        MARK: mark,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "COLUMNS": "120",
        "XDG_STATE_HOME": str(folder / "state"),
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


def test_a_newcomer_has_a_calibrated_model_of_a_csv_with_few_commands(reader: Reader, steps: list[Step]) -> None:
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
def test_the_examples_commands_do_what_they_say(reader: Reader) -> None:
    """In the newcomer's clone: what was typed there already is not typed again."""
    examples = ROOT / "examples"
    reader.follow(read_steps(ROOT / "docs" / "quickstart.md", NEWCOMER))
    own_csv = read_steps(examples / "own_csv/README.md")
    reader.follow([step for step in own_csv if "serve" not in step.command and "predict" not in step.command])
    reader.follow(read_steps(examples / "own_accelerator/README.md"))
    reader.follow(read_steps(examples / "own_network/README.md"))
    reader.stop()
    for command, seconds in reader.seconds.items():
        print(f"{seconds:6.1f} s  {command}")  # noqa: T201 - pytest -s shows it
    assert (reader.folder / "offramp/runs/words/answers.csv").is_file()


def test_a_commands_output_is_compared_without_its_numbers() -> None:
    assert normalised("│ 576 of 1440 │  2.5e-3 s") == normalised("12 of 1 1.5 s")
    plans = (
        "block 0 in batches of 16, blocks 1 to 5 in batches of 8, exits after 0, 3",
        "blocks 0 to 5 in batches of 4, exits after 2",
    )
    assert normalised(plans[0]) == normalised(plans[1])
    assert normalised("2 of 1 thread by onnx") == normalised("1 of 2 threads by torch")
    assert normalised("exits after 1") != normalised("no exits")
    assert normalised("exits 0: 5, 1: 7, 2: 3; end") == normalised("exits 5: 12; end")
