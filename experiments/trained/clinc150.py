"""CLINC150 on MiniLM-L6: ramps on the frozen backbone, thresholds with a guarantee, the test set.

    OFFRAMP_DATA=... python -m experiments.trained.clinc150 [--policy confidence]

Trains on train, calibrates on val (budget 1 %, confidence 90 %), reports on test; the model stays in runs/clinc150.
Minutes: about 3 on two cores. Seed 0.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from earlyexit.data.rows import read_labelled
from experiments.data import RUNS, require_data
from experiments.models import finished
from offramp.commands.calibrate import CalibrateJob, outcome_figures
from offramp.commands.train import resolve_backbone
from offramp.commands.train_job import TrainJob
from optimizer.risk import Guarantee
from profiles.scores import Score

DATA = "clinc150/data_full.json"


def run(folder: Path, data: Path, *, policy: Score = "entropy", seed: int = 0) -> dict[str, Any]:
    """Train unless the folder holds the model, calibrate, and give the figures on val and test."""
    learn, validate, test = (read_labelled(data, part=part) for part in ("train", "val", "test"))
    job = TrainJob(backbone=resolve_backbone("minilm"), name="clinc150", seed=seed, source=DATA)
    guarantee = Guarantee(budget=0.01, confidence=0.90)
    calibration = CalibrateJob(policy=policy, guarantee=guarantee, seed=seed, source=DATA)
    card, outcome = finished(folder, job, calibration, (learn, validate, test))
    return {"thresholds": card.thresholds, "tested": card.tested, "test": outcome_figures(outcome)}


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.trained.clinc150", description=__doc__)
    parser.add_argument("--policy", choices=("entropy", "confidence"), default="entropy")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = run(RUNS / "clinc150", require_data(DATA), policy=options.policy)
    if options.json:
        print(json.dumps(report))
        return
    from rich.console import Console

    from offramp.cli.calibration_tables import calibration_tables

    Console().print(*calibration_tables(options.policy, report))


if __name__ == "__main__":
    main()
