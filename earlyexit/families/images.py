"""Code that image networks share. Tensor legend: B images, H height, W width, C channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families import STATE_DICTS, find_family
from earlyexit.families.base import Backbone, FinalHead, Pretrained
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.piece import Layout, Tensors

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""ImageNet's means of red, green and blue, from 0 to 1. The common CIFAR checkpoints use them too."""
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Size of a network's images in pixels, and normalisation of red, green and blue from 0 to 1."""

    height: int
    width: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def shape_after(self, block: int) -> tuple[int, ...]:
        """Returns the shape of one input's hidden state after a block."""
        raise NotImplementedError


class ImageBackbone(Backbone):
    """Consecutive modules over images. `stem` maps pixels to the first block's input."""

    config: ImageConfig

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


class NormalisedPixels(nn.Module):
    """Normalises the uint8 pixels of an image codec."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not saved with the weights, and created on the host even if the weights are on the meta device.
        self.register_buffer("mean_C11", _in_bytes(mean), persistent=False)
        self.register_buffer("std_C11", _in_bytes(std), persistent=False)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Returns normalised pixels, (B, C, H, W), of pixels from 0 to 255, (B, H, W, C)."""
        pixels_BCHW = images_BHWC.permute(0, 3, 1, 2).to(self.mean_C11.dtype)
        return (pixels_BCHW - self.mean_C11) / self.std_C11


def _in_bytes(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, device="cpu")[:, None, None] * 255


def read_pickle(path: Path, device: str = "cpu") -> Any:
    """Returns what `torch.save` wrote; raises ModelFolderError for other files and for objects that are no tensors.

    `device`: where tensors are loaded; "meta" reads their shapes only.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch and pickle raise many kinds of errors for broken files
        raise ModelFolderError(f"{path} cannot be read as weights by torch.load: {type(error).__name__}") from error


def load_state_file(path: Path) -> tuple[Pretrained, str]:
    """Returns the network in a file, and its family.

    The file is a state dict, or a dict with one as `state_dict` or `model`. Raises ModelFolderError otherwise.
    """
    state = read_pickle(path)
    if isinstance(state, dict):
        state = state.get("state_dict", state.get("model", state))
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise ModelFolderError(f"{path} has no state dict")
    weights: dict[str, Tensor] = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    for name in STATE_DICTS:
        try:
            pretrained = find_family(name).from_state(weights)
        except ModelFolderError as error:
            raise ModelFolderError(f"{path} {error}") from error
        if pretrained is not None:
            return pretrained, name
    some = ", ".join(sorted(weights)[:3]) or "none"
    raise ModelFolderError(
        f"{path} has no known network; its first tensors are {some}. Known: {'; '.join(STATE_DICTS.values())}"
    )


def filled(
    make: Callable[[], Backbone],
    weights: Mapping[str, Tensor],
    layers: Mapping[str, str],
    classifier: str,
    codec: NamedSpec,
    *,
    called: str,
) -> Pretrained:
    """Returns the network of a state dict. `layers`: name of a layer with weights -> our name.

    Raises ModelFolderError if the weights do not fit the network, which messages call `called`.
    """
    with torch.device("meta"):
        backbone = make()
    head, parts = linear_head(weights, classifier), {name: name.rpartition(".") for name in weights}
    renamed = {
        f"{layers.get(layer, layer)}.{kind}": weights[name]
        for name, (layer, _, kind) in parts.items()
        if layer != classifier
    }
    # Batch norms may lack num_batches_tracked.
    norms = {name.rsplit(".", 1)[0] for name in renamed if name.endswith("running_mean")}
    counts = {f"{norm}.num_batches_tracked": torch.tensor(0) for norm in norms}
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in renamed.items()}
    try:
        backbone.load_state_dict(counts | floats, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())  # torch's message has one line per tensor
        raise ModelFolderError(f"does not fit a {called}: {reason}") from error
    return Pretrained(backbone=backbone, head=head, label_names=None, codec=codec)


def linear_head(weights: Mapping[str, Tensor], name: str) -> FinalHead:
    """Returns a checkpoint's last layer as a head with mean pooling. Raises ModelFolderError for missing tensors."""
    weight, bias = tensor_of(weights, f"{name}.weight", sides=2), tensor_of(weights, f"{name}.bias", sides=1)
    if len(weight) != len(bias):
        raise ModelFolderError(f"has {name}.weight of {len(weight)} outputs and {name}.bias of {len(bias)}")
    head = {"classifier.weight": weight.float(), "classifier.bias": bias.float()}
    return FinalHead(style="light", pooling="mean", num_outputs=len(bias), weights=head)


def image_codec(config: ImageConfig, *, shortest_edge: int | None) -> NamedSpec:
    """Returns the codec for a network's images. `shortest_edge`: their shorter side before the centre is cropped."""
    codec: dict[str, Any] = {"name": "image", "height": config.height, "width": config.width}
    return codec if shortest_edge is None else codec | {"shortest_edge": shortest_edge}


def tensor_of(weights: Mapping[str, Tensor], name: str, *, sides: int) -> Tensor:
    """Returns a tensor with `sides` dimensions; raises ModelFolderError if it is missing or has other dimensions."""
    if name not in weights:
        raise ModelFolderError(f"has no tensor {name}")
    tensor = weights[name]
    if tensor.dim() != sides or not tensor.numel():
        raise ModelFolderError(f"has {name} of shape {list(tensor.shape)}; {sides} dimensions are needed")
    return tensor
