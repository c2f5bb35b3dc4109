"""Trains the models of experiments on public data, calibrates them, and tests them on unseen rows.

    OFFRAMP_DATA=... python -m experiments.trained {clinc150,mpnet,cifar10,lsp,camvid} [--out FOLDER] [--json]

- `clinc150`: MiniLM-L6 with ramps on the frozen backbone; CLINC150's own parts. Minutes: about 3 on two cores.
- `mpnet`: all-mpnet-base-v2, 12 blocks of 768, frozen, in bfloat16. Trained on 40 questions of each of CLINC150's
  intents, calibrated on val, tested on 2,000 of test. Minutes: about 3 (AMX). Needs the extra `mpnet`.
- `cifar10`: ResNet-32 with bridges (PAME, section 5.1), fine-tuned to imitate the published network (section 5.2) on
  10,000 train images, shifted, mirrored and patched. Half of 5,000 test images calibrates. Minutes: 20.
- `lsp`, `camvid`: small residual networks from random weights, with a bridge and the last exit's head at every exit,
  trained jointly. LSP: 2,500 images train, half of 500 calibrates. CamVid: the source's parts. Minutes: 32 and 21.

Confidence 90 %, budget 1 %, for maps 5 %; seed 0. A model that exists is not trained again.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.training.augmentation import Augmentation
from experiments.data import RUNS, require_data
from offramp.commands.calibrate import calibrate, record_exits
from offramp.commands.folders import resolve_backbone
from offramp.commands.jobs import CalibrateJob, TrainJob
from offramp.commands.output import progress_bars
from offramp.commands.thresholds import outcome_figures
from offramp.commands.train import train
from profiles.scores import Score

Parts = tuple[LabelledRows, LabelledRows, LabelledRows]
"""Rows to train on, to calibrate with, and unseen rows."""
CLINC150 = "clinc150/data_full.json"
CIFAR10 = ("cifar10/lossless/cifar10_train_10000_webp.zip", "cifar10/lossless/cifar10_test_5000_webp.zip")
PER_INTENT, UNSEEN_QUESTIONS = 40, 2000
LSP_JOINTS = (
    *("right ankle", "right knee", "right hip", "left hip", "left knee", "left ankle"),
    *("right wrist", "right elbow", "right shoulder", "left shoulder", "left elbow", "left wrist"),
    *("neck", "head top"),
)


def clinc150_parts() -> Parts:
    """Returns train, val and test."""
    learn, validate, test = (read_labelled(require_data(CLINC150), part=part) for part in ("train", "val", "test"))
    return learn, validate, test


def few_questions() -> Parts:
    """Returns few training rows, because the backbone has 110 million parameters."""
    learn, validate, test = clinc150_parts()
    seen, kept = Counter[str](), list[int]()
    for row, label in enumerate(learn.labels):
        seen[label] += 1
        if seen[label] <= PER_INTENT:
            kept.append(row)
    return learn.select(kept), validate, test.select(Random(0).sample(range(len(test)), UNSEEN_QUESTIONS))


def cifar10_parts() -> Parts:
    """Returns 10,000 train images, and 5,000 test images in halves."""
    learn, test = (read_labelled(require_data(name)) for name in CIFAR10)
    return (learn, *test.divide(0.5, seed=0))


def lsp_parts() -> Parts:
    """Returns the images with names of joints; the table has only their numbers."""
    path, table = require_data("lsp/lsp_3000_96.zip"), require_data("lsp/joints.csv")
    learn, unseen = (
        replace(read_labelled(path, joints=table, part=part), part_names=LSP_JOINTS) for part in ("train", "test")
    )
    return (learn, *unseen.divide(0.5, seed=0))


def camvid_parts() -> Parts:
    """Returns the parts of the source."""
    path, table = require_data("camvid/camvid_240x180.zip"), require_data("camvid/classes.csv")
    learn, validate, test = (read_labelled(path, classes=table, part=part) for part in ("train", "val", "test"))
    return learn, validate, test


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The recipe of a model."""

    folder: Path
    job: Callable[[], TrainJob]
    parts: Callable[[], Parts]
    budget: float = 0.01
    policy: Score | None = None
    network: Mapping[str, Any] | None = None
    """Configuration of an untrained network, which the job's backbone reads from `network.json` in the folder."""

    def calibration(self, source: str) -> CalibrateJob:
        """Returns the calibration, with the dtype in which the ramps were trained."""
        return CalibrateJob(policy=self.policy, budget=self.budget, dtype=self.job().dtype, source=source)


def _resnet(blocks: tuple[int, ...], widths: tuple[int, ...], dilated: int, height: int, width: int) -> dict[str, Any]:
    sizes = {"blocks": blocks, "widths": widths, "dilated": dilated, "height": height, "width": width}
    return {"family": "resnet", "stem": "large", **sizes}


def _maps(name: str, task: str, ramps: tuple[int, ...], augmentation: Augmentation, epochs: int) -> TrainJob:
    return TrainJob(
        backbone="network.json",
        name=name,
        task=task,
        ramp_style="bridge",
        head_style="maps",
        ramps=ramps,
        joint=True,
        augment=augmentation,
        epochs=epochs,
        source=name,
    )


TRAINED: Mapping[str, Trained] = {
    "clinc150": Trained(
        folder=RUNS / "clinc150",
        job=lambda: TrainJob(backbone=resolve_backbone("minilm"), name="clinc150", source=CLINC150),
        parts=clinc150_parts,
    ),
    "mpnet": Trained(
        folder=RUNS / "mpnet" / "clinc150",
        job=lambda: TrainJob(
            backbone=resolve_backbone("mpnet"), name="mpnet-clinc150", dtype="bfloat16", source=CLINC150
        ),
        parts=few_questions,
    ),
    "cifar10": Trained(
        folder=RUNS / "pame" / "cifar10",
        job=lambda: TrainJob(
            backbone=str(require_data("resnet_cifar10/resnet32.th")),
            name="cifar10",
            ramp_style="bridge",
            ramps=(2, 5, 8, 11),
            joint=True,
            imitate=True,
            augment=Augmentation(patch=0.5),
            source=CIFAR10[0],
        ),
        parts=cifar10_parts,
        policy="confidence",
    ),
    "lsp": Trained(
        folder=RUNS / "pame" / "lsp",
        job=lambda: _maps("lsp", "pose", (2, 4, 7), Augmentation(shift=0.1, turn=30, zoom=0.25), 18),
        parts=lsp_parts,
        budget=0.05,
        network=_resnet((3, 4, 4), (32, 64, 64), dilated=2, height=96, width=96),
    ),
    "camvid": Trained(
        folder=RUNS / "pame" / "camvid",
        job=lambda: _maps("camvid", "segmentation", (2, 5, 8), Augmentation(shift=0.1, zoom=0.25), 30),
        parts=camvid_parts,
        budget=0.05,
        network=_resnet((3, 4, 5), (32, 64, 96), dilated=1, height=180, width=240),
    ),
}


def run(name: str, folder: Path | None = None) -> dict[str, Any]:
    """Trains the model if it is missing, calibrates it, and returns its figures on tested and unseen rows."""
    made = TRAINED[name]
    folder, job = folder or made.folder, made.job()
    learn, validate, unseen = made.parts()
    if not (folder / "model.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        if made.network is not None:
            (folder / job.backbone).write_text(json.dumps(made.network), encoding="utf-8")
            job = job.model_copy(update={"backbone": str(folder / job.backbone)})
        with progress_bars() as progress:
            train(job, learn, folder, progress=progress)
    calibration = made.calibration(job.source)
    card, _ = calibrate(folder, validate, calibration)
    outcome = record_exits(folder, unseen, card, calibration.dtype).outcome(card.thresholds)
    return {"thresholds": card.thresholds, "tested": card.tested, "test": outcome_figures(outcome)}


def main() -> None:
    """Runs and prints."""
    parser = ArgumentParser(prog="python -m experiments.trained", description=__doc__)
    parser.add_argument("name", choices=tuple(TRAINED))
    parser.add_argument("--out", type=Path, help="output folder; experiments read the default one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = run(options.name, options.out)
    if options.json:
        print(json.dumps(report))
        return
    test = report["test"]
    print(
        f"unseen rows: agreement {test['agreement']:.2%}, accuracy {test['accuracy'] or 0:.2%}, "
        f"{test['mean_blocks']:.2f} of {test['num_blocks']} blocks"
    )


if __name__ == "__main__":
    main()
