"""Trains and calibrates the model of the demo, on generated texts or on the user's own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from earlyexit.data.rows import LabelledRows, read_labelled, write_labelled
from earlyexit.network.store import read_card
from offramp.commands.calibrate import calibrate
from offramp.commands.calibration_files import read_calibration
from offramp.commands.jobs import CalibrateJob, TrainJob
from offramp.commands.packaged import resolve_backbone
from offramp.commands.progress import progress_bars
from offramp.commands.recording import record_exits
from offramp.commands.train import train
from optimizer.calibration_file import CALIBRATION_FILE, CalibrationCard
from profiles.records import ExitRecords

TEXTS = Path(__file__).with_name("texts.csv")
"""9,600 short requests with 48 intents, generated from templates (`offramp/demo/texts.py@343bb79a`)."""
SEED = 0
BUDGET = 0.02
"""The error that E3 tolerates (section 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A trained model with its calibration, and its answers to the test texts."""

    folder: Path
    test: LabelledRows
    calibration: CalibrationCard
    expected: ExitRecords
    """Exit records of the test texts: the answers of the full model and of every ramp."""


def prepare(runs: Path, data: Path | None) -> Prepared:
    """Trains and calibrates a model, unless an earlier run has made it from the same data."""
    runs.mkdir(parents=True, exist_ok=True)
    if data is None:
        learn, validate, test = _divided(read_labelled(TEXTS))
        for name, part in (("train", learn), ("validation", validate), ("test", test)):
            write_labelled(part, runs, name)
    elif data.suffix == ".json":  # CLINC150 has these parts
        learn, validate, test = (read_labelled(data, part=part) for part in ("train", "val", "test"))
    else:
        learn, validate, test = _divided(read_labelled(data))
    folder = runs / "model"
    source = str(data.resolve()) if data else "generated"
    if not (folder / CALIBRATION_FILE).is_file() or read_card(folder).provenance.get("data") != source:
        shutil.rmtree(folder, ignore_errors=True)
        job = TrainJob(backbone=resolve_backbone("minilm"), name="demo", max_length=128, seed=SEED, source=source)
        with progress_bars() as progress:
            train(job, learn, folder, progress=progress)
        calibrate(folder, validate, CalibrateJob(budget=BUDGET, seed=SEED, source=source))
    calibration = read_calibration(folder)
    expected = record_exits(folder, test, calibration.policy)
    return Prepared(folder=folder, test=test, calibration=calibration, expected=expected)


def _divided(rows: LabelledRows) -> tuple[LabelledRows, LabelledRows, LabelledRows]:
    """Returns 60 % of the rows of each label for training, 20 % for calibration and 20 % for testing."""
    learn, rest = rows.divide(0.4, SEED)
    return learn, *rest.divide(0.5, SEED)
