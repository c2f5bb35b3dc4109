"""The demo's models: trained on generated texts, or on the user's own, calibrated and recorded; and its cascade.

The cascade is the first half of the model's blocks before the whole model without its ramps. Nothing smaller ships with
what the demo needs. The whole model's own ramps are left out of the large one: they would be those of the small one,
without its blocks being run twice, and the planner would leave the small one alone.
"""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from earlyexit.codecs.text import TOKENIZER_FILE
from earlyexit.data.rows import LabelledRows, read_labelled, write_labelled
from earlyexit.families import find_family
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, read_card, save_model
from offramp.commands.calibrate import calibrate
from offramp.commands.calibrated import read_calibration
from offramp.commands.chain import chain_models
from offramp.commands.jobs import CalibrateJob, TrainJob
from offramp.commands.packaged import resolve_backbone
from offramp.commands.progress import progress_bars
from offramp.commands.recording import record_exits
from offramp.commands.train import train
from offramp.demo.texts import generate
from optimizer.calibration_file import CALIBRATION_FILE, CalibrationCard
from profiles.records import ExitRecords

# The cascade.


MODEL, SMALL, LARGE, CASCADE = "model", "small", "large", "cascade"
"""Folders of a run of the demo."""


def make_cascade(runs: Path, validate: LabelledRows, job: CalibrateJob) -> Path:
    """Both models and their chain, calibrated, beside the demo's model; gives the chain's folder."""
    model = load_model(runs / MODEL)
    half, whole = model.num_blocks // 2, model.num_blocks
    small = first_blocks(model, half, name="demo-small")
    large = first_blocks(model, whole, name="demo-large", ramps=False)
    for folder, member in ((runs / SMALL, small), (runs / LARGE, large)):
        save_model(member, folder)
        shutil.copyfile(runs / MODEL / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        calibrate(folder, validate, job)
    chain_models([runs / SMALL, runs / LARGE], runs / CASCADE)  # named as the large one, of which it is a version
    calibrate(runs / CASCADE, validate, job)
    return runs / CASCADE


def first_blocks(model: EarlyExitModel, num_blocks: int, *, name: str, ramps: bool = True) -> EarlyExitModel:
    """A model of a model's first blocks, whose head is the exit after the last of them; nothing is shared."""
    backbone = find_family(model.info.family).build({**model.backbone.to_config(), "num_blocks": num_blocks})
    known = model.backbone.state_dict()
    backbone.load_state_dict({tensor: known[tensor] for tensor in backbone.state_dict()})
    last, info = num_blocks - 1, replace(model.info, name=name)
    if num_blocks < model.num_blocks:
        info = replace(info, head_style=model.info.ramp_style, head_pooling=model.info.pooling)
    kept = [block for block in model.ramp_indices if block < last] if ramps else []
    return EarlyExitModel(
        info, backbone, {block: deepcopy(model.exit_head(block)) for block in kept}, deepcopy(model.exit_head(last))
    ).eval()


# The model.


SEED = 0
BUDGET = 0.02
"""E3's tolerance: less than 2 % error (section 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model folder and what is known of it."""

    folder: Path
    test: LabelledRows
    calibration: CalibrationCard
    expected: ExitRecords
    """Exit records of the test texts: what the full model, and every ramp, says of them."""


def prepare(runs: Path, data: Path | None) -> Prepared:
    """Train and calibrate, unless an earlier run left the model."""
    runs.mkdir(parents=True, exist_ok=True)
    if data is None:
        learn, validate, test = _divided(generate(seed=SEED))
        for name, part in (("train", learn), ("validation", validate), ("test", test)):
            write_labelled(part, runs, name)
    elif data.suffix == ".json":  # CLINC150's own lists
        learn, validate, test = (read_labelled(data, part=part) for part in ("train", "val", "test"))
    else:
        learn, validate, test = _divided(read_labelled(data))
    folder = runs / MODEL
    source = str(data.resolve()) if data else "generated"
    promise = CalibrateJob(budget=BUDGET, seed=SEED, source=source)
    left = (folder / CALIBRATION_FILE).is_file()  # by an earlier run, perhaps of other texts
    if not left or read_card(folder).provenance.get("data") != source:
        for stale in (folder, runs / CASCADE):
            shutil.rmtree(stale, ignore_errors=True)
        job = TrainJob(backbone=resolve_backbone("minilm"), name="demo", max_length=128, seed=SEED, source=source)
        with progress_bars() as progress:
            train(job, learn, folder, progress=progress)
        calibrate(folder, validate, promise)
    if not (runs / CASCADE / CALIBRATION_FILE).is_file():
        make_cascade(runs, validate, promise)
    calibration = read_calibration(folder)
    expected = record_exits(folder, test, calibration.policy)
    return Prepared(folder=folder, test=test, calibration=calibration, expected=expected)


def _divided(rows: LabelledRows) -> tuple[LabelledRows, LabelledRows, LabelledRows]:
    """60 % to learn from, 20 % each to calibrate by and to test by, of every label alike."""
    learn, rest = rows.divide(0.4, SEED)
    return learn, *rest.divide(0.5, SEED)
