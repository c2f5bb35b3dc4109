"""Poses (LSP) and street scenes (CamVid): small networks trained jointly with their exits, beside ones with one exit.

    OFFRAMP_DATA=... python -m experiments.trained.vision [--case lsp] [--plain] [--epochs 40] [--out runs/pame]

Residual networks from weights at random, with bridges (PAME section 5.1) before the same head at every exit, all exits
trained together, equal weights (section 5.2). LSP: 2,500 images learn, half of 500 calibrates (budget 5 %, confidence
90 %), the other half is reported on; CamVid: 367 learn, 101 calibrate, 233 are reported on, the source's parts.
`--plain` trains the same network without ramps as long, to compare the last exit with. Models stay in runs/; one that
is there is not trained again. Minutes on one core of a busy machine: LSP 32, CamVid 21; about as long again with
`--plain`. Seed 0.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.network.checkpoint import RampOptions
from earlyexit.training.augmentation import Augmentation
from experiments.data import require_data
from experiments.kit import keep, show
from experiments.pame_cases import MODELS
from offramp.commands.calibrate import CalibrateJob, calibrate
from offramp.commands.progress import progress_bars
from offramp.commands.train import train
from offramp.commands.train_job import TrainJob
from optimizer.risk import Guarantee

LSP_JOINTS = (
    *("right ankle", "right knee", "right hip", "left hip", "left knee", "left ankle"),
    *("right wrist", "right elbow", "right shoulder", "left shoulder", "left elbow", "left wrist"),
    *("neck", "head top"),
)
BUDGET = 0.05
"""Mean loss: joints, or pixels, that an early exit answers otherwise than the last."""
Parts = tuple[LabelledRows, LabelledRows, LabelledRows]
"""To learn from, to calibrate with, to report on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A data set and the network for it."""

    task: str
    network: Mapping[str, Any]
    """As a file of an untrained network has it."""
    ramps: tuple[int, ...]
    augmentation: Augmentation
    epochs: int

    @property
    def ramp_options(self) -> RampOptions:
        """A bridge and the head of the last exit."""
        return RampOptions(style="bridge", head_style="maps", at=self.ramps)


def _resnet(blocks: tuple[int, ...], widths: tuple[int, ...], dilated: int, height: int, width: int) -> dict[str, Any]:
    return {
        "family": "resnet",
        "blocks": blocks,
        "widths": widths,
        "stem": "large",
        "dilated": dilated,
        "height": height,
        "width": width,
    }


CASES: Mapping[str, Case] = {
    "lsp": Case(
        task="pose",
        network=_resnet((3, 4, 4), (32, 64, 64), dilated=2, height=96, width=96),
        ramps=(2, 4, 7),
        augmentation=Augmentation(shift=0.1, turn=30, zoom=0.25),
        epochs=18,
    ),
    "camvid": Case(
        task="segmentation",
        network=_resnet((3, 4, 5), (32, 64, 96), dilated=1, height=180, width=240),
        ramps=(2, 5, 8),
        augmentation=Augmentation(shift=0.1, zoom=0.25),
        epochs=30,
    ),
}


def lsp_parts() -> Parts:
    """With the joints' names, which the table has numbers for."""
    path, table = require_data("lsp/lsp_3000_96.zip"), require_data("lsp/joints.csv")
    learn, unseen = (
        replace(read_labelled(path, joints=table, part=part), part_names=tuple(LSP_JOINTS))
        for part in ("train", "test")
    )
    calibrating, reported = unseen.divide(0.5, seed=0)
    return learn, calibrating, reported


def camvid_parts() -> Parts:
    """The source's split."""
    path, table = require_data("camvid/camvid_240x180.zip"), require_data("camvid/classes.csv")
    learn, calibrating, reported = (read_labelled(path, classes=table, part=part) for part in ("train", "val", "test"))
    return learn, calibrating, reported


PARTS = {"lsp": lsp_parts, "camvid": camvid_parts}


def trained(folder: Path, name: str, case: Case, learn: LabelledRows, *, plain: bool = False) -> Path:
    """The folder of the case's model, trained if it is not there; `plain`: with no exit but the last."""
    if not (folder / "model.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        network = folder / "network.json"
        network.write_text(json.dumps(case.network), encoding="utf-8")
        ramps = replace(case.ramp_options, at=()) if plain else case.ramp_options
        job = TrainJob(
            backbone=str(network),
            name=name,
            task=case.task,
            ramps=ramps,
            joint=True,
            augmentation=case.augmentation,
            epochs=case.epochs,
            source=name,
        )
        with progress_bars() as progress:
            train(job, learn, folder, progress=progress)
    return folder


def exit_figures(folder: Path, rows: LabelledRows) -> dict[int, dict[str, float]]:
    """How right every exit is on labelled rows, by block: 1 - mean loss, and the task's own figures."""
    from earlyexit.codecs import find_codec
    from earlyexit.network.store import load_model
    from earlyexit.training.ramps import exit_outputs

    model = load_model(folder)
    codec = find_codec(model.info.codec, folder)
    right = rows.targets(model.task, codec)
    figures: dict[int, dict[str, float]] = {}
    for block, outputs in exit_outputs(model, rows.encode(codec), batch=16).items():
        answers = model.task.answer(outputs).numpy()
        tallies = model.task.tallies(answers, right).sum(0)
        figures[block] = {"agreement": 1 - float(model.task.loss(answers, right).mean())} | model.task.figures(tallies)
    return figures


def report_on(name: str, folder: Path, case: Case, *, plain: bool) -> dict[str, Any]:
    """Train, calibrate and report; with `plain` the network without ramps beside it."""
    learn, calibrating, reported = PARTS[name]()
    trained(folder, name, case, learn)
    report: dict[str, Any] = {"case": name, "exits": exit_figures(folder, reported)}
    job = CalibrateJob(guarantee=Guarantee(budget=BUDGET, confidence=0.90), source=name)
    card, _ = calibrate(folder, calibrating, job)
    report |= {"thresholds": card.thresholds, "tested": card.tested}
    if plain:
        alone = trained(folder.with_name(f"{name}-plain"), f"{name}-plain", case, learn, plain=True)
        report["plain"] = exit_figures(alone, reported)
    return report


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.trained.vision", description=__doc__)
    parser.add_argument("--case", choices=tuple(CASES), action="append")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, default=MODELS)
    options = parser.parse_args()
    for name in options.case or CASES:
        case = CASES[name] if options.epochs is None else replace(CASES[name], epochs=options.epochs)
        report = report_on(name, options.out / name, case, plain=options.plain)
        _print(report)
        keep(report, options.out / f"{name}.json")


def _print(report: Mapping[str, Any]) -> None:
    columns = list(next(iter(report["exits"].values())))
    rows = [(f"exit after block {block}", *figures.values()) for block, figures in report["exits"].items()]
    rows += [("without ramps", *figures.values()) for figures in report.get("plain", {}).values()]
    show(report["case"], ("", *columns), rows)
    tested = report["tested"]
    print(f"calibrated: agreement {tested['agreement']:.4f}, mean blocks {tested['mean_blocks']:.2f}")


if __name__ == "__main__":
    main()
