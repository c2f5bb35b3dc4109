"""What PAME's search expects of an exit, against batches of images that run with that exit on (PAME, figure 12's bars).

    OFFRAMP_DATA=... python -m experiments.pame.estimates [--model runs/pame/cifar10] [--batch 16] [--batches 24]

The time matrix is measured: every stage that begins with the model or behind an exit, at several batch sizes, check
and copy included. The batching pattern comes from the exit records of the images that set the thresholds. What follows
for mean (equation 2) and tail is held against images that neither has seen, cut into batches, each run as a whole.
Stages and batches are timed in turns, in processor time of one thread, medians of all rounds: a machine that is busy
disturbs both alike. Who leaves differs between the two halves of the images too; "with their pattern" is without that.
Minutes: about 5 on one core. Seed 0.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.data import RUNS, require_data
from experiments.kit import keep, show
from experiments.pame.models import MODELS, require_model
from optimizer.calibration_file import read_calibration_file
from optimizer.pame.on_batches import BatchTimes, batch_times
from optimizer.pame.times import Seconds
from profiles.batches import IntArray, RecordedBatches
from profiles.records import ExitRecords
from profiles.scores import FloatArray

if TYPE_CHECKING:
    from earlyexit.model import EarlyExitModel
    from earlyexit.piece import Piece

TEST = "cifar10/lossless/cifar10_test_5000_webp.zip"
SEED = 0

Stage = tuple[int, int | None]
"""First block, and the exit that ends it; None: the model's end."""
Run = Callable[[], list[float]]
"""Seconds until each step of a cut was done, from its start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """Medians of all rounds."""

    stages: Mapping[Stage, Mapping[int, float]]
    """Seconds by batch size."""
    batches: Mapping[tuple[int, ...], Sequence[BatchFigures]]
    """By active ramps, batch by batch."""

    def seconds(self) -> Seconds:
        """Linear between the sizes that were measured."""

        def seconds(first: int, exit_: int | None, sizes_X: FloatArray) -> FloatArray:
            known = self.stages[first, exit_]
            return np.interp(sizes_X, list(known), list(known.values()))

        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """One batch of images."""

    left: tuple[int, ...]
    """Inputs inside after each active ramp."""
    steps_s: tuple[float, ...]
    """Until each step was done; fewer steps than exits where everybody had left."""

    def mean_s(self, size: int) -> float:
        """Of its images, until their answer."""
        inside = (size, *self.left, 0)
        leaving = [before - after for before, after in pairwise(inside)]
        steps_s = (*self.steps_s, *(0.0,) * (len(leaving) - len(self.steps_s)))
        return sum(number * seconds for number, seconds in zip(leaving, steps_s, strict=True)) / size


def measure(model: EarlyExitModel, thresholds: Mapping[int, float], images: Sequence[Piece], rounds: int) -> Measured:
    """Every stage at every size, and every batch with each set of ramps, in turns; the first round warms up."""
    size, ramps = len(images[0]), tuple(sorted(thresholds))
    sets = [(), *((ramp,) for ramp in ramps), ramps]
    runs: dict[Any, Run] = {}
    for stage in _stages(ramps):
        for number in _sizes(size):
            runs[stage, number] = _stage_run(model, stage, images[0], number)
    counted: dict[Any, tuple[int, ...]] = {}
    for active in sets:
        for place, piece in enumerate(images):
            runs[active, place, "batch"], counted[active, place] = _batch_run(model, active, thresholds, piece)
    found: dict[Any, list[list[float]]] = {key: [] for key in runs}
    rng = np.random.default_rng(SEED)
    for turn in range(rounds + 1):
        for at in rng.permutation(len(runs)).tolist():
            key = list(runs)[at]
            steps_s = runs[key]()
            if turn:
                found[key].append(steps_s)
        print(f"round {turn} of {rounds}", flush=True)
    medians = {key: np.median(np.array(rows), axis=0) for key, rows in found.items()}
    return Measured(
        stages={
            stage: {number: float(medians[stage, number][0]) for number in _sizes(size)} for stage in _stages(ramps)
        },
        batches={
            active: [
                BatchFigures(left=counted[active, place], steps_s=tuple(medians[active, place, "batch"].tolist()))
                for place in range(len(images))
            ]
            for active in sets
        },
    )


def _stages(ramps: Sequence[int]) -> list[Stage]:
    firsts = [0, *(ramp + 1 for ramp in ramps)]
    return [(first, exit_) for first in firsts for exit_ in (*ramps, None) if exit_ is None or exit_ >= first]


def _sizes(size: int) -> list[int]:
    return sorted({1, *range(4, size, 4), size})


def _timed_steps(steps: Callable[[], Any]) -> Run:
    def run() -> list[float]:
        started_s = time.process_time()
        return [time.process_time() - started_s for _ in steps()]

    return run


def _stage_run(model: EarlyExitModel, stage: Stage, images: Piece, number: int) -> Run:
    """A stage alone: at an exit half of the inputs move on, so that they are copied."""
    from earlyexit.cut import cut_out
    from earlyexit.policies.threshold import ConfidencePolicy
    from earlyexit.split import Segment

    first, exit_ = stage
    piece = images.select(range(number))
    if first:
        values, _ = model.run(Segment(first=0, end=first, ramp=None), piece)
        piece = _at(piece, first, values)
    if exit_ is None:
        cut = cut_out(model, first, model.num_blocks, (), ConfidencePolicy(2.0))
        return _timed_steps(lambda: cut.run(piece))
    values, outputs = model.run(Segment(first=first, end=exit_ + 1, ramp=exit_), piece)
    assert outputs is not None
    middle = float(np.median(model.task.score(outputs).numpy()))
    cut = cut_out(model, first, exit_ + 1, (exit_,), ConfidencePolicy(middle))
    return _timed_steps(lambda: cut.run(piece))


def _at(piece: Piece, block: int, values: Any) -> Piece:
    return replace(piece, next_block=block, tensors=tuple(each.clone() for each in values))


def _batch_run(
    model: EarlyExitModel, active: tuple[int, ...], thresholds: Mapping[int, float], piece: Piece
) -> tuple[Run, tuple[int, ...]]:
    """A batch from start to end, and how many are inside after each ramp."""
    from earlyexit.cut import cut_out
    from earlyexit.policies.threshold import ConfidencePolicy

    cut = cut_out(model, 0, model.num_blocks, active, ConfidencePolicy({ramp: thresholds[ramp] for ramp in active}))
    exits = [answer.exit for step in cut.run(piece) for answer in step.answers]
    left = tuple(sum(exit_ > ramp for exit_ in exits) for ramp in active)
    return _timed_steps(lambda: cut.run(piece)), left


def compared(measured: Measured, records: RecordedBatches) -> list[dict[str, Any]]:
    """Per set of ramps: mean and tail as estimated from the records, from the images' own pattern, and as measured."""
    rows, seconds, size = [], measured.seconds(), records.size
    for active, batches in measured.batches.items():
        left_KA: IntArray = np.array([each.left for each in batches], dtype=np.int64).reshape(len(batches), len(active))
        mean_s = float(np.mean([each.mean_s(size) for each in batches]))
        tail_s = float(np.mean([each.steps_s[-1] for each in batches]))
        expected = batch_times(seconds, active, records.remaining(active), size)
        same_pattern = batch_times(seconds, active, left_KA, size)
        rows.append(
            {
                "ramps": list(active),
                "mean_ms": 1e3 * mean_s,
                "tail_ms": 1e3 * tail_s,
                **_errors("estimated", expected, mean_s, tail_s),
                **_errors("their pattern", same_pattern, mean_s, tail_s),
            }
        )
    return rows


def _errors(name: str, times: BatchTimes, mean_s: float, tail_s: float) -> dict[str, float]:
    return {f"{name}: mean error": times.mean_s / mean_s - 1, f"{name}: tail error": times.tail_s / tail_s - 1}


def pieces_of(model: EarlyExitModel, folder: Path, size: int, number: int) -> list[Piece]:
    """Batches of images that no threshold has seen: the half that is for reports."""
    from earlyexit.codecs import find_codec
    from earlyexit.dataset import read_labelled
    from earlyexit.network import from_wire
    from earlyexit.policies.threshold import ConfidencePolicy
    from earlyexit.wire import entering

    _, test = read_labelled(require_data(TEST)).divide(0.5, seed=0)
    encoded = test.encode(find_codec(model.info.codec, folder))
    order = np.random.default_rng(SEED).permutation(len(encoded))[: size * number].tolist()
    rows = [order[at : at + size] for at in range(0, len(order), size)]
    policy = ConfidencePolicy(1.0)
    return [
        from_wire(model, entering([str(row) for row in batch], [encoded[row] for row in batch]), policy)
        for batch in rows
    ]


def main() -> None:
    """Measure, print and write."""
    import torch

    from earlyexit.store import load_model

    parser = ArgumentParser(prog="python -m experiments.pame.estimates", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODELS / "cifar10")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=24, help="of images")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    require_model(options.model, "calibration.json", "exit_records.npz")
    torch.set_num_threads(1)
    model = load_model(options.model)
    thresholds = read_calibration_file(options.model / "calibration.json").thresholds
    records = ExitRecords.load(options.model / "exit_records.npz")
    with torch.inference_mode():
        images = pieces_of(model, options.model, options.batch, options.batches)
        measured = measure(model, thresholds, images, options.rounds)
    rows = compared(measured, RecordedBatches.of_records(records, thresholds, options.batch))
    columns = ("ramps", "mean ms", "tail ms", "estimated: mean", "tail", "with their pattern: mean", "tail")
    told = [
        (
            ", ".join(map(str, row["ramps"])) or "none",
            f"{row['mean_ms']:.1f}",
            f"{row['tail_ms']:.1f}",
            *(f"{value:+.1%}" for name, value in row.items() if name.endswith("error")),
        )
        for row in rows
    ]
    show(f"{options.model.name}, batches of {options.batch}, processor time of one thread", columns, told)
    print(f"written: {keep(rows, RUNS / f'pame-estimates-{options.batch}.json')}")


if __name__ == "__main__":
    main()
