"""A model small enough to be served in a test, what it must answer, and a process that serves it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from earlyexit.checkpoint import random_model
from earlyexit.cut import cut_out
from earlyexit.model import EarlyExitModel
from earlyexit.network import from_wire
from earlyexit.policies.base import Opinion
from earlyexit.policies.threshold import EntropyPolicy
from earlyexit.record import exit_outputs
from earlyexit.split import Split
from earlyexit.store import save_model
from earlyexit.tasks.label import LabelTask
from earlyexit.tokenizer import TextTokenizer
from earlyexit.wire import entering
from optimizer.plan import Plan, PolicySpec, Stage
from tests.answers import label_of

HERE = Path(__file__).parent
START_S = 120.0
STOP_S = 20.0
WORDS = ("[UNK]", "pay", "my", "bill", "card", "lost", "when", "is", "the", "rain", "coming", "to", "town")
LABELS = ("bill", "card", "weather")
MAX_LENGTH = 12
NUM_BLOCKS = 4
RAMPS = (0, 1, 2)
MARK = "OFFRAMP_TEST_RUN"


@dataclass(frozen=True, kw_only=True)
class Running:
    """A service's process; what is written to it is its script's to understand."""

    process: subprocess.Popen[bytes]
    url: str

    def ask(self, line: str, log: Path, patience_s: float) -> str:
        """Write a line, and read the next that comes back."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()
        return next_line(self.process, log, patience_s)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What an input must be answered with."""

    label: str
    score: float
    exit: int


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running service and what it must say."""

    url: str
    texts: tuple[str, ...]
    answers: tuple[Expected, ...]

    def check(self, index: int, answer: dict[str, Any]) -> None:
        expected = self.answers[index]
        assert (answer["label"], answer["exit"]) == (expected.label, expected.exit)
        assert answer["score"] == pytest.approx(expected.score, abs=2e-5)


def some_texts(count: int) -> tuple[str, ...]:
    rng = np.random.default_rng(5)
    return tuple(" ".join(rng.choice(WORDS[1:], size=rng.integers(1, MAX_LENGTH))) for _ in range(count))


def make_model(folder: Path, *, seed: int = 3) -> tuple[EarlyExitModel, TextTokenizer]:
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "num_blocks": NUM_BLOCKS,
        "num_heads": 4,
        "intermediate_size": 64,
        "max_length": MAX_LENGTH,
    }
    model = random_model(sizes, name="tiny", task=LabelTask(LABELS), seed=seed)
    save_model(model, folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, TextTokenizer(tokenizer, MAX_LENGTH)


def median_entropies(model: EarlyExitModel, tokenizer: TextTokenizer, texts: tuple[str, ...]) -> dict[int, float]:
    """Thresholds that let about half of the inputs leave at every ramp, none of them on the edge."""
    logits = exit_outputs(model, tokenizer.encode(texts))
    thresholds = {}
    for ramp in RAMPS:
        entropies = torch.sort(EntropyPolicy(0.0).score(Opinion(model.task, logits[ramp]))).values
        middle = len(texts) // 2
        thresholds[ramp] = float(entropies[middle - 1] + entropies[middle]) / 2
    return thresholds


def two_stages(thresholds: dict[int, float]) -> Plan:
    first = Split(first=0, end=2, batch=8, ramps=(0, 1))
    rest = (Split(first=2, end=3, batch=4, ramps=(2,)), Split(first=3, end=4, batch=4))
    stages = tuple(Stage(device="cpu", replicas=1, splits=splits) for splits in ((first,), rest))
    return Plan(stages=stages, policy=PolicySpec(name="entropy", thresholds=thresholds))


def one_stage(thresholds: dict[int, float]) -> Plan:
    split = Split(first=0, end=NUM_BLOCKS, batch=8, ramps=RAMPS)
    stage = Stage(device="cpu", replicas=1, splits=(split,))
    return Plan(stages=(stage,), policy=PolicySpec(name="entropy", thresholds=thresholds))


def answer_alone(model: EarlyExitModel, tokenizer: TextTokenizer, text: str, thresholds: dict[int, float]) -> Expected:
    """The uncut model's answer to one text."""
    policy = EntropyPolicy(thresholds)
    wire = entering([""], tokenizer.encode([text]))
    steps = cut_out(model, 0, NUM_BLOCKS, RAMPS, policy).run(from_wire(model, wire, policy))
    [answer] = [answer for step in steps for answer in step.answers]
    return Expected(label=LABELS[label_of(answer)], score=answer.score, exit=answer.exit)


@contextmanager
def running(folder: Path, *, script: str, port: int) -> Iterator[Running]:
    """A script of this folder in a process of its own; afterwards no process that it led to is left."""
    mark = uuid.uuid4().hex
    environment = os.environ | {MARK: mark, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    log = folder / "service.log"
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), str(folder), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            cwd=HERE.parents[1],
            env=environment,
        )
    try:
        with process:
            yield Running(process=process, url=next_line(process, log, START_S))
            process.communicate(timeout=STOP_S)
        assert process.returncode == 0, log.read_text()
        left = remaining(mark, patience_s=5.0)
        assert left == {}
    finally:
        for pid in remaining(mark, patience_s=0.0):
            os.kill(pid, signal.SIGKILL)


def next_line(process: subprocess.Popen[bytes], log: Path, patience_s: float) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], patience_s)
    line = process.stdout.readline().decode().strip() if readable else ""
    if not line:
        process.kill()
        pytest.fail(f"the service said nothing:\n{log.read_text()}")
    return line


def remaining(mark: str, *, patience_s: float) -> dict[int, str]:
    """Processes that inherited the mark, once they had time to end."""
    until_s = time.monotonic() + patience_s
    while (found := marked(mark)) and time.monotonic() < until_s:
        time.sleep(0.1)
    return found


def marked(mark: str) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        except OSError:  # it has ended, or is not ours to read
            continue
    return found
