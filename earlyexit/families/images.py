"""What networks over images share. Tensor legend: B images, H rows, W columns, C channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families import STATE_DICTS, find_family
from earlyexit.families.base import Backbone, FinalHead, JsonDict, Pretrained
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.piece import Layout, Tensors

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Means of red, green and blue from 0 to 1 over ImageNet, which the usual CIFAR checkpoints use too."""
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The images that a network takes, and how their pixels are normalised."""

    height: int
    """In pixels."""
    width: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Of red, green and blue from 0 to 1."""
    std: tuple[float, ...] = IMAGENET_STD

    def shape_after(self, block: int) -> tuple[int, ...]:
        """Returns the shape of one input's hidden state after a block."""
        raise NotImplementedError


class ImageBackbone(Backbone):
    """A chain of modules over images; `stem` turns pixels into the first block's input."""

    def __init__(self, config: ImageConfig, stem: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.num_blocks = len(self.blocks)
        shape = (config.height, config.width, len(config.mean))
        self.inputs = (TensorSpec(name="image", shape=shape, dtype="uint8"),)

    def boundary(self, block: int) -> Boundary:
        return (TensorSpec(name="hidden", shape=self.config.shape_after(block)),)

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return (self.stem(inputs[0]),)

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return (self.blocks[index](hidden[0]),)

    def to_config(self) -> JsonDict:
        return asdict(self.config)


class NormalisedPixels(nn.Module):
    """Turns an image codec's bytes into normalised pixels, channels first."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not saved with the weights; on the host even if weights are built on `meta` at first.
        self.register_buffer("mean_C11", _in_bytes(mean), persistent=False)
        self.register_buffer("std_C11", _in_bytes(std), persistent=False)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Returns pixels from 0 to 255, (B, H, W, C), normalised as (B, C, H, W)."""
        pixels_BCHW = images_BHWC.permute(0, 3, 1, 2).to(self.mean_C11.dtype)
        return (pixels_BCHW - self.mean_C11) / self.std_C11


def _in_bytes(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, device="cpu")[:, None, None] * 255


def load_state_file(path: Path) -> tuple[Pretrained, str]:
    """Returns a file's network and family.

    The file holds a state dict alone, or as `state_dict` or `model` beside other facts. Raises ModelFolderError for
    other files, unknown networks and missing tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader and pickle's fail in ways of their own
        raise ModelFolderError(f"{path} cannot be read as weights: {error}") from error
    inner = isinstance(state, dict) and next((state[key] for key in ("state_dict", "model") if key in state), state)
    if not isinstance(inner, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in inner.items()
    ):
        raise ModelFolderError(f"{path} holds no state dict")
    weights: dict[str, Tensor] = {name.removeprefix("module."): tensor for name, tensor in inner.items()}
    for name in STATE_DICTS:
        try:
            pretrained = find_family(name).from_state(weights)
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
