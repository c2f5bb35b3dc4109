"""Small tasks whose outputs are maps, and maps made by hand."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.segmentation import SegmentationTask

BODY = PoseTask(
    ("head", "left hand", "right hand"),
    heatmap_side=8,
    image_side=32,
    tolerance=4.0,
    mirror_pairs=[("left hand", "right hand")],
    highest=2,
)
"""A pixel of a heatmap is four of the image: the middle of heatmap pixel u lies at 4 * u + 1.5."""
STREET = SegmentationTask(("road", "car", "sky", "unknown"), height=4, width=6, ignored=("unknown",), stride=2)
"""Maps of 2 x 3 pixels."""


def peaks(*places: tuple[int, int, float]) -> Tensor:
    """Heatmaps (1, J, 8, 8) that are 0 but for one value each: (x, y, value)."""
    maps = torch.zeros(1, len(places), BODY.heatmap_side, BODY.heatmap_side)
    for joint, (x, y, value) in enumerate(places):
        maps[0, joint, y, x] = value
    return maps


def logits_of(classes: Sequence[Sequence[int]], probability: float = 0.9) -> Tensor:
    """Logits (1, 4, h, w) that give each pixel's class that probability, and the others the same share of the rest."""
    index = torch.tensor(classes)
    rest = torch.full((4, *index.shape), (1 - probability) / 3)
    return rest.scatter(0, index[None], probability).log()[None]


def png_of(array: npt.NDArray[Any], mode: str | None = None, **options: Any) -> bytes:
    """A PNG file of an array, in a mode of Pillow's."""
    file = io.BytesIO()
    image = Image.fromarray(array)
    (image if mode is None else image.convert(mode)).save(file, format=options.pop("format", "PNG"), **options)
    return file.getvalue()


def ids(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.uint8]:
    """A mask."""
    return np.array(rows, dtype=np.uint8)
