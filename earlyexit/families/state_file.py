"""Files of state dicts (.th, .pt, .pth), read by the family whose names their tensors have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families import STATE_DICTS, find_family
from earlyexit.families.base import FinalHead, Pretrained
from earlyexit.families.pixels import ImageConfig
from earlyexit.named import NamedSpec


def load_state_file(path: Path, size: tuple[int, int] | None = None) -> tuple[Pretrained, str]:
    """Returns a file's network and family; `size`: height and width of its images, None for those of its training.

    The file holds a state dict alone, or as `state_dict` or `model` beside other facts. Raises ModelFolderError for
    other files, unknown networks and missing tensors.
    """
    weights = {name.removeprefix("module."): tensor for name, tensor in _read(path).items()}
    for name in STATE_DICTS:
        try:
            pretrained = find_family(name).from_state(weights, size)
        except ModelFolderError as error:
            raise ModelFolderError(f"{path} {error}") from error
        if pretrained is not None:
            return pretrained, name
    some = ", ".join(sorted(weights)[:3]) or "none"
    raise ModelFolderError(
        f"{path} holds no network that is known; its tensors are {some}. Known: {'; '.join(STATE_DICTS.values())}"
    )


def fill(backbone: nn.Module, weights: Mapping[str, Tensor], called: str) -> None:
    """Replace a backbone's tensors by a checkpoint's, under our names; raises ModelFolderError.

    Norms may lack their counts of batches.
    """
    norms = {name.rsplit(".", 1)[0] for name in weights if name.endswith("running_mean")}
    counts = {f"{norm}.num_batches_tracked": torch.tensor(0) for norm in norms}
    floats = {name: each.float() if each.is_floating_point() else each for name, each in weights.items()}
    try:
        backbone.load_state_dict(counts | floats, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())  # torch gives a line to each tensor
        raise ModelFolderError(f"does not fit a {called}: {reason}") from error


def linear_head(weights: Mapping[str, Tensor], name: str) -> FinalHead:
    """Returns a checkpoint's last layer, a head over mean pooling; raises ModelFolderError for missing tensors."""
    weight, bias = tensor_of(weights, f"{name}.weight", sides=2), tensor_of(weights, f"{name}.bias", sides=1)
    if len(weight) != len(bias):
        raise ModelFolderError(f"holds {name}.weight of {len(weight)} outputs and {name}.bias of {len(bias)}")
    head = {"classifier.weight": weight.float(), "classifier.bias": bias.float()}
    return FinalHead(style="light", pooling="mean", num_outputs=len(bias), weights=head)


def image_codec(config: ImageConfig, *, shortest_edge: int | None) -> NamedSpec:
    """Returns the codec for a network's images; `shortest_edge`: their size before the middle is cut out."""
    codec: dict[str, Any] = {"name": "image", "height": config.height, "width": config.width}
    return codec if shortest_edge is None else codec | {"shortest_edge": shortest_edge}


def tensor_of(weights: Mapping[str, Tensor], name: str, *, sides: int) -> Tensor:
    """Returns a tensor that a network needs; raises ModelFolderError if it is missing, or has other dimensions."""
    if name not in weights:
        raise ModelFolderError(f"has no tensor {name}")
    tensor = weights[name]
    if tensor.dim() != sides or not tensor.numel():
        raise ModelFolderError(f"holds {name} of shape {list(tensor.shape)}; one of {sides} sides is needed")
    return tensor


def _read(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader and pickle's fail in ways of their own
        raise ModelFolderError(f"{path} cannot be read as weights: {error}") from error
    inner = _innermost(state) if isinstance(state, dict) else None
    if not isinstance(inner, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in inner.items()
    ):
        raise ModelFolderError(f"{path} holds no state dict")
    return inner


def _innermost(state: dict[str, Any]) -> object:
    return next((state[key] for key in ("state_dict", "model") if key in state), state)
