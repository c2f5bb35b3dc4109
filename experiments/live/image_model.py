"""An image model in two halves or whole: its folder, images, and what the uncut model says of each.

ResNet-20 with ramps as `python -m experiments.trained.cifar10` leaves it, and CIFAR-10's test images; without
OFFRAMP_DATA the same network with random weights, and noise.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from earlyexit.boundary import HopDtype
from earlyexit.codecs import find_codec
from earlyexit.cut import cut_out
from earlyexit.dataset import read_labelled
from earlyexit.model import EarlyExitModel
from earlyexit.network import from_wire
from earlyexit.piece import Piece
from earlyexit.policies.base import Opinion
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.signature import Encoded
from earlyexit.split import Split
from earlyexit.store import load_model, read_card, save_model
from earlyexit.train import exit_outputs
from earlyexit.wire import Answer, entering
from experiments.data import RUNS, data_folder
from experiments.trained import cifar10
from offramp.jobs.calibration import read_calibration
from optimizer.plan import Plan, PolicySpec, Stage

NETWORK, RAMP_STYLE = "resnet20", "light"
DEPTH, SIDE = 20, 32
EDGE = 1e-3
"""Images whose confidence at a ramp is as near to its threshold are not sent: batches round otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """A model, and images that are sent to it as files."""

    folder: Path
    model: EarlyExitModel
    thresholds: dict[int, float]
    """Confidences."""
    images: tuple[bytes, ...]
    encoded: tuple[Encoded, ...]
    is_trained: bool

    @property
    def policy(self) -> ConfidencePolicy:
        return ConfidencePolicy(self.thresholds)

    def plan(self, *bounds: int, replicas: int = 2, batch: int = 8) -> Plan:
        """Stages between these blocks, every ramp on."""
        edges = (0, *bounds, self.model.num_blocks)
        stages = tuple(
            Stage(device="cpu", replicas=replicas, splits=(self._split(first, end, batch),))
            for first, end in pairwise(edges)
        )
        return Plan(stages=stages, policy=PolicySpec(name="confidence", thresholds=self.thresholds))

    def answers(self, *bounds: int, hop_dtype: HopDtype = "same") -> list[Answer]:
        """Of every image alone, by the model cut at these blocks; by the uncut one where there are none."""
        edges = (0, *bounds, self.model.num_blocks)
        return [self._answer(each, edges, hop_dtype) for each in self.encoded]

    def _split(self, first: int, end: int, batch: int) -> Split:
        ramps = tuple(ramp for ramp in sorted(self.thresholds) if first <= ramp < end)
        return Split(first=first, end=end, batch=batch, ramps=ramps)

    def _answer(self, encoded: Encoded, edges: Sequence[int], hop_dtype: HopDtype) -> Answer:
        piece: Piece | None = from_wire(self.model, entering([""], [encoded]), self.policy)
        for first, end in pairwise(edges):
            assert piece is not None
            piece = from_wire(self.model, piece.to_wire(hop_dtype), self.policy) if first else piece
            for step in cut_out(self.model, first, end, self._split(first, end, 1).ramps, self.policy).run(piece):
                if step.answers:
                    return step.answers[0]
                piece = step.survivors
        raise AssertionError("the last block answers")


def image_model(num_images: int, *, halving: Sequence[int] = ()) -> ImageModel:
    """Trained where there is data, else random; made where it is missing.

    `halving`: ramps at each of which half of the images that are still inside leave, instead of calibrated thresholds.
    """
    data = data_folder()
    trained = data is not None and (data / cifar10.TEST).is_file()
    folder, thresholds, images = _trained(num_images) if trained else _random(num_images)
    model, codec = load_model(folder), find_codec(read_card(folder).codec, folder)
    encoded = tuple(codec.encode(list(images), truncate=False))
    if halving or not thresholds:
        thresholds = medians(model, encoded, halving or model.ramp_indices[:2])
    clear = _clear_of_edges(model, encoded, thresholds)
    return ImageModel(
        folder=folder,
        model=model,
        thresholds=thresholds,
        images=tuple(images[k] for k in clear),
        encoded=tuple(encoded[k] for k in clear),
        is_trained=trained,
    )


def _trained(num_images: int) -> tuple[Path, dict[int, float], Sequence[bytes]]:
    folder = RUNS / f"cifar10-{NETWORK}-{RAMP_STYLE}"
    learn, test = (read_labelled(data_folder() / name) for name in (cifar10.TRAIN, cifar10.TEST))  # type: ignore[operator] # it is there
    if not (folder / "calibration.json").is_file():
        cifar10.run(folder, NETWORK, RAMP_STYLE, learn, test)
    step = max(1, len(test) // num_images)
    [files] = test.columns.values()
    return folder, dict(read_calibration(folder).thresholds), [bytes(file) for file in files[::step][:num_images]]


def _random(num_images: int) -> tuple[Path, dict[int, float], Sequence[bytes]]:
    from earlyexit.checkpoint import RampOptions, random_model
    from earlyexit.tasks.label import LabelTask

    folder = RUNS / "live" / "random-resnet"
    codec = {"name": "image", "height": SIDE, "width": SIDE}
    task, ramps = LabelTask(tuple("abcdefghij")), RampOptions(style="mlp", pooling="grid")
    config = {"depth": DEPTH, "side": SIDE}
    save_model(random_model(config, family="resnet", name="random", codec=codec, task=task, ramps=ramps), folder)
    return folder, {}, [_noise(seed) for seed in range(num_images)]


def _noise(seed: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def medians(model: EarlyExitModel, encoded: Sequence[Encoded], ramps: Sequence[int]) -> dict[int, float]:
    """Thresholds by which half of the images that are still inside leave at each of these ramps."""
    outputs = exit_outputs(model, encoded)
    thresholds, inside = dict[int, float](), np.ones(len(encoded), dtype=bool)
    for ramp in ramps:
        score_B = Opinion(model.task, outputs[ramp]).score_B.double().numpy()
        thresholds[ramp] = float(np.median(score_B[inside]))
        inside &= score_B < thresholds[ramp]
    return thresholds


def _clear_of_edges(model: EarlyExitModel, encoded: Sequence[Encoded], thresholds: dict[int, float]) -> list[int]:
    outputs = exit_outputs(model, encoded)
    near = np.zeros(len(encoded), dtype=bool)
    for ramp, threshold in thresholds.items():
        near |= np.abs(Opinion(model.task, outputs[ramp]).score_B.numpy() - threshold) < EDGE
    return np.flatnonzero(~near).tolist()
