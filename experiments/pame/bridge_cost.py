"""Multiply-adds of bridges and heads beside those of the backbone (PAME, figure 3 and section 5.1).

    python -m experiments.pame.bridge_cost

Counted, not measured: ResNet-101 for images of 224 x 224, ramps at PAME's places. No weights are made. Minutes: less
than one.
"""

from __future__ import annotations

from argparse import ArgumentParser
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from earlyexit.families.resnet import ResNetBackbone
from earlyexit.families.resnet_config import imagenet_layout
from earlyexit.ramps import build_ramp
from earlyexit.ramps.heads import Ramp
from experiments.kit import show

SIDE = 224
PLACES = tuple(range(0, 31, 3))
"""Blocks, from 0: PAME's e = 3i - 2 counts from 1 (section 7.1)."""
LABELS, JOINTS, CLASSES = 1000, 16, 19
"""Of ImageNet, MPII and Cityscapes."""
SIMPLE_WIDTH = 256
"""Channels of the deconvolutions in Simple Baselines' own head."""
PUBLISHED = {"simple_gmacs": 5.77, "simple_share": 0.735}
"""Of Simple Baselines' head, at this image size (PAME, section 3.2)."""


def main() -> None:
    """Count and print."""
    ArgumentParser(prog="python -m experiments.pame.bridge_cost", description=__doc__).parse_args()
    with torch.device("meta"):
        backbone = ResNetBackbone(imagenet_layout(101)).to("meta").eval()
        backbone_macs = _of_backbone(backbone)
        whole = sum(backbone_macs)
        _show_bridges(backbone, backbone_macs)
        _show_heads(backbone.boundary(backbone.num_blocks - 1)[0].shape, whole)
        _show_simple(whole)


def _show_bridges(backbone: ResNetBackbone, backbone_macs: list[int]) -> None:
    whole, rows = sum(backbone_macs), []
    for block in PLACES:
        before = sum(backbone_macs[: block + 1])
        bridge = macs_of(backbone.bridge(block), torch.empty(1, *backbone.boundary(block)[0].shape))
        rows.append((block, before / 1e9, bridge / 1e9, bridge / whole, bridge / (whole - before)))
    columns = ("after block", "backbone G", "bridge G", "of the backbone", "of what is left")
    show("Bridges of ResNet-101: multiply-adds up to a block, and of the bridge behind it", columns, rows)


def _show_heads(row: tuple[int, ...], whole: int) -> None:
    heads = {
        "light, 1000 labels": ("light", (LABELS,)),
        "maps, 19 classes at stride 4": ("maps", (CLASSES, SIDE // 4, SIDE // 4)),
        "deconv, 16 joints at stride 4": ("deconv", (JOINTS, SIDE // 4, SIDE // 4)),
    }
    rows = []
    for name, (style, output_shape) in heads.items():
        head = build_ramp(style, row, output_shape, "mean")
        macs = macs_of(_Head(head), torch.empty(1, *row))
        rows.append((name, macs / 1e9, macs / whole))
    show("Heads behind the last block", ("head", "G", "of the backbone"), rows)


def _show_simple(whole: int) -> None:
    """Simple Baselines' head two ways: what is computed, and with every tap at every pixel that comes out."""
    sides, widths = (7, 14, 28), (2048, SIMPLE_WIDTH, SIMPLE_WIDTH)
    taps = [16 * before * SIMPLE_WIDTH for before in widths]
    last = (SIDE // 4) ** 2 * SIMPLE_WIDTH * JOINTS
    done = sum(side**2 * each for side, each in zip(sides, taps, strict=True)) + last
    naive = sum((2 * side) ** 2 * each for side, each in zip(sides, taps, strict=True)) + last
    rows = [
        ("computed", done / 1e9, done / whole),
        ("every tap at every pixel given", naive / 1e9, naive / whole),
        ("the paper's", PUBLISHED["simple_gmacs"], PUBLISHED["simple_share"]),
    ]
    show("Simple Baselines' head of 256 channels", ("counted as", "G", "of the backbone"), rows)


class _Head(nn.Module):
    """A head on whole maps."""

    def __init__(self, head: Ramp) -> None:
        super().__init__()
        self.head = head

    def forward(self, rows: Tensor) -> Tensor:
        return self.head.classify(self.head.gather_rows(rows))


def _of_backbone(backbone: ResNetBackbone) -> list[int]:
    """Of every block; the stem's are the first block's."""
    stem = macs_of(backbone.stem, torch.empty(1, SIDE, SIDE, 3, dtype=torch.uint8))
    sizes = backbone.config.block_sizes()
    shapes: list[tuple[int, ...]] = [(sizes[0].before, SIDE // 4, SIDE // 4)]
    shapes += [backbone.boundary(block)[0].shape for block in range(backbone.num_blocks - 1)]
    macs = [macs_of(block, torch.empty(1, *shape)) for block, shape in zip(backbone.blocks, shapes, strict=True)]
    return [stem + macs[0], *macs[1:]]


@torch.no_grad()
def macs_of(network: nn.Module, values: Tensor) -> int:
    """Multiply-adds of its convolutions and linear layers on these values; those of biases and norms are left out."""
    total = 0

    def count(module: nn.Module, given: tuple[Any, ...], result: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.ConvTranspose2d):  # every number that comes in is multiplied with all it goes to
            total += given[0].numel() * prod(module.kernel_size) * module.out_channels // module.groups
        elif isinstance(module, nn.Conv2d):
            total += result.numel() * prod(module.kernel_size) * module.in_channels // module.groups
        elif isinstance(module, nn.Linear):
            total += result.numel() * module.in_features

    hooks = [module.register_forward_hook(count) for module in network.modules()]
    network.eval()(values)
    for hook in hooks:
        hook.remove()
    return total


if __name__ == "__main__":
    main()
