"""ResNets from state dicts: torchvision's names, and those of CIFAR's usual implementation, to ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from earlyexit.families.resnet_config import ResNetConfig
from earlyexit.families.state_file import tensor_of
from earlyexit.named import NamedSpec

CLASSIFIERS = ("fc", "linear")
"""torchvision's name of the last layer, and CIFAR's."""
PARTS = {
    "conv1": "convolution_1",
    "conv2": "convolution_2",
    "conv3": "convolution_3",
    "bn1": "norm_1",
    "bn2": "norm_2",
    "bn3": "norm_3",
    "downsample.0": "shortcut.convolution",
    "downsample.1": "shortcut.norm",
}
STEM = {"conv1": "convolution", "bn1": "norm"}
LAYER = re.compile(r"layer([1-9]\d{0,3})\.(\d{1,4})\.(.+)", re.ASCII)
"""A part's region, its block there, and its name in the block."""
LARGE_KERNEL = 7
CODECS: Mapping[str, dict[str, Any]] = {
    "small": {"height": 32, "width": 32},
    "large": {"height": 224, "width": 224, "shortest_edge": 256},
}
"""What images the published networks with these stems are for, and how these come to that size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundResNet:
    """What a state dict holds."""

    config: ResNetConfig
    weights: Mapping[str, Tensor]
    """By our names, without the classifier."""
    classifier: str
    """The name of the last layer there."""
    codec: NamedSpec


def find_resnet(weights: Mapping[str, Tensor], size: tuple[int, int] | None) -> FoundResNet | None:
    """The network of a state dict; None where its tensors are of another.

    Raises ModelFolderError where it is not whole.
    """
    classifier = next((name for name in CLASSIFIERS if f"{name}.weight" in weights), None)
    if classifier is None or not {"conv1.weight", "layer1.0.conv1.weight"} <= set(weights):
        return None
    large = tensor_of(weights, "conv1.weight", sides=4).shape[-1] == LARGE_KERNEL
    firsts = [tensor_of(weights, f"layer{region}.0.conv1.weight", sides=4) for region in _regions(weights)]
    codec = CODECS["large" if large else "small"]
    if size is not None:
        codec = {"height": size[0], "width": size[1]}
    config = ResNetConfig(
        blocks=_blocks(weights),
        widths=tuple(map(len, firsts)),
        kind="bottleneck" if "layer1.0.conv3.weight" in weights else "basic",
        stem="large" if large else "small",
        projected=any(".downsample." in name for name in weights),
        height=codec["height"],
        width=codec["width"],
    )
    renamed = _renamed(weights, config)
    return FoundResNet(config=config, weights=renamed, classifier=classifier, codec={"name": "image", **codec})


def _regions(weights: Mapping[str, Tensor]) -> range:
    """The regions up to the last that a name has, from 1 on."""
    return range(1, max(int(found[1]) for found in map(LAYER.match, weights) if found) + 1)


def _blocks(weights: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Of each region: how many blocks the names have."""
    places = {(int(found[1]), int(found[2])) for found in map(LAYER.match, weights) if found}
    return tuple(sum(of == region for of, _ in places) for region in _regions(weights))


def _renamed(weights: Mapping[str, Tensor], config: ResNetConfig) -> dict[str, Tensor]:
    """`layer2.0.bn1.bias` is `blocks.N.norm_1.bias`; without the classifier."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        part, _, kind = name.rpartition(".")
        found = LAYER.fullmatch(part)
        if part in STEM:
            renamed[f"stem.{STEM[part]}.{kind}"] = tensor
        elif found and found[3] in PARTS:
            index = config.firsts[int(found[1]) - 1] + int(found[2])
            renamed[f"blocks.{index}.{PARTS[found[3]]}.{kind}"] = tensor
        elif part not in CLASSIFIERS:
            renamed[name] = tensor
    return renamed
