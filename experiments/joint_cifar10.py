"""CIFAR-10 on ResNet-32: exits trained jointly with the network (PAME section 5.2), beside ramps on the frozen one.

    OFFRAMP_DATA=... python -m experiments.joint_cifar10 [--epochs 16] [--out runs/joint-cifar10]

Both have exits after the same blocks, K exits equidistant as PAME has them. Jointly: bridges (section 5.1), the whole
network fine-tuned on 10,000 train images, shifted, mirrored and patched, to imitate the published network. Frozen:
`mlp` ramps on a grid that imitate it too. Half of 5,000 test images calibrates (budget 1 %, confidence 90 %), the other
half is reported on. An exit saves blocks and costs what its ramp takes: both are reported, ramps' time in blocks as
measured on one core, one image at a time. Models stay in runs/. Minutes on one core of a busy machine: 20. Seed 0.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earlyexit.checkpoint import RampOptions
from earlyexit.dataset import LabelledRows, read_labelled
from earlyexit.training.augmentation import Augmentation
from experiments.cifar10 import TEST, TRAIN, checkpoint_of
from experiments.data import RUNS, require_data
from experiments.kit import keep, show
from experiments.models import finished
from offramp.jobs.calibration import CalibrateJob, outcome_figures
from offramp.jobs.ramp_times import time_exits
from offramp.jobs.train_job import TrainJob
from optimizer.risk import Guarantee

NETWORK = "resnet32"
PLACES = (2, 5, 8, 11)
"""Of 15 blocks: every third, and the last."""
SIDES: Mapping[str, tuple[RampOptions, bool]] = {
    "frozen": (RampOptions(style="mlp", pooling="grid", at=PLACES), False),
    "joint": (RampOptions(style="bridge", at=PLACES), True),
}
"""Options of the ramps, and whether the network is trained with them."""


def job_of(side: str, folder: Path, epochs: int | None) -> TrainJob:
    """What trains a side."""
    ramps, joint = SIDES[side]
    return TrainJob(
        backbone=str(checkpoint_of(NETWORK)),
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
    from earlyexit.store import load_model

    model = load_model(folder)
    block_s, ramp_s = time_exits(model, folder)
    met = [figures["survival"][block] for block in model.ramp_indices]
    cost = sum(share * seconds for share, seconds in zip(met, ramp_s, strict=True)) / block_s.mean()
    saved = figures["num_blocks"] - figures["mean_blocks"]
    return {"saved": saved, "ramps_cost": float(cost), "saved_net": saved - float(cost)}


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.joint_cifar10", description=__doc__)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, default=RUNS / "joint-cifar10")
    options = parser.parse_args()
    learn, test = (read_labelled(require_data(name)) for name in (TRAIN, TEST))
    reports = [run(side, options.out / side, learn, test, options.epochs) for side in SIDES]
    columns = ("", "last exit", "agreement", "accuracy", "blocks saved", "ramps cost", "saved, net")
    show("CIFAR-10, ResNet-32, budget 1 %", columns, map(_row, reports))
    keep(reports, options.out / "figures.json")


def _row(report: Mapping[str, Any]) -> tuple[object, ...]:
    test = report["test"]
    shares = (f"{test[name]:.2%}" for name in ("full_accuracy", "agreement", "accuracy"))
    return (report["side"], *shares, report["saved"], report["ramps_cost"], report["saved_net"])


if __name__ == "__main__":
    main()
