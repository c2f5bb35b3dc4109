"""CIFAR-10 on ResNet-32: exits trained jointly with the network (PAME section 5.2), beside ramps on the frozen one.

    OFFRAMP_DATA=... python -m experiments.trained.joint_cifar10 [--epochs 16] [--out runs/pame]

Both have exits after the same blocks, K exits equidistant as PAME has them. Jointly: bridges (section 5.1), the whole
network fine-tuned on 10,000 train images, shifted, mirrored and patched, to imitate the published network. Frozen:
`mlp` ramps on a grid that imitate it too. Half of 5,000 test images calibrates (budget 1 %, confidence 90 %), the other
half is reported on. An exit saves blocks and costs what its ramp takes: both are reported, ramps' time in blocks as
measured on the cores there are, 16 images at a time. Models stay in runs/pame: `cifar10`, which PAME's studies read,
and `cifar10-frozen`. Minutes on one core of a busy machine: 20.
Seed 0.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.network.checkpoint import RampOptions
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model
from earlyexit.network.wire import Encoded
from earlyexit.training.augmentation import Augmentation
from earlyexit.training.ramps import pack
from experiments.data import require_data
from experiments.kit import keep, show
from experiments.models import finished
from experiments.pame_cases import MODELS
from offramp.commands.calibrate import CalibrateJob, outcome_figures
from offramp.commands.train_job import TrainJob
from optimizer.risk import Guarantee

TRAIN = "cifar10/lossless/cifar10_train_10000_webp.zip"
TEST = "cifar10/lossless/cifar10_test_5000_webp.zip"
NETWORK = "resnet32"
BATCH, ROUNDS = 16, 15
"""Of the measured times."""
PLACES = (2, 5, 8, 11)
"""Of 15 blocks: every third, and the last."""
SIDES: Mapping[str, tuple[RampOptions, bool]] = {
    "frozen": (RampOptions(style="mlp", pooling="grid", at=PLACES), False),
    "joint": (RampOptions(style="bridge", at=PLACES), True),
}
"""Options of the ramps, and whether the network is trained with them."""
FOLDERS = {"frozen": "cifar10-frozen", "joint": "cifar10"}
"""Of the models, below `--out`."""


def job_of(side: str, folder: Path, epochs: int | None) -> TrainJob:
    """What trains a side."""
    ramps, joint = SIDES[side]
    return TrainJob(
        backbone=str(require_data(f"resnet_cifar10/{NETWORK}.th")),
        name=folder.name,
        ramps=ramps,
        source=TRAIN,
        imitate=True,
        joint=joint,
        augmentation=Augmentation(patch=0.5) if joint else None,
        epochs=epochs if joint else None,
    )


def run(side: str, folder: Path, learn: LabelledRows, test: LabelledRows, epochs: int | None) -> dict[str, Any]:
    """Train unless the folder holds the model, calibrate on one half of `test`, and give the figures of the other."""
    calibration = CalibrateJob(policy="confidence", guarantee=Guarantee(budget=0.01, confidence=0.90), source=TEST)
    card, outcome = finished(folder, job_of(side, folder, epochs), calibration, (learn, *test.divide(0.5, seed=0)))
    figures = outcome_figures(outcome)
    return {"side": side, "tested": card.tested, "test": figures} | in_blocks(folder, figures)


def in_blocks(folder: Path, figures: Mapping[str, Any]) -> dict[str, float]:
    """Blocks that exits save for an input, and what ramps cost it of them: those it meets, by their time."""
    block_s, ramp_s = times(load_model(folder))
    cost = sum(figures["survival"][block] * seconds for block, seconds in ramp_s.items()) / block_s
    saved = figures["num_blocks"] - figures["mean_blocks"]
    return {"saved": saved, "ramps_cost": cost, "saved_net": saved - cost}


@torch.inference_mode()
def times(model: EarlyExitModel) -> tuple[float, dict[int, float]]:
    """Seconds of a block, the mean, and of each ramp: the quickest of some rounds, since others only ever add."""
    shape = model.boundary(-1)[0].shape
    values, layout = pack([Encoded(1, (np.zeros((1, *shape), dtype=np.uint8),))] * BATCH, model.device)
    block_s, ramp_s = [math.inf] * model.num_blocks, dict.fromkeys(model.ramp_indices, math.inf)
    for _ in range(ROUNDS):
        hidden = values
        for block in range(model.num_blocks):
            begun_s = perf_counter()
            hidden = model.run_blocks(block, block + 1, hidden, layout)
            block_s[block] = min(block_s[block], perf_counter() - begun_s)
            if block in ramp_s:
                begun_s = perf_counter()
                model.exit_outputs(block, hidden, layout)
                ramp_s[block] = min(ramp_s[block], perf_counter() - begun_s)
    return sum(block_s) / model.num_blocks, ramp_s


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.trained.joint_cifar10", description=__doc__)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, default=MODELS)
    options = parser.parse_args()
    learn, test = (read_labelled(require_data(name)) for name in (TRAIN, TEST))
    reports = [run(side, options.out / FOLDERS[side], learn, test, options.epochs) for side in SIDES]
    columns = ("", "last exit", "agreement", "accuracy", "blocks saved", "ramps cost", "saved, net")
    show("CIFAR-10, ResNet-32, budget 1 %", columns, map(_row, reports))
    keep(reports, options.out / "cifar10.json")


def _row(report: Mapping[str, Any]) -> tuple[object, ...]:
    test = report["test"]
    shares = (f"{test[name]:.2%}" for name in ("full_accuracy", "agreement", "accuracy"))
    return (report["side"], *shares, report["saved"], report["ramps_cost"], report["saved_net"])


if __name__ == "__main__":
    main()
