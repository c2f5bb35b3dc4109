"""Sizes of residual networks, such as those for CIFAR and ImageNet (He et al., CVPR 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal, get_args

from earlyexit.errors import ModelFolderError
from earlyexit.families.pixels import ImageConfig, halved

Kind = Literal["basic", "bottleneck"]
Stem = Literal["small", "large"]

EXPANSION: Mapping[str, int] = {"basic": 1, "bottleneck": 4}
"""Channels that a block gives, per channel of its 3 x 3 convolution."""
LAYERS: Mapping[str, int] = {"basic": 2, "bottleneck": 3}
"""Layers with weights in a block, without its shortcut."""
STEM_HALVINGS: Mapping[str, int] = {"small": 0, "large": 2}
"""How often the stem halves the sides of an image."""
CIFAR_WIDTHS = (16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Channels of one residual block, its stride and its dilation."""

    before: int
    inner: int
    after: int
    stride: int = 1
    dilation: int = 1
    """Of its 3 x 3 convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig(ImageConfig):
    """Sizes of a network, and how its pixels are normalised. Raises ModelFolderError for impossible sizes."""

    blocks: tuple[int, ...] = (3, 3, 3)
    """Blocks in each region. Every region but the first halves the sides of the maps in its first block."""
    widths: tuple[int, ...] = CIFAR_WIDTHS
    """Channels of each region's 3 x 3 convolutions; the stem gives the first."""
    kind: Kind = "basic"
    """Blocks of two 3 x 3 convolutions, or of one between two 1 x 1 (which give four times as many channels)."""
    stem: Stem = "small"
    """A 3 x 3 convolution, or one of 7 x 7 with stride 2 and max pooling after it."""
    projected: bool = False
    """Whether shortcuts that change the shape are 1 x 1 convolutions (He et al.'s option B). Otherwise they have no
    weights: every second pixel, and zeros for new channels (option A)."""
    dilated: int = 0
    """How many of the last regions keep the sides and dilate their convolutions, as networks for segmentation do."""
    height: int = 32
    width: int = 32

    def __post_init__(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("stem", get_args(Stem))):
            if getattr(self, name) not in allowed:
                raise ModelFolderError(f"{name} {getattr(self, name)!r}; known: {', '.join(allowed)}")
        if not self.blocks or len(self.blocks) != len(self.widths):
            raise ModelFolderError(f"blocks are of {len(self.blocks)} regions, widths of {len(self.widths)}")
        if min(*self.blocks, *self.widths, self.height, self.width) < 1:
            raise ModelFolderError("every region needs a block, every width a channel, every image a pixel")
        if not 0 <= self.dilated < len(self.blocks):
            raise ModelFolderError(f"0 to {len(self.blocks) - 1} regions can be dilated, not {self.dilated}")
        if not self.projected and list(self.widths) != sorted(self.widths):
            raise ModelFolderError(f"shortcuts without weights lose no channels, so widths rise: {list(self.widths)}")

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks)

    @property
    def depth(self) -> int:
        """Layers with weights in blocks, stem and classifier, by which these networks are named."""
        return LAYERS[self.kind] * self.num_blocks + 2

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first block of every region."""
        return tuple(accumulate(self.blocks[:-1], initial=0))

    def shape_after(self, block: int) -> tuple[int, int, int]:
        """Returns (C, H, W) of the hidden state after a block."""
        region = sum(first <= block for first in self.firsts) - 1
        halvings = STEM_HALVINGS[self.stem] + min(region, self._undilated - 1)
        height, width = halved((self.height, self.width), halvings)
        return self.widths[region] * EXPANSION[self.kind], height, width

    def block_sizes(self) -> list[BlockSizes]:
        """Returns the sizes of every block, from the first on."""
        sizes: list[BlockSizes] = []
        before, dilation = self.widths[0], 1
        for region, (number, inner) in enumerate(zip(self.blocks, self.widths, strict=True)):
            strides = region > 0 and region < self._undilated
            for index in range(number):
                after = inner * EXPANSION[self.kind]
                stride = 2 if strides and index == 0 else 1
                sizes.append(BlockSizes(before=before, inner=inner, after=after, stride=stride, dilation=dilation))
                if index == 0 and region >= self._undilated:
                    dilation *= 2  # the first block's input is not dilated yet
                before = after
        return sizes

    @property
    def _undilated(self) -> int:
        return len(self.blocks) - self.dilated


def cifar_layout(depth: int = 20, *, side: int = 32, **settings: Any) -> ResNetConfig:
    """Returns a network of the 6n + 2 family (He et al., section 4.2): three regions of n basic blocks.

    Raises ModelFolderError for other depths.
    """
    if depth < 8 or depth % 6 != 2:
        raise ModelFolderError(f"a depth of 6n + 2 layers is needed (20, 32, 44, 56, 110), not {depth}")
    return ResNetConfig(blocks=((depth - 2) // 6,) * len(CIFAR_WIDTHS), height=side, width=side, **settings)


def config_from_json(config: Mapping[str, Any]) -> ResNetConfig:
    """Returns the sizes in a model's card, which early versions gave as depth and side of the 6n + 2 family."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.items()
    }
    sizes = {each.name for each in fields(ResNetConfig)} - {"mean", "std"}
    return ResNetConfig(**values) if sizes & values.keys() else cifar_layout(**values)
