"""What `offramp train` is asked for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from earlyexit.errors import InputError, ModelFolderError
from earlyexit.families import GENERATES
from earlyexit.named import NAME_PATTERN
from earlyexit.network.boundary import FloatName
from earlyexit.network.checkpoint import RampOptions

if TYPE_CHECKING:  # a job is read without torch
    from earlyexit.training.augmentation import Augmentation

LABEL, TOKEN = "label", "token"
"""Of most models; of decoders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """Everything that decides what a training run gives; refuses a name that `model.json` cannot hold."""

    backbone: str
    """Checkpoint folder, hub name, file of a state dict (.th, .pt, .pth) or of a network's configuration (.json), or
    your own, `module:function`."""
    name: str
    codec: str | None = None
    """Your own, `module:function`; None for what the network and the data say."""
    task: str = LABEL
    """`label`, `regression`, `pose`, `segmentation`, `token` of decoders, or your own, `module:function`."""
    tokenizer: str | None = None
    """Checkpoint folder, hub name or file; None: the backbone's."""
    ramps: RampOptions = field(default_factory=RampOptions)
    joint: bool = False
    """Train backbone, ramps and head together instead of the ramps on a frozen backbone."""
    imitate: bool = False
    """Have ramps learn the full model's outputs instead of the labels; trained jointly, all exits those of the network
    as it came."""
    augmentation: Augmentation | None = None
    """How images are changed each time joint training sees them."""
    patience: int | None = None
    """Epochs in a row without a better loss on rows kept apart, after which joint training stops."""
    answers: int | None = None
    """Of decoders: ramps learn from so many tokens of the model's own answers to the rows; None: from the rows."""
    chat: bool = False
    """Of decoders: rows are what a user says in a chat, not the beginning of a text."""
    max_length: int | None = None
    epochs: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    dtype: FloatName = "float32"
    """In which a frozen backbone computes what its ramps learn from; weights are kept as they came."""
    seed: int = 0
    source: str = ""
    """Where the rows came from, for the record."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.task != TOKEN and (self.answers is not None or self.chat):
            raise InputError(f"--answers and --chat are of decoders, --task {TOKEN}")
        if self.task == TOKEN and (self.joint or self.imitate or self.dtype != "float32"):
            raise InputError(
                "a decoder's ramps learn in float32 of what the full model says: --joint, --imitate and --dtype are "
                "not for them"
            )
        if not self.joint and (self.augmentation or self.patience):
            name = "--augment" if self.augmentation else "--patience"
            raise InputError(f"{name} goes with --joint: ramps on a frozen backbone see each input once")
        if self.joint and self.dtype != "float32":
            raise InputError(f"--dtype {self.dtype} is of a frozen backbone: joint training chooses by itself")


def default_task(backbone: str) -> str:
    """A backbone's default task: `token` for a decoder's file or checkpoint folder, else `label`.

    Raises ModelFolderError where the checkpoint's config.json is not JSON.
    """
    config = Path(backbone) / "config.json"
    if not config.is_file():
        return TOKEN if backbone.endswith(".gguf") else LABEL
    try:
        says = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{config}: not JSON: {error}") from error
    return TOKEN if isinstance(says, dict) and says.get("model_type") in GENERATES else LABEL


def check_name(name: str) -> None:
    """Raise InputError for a model's name that `model.json` cannot hold."""
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InputError(
            f"a model cannot be named {name!r}: letters, digits, '.', '_' and '-' are allowed, a letter or digit "
            "first; --name gives another than the folder's"
        )
