"""Runs the commands of a document's console blocks, as a reader would type them, and holds what they print to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import IO

import psutil
import pytest

KEPT = ("cd ", "export ", "source ")
"""What a shell remembers; it stands before every command behind it."""
ELIDED = "..."
START_S = 300.0
"""A service that is not up by then hangs. An idle machine takes 20 s; two slow cores, beside other tests, 120."""
COMMAND_S = 600.0
STOP_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, and the lines that the document shows below it."""

    command: str
    shown: tuple[str, ...]


def read_steps(document: Path, title: str | None = None) -> list[Step]:
    """The commands of the console blocks below a heading, or of the whole document, in order."""
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
    """A line without what differs from run to run: numbers, how many stand in a list, and how wide a table is.

    Measured times decide which backend is chosen, and the splits of a chosen plan.
    """
    line = re.sub(r"(0: 0, )+0: 0", "0: 0", re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line))
    line = re.sub(r"(blocks? 0( to 0)? in batches of 0, )+", "splits, ", re.sub(r"(0, )+0", "0", line))
    line = re.sub(r"by (torch|onnx)\b", "by its backend", line).replace("threads", "thread")
    return " ".join(line.replace("│", " ").replace("…", " ").split())


@dataclass
class Reader:
    """Types the commands, one after the other, in a folder."""

    folder: Path
    environment: dict[str, str]
    change: Callable[[str], str | None]
    """What is typed instead of a command; None for nothing."""
    remembered: list[str] = field(default_factory=list)
    service: subprocess.Popen[str] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def follow(self, steps: list[Step]) -> None:
        """Do them all but what was done before; a service runs on until `stop`."""
        for step in steps:
            typed = self.change(step.command)
            if typed is None or step.command in self.seconds:
                continue
            began_s = time.monotonic()
            if typed.startswith(KEPT):
                self.remembered.append(typed)
                said = self._done("true")
            elif typed.startswith("offramp serve"):
                said = self._served(typed)
            else:
                said = self._done(typed)
            self.seconds[step.command] = time.monotonic() - began_s
            _hold(step, said)

    def stop(self, by: signal.Signals = signal.SIGINT) -> str:
        """End the service, by Ctrl-C or by another signal to its process alone; returns what it said last."""
        assert self.service is not None
        ending, self.service = self.service, None
        send = os.killpg if by is signal.SIGINT else os.kill
        send(ending.pid, by)
        rest, _ = ending.communicate(timeout=STOP_S)
        return rest

    def _shell(self, command: str) -> list[str]:
        return ["bash", "-c", "\n".join(["set -e", *self.remembered, command])]

    def _done(self, command: str) -> str:
        done = subprocess.run(
            self._shell(command),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def _served(self, command: str) -> str:
        """Until it says how to ask it."""
        if self.service is not None:
            self.stop()
        self.service = subprocess.Popen(
            self._shell(f"exec {command}"),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self._until_asked_for()

    def lose_head(self) -> str:
        """Kill Ray's head under the service, which starts anew; what it says until it can be asked again."""
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
    """What is said up to a line."""
    said: list[str] = []
    for line in file:
        said.append(line)
        if wanted in line:
            return "".join(said)
    pytest.fail(f"no {wanted!r} was said:\n{''.join(said)}")


def _hold(step: Step, said: str) -> None:
    """Every line that the document shows was said, but for its numbers."""
    lines = {normalised(line) for line in said.splitlines()}
    missing = [line for line in step.shown if normalised(line) not in lines]
    assert missing == [], f"$ {step.command}\nsaid:\n{said}"
