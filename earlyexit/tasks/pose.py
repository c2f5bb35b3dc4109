"""Pose estimation: the position of each joint of a person, from one heatmap per joint.

Tensor legend: B inputs, J joints, S the side of a heatmap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError
from earlyexit.network.boundary import MAX_SIDE, Column, Value, array_of
from earlyexit.tasks.base import FloatArray, IntArray, Task, ValueArray
from earlyexit.tasks.checks import check_whole, listed_names

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.training.augmentation import Moves

QUARTER = 0.25
"""Offset of a joint from the highest pixel towards the higher neighbour, as in Simple Baselines (Xiao et al. 2018)."""


class PoseTask(Task):
    """An answer is x, y and probability of every joint, float32 (J, 3). Outputs are heatmaps with a peak of 1.

    x and y are in pixels of the model's square input image, where 0 is the centre of the first pixel. The loss is the
    share of joints beyond the tolerance (1 - PCK). Joints without a right position do not count.
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
        """`tolerance`: in pixels of the image. `sigma`: width of the peaks in training, in pixels of a heatmap.

        `mirror_pairs`: joints that swap in a mirror image. `highest`: number of principal values per heatmap (five in
        PAME section 5.3). Raises ValueError for invalid settings.
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
            raise ValueError(f"at least one joint is needed, and all names must differ; not {list(names)}")
        for name, number in (("tolerance", self.tolerance), ("sigma", self.sigma)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name} must be positive and finite, not {number}")
        check_whole(heatmap_side**2, highest=highest)
        paired = list(chain.from_iterable(self.mirror_pairs))
        unknown = sorted(set(paired) - set(names))
        if unknown or len(set(paired)) < len(paired):
            wrong = f"{unknown[0]!r} is not a joint" if unknown else "a joint is in two pairs"
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
        """Returns each heatmap's highest pixel, moved a quarter pixel towards the higher neighbour on each axis."""
        import torch

        side, flat_BJK = self.heatmap_side, outputs_BC.flatten(2)
        peak_BJ, index_BJ = flat_BJK.max(-1)

        def neighbour(offset: int) -> Tensor:
            return flat_BJK.gather(2, (index_BJ + offset).clamp(0, side**2 - 1)[..., None])[..., 0]

        def coordinate(pixel_BJ: Tensor, stride: int) -> Tensor:
            is_inner_BJ = (pixel_BJ > 0) & (pixel_BJ < side - 1)
            refined_BJ = pixel_BJ + QUARTER * (neighbour(stride) - neighbour(-stride)).sign() * is_inner_BJ
            return (refined_BJ + 0.5) * (self.image_side / side) - 0.5

        x_BJ, y_BJ = coordinate(index_BJ % side, 1), coordinate(index_BJ // side, side)
        return torch.stack([x_BJ, y_BJ, peak_BJ.clamp(0, 1)], dim=-1).float()

    def principal_values(self, outputs_BC: Tensor) -> Tensor:
        """Returns the highest values of each heatmap, (B, J * `highest`)."""
        return outputs_BC.flatten(2).topk(self.highest, dim=-1, sorted=False).values.clamp(0, 1).flatten(1).float()

    def loss(self, early: ValueArray, full: ValueArray) -> FloatArray:
        near_B, visible_B = self._near(early, full)
        return np.asarray((visible_B - near_B) / np.maximum(visible_B, 1), dtype=np.float64)

    def tallies(self, early: ValueArray, right: ValueArray) -> IntArray:
        """Returns the numbers of joints within the tolerance, and of visible joints, (B, 2)."""
        return np.stack(self._near(early, right), axis=1)

    def figures(self, tallies_K: IntArray) -> dict[str, float]:
        """Returns the share of visible joints that are within the tolerance (PCK)."""
        near, visible = tallies_K.tolist()
        return {"pck": near / max(visible, 1)}

    def _near(self, early: ValueArray, right: ValueArray) -> tuple[IntArray, IntArray]:
        """Returns the numbers of joints within the tolerance, and of visible joints, for each input."""
        visible_BJ = ~np.isnan(right[..., :2]).any(-1)
        distance_BJ = np.hypot(*np.moveaxis(early[..., :2].astype(np.float64) - right[..., :2], -1, 0))
        near_BJ = visible_BJ & (distance_BJ <= self.tolerance)
        return near_BJ.sum(1, dtype=np.int64), visible_BJ.sum(1, dtype=np.int64)

    def to_json(self, value: Value, score: float) -> dict[str, Any]:
        keypoints = [
            {"joint": name, "x": round(x, 3), "y": round(y, 3), "score": round(probability, 6)}
            for name, (x, y, probability) in zip(self.joint_names, array_of(value).tolist(), strict=True)
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
        """Returns x and y of every joint, float32 (N, J, 2), NaN for joints that are not visible."""
        return np.stack([self._positions(np.asarray(label), row) for row, label in enumerate(labels, start=1)])

    def _positions(self, label_JX: ValueArray, row: int) -> ValueArray:
        if label_JX.shape != (self.num_outputs, 2) or label_JX.dtype.kind not in "fiu":
            raise DataError(
                f"row {row}: joints of the shape {list(label_JX.shape)}; x and y of {self.num_outputs} joints are "
                f"needed, [{self.num_outputs}, 2], NaN for joints that are not visible"
            )
        positions = label_JX.astype(np.float32)
        hidden = np.isnan(positions)
        outside = ~hidden & ~((positions >= -0.5) & (positions <= self.image_side - 0.5))
        wrong = np.flatnonzero(outside.any(1) | (hidden.any(1) != hidden.all(1)))
        if len(wrong):
            x, y = positions[wrong[0]].tolist()
            raise DataError(
                f"row {row}: {self.joint_names[wrong[0]]!r} at ({x:g}, {y:g}) is outside the image of "
                f"{self.image_side} x {self.image_side} pixels; x and y are both NaN if a joint is not visible"
            )
        return positions

    def check_coverage(self, targets_N: ValueArray) -> None:
        never_visible = np.isnan(targets_N).any(-1).all(0)
        if never_visible.any():
            name = self.joint_names[int(never_visible.argmax())]
            raise DataError(f"{name!r} is visible in no row, so that its position cannot be learned")

    def mirrored(self, targets_B: ValueArray) -> ValueArray:
        """Returns the positions in the mirrored image, with left and right joints swapped."""
        partners = dict(self.mirror_pairs) | {right: left for left, right in self.mirror_pairs}
        order = [self.joint_names.index(partners.get(name, name)) for name in self.joint_names]
        mirrored = targets_B[:, order].copy()
        mirrored[..., 0] = self.image_side - 1 - mirrored[..., 0]
        return mirrored

    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Returns mean squared error to heatmaps with a Gaussian peak at each joint, over the visible joints."""
        visible_BJ = ~targets_B.isnan().any(-1)
        error_BJ = (outputs_BC.float() - self.heatmaps(targets_B)).square().mean((2, 3))
        return error_BJ.where(visible_BJ, 0.0).sum() / visible_BJ.sum().clamp(min=1)

    def moved(self, targets_B: Tensor, moves: Moves) -> Tensor:
        """Returns the positions after the moves; NaN for joints that leave the image."""
        import torch

        mirrored_B = torch.from_numpy(self.mirrored(targets_B.numpy()))
        positions_B = torch.where(moves.mirrored_B[:, None, None], mirrored_B, targets_B)
        return moves.of_points(positions_B, self.image_side, self.image_side)

    def imitation_loss(self, outputs_BC: Tensor, full_BC: Tensor, softness: float) -> Tensor:
        """Returns mean squared error to the full model's heatmaps."""
        return (outputs_BC.float() - full_BC.float()).square().mean()

    def heatmaps(self, targets_B: Tensor) -> Tensor:
        """Returns heatmaps for training, float32 (B, J, S, S), on the targets' device; 0 for joints not visible."""
        import torch

        pixel_S = torch.arange(self.heatmap_side, device=targets_B.device)
        centre_BJ2 = (targets_B.float() + 0.5) * (self.heatmap_side / self.image_side) - 0.5

        def gaussian(centre_BJ: Tensor) -> Tensor:
            return (-((pixel_S - centre_BJ[..., None]).square() / (2 * self.sigma**2))).exp().nan_to_num(0.0)

        return gaussian(centre_BJ2[..., 1])[..., :, None] * gaussian(centre_BJ2[..., 0])[..., None, :]
