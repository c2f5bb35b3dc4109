"""CIFAR-10 on ResNet-20 and ResNet-32: ramps on the frozen networks, thresholds with a guarantee, unseen images.

    OFFRAMP_DATA=... python -m experiments.trained.cifar10 [--network resnet20] [--policy confidence]

Ramps learn from 10,000 images of the train part. The networks were trained on these, and are surer of them than of
others: one half of 5,000 test images calibrates (budget 1 %, confidence 90 %), the other half is reported on.
Two kinds of ramps: `light`, the mean of the map and a linear layer, from the labels; `mlp`, a grid of 4 x 4 means and a
hidden layer of 64, which imitates the full model. The models stay in runs/. Minutes: about 10 on two cores. Seed 0.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earlyexit.checkpoint import RampOptions
from earlyexit.dataset import LabelledRows, read_labelled
from experiments.data import RUNS, require_data
from experiments.models import finished
from offramp.jobs.calibration import CalibrateJob, outcome_figures
from offramp.jobs.train_job import TrainJob
from optimizer.risk import Guarantee
from profiles.scores import Score

TRAIN = "cifar10/lossless/cifar10_train_10000_webp.zip"
TEST = "cifar10/lossless/cifar10_test_5000_webp.zip"
NETWORKS = ("resnet20", "resnet32")
RAMPS: Mapping[str, tuple[RampOptions, bool]] = {
    "light": (RampOptions(style="light", pooling="mean"), False),
    "mlp": (RampOptions(style="mlp", pooling="grid"), True),
}
"""Options of the ramps, and whether they imitate the full model."""


def checkpoint_of(network: str) -> Path:
    """The published weights of a network."""
    return require_data(f"resnet_cifar10/{network}.th")


def run(
    folder: Path, network: str, ramps: str, learn: LabelledRows, test: LabelledRows, *, policy: Score = "confidence"
) -> dict[str, Any]:
    """Train unless the folder holds the model, calibrate on one half of `test`, and give the figures of the other."""
    options, imitate = RAMPS[ramps]
    backbone = str(checkpoint_of(network))
    job = TrainJob(backbone=backbone, name=folder.name, ramps=options, source=TRAIN, imitate=imitate)
    guarantee = Guarantee(budget=0.01, confidence=0.90)
    calibration = CalibrateJob(policy=policy, guarantee=guarantee, source=TEST)
    card, outcome = finished(folder, job, calibration, (learn, *test.divide(0.5, seed=0)))
    told = {"network": network, "ramps": ramps, "policy": policy, "tested": card.tested}
    return told | {"test": outcome_figures(outcome)}


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.trained.cifar10", description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--ramps", choices=tuple(RAMPS), action="append")
    parser.add_argument("--policy", choices=("entropy", "confidence"), default="confidence")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    learn, test = (read_labelled(require_data(name)) for name in (TRAIN, TEST))
    if not options.json:
        print("network    ramps   agreement   accuracy   full model   mean blocks")
    for network in options.network or NETWORKS:
        for ramps in options.ramps or RAMPS:
            report = run(RUNS / f"cifar10-{network}-{ramps}", network, ramps, learn, test, policy=options.policy)
            print(json.dumps(report) if options.json else _line(report), flush=True)


def _line(report: Mapping[str, Any]) -> str:
    test = report["test"]
    return (
        f"{report['network']:<10} {report['ramps']:<6} {test['agreement']:10.2%} {test['accuracy']:10.2%} "
        f"{test['full_accuracy']:12.2%} {test['mean_blocks']:8.2f} of {test['num_blocks']}"
    )


if __name__ == "__main__":
    main()
