"""A class for every pixel of an image.

Tensor legend: B inputs, C classes, H and W the sides of the image, h and w those of an exit's own map.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError
from earlyexit.network.boundary import MAX_SIDE, Column, PackedArray, Value
from earlyexit.tasks.base import FloatArray, IntArray, Task, ValueArray
from earlyexit.tasks.checks import MOST_CLASSES, check_whole, colours, listed_names, read_mask, to_png
from earlyexit.tasks.label import imitated

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.training.augmentation import Moves

PNG = "image/png"
LEFT_OUT = -100
"""The class id that torch's cross-entropy ignores."""


class SegmentationTask(Task):
    """An answer is a map of class ids at the image's size, uint8 (H, W); outputs are logits, (B, C, h, w).

    The loss is the share of pixels with a wrong class (1 - pixel agreement); pixels whose right class is ignored do not
    count.
    """

    name = "segmentation"
    zero_one = False
    large = True
    content_types = (PNG,)

    def __init__(
        self, class_names: Sequence[str], *, height: int, width: int, ignored: Sequence[str] = (), stride: int = 4
    ) -> None:
        """`height` and `width` are those of the image; a pixel of an exit's own map covers `stride` x `stride` pixels.

        `ignored`: classes that count in no loss and no figure. Raises ValueError for contradictory values.
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
            wrong = f"{unknown[0]!r} is no class" if unknown else "all classes are"
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
        """Whether classes and image size are the same; the exits' own maps may differ in size."""
        if not isinstance(other, SegmentationTask):
            return False
        ours, theirs = ((task.class_names, task.height, task.width) for task in (self, other))
        return ours == theirs

    def answer(self, outputs_BC: Tensor) -> Tensor:
        """Returns the likeliest class of every pixel of the image, uint8 (B, H, W), by interpolated logits."""
        import torch
        from torch.nn.functional import interpolate

        size = self.height, self.width
        # With a pixel's logits side by side a CPU finds the highest four times as fast.
        logits_BChw = outputs_BC.float().contiguous(memory_format=torch.channels_last)
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
        """Returns for each class the pixels answered rightly, answered, and of this right class, (B, 3 * C)."""
        classes = self.num_outputs
        counted_BHW = ~np.isin(right, self._ignored_ids)
        tallies = np.zeros((len(early), 3, classes), dtype=np.int64)
        for row, counted in enumerate(counted_BHW):
            answered, true = early[row][counted], right[row][counted]
            for kind, pixels in enumerate((true[answered == true], answered, true)):
                tallies[row, kind] = np.bincount(pixels, minlength=classes)
        return tallies.reshape(len(early), -1)

    def figures(self, tallies_K: IntArray) -> dict[str, float]:
        """Returns the share of right pixels, and the mean intersection over union of the classes.

        Ignored classes, and classes that are neither answered nor right anywhere, are left out of the mean.
        """
        both_C, answered_C, true_C = tallies_K.reshape(3, self.num_outputs)
        union_C = answered_C + true_C - both_C
        there_C = union_C > 0
        there_C[self._ignored_ids] = False
        mean_iou = float((both_C[there_C] / union_C[there_C]).mean()) if there_C.any() else 0.0
        return {"pixel_accuracy": float(both_C.sum() / max(int(true_C.sum()), 1)), "mean_iou": mean_iou}

    def to_json(self, value: Value, score: float) -> dict[str, Any]:
        class_map_HW = _array(value)
        file = base64.b64encode(to_png(class_map_HW, self.num_outputs)).decode()
        counts_C = np.bincount(class_map_HW.reshape(-1), minlength=self.num_outputs)
        tones = colours(self.num_outputs)
        present = [  # those with most pixels first
            {
                "id": k,
                "name": self.class_names[k],
                "share": round(int(counts_C[k]) / class_map_HW.size, 6),
                "colour": "#{:02x}{:02x}{:02x}".format(*tones[k]),
            }
            for k in np.argsort(-counts_C, kind="stable").tolist()
            if counts_C[k]
        ]
        return {"class_map": file, "classes": present, "score": round(score, 6)}

    def to_content(self, content_type: str, value: Value) -> bytes:
        return to_png(_array(value), self.num_outputs)

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
                "description": "Those that there are, with their share of the pixels and their colour in the file.",
            },
            "score": {"type": "number", "description": "Mean probability of the pixels' classes."},
        }

    def targets(self, labels: Sequence[Any]) -> ValueArray:
        """Returns class ids, uint8 (N, H, W), of index images: a PNG file's bytes, or arrays."""
        masks = [
            read_mask(label, height=self.height, width=self.width, row=row) for row, label in enumerate(labels, start=1)
        ]
        for row, mask in enumerate(masks, start=1):
            if (most := int(mask.max())) >= self.num_outputs:
                raise DataError(
                    f"row {row}: class id {most}; the {self.num_outputs} classes are 0 to {self.num_outputs - 1}"
                )
        return np.stack(masks)

    def check_taught(self, targets_N: ValueArray) -> None:
        there_C = np.bincount(targets_N.reshape(-1), minlength=self.num_outputs) > 0
        there_C[self._ignored_ids] = True
        if not there_C.all():
            name = self.class_names[int(there_C.argmin())]
            raise DataError(f"no row has a pixel of {name!r}: nothing teaches it; leave the class out, or ignore it")

    def mirrored(self, targets_B: ValueArray) -> ValueArray:
        """Returns every map mirrored."""
        return np.ascontiguousarray(targets_B[:, :, ::-1])

    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Returns cross-entropy of the map's pixels, each with the class in the middle of its area of the image."""
        import torch
        from torch.nn.functional import cross_entropy

        _, *sides = self.output_shape
        rows, columns = (
            ((torch.arange(small, device=targets_B.device) + 0.5) * (large / small)).long()
            for small, large in zip(sides, (self.height, self.width), strict=True)
        )
        right_Bhw = targets_B[:, rows][:, :, columns].long()
        ignored = torch.tensor(self._ignored_ids, device=right_Bhw.device, dtype=torch.long)
        right_Bhw = right_Bhw.masked_fill(torch.isin(right_Bhw, ignored), LEFT_OUT)
        total = cross_entropy(outputs_BC.float(), right_Bhw, ignore_index=LEFT_OUT, reduction="sum")
        return total / (right_Bhw != LEFT_OUT).sum().clamp(min=1)

    def moved(self, targets_B: Tensor, moves: Moves) -> Tensor:
        """Returns maps moved with their images; new pixels get an ignored class, or the first if none is ignored."""
        return moves.of_classes(targets_B, outside=next(iter(self._ignored_ids), 0))

    def imitation_loss(self, outputs_BC: Tensor, full_BC: Tensor, *, keep_scale: bool = False) -> Tensor:
        """Returns cross-entropy to the full model's softened probabilities of every pixel of the map."""
        return imitated(outputs_BC, full_BC, keep_scale=keep_scale)


def _array(value: Value) -> ValueArray:
    assert isinstance(value, PackedArray)
    return value.numpy()
