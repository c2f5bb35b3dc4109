"""The demo's cascade: the first half of its model's blocks before the whole model without its ramps.

Nothing smaller ships with what the demo needs. The whole model's own ramps are left out of the large one: they would be
those of the small one, without its blocks being run twice, and the planner would leave the small one alone.
"""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from earlyexit.codecs.tokenizer import TOKENIZER_FILE
from earlyexit.data.rows import LabelledRows
from earlyexit.families import find_family
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from offramp.commands.calibrate import calibrate
from offramp.commands.chain import chain_models
from offramp.commands.jobs import CalibrateJob

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
