"""Small text models with random weights."""

from __future__ import annotations

from typing import Any

from earlyexit.network.checkpoint import RampOptions, random_model
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
