"""Small text models with random weights, and ramps for loaded networks."""

from __future__ import annotations

from typing import Any

import torch

from earlyexit.families.base import Pretrained
from earlyexit.named import NamedSpec
from earlyexit.network.checkpoint import RampOptions, add_ramps, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_blocks": 4,
    "num_heads": 4,
    "intermediate_size": 64,
    "max_length": 32,
}
ABC = LabelTask(("a", "b", "c"))


def small(
    task: Task = ABC, *, seed: int = 1, family: str = "bert", ramps: RampOptions | None = None, **sizes: Any
) -> EarlyExitModel:
    """Four blocks, ramps after 0, 1 and 2, unless `sizes` or `ramps` say otherwise; its weights need no gradients."""
    model = random_model(SMALL | sizes, task=task, seed=seed, family=family, ramps=ramps)
    return model.requires_grad_(False)


def ramped(
    pretrained: Pretrained,
    family: str,
    task: Task = ABC,
    *,
    codec: NamedSpec | None = None,
    ramps: RampOptions | None = None,
    seed: int | None = 0,
    name: str = "m",
) -> EarlyExitModel:
    """A network that was read, with untrained ramps; by its own codec, or else one of texts; without gradients.

    `seed`: None for ramps of the random numbers that come next.
    """
    spec = codec or pretrained.codec or {"name": "text", "max_length": pretrained.backbone.max_length}
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        model = add_ramps(pretrained, name=name, family=family, codec=spec, task=task, ramps=ramps or RampOptions())
    return model.requires_grad_(False)
