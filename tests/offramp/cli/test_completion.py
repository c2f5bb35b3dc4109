"""What a shell is told when the tabulator is pressed, asked as typer's own script asks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import get_args

import pytest

from offramp.cli.app import main
from offramp.commands.options import StrategyName
from optimizer.decision import Strategy
from tests.offramp.cli.runs import Captured

HEAVY = ("torch", "ray", "numpy", "scipy", "numba", "transformers", "httpx", "aiohttp", "httptools", "psutil")
COMMAND = f"""
import atexit, sys
sys.argv = ["offramp"]
atexit.register(lambda: print(*set({HEAVY!r}) & set(sys.modules), file=sys.stderr))
from offramp.cli.app import main
main()
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Callable[..., list[str]]:
    """What the command says in the environment by which a shell asks."""

    def ask(instruction: str, *words: str) -> list[str]:
        asking = {"_OFFRAMP_COMPLETE": instruction, "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        for name, value in asking.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["offramp"])
        monkeypatch.setattr(sys.modules["__main__"], "__package__", "")  # else the program is `python -m pytest`
        with pytest.raises(SystemExit, match="0"):
            main()
        return capsys.readouterr().out.split()

    return ask


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
def test_words_are_completed(asked: Callable[..., list[str]], words: tuple[str, ...], completed: list[str]) -> None:
    assert asked("complete_bash", *words) == completed


@pytest.mark.parametrize("words", [("offramp", "serve", "exam"), ("offramp", "train", "--data", "exam")])
def test_a_file_is_left_to_the_shell(asked: Callable[..., list[str]], words: tuple[str, ...]) -> None:
    assert asked("complete_bash", *words) == []
    assert "complete -o default -F" in " ".join(asked("source_bash")), "bash then completes files itself"


def test_completing_loads_nothing_heavy() -> None:
    asking = {"_OFFRAMP_COMPLETE": "complete_bash", "COMP_WORDS": "offramp serve --plan s", "COMP_CWORD": "3"}
    command = [sys.executable, "-c", COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | asking)
    assert (done.stdout.split(), done.stderr.split()) == (["stock", "serial"], [])


def test_the_names_that_are_completed_are_those_that_are_accepted() -> None:
    assert set(get_args(StrategyName)) == set(get_args(Strategy))
