"""What `offramp inject` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from earlyexit.errors import InputError
from earlyexit.network.checkpoint import RampOptions
from offramp.commands.train_job import check_name

PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".th", ".joblib")
"""Endings of files that may run foreign code while they are loaded."""
MOST_BLOCKS = 12
"""Default number of blocks; a transformer of that many layers is the largest that planners are measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectJob:
    """Everything that decides what an injection gives; refuses what cannot be a model."""

    backbone: str
    """An ONNX file, or `module:function` that gives a torch module and example inputs."""
    name: str
    codec: str | None = None
    """Your own, `module:function`; None for what the network and the data say."""
    tokenizer: str | None = None
    max_length: int | None = None
    image_size: tuple[int, int] | None = None
    """Height and width, where an ONNX file leaves them open."""
    pixels: Mapping[str, Any] = field(default_factory=dict)
    """How an ONNX file takes pixels: settings of `earlyexit.foreign.onnx_config.Pixels`."""
    labels: tuple[str, ...] | None = None
    """Names of the model's answers in its order; None for what the data says."""
    output: str | None = None
    """Of several, the one that is the answer; None for the only one that can be."""
    blocks: int | None = None
    """None for as many as there are sites for, up to `MOST_BLOCKS`."""
    sets: bool = False
    """Whether it may be cut where a few tensors carry everything together, where for long none does alone."""
    ramps: RampOptions = field(default_factory=RampOptions)
    from_answers: bool = False
    """Have ramps learn of the model's own answers instead of the labels."""
    hold_out: float | None = None
    """Share of the rows to keep from training."""
    epochs: int | None = None
    learning_rate: float | None = None
    seed: int = 0
    source: str = ""
    """Where the rows came from, for the record."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.backbone.endswith(PICKLES):
            raise InputError(
                f"{self.backbone} is a pickle, which may run foreign code and is not loaded; give an ONNX file, or "
                "your own module:function that returns the module, its weights from safetensors or by "
                "torch.load(..., weights_only=True), and example inputs"
            )
        if self.blocks is not None and self.blocks < 2:
            raise InputError(f"--blocks {self.blocks}; at least 2 are needed, for a ramp to sit between them")
        if self.hold_out is not None and not 0 < self.hold_out < 1:
            raise InputError(f"--hold-out {self.hold_out:g}; a share between 0 and 1 is needed")
