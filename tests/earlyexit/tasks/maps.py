"""Small tasks whose outputs are maps, and maps made by hand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from earlyexit.families.own import TensorBackbone
from earlyexit.network.boundary import Encoded, TensorSpec
from earlyexit.network.checkpoint import RampOptions, load_pretrained
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.segmentation import SegmentationTask
from tests.earlyexit.codecs.pictures import png_chunks
from tests.earlyexit.network.models import ramped

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


def png_with_large_text() -> bytes:
    """Returns an image of 6 x 4 grey pixels with a text that decompresses to more than Pillow accepts."""
    text = (b"zTXt", b"k\0\0" + zlib.compress(bytes(3 << 20)))
    return png_chunks((6, 4, 8, 0), [bytes(6)] * 4, text)


def ids(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.uint8]:
    """Returns a mask."""
    return np.array(rows, dtype=np.uint8)


class Slightly(nn.Module):
    """Logits that change a little from block to block, so that exits agree on most pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        return maps_BCHW + 0.5 * torch.tanh(self.convolution(maps_BCHW))


class Reading(nn.Module):
    """Pixels (B, H, W, 3) as maps with a pixel for `stride` x `stride` of them."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, kernel_size=stride, stride=stride)

    def forward(self, pixels_BHW3: Tensor) -> Tensor:
        maps_BCHW: Tensor = self.convolution(pixels_BHW3.float().movedim(-1, 1) / 32)
        return maps_BCHW


def build(channels: int = 4, stride: int = 2, height: int = 4, width: int = 6) -> TensorBackbone:
    """Three blocks that all give what the task's exits do."""
    return TensorBackbone(
        embed=Reading(channels, stride),
        blocks=[Slightly(channels) for _ in range(3)],
        inputs=(TensorSpec(name="image", shape=(height, width, 3), dtype="uint8"),),
        config={"channels": channels, "stride": stride, "height": height, "width": width},
    )


def model_of_maps() -> EarlyExitModel:
    """Returns an untrained model of `STREET` with ramps after all blocks but the last."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pretrained, family = load_pretrained(f"{__name__}:build")
    codec = {"name": "image", "height": STREET.height, "width": STREET.width}
    return ramped(pretrained, family, STREET, codec=codec, ramps=RampOptions(style="given"), name="street")


def images(count: int, seed: int = 0) -> list[npt.NDArray[np.uint8]]:
    """Noise, in the size of `STREET`."""
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 256, size=(count, STREET.height, STREET.width, 3), dtype=np.uint8))


def encoded_images(count: int, seed: int = 0) -> list[Encoded]:
    """The same, as the network takes them."""
    return [Encoded(1, (image[None],)) for image in images(count, seed)]
