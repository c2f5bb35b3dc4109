"""Semantic segmentation: a class for every pixel of an image.

Tensor legend: B inputs, C classes, H and W height and width of the image, h and w of an exit's map.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError
from earlyexit.network.boundary import MAX_SIDE, Column, Value, array_of
from earlyexit.tasks.base import FloatArray, IntArray, Task, ValueArray
from earlyexit.tasks.checks import MOST_CLASSES, check_whole, colours, listed_names, read_mask, to_png
from earlyexit.tasks.label import distillation_loss

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.training.augmentation import Moves

PNG = "image/png"
IGNORED_ID = -100
"""The class id that torch's cross-entropy ignores."""


class SegmentationTask(Task):
    """An answer is a map of class ids in the image's size, uint8 (H, W). Outputs are logits, (B, C, h, w).

    The loss is the share of pixels with a wrong class. Pixels whose right class is ignored do not count.
    """

    name = "segmentation"
    zero_one = False
    large = True
    content_types = (PNG,)

    def __init__(
        self, class_names: Sequence[str], *, height: int, width: int, ignored: Sequence[str] = (), stride: int = 4
    ) -> None:
        """`height`, `width`: size of the image. A pixel of an exit's map covers `stride` x `stride` pixels of it.

        `ignored`: classes that count in no loss and no metric. Raises ValueError for invalid settings.
        """
        self.class_names = listed_names(class_names)
        self.height = height
        self.width = width
        self.ignored = listed_names(ignored)
        self.stride = stride
        check_whole(MAX_SIDE, height=height, width=width, stride=stride)
        names = self.class_names
        if not 2 <= len(names) <= MOST_CLASSES or len(set(names)) < len(names):
            raise ValueError(f"2 to {MOST_CLASSES} different classes are needed, not {list(names)}")
        unknown = sorted(set(self.ignored) - set(names))
        if unknown or not set(names) - set(self.ignored):
            wrong = f"{unknown[0]!r} is not a class" if unknown else "all classes are ignored"
            raise ValueError(f"ignored: {wrong}; classes are {', '.join(names)}")
        self.num_outputs = len(names)
        self._ignored_ids = [names.index(name) for name in self.ignored]
        self.num_principal_values = math.prod(self.output_shape[1:])
        self.image_sides = height, width
        class_map = Column(name="class_map", datatypes=("UINT8",), shape=(height, width))
        self.columns = class_map, Column(name="score", datatypes=("FP32",))

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.num_outputs, -(-self.height // self.stride), -(-self.width // self.stride))

    def compares(self, other: Task) -> bool:
        """Whether classes and image size are the same; the exits' maps may differ in size."""
        if not isinstance(other, SegmentationTask):
            return False
        ours, theirs = ((task.class_names, task.height, task.width) for task in (self, other))
        return ours == theirs

    def answer(self, outputs_BC: Tensor) -> Tensor:
        """Returns the most probable class of every pixel, uint8 (B, H, W), from interpolated logits."""
        import torch
        from torch.nn.functional import interpolate

        size = self.height, self.width
        lowest = torch.finfo(torch.float32).min  # instead of -inf, whose product with a pixel's weight of 0 is NaN
        # argmax on a CPU is four times as fast if a pixel's logits are adjacent in memory.
        logits_BChw = outputs_BC.float().clamp_min(lowest).contiguous(memory_format=torch.channels_last)
        logits_BCHW = interpolate(logits_BChw, size=size, mode="bilinear", align_corners=False)
        return logits_BCHW.argmax(1).to(torch.uint8)

    def principal_values(self, outputs_BC: Tensor) -> Tensor:
        """Returns the highest probability of every pixel of the map, (B, h * w)."""
        logits_BCK = outputs_BC.float().flatten(2)
        return (logits_BCK - logits_BCK.amax(1, keepdim=True)).exp_().sum(1).reciprocal_()

    def loss(self, early: ValueArray, full: ValueArray) -> FloatArray:
        counted_BHW = ~np.isin(full, self._ignored_ids)
        wrong_B = (counted_BHW & (early != full)).sum((1, 2))
        return np.asarray(wrong_B / np.maximum(counted_BHW.sum((1, 2)), 1), dtype=np.float64)

    def tallies(self, early: ValueArray, right: ValueArray) -> IntArray:
        """Returns the numbers of correct, predicted and actual pixels of each class, (B, 3 * C)."""
        classes = self.num_outputs
        counted_BHW = ~np.isin(right, self._ignored_ids)
        tallies = np.zeros((len(early), 3, classes), dtype=np.int64)
        for row, counted in enumerate(counted_BHW):
            predicted, actual = early[row][counted], right[row][counted]
            for kind, pixels in enumerate((actual[predicted == actual], predicted, actual)):
                tallies[row, kind] = np.bincount(pixels, minlength=classes)
        return tallies.reshape(len(early), -1)

    def figures(self, tallies_K: IntArray) -> dict[str, float]:
        """Returns pixel accuracy, and mean intersection over union of the classes.

        Ignored classes, and classes that are neither predicted nor right for any pixel, are left out of the mean.
        """
        correct_C, predicted_C, actual_C = tallies_K.reshape(3, self.num_outputs)
        union_C = predicted_C + actual_C - correct_C
        occurs_C = union_C > 0
        occurs_C[self._ignored_ids] = False
        mean_iou = float((correct_C[occurs_C] / union_C[occurs_C]).mean()) if occurs_C.any() else 0.0
        return {"pixel_accuracy": float(correct_C.sum() / max(int(actual_C.sum()), 1)), "mean_iou": mean_iou}

    def to_json(self, value: Value, score: float) -> dict[str, Any]:
        class_map_HW = array_of(value)
        file = base64.b64encode(to_png(class_map_HW, self.num_outputs)).decode()
        counts_C = np.bincount(class_map_HW.reshape(-1), minlength=self.num_outputs)
        palette = colours(self.num_outputs)
        present = [  # classes with most pixels first
            {
                "id": k,
                "name": self.class_names[k],
                "share": round(int(counts_C[k]) / class_map_HW.size, 6),
                "colour": "#{:02x}{:02x}{:02x}".format(*palette[k]),
            }
            for k in np.argsort(-counts_C, kind="stable").tolist()
            if counts_C[k]
        ]
        return {"class_map": file, "classes": present, "score": round(score, 6)}

    def to_content(self, content_type: str, value: Value) -> bytes:
        return to_png(array_of(value), self.num_outputs)

    @property
    def json_schema(self) -> Mapping[str, Any]:
        ids = ", ".join(f"{k} {name}" for k, name in enumerate(self.class_names))
        number, text = {"type": "number"}, {"type": "string"}
        present = {"id": {"type": "integer"}, "name": text, "share": number, "colour": text}
        return {
            "class_map": {
                "type": "string",
                "contentEncoding": "base64",
                "contentMediaType": PNG,
                "description": f"A PNG file, {self.width} x {self.height}; its pixels are class ids: {ids}.",
            },
            "classes": {
                "type": "array",
                "items": {"type": "object", "properties": present, "required": list(present)},
                "description": "The classes in the image, with their share of the pixels and their colour in the file.",
            },
            "score": {"type": "number", "description": "Mean probability of the pixels' classes."},
        }

    def targets(self, labels: Sequence[Any]) -> ValueArray:
        """Returns class ids, uint8 (N, H, W). Labels are the bytes of indexed PNG files, or arrays."""
        masks = [
            read_mask(label, height=self.height, width=self.width, row=row) for row, label in enumerate(labels, start=1)
        ]
        for row, mask in enumerate(masks, start=1):
            if (largest := int(mask.max())) >= self.num_outputs:
                raise DataError(
                    f"row {row}: class id {largest}; the {self.num_outputs} classes are 0 to {self.num_outputs - 1}"
                )
        return np.stack(masks)

    def check_coverage(self, targets_N: ValueArray) -> None:
        learned_C = np.bincount(targets_N.reshape(-1), minlength=self.num_outputs) > 0
        learned_C[self._ignored_ids] = True
        if not learned_C.all():
            name = self.class_names[int(learned_C.argmin())]
            raise DataError(f"no row has a pixel of {name!r}, which cannot be learned: remove the class, or ignore it")

    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Returns cross-entropy over the map's pixels. The target of each is the class at the centre of its area."""
        import torch
        from torch.nn.functional import cross_entropy

        _, *sides = self.output_shape
        rows, columns = (
            ((torch.arange(small, device=targets_B.device) + 0.5) * (large / small)).long()
            for small, large in zip(sides, (self.height, self.width), strict=True)
        )
        right_Bhw = targets_B[:, rows][:, :, columns].long()
        ignored = torch.tensor(self._ignored_ids, device=right_Bhw.device, dtype=torch.long)
        right_Bhw = right_Bhw.masked_fill(torch.isin(right_Bhw, ignored), IGNORED_ID)
        total = cross_entropy(outputs_BC.float(), right_Bhw, ignore_index=IGNORED_ID, reduction="sum")
        return total / (right_Bhw != IGNORED_ID).sum().clamp(min=1)

    def moved(self, targets_B: Tensor, moves: Moves) -> Tensor:
        """Returns maps moved with their images. New pixels get an ignored class, or class 0 if none is ignored."""
        return moves.of_classes(targets_B, outside=next(iter(self._ignored_ids), 0))

    def imitation_loss(self, outputs_BC: Tensor, full_BC: Tensor, softness: float) -> Tensor:
        """Returns cross-entropy to the full model's softened probabilities, over the map's pixels."""
        return distillation_loss(outputs_BC, full_BC, softness)
