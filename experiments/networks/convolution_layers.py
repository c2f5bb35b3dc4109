"""Networks over images on a CPU: as torch runs them, channels-last, and with norms folded and weights laid out once.

    python -m experiments.networks.convolution_layers

One thread; medians of processor time, the sides in turn. Minutes: about 3.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from statistics import median

import torch
from torch import Tensor

from earlyexit.families.resnet import ResNetBackbone
from earlyexit.families.resnet_config import ResNetConfig, cifar_layout, imagenet_layout, small_layout
from earlyexit.reordered import reorder_convolutions
from experiments.kit import show
from experiments.turns import Figures, in_turns

NETWORKS: Mapping[str, tuple[ResNetConfig, tuple[int, ...]]] = {
    "ResNet-20, 32 x 32": (cifar_layout(20), (1, 8, 32)),
    "small, 180 x 240": (small_layout(180, 240, dilated=2), (1, 4)),
    "ResNet-50, 224 x 224": (imagenet_layout(50), (1, 4)),
}
WARM_UP = 2


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.networks.convolution_layers", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (config, batches) in NETWORKS.items():
        sides = _sides(ResNetBackbone(config).eval().requires_grad_(False))
        for batch in batches:
            images = torch.randint(0, 256, (batch, config.height, config.width, 3), dtype=torch.uint8)
            turns = {side: partial(_run, network, images) for side, network in sides.items()}
            found = in_turns(turns, options.repeats, warm_ups=WARM_UP)
            plain_ms, last_ms, reordered_ms = (median(found[side]["ms"]) for side in sides)
            rows.append((f"{name}, batch {batch}", plain_ms, plain_ms / last_ms, plain_ms / reordered_ms))
    show("", ("network", "torch ms", "torch / channels-last", "torch / reordered"), rows)


def _sides(network: ResNetBackbone) -> dict[str, Callable[[Tensor], Tensor]]:
    channels_last, reordered = deepcopy(network), deepcopy(network)
    for parameter in channels_last.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.contiguous(memory_format=torch.channels_last)
    reorder_convolutions(reordered)
    whole = {"torch": network, "channels-last": channels_last, "reordered": reordered}
    return {name: partial(_whole, each) for name, each in whole.items()}


def _whole(network: ResNetBackbone, images: Tensor) -> Tensor:
    hidden: Tensor = network.stem(images)
    for block in network.blocks:
        hidden = block(hidden)
    return hidden


@torch.inference_mode()
def _run(side: Callable[[Tensor], Tensor], images: Tensor) -> Figures:
    started_s = time.process_time()
    side(images)
    return {"ms": 1e3 * (time.process_time() - started_s)}


if __name__ == "__main__":
    main()
