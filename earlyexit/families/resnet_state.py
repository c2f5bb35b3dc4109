"""ResNets from state dicts: torchvision's names, and those of CIFAR's usual implementation, to ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from earlyexit.families.resnet_config import ResNetConfig
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
    """The network of a state dict; None where its tensors are of another."""
    stem = weights.get("conv1.weight")
    blocks = _blocks(weights)
    classifier = next((name for name in CLASSIFIERS if f"{name}.weight" in weights), None)
    if stem is None or classifier is None or not blocks:
        return None
    large = stem.shape[-1] == LARGE_KERNEL
    codec = CODECS["large" if large else "small"]
    if size is not None:
        codec = {"height": size[0], "width": size[1]}
    config = ResNetConfig(
        blocks=blocks,
        widths=tuple(len(weights[f"layer{region + 1}.0.conv1.weight"]) for region in range(len(blocks))),
        kind="bottleneck" if "layer1.0.conv3.weight" in weights else "basic",
        stem="large" if large else "small",
        projected=any(".downsample." in name for name in weights),
        height=codec["height"],
        width=codec["width"],
    )
    renamed = _renamed(weights, config)
    return FoundResNet(config=config, weights=renamed, classifier=classifier, codec={"name": "image", **codec})


def _blocks(weights: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Of each region: how many blocks the names have."""
    numbers: list[int] = []
    while f"layer{len(numbers) + 1}.0.conv1.weight" in weights:
        region = len(numbers) + 1
        numbers.append(len({name.split(".")[1] for name in weights if name.startswith(f"layer{region}.")}))
    return tuple(numbers)


def _renamed(weights: Mapping[str, Tensor], config: ResNetConfig) -> dict[str, Tensor]:
    """`layer2.0.bn1.bias` is `blocks.N.norm_1.bias`; without the classifier."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        part, _, kind = name.rpartition(".")
        region, _, inner = part.partition(".")
        block, _, inner = inner.partition(".")
        if part in STEM:
            renamed[f"stem.{STEM[part]}.{kind}"] = tensor
        elif inner in PARTS and region[5:].isdigit() and block.isdigit():
            index = config.firsts[int(region[5:]) - 1] + int(block)
            renamed[f"blocks.{index}.{PARTS[inner]}.{kind}"] = tensor
        elif part not in CLASSIFIERS:
            renamed[name] = tensor
    return renamed
