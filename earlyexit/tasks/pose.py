"""The places of a person's joints: one heatmap per joint.

Tensor legend: B inputs, J joints, S the side of a heatmap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError
from earlyexit.network.boundary import MAX_SIDE, Column, PackedArray, Value
from earlyexit.tasks.base import FloatArray, IntArray, Task, ValueArray
from earlyexit.tasks.checks import check_whole, listed_names

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.training.augmentation import Moves

QUARTER = 0.25
"""Share of a heatmap's pixel by which a joint lies from the highest pixel towards its higher neighbour, as in Simple
Baselines (Xiao et al. 2018) and the hourglass networks before it."""


class PoseTask(Task):
    """An answer is x, y and probability of every joint, float32 (J, 3); outputs are heatmaps with a peak of 1.

    x and y are in pixels of the model's square input image; 0 is the middle of the left or upper pixel. The loss is the
    share of joints beyond the tolerance (1 - PCK); joints without a right place do not count.
    """

    name = "pose"
    zero_one = False
    large = True

    def __init__(
        self,
        joint_names: Sequence[str],
        *,
        heatmap_side: int,
        image_side: int,
        tolerance: float,
        mirror_pairs: Sequence[Sequence[str]] = (),
        highest: int = 5,
        sigma: float = 2.0,
    ) -> None:
        """`tolerance` is in pixels of the image; `sigma`, the width of the peaks in training, in pixels of a heatmap.

        `mirror_pairs`: joints that swap in a mirror; `highest`: the number of principal values of each heatmap (PAME
        section 5.3 takes five). Raises ValueError for contradictory values.
        """
        self.joint_names = listed_names(joint_names)
        self.heatmap_side = heatmap_side
        self.image_side = image_side
        self.tolerance = float(tolerance)
        self.mirror_pairs = tuple((left, right) for left, right in mirror_pairs)
        self.highest = highest
        self.sigma = float(sigma)
        check_whole(MAX_SIDE, heatmap_side=heatmap_side, image_side=image_side)
        names = self.joint_names
        if not names or len(set(names)) < len(names):
            raise ValueError(f"at least one joint is needed, each with a name of its own, not {list(names)}")
        for called, number in (("tolerance", self.tolerance), ("sigma", self.sigma)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{called} must be positive and finite, not {number}")
        check_whole(heatmap_side**2, highest=highest)
        paired = list(chain.from_iterable(self.mirror_pairs))
        unknown = sorted(set(paired) - set(names))
        if unknown or len(set(paired)) < len(paired):
            wrong = f"{unknown[0]!r} is no joint" if unknown else "a joint is in two pairs"
            raise ValueError(f"mirror_pairs: {wrong}; joints are {', '.join(names)}")
        self.num_outputs = len(names)
        self.num_principal_values = len(names) * highest
        self.image_sides = image_side, image_side
        keypoints = Column(name="keypoints", datatypes=("FP32",), shape=(len(names), 3))
        self.columns = keypoints, Column(name="score", datatypes=("FP32",))

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.num_outputs, self.heatmap_side, self.heatmap_side)

    def compares(self, other: Task) -> bool:
        """Whether joints and image size are the same; heatmaps and tolerances may differ."""
        if not isinstance(other, PoseTask):
            return False
        return (self.joint_names, self.image_side) == (other.joint_names, other.image_side)

    def answer(self, outputs_BC: Tensor) -> Tensor:
        """Returns each highest pixel, moved a quarter of a pixel towards its higher neighbour on each axis."""
        import torch

        side, flat_BJK = self.heatmap_side, outputs_BC.flatten(2)
        peak_BJ, at_BJ = flat_BJK.max(-1)
        places = []
        for line_BJ, step in ((at_BJ % side, 1), (at_BJ // side, side)):
            inner_BJ = (line_BJ > 0) & (line_BJ < side - 1)
            before_BJ, after_BJ = (
                flat_BJK.gather(2, (at_BJ + way * step).clamp(0, side**2 - 1)[..., None])[..., 0] for way in (-1, 1)
            )
            places.append(line_BJ + QUARTER * (after_BJ - before_BJ).sign() * inner_BJ)
        x_BJ, y_BJ = ((place_BJ + 0.5) * (self.image_side / side) - 0.5 for place_BJ in places)
        return torch.stack([x_BJ, y_BJ, peak_BJ.clamp(0, 1)], dim=-1).float()

    def principal_values(self, outputs_BC: Tensor) -> Tensor:
        """Returns the highest values of each heatmap, (B, J * `highest`)."""
        return outputs_BC.flatten(2).topk(self.highest, dim=-1, sorted=False).values.clamp(0, 1).flatten(1).float()

    def loss(self, early: ValueArray, full: ValueArray) -> FloatArray:
        near_B, counted_B = self._near(early, full)
        return np.asarray((counted_B - near_B) / np.maximum(counted_B, 1), dtype=np.float64)

    def tallies(self, early: ValueArray, right: ValueArray) -> IntArray:
        """Returns joints within the tolerance, and joints that count."""
        return np.stack(self._near(early, right), axis=1)

    def figures(self, tallies_K: IntArray) -> dict[str, float]:
        """Returns the share of all joints within the tolerance."""
        near, counted = tallies_K.tolist()
        return {"pck": near / max(counted, 1)}

    def _near(self, early: ValueArray, right: ValueArray) -> tuple[IntArray, IntArray]:
        """Returns, for each input, joints within the tolerance, and joints that count."""
        counted_BJ = ~np.isnan(right[..., :2]).any(-1)
        distance_BJ = np.hypot(*np.moveaxis(early[..., :2].astype(np.float64) - right[..., :2], -1, 0))
        near_BJ = counted_BJ & (distance_BJ <= self.tolerance)
        return near_BJ.sum(1, dtype=np.int64), counted_BJ.sum(1, dtype=np.int64)

    def to_json(self, value: Value, score: float) -> dict[str, Any]:
        assert isinstance(value, PackedArray)
        keypoints = [
            {"joint": name, "x": round(x, 3), "y": round(y, 3), "score": round(sure, 6)}
            for name, (x, y, sure) in zip(self.joint_names, value.numpy().tolist(), strict=True)
        ]
        return {"keypoints": keypoints, "score": round(score, 6)}

    @property
    def json_schema(self) -> Mapping[str, Any]:
        number = {"type": "number"}
        joint = {"joint": {"type": "string", "enum": list(self.joint_names)}, "x": number, "y": number}
        return {
            "keypoints": {
                "type": "array",
                "items": {"type": "object", "properties": {**joint, "score": number}},
                "description": f"In pixels of an image of {self.image_side} x {self.image_side}.",
            },
            "score": {"type": "number", "description": f"Mean of the {self.highest} highest values of each heatmap."},
        }

    def targets(self, labels: Sequence[Any]) -> ValueArray:
        """Returns x and y of every joint, float32 (N, J, 2), NaN for joints that cannot be seen."""
        return np.stack([self._places(np.asarray(label), row) for row, label in enumerate(labels, start=1)])

    def _places(self, places_JX: ValueArray, row: int) -> ValueArray:
        if places_JX.shape != (self.num_outputs, 2) or places_JX.dtype.kind not in "fiu":
            raise DataError(
                f"row {row}: joints of the shape {list(places_JX.shape)}; x and y of {self.num_outputs} joints are "
                f"needed, [{self.num_outputs}, 2], NaN where one cannot be seen"
            )
        places = places_JX.astype(np.float32)
        unseen = np.isnan(places)
        outside = ~unseen & ~((places >= -0.5) & (places <= self.image_side - 0.5))
        wrong = np.flatnonzero(outside.any(1) | (unseen.any(1) != unseen.all(1)))
        if len(wrong):
            x, y = places[wrong[0]].tolist()
            raise DataError(
                f"row {row}: {self.joint_names[wrong[0]]!r} at ({x:g}, {y:g}) is outside the image of "
                f"{self.image_side} x {self.image_side} pixels; both are NaN where a joint cannot be seen"
            )
        return places

    def check_taught(self, targets_N: ValueArray) -> None:
        never = np.isnan(targets_N).any(-1).all(0)
        if never.any():
            raise DataError(f"{self.joint_names[int(never.argmax())]!r} is seen in no row: nothing teaches where it is")

    def mirrored(self, targets_B: ValueArray) -> ValueArray:
        """Returns the places in the mirrored image, with left and right joints swapped."""
        index = {name: k for k, name in enumerate(self.joint_names)}
        order = list(range(self.num_outputs))
        for left, right in self.mirror_pairs:
            order[index[left]], order[index[right]] = index[right], index[left]
        mirrored = targets_B[:, order].copy()
        mirrored[..., 0] = self.image_side - 1 - mirrored[..., 0]
        return mirrored

    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Returns mean squared error to heatmaps with a Gaussian peak at each joint, over the joints that are seen."""
        seen_BJ = ~targets_B.isnan().any(-1)
        error_BJ = (outputs_BC.float() - self.heatmaps(targets_B)).square().mean((2, 3))
        return error_BJ.where(seen_BJ, 0.0).sum() / seen_BJ.sum().clamp(min=1)

    def moved(self, targets_B: Tensor, moves: Moves) -> Tensor:
        """Returns the places after the moves; NaN for joints that leave the image."""
        import torch

        turned_B = torch.from_numpy(self.mirrored(targets_B.numpy()))
        seen_B = torch.where(moves.mirrored_B[:, None, None], turned_B, targets_B)
        return moves.of_places(seen_B, self.image_side, self.image_side)

    def imitation_loss(self, outputs_BC: Tensor, full_BC: Tensor, *, keep_scale: bool = False) -> Tensor:
        """Returns mean squared error to the full model's heatmaps."""
        return (outputs_BC.float() - full_BC.float()).square().mean()

    def heatmaps(self, targets_B: Tensor) -> Tensor:
        """Returns the heatmaps for training, float32 (B, J, S, S), on the targets' device; 0 for unseen joints."""
        import torch

        at_S = torch.arange(self.heatmap_side, device=targets_B.device)
        place_BJ2 = (targets_B.float() + 0.5) * (self.heatmap_side / self.image_side) - 0.5
        off_2BJS = [(at_S - place_BJ2[..., axis, None]).square() / (2 * self.sigma**2) for axis in (0, 1)]
        x_BJS, y_BJS = ((-off_BJS).exp().nan_to_num(0.0) for off_BJS in off_2BJS)
        return y_BJS[..., :, None] * x_BJS[..., None, :]
