"""What a shell is told when the tabulator is pressed, asked as typer's own script asks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import pytest

from offramp.commands.options import StrategyName
from optimizer.decision import Strategy

HEAVY = ("torch", "ray", "numpy", "scipy", "numba", "transformers", "httpx", "aiohttp", "httptools", "psutil")
COMMAND = f"""
import atexit, sys
sys.argv = ["offramp"]
atexit.register(lambda: print(*set({HEAVY!r}) & set(sys.modules), file=sys.stderr))
from offramp.cli.app import main
main()
"""


def asked(instruction: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with the environment by which a shell asks."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ
        | {
            "_OFFRAMP_COMPLETE": instruction,
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        },
    )


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("offramp", "doc"), ["doctor"]),
        (("offramp", "serve", "--plan", "s"), ["stock", "serial"]),
        (("offramp", "serve", "--dtype", ""), ["float32", "bfloat16"]),
        (("offramp", "profile", "m", "--backend", "o"), ["onnx"]),
        (("offramp", "plan", "--strategy", "e"), ["early-exit", "e3"]),
        (("offramp", "simulate", "--strategy", "e3"), ["e3"]),
        (("offramp", "calibrate", "--policy", "c"), ["confidence"]),
        (("offramp", "predict", "--format", ""), ["jsonl", "csv"]),
    ],
    ids=lambda value: "-".join(value[1:]),
)
def test_commands_and_choices_are_completed(words: tuple[str, ...], completed: list[str]) -> None:
    assert asked("complete_bash", *words).stdout.split() == completed


@pytest.mark.parametrize("words", [("offramp", "serve", "exam"), ("offramp", "train", "--data", "exam")])
def test_a_file_is_left_to_the_shell(words: tuple[str, ...]) -> None:
    assert asked("complete_bash", *words).stdout.split() == []
    assert "complete -o default -F" in asked("source_bash").stdout, "bash then completes files itself"


def test_completing_loads_nothing_heavy() -> None:
    assert asked("complete_bash", "offramp", "serve", "--plan", "").stderr.split() == []


def test_the_names_that_are_completed_are_those_that_are_accepted() -> None:
    assert set(get_args(StrategyName)) == set(get_args(Strategy))
