"""Small networks over images with random weights: classifiers, and of poses and class maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from earlyexit.families.resnet import ResNetConfig, cifar_layout
from earlyexit.families.vgg import VggConfig
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.segmentation import SegmentationTask

JOINTS = ("head", "neck", "left hand", "right hand")
CLASSES = ("road", "car", "sky")
LABELS = LabelTask(("a", "b", "c", "d"))


def vision_model(
    config: ResNetConfig | VggConfig,
    task: Task = LABELS,
    *,
    style: str = "light",
    head: str | None = None,
    seed: int = 0,
) -> EarlyExitModel:
    """Any layout with any ramps; norms as if it had been trained, so that none can be forgotten."""
    model = random_model(
        asdict(config),
        family="resnet" if isinstance(config, ResNetConfig) else "vgg",
        codec={"name": "image", "height": config.height, "width": config.width},
        task=task,
        ramps=RampOptions(style=style, head_style=head),
        seed=seed,
    )
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return model.requires_grad_(False)


def small_layout(height: int, width: int, *, narrowest: int = 16, **settings: Any) -> ResNetConfig:
    """Four regions of a basic block; the last one has a second block."""
    widths = tuple(narrowest * 2**region for region in range(4))
    sizes: dict[str, Any] = {"blocks": (1, 1, 1, 2), "widths": widths, "stem": "large", "projected": True}
    return ResNetConfig(**sizes, height=height, width=width, **settings)


def pose_model(side: int = 96, *, style: str = "bridge", head: str = "deconv", seed: int = 0) -> EarlyExitModel:
    """Four joints in square images; a pixel of a heatmap is four of the image."""
    task = PoseTask(JOINTS, heatmap_side=side // 4, image_side=side, tolerance=side / 10)
    return vision_model(small_layout(side, side, narrowest=8), task, style=style, head=head, seed=seed)


def segmentation_model(
    height: int = 180, width: int = 240, *, style: str = "bridge", head: str = "maps", seed: int = 0
) -> EarlyExitModel:
    """Three classes; the last two regions are dilated."""
    task = SegmentationTask(CLASSES, height=height, width=width)
    return vision_model(small_layout(height, width, narrowest=8, dilated=2), task, style=style, head=head, seed=seed)


MODELS: Mapping[str, Callable[[], EarlyExitModel]] = {
    "CIFAR's layout": lambda: vision_model(cifar_layout(14, side=15)),
    "CIFAR's layout, bridges": lambda: vision_model(cifar_layout(14, side=15), style="bridge"),
    "basic": lambda: vision_model(small_layout(50, 35, narrowest=4)),
    "basic, bridges": lambda: vision_model(small_layout(50, 35, narrowest=4), style="bridge"),
    "bottleneck": lambda: vision_model(small_layout(50, 35, narrowest=4, kind="bottleneck")),
    "bottleneck, dilated": lambda: vision_model(small_layout(50, 35, narrowest=4, kind="bottleneck", dilated=2)),
    "vgg": lambda: vision_model(_vgg(norms=False)),
    "vgg with norms": lambda: vision_model(_vgg(norms=True)),
    "pose, bridges": lambda: pose_model(36),
    "pose": lambda: pose_model(36, style="maps"),
    "segmentation, bridges": lambda: segmentation_model(45, 60),
    "segmentation": lambda: segmentation_model(45, 60, style="maps"),
    "segmentation, deconvolutions": lambda: segmentation_model(45, 60, style="deconv", head="deconv"),
}
"""A model of every family and kind of head, as small as possible."""


def _vgg(**settings: Any) -> VggConfig:
    return VggConfig(convolutions=(1, 2), widths=(4, 8), cells=2, hidden=(12, 10), height=17, width=14, **settings)


def noise(model: EarlyExitModel, count: int, *, seed: int = 0) -> list[Encoded]:
    """Images of the size that a model takes, of different brightness."""
    rng = np.random.default_rng(seed)
    shape = model.takes(0)[0].shape
    return [
        Encoded(1, (rng.integers(0, most, (1, *shape)).astype(np.uint8),))
        for most in rng.integers(20, 256, count).tolist()
    ]
