"""Poses (LSP) and street scenes (CamVid): small networks trained jointly with their exits, beside ones with one exit.

    OFFRAMP_DATA=... python -m experiments.vision [--case lsp] [--plain] [--epochs 40] [--out runs/vision]

Residual networks from weights at random, with bridges (PAME section 5.1) before the same head at every exit, all exits
trained together, equal weights (section 5.2). LSP: 2,500 images learn, half of 500 calibrates (budget 1 %, confidence
90 %), the other half is reported on; CamVid: 367 learn, 101 calibrate, 233 are reported on, the source's parts.
`--plain` trains the same network without ramps as long, to compare the last exit with. Models stay in runs/; one that
is there is not trained again. Minutes on two cores: LSP 25, CamVid 15; as long again with `--plain`. Seed 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from earlyexit.checkpoint import RampOptions
from earlyexit.dataset import LabelledRows, read_labelled
from earlyexit.training.augmentation import Augmentation
from experiments.data import require_data
from offramp.jobs.progress import progress_bars
from offramp.jobs.train_job import TrainJob
from offramp.jobs.training import train

LSP_JOINTS = (
    *("right ankle", "right knee", "right hip", "left hip", "left knee", "left ankle"),
    *("right wrist", "right elbow", "right shoulder", "left shoulder", "left elbow", "left wrist"),
    *("neck", "head top"),
)
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
