"""Makes a cascade of the demo's model: its first three blocks, then all six blocks without ramps.

python examples/cascade/models.py runs/demo     # after `make demo`
"""

from __future__ import annotations

import shutil
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from earlyexit.codecs.text import TOKENIZER_FILE
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.families import find_family
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from offramp.commands.calibrate import calibrate
from offramp.commands.jobs import CalibrateJob
from offramp.commands.train import chain_models


def make_cascade(runs: Path, validate: LabelledRows, job: CalibrateJob) -> Path:
    """Writes both models and their chain, all calibrated, next to the demo's model; returns the chain's folder.

    The large model has no ramps. Its first ramps would equal those of the small model, at no extra cost, so the planner
    would leave the small model out.
    """
    model = load_model(runs / "model")
    small = first_blocks(model, model.num_blocks // 2, name="demo-small")
    large = first_blocks(model, model.num_blocks, name="demo-large", ramps=False)
    for folder, member in ((runs / "small", small), (runs / "large", large)):
        save_model(member, folder)
        shutil.copyfile(runs / "model" / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        calibrate(folder, validate, job)
    chain_models([runs / "small", runs / "large"], runs / "cascade")  # a version of the large model
    calibrate(runs / "cascade", validate, job)
    return runs / "cascade"


def first_blocks(model: EarlyExitModel, num_blocks: int, *, name: str, ramps: bool = True) -> EarlyExitModel:
    """Returns a model of the first blocks of a model. Its head is the exit after the last of these blocks."""
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


if __name__ == "__main__":
    demo = Path(sys.argv[1])
    make_cascade(demo, read_labelled(demo / "validation.csv"), CalibrateJob(budget=0.02, source="generated"))
