"""The contract of a family: the methods of a network that can be split and left early."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from earlyexit.engine.device import Memory
from earlyexit.errors import ModelFolderError
from earlyexit.named import Fill, NamedSpec
from earlyexit.network.boundary import Boundary
from earlyexit.network.piece import Layout, Piece, Tensors
from earlyexit.ramps import RampStyle
from earlyexit.ramps.pooling import Pooling

JsonDict = dict[str, Any]


class Backbone(nn.Module, ABC):
    """A network without its head: an embedding and consecutive blocks. Tensors are packed (see `piece.py`).

    The values of an input must not depend on other inputs of the batch. Exits use the first tensor after a block.
    """

    reorders_linears: ClassVar[bool] = True
    """Whether linear layers are only called, on 2-dimensional values, so that a CPU backend may re-layout weights."""
    float32_only: ClassVar[bool] = False
    """Whether the network computes in float32 regardless of the requested type. It may then have no parameters."""
    measures_importance: ClassVar[bool] = False
    """Whether `run_blocks` accepts an additional tensor, `importance` (N,), to which each block adds the attention that
    the tokens receive, and which it returns."""
    vocabulary: str | None = None
    """Name of the embedding's weights, if a decoder's head shares them; None if the head has its own weights."""
    own_runtime: ClassVar[bool] = False
    """Whether the blocks need a runtime of their own, so that they cannot be exported or captured."""

    config: Any
    num_blocks: int
    inputs: Boundary
    """The tensors that `embed` accepts."""
    max_length: int = 1
    """Maximum tokens of an input, with special tokens; 1 if inputs have no tokens."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of keys and values per token of a sequence; 0 if the network has no sequences."""
        return 0

    def open_memory(self, tokens: int, fill: Fill = "compute") -> Memory[Piece]:
        """Allocates and returns memory for the keys and values of `tokens` tokens, on the weights' device.

        Networks with sequences need it before the first batch. `fill`: how blocks that a token skipped get its keys and
        values. Raises InputError for too few tokens, and ModelFolderError if the network has no sequences.
        """
        raise ModelFolderError("this network keeps nothing of sequences")

    @abstractmethod
    def boundary(self, block: int) -> Boundary:
        """Returns the specs of the tensors after a block."""

    @abstractmethod
    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        """Returns the tensors before block 0."""

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        """Returns the tensors after a block. Subclasses define this method or `run_blocks`."""
        if type(self).run_blocks is Backbone.run_blocks:
            raise ModelFolderError(f"{type(self).__name__} needs run_block or run_blocks")
        return self.run_blocks(index, index + 1, hidden, layout)

    def run_blocks(self, first: int, end: int, hidden: Tensors, layout: Layout) -> Tensors:
        """Returns the tensors after blocks first to end - 1, between which no exit is active."""
        for index in range(first, end):
            hidden = self.run_block(index, hidden, layout)
        return hidden

    def prepare(self, spans: Collection[tuple[int, int]], device: torch.device) -> None:
        """Prepares runs of `run_blocks` from the first to the second number of each span. By default, does nothing."""

    def bridge(self, block: int) -> nn.Module | None:
        """Returns a new module from the first tensor after `block`, (B, ...), to the shape after the last block.

        It has copies of the weights of later blocks, or is an identity if the shapes are equal. Returns None if the
        family has no bridges. The values of an input must not depend on other inputs.
        """
        return None

    def to_config(self) -> JsonDict:
        """Returns the JSON configuration from which the family's `build` makes an equal, untrained backbone.

        By default, the fields of the dataclass `config`.
        """
        return asdict(self.config)

    def sha256(self) -> str:
        """Returns a digest of the weights, independent of their device, that identifies the network."""
        digest = hashlib.sha256()
        for part in weight_bytes(self):
            digest.update(part)
        return digest.hexdigest()

    def write_files(self, folder: Path) -> None:
        """Writes the files that `build` reads from a model's folder, if they do not exist. By default, none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalHead:
    """The head of a checkpoint: a ramp style, and its weights."""

    style: RampStyle
    pooling: Pooling
    num_outputs: int
    weights: Mapping[str, Tensor]
    """The weights by the names of the style's module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """The content of a checkpoint."""

    backbone: Backbone
    head: FinalHead | None
    """None if the checkpoint has no head, as bare encoders have none."""
    label_names: tuple[str, ...] | None
    """Labels in the order of the head's outputs; None if the checkpoint does not name them. They are then sorted."""
    codec: NamedSpec | None = None
    """The codec of the inputs; None if it is chosen by the data."""
    start: int | None = None
    """The first token of the answers of an encoder-decoder; None for other networks."""
    ignored: tuple[str, ...] = ()
    """Settings of a decoder's `generation_config.json` that change answers in `transformers`, but not here."""


class Family:
    """Builds backbones from configurations and checkpoints."""

    name: str
    sizes: ClassVar[Callable[..., Any]]
    """The dataclass of the backbone's configuration."""
    backbone: ClassVar[Callable[..., Backbone]]
    """The class of the backbone."""
    lazy_weights: bool = True
    """Whether saved weights replace all tensors, so that `build` may create them on the meta device."""

    def build(self, config: JsonDict, folder: Path | None = None) -> Backbone:
        """Returns a backbone with random weights. `config`: of `Backbone.to_config`; missing keys get defaults.

        `folder`: the model's folder, for families with additional files (`Backbone.write_files`), or None. Raises
        ModelFolderError for files that do not match the configuration.
        """
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
        return type(self).backbone(type(self).sizes(**values))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Returns the network of a loaded `transformers` model of this family.

        `pairs`: whether inputs are pairs of texts, which token types distinguish if the model has them. Raises
        ModelFolderError for models that the family does not support. By default, it supports none.
        """
        raise ModelFolderError(f"{self.name!r} networks have no transformers checkpoints: see docs/models.md")

    def from_state(self, weights: Mapping[str, Tensor]) -> Pretrained | None:
        """Returns the network of a state dict; None if its tensors are named like another family's.

        Raises ModelFolderError for missing tensors and wrong shapes, with a message to follow the file's name.
        """
        return None


def weight_bytes(module: nn.Module) -> Iterator[bytes | memoryview]:
    """Yields a module's state for a digest: names, dtypes, shapes and values."""
    for name, tensor in module.state_dict().items():
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data  # as bytes, because numpy has no bfloat16


def renamed(weights: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Returns a checkpoint's weights by our names. `names`: our name -> names of the tensors to concatenate."""
    return {ours: torch.cat([weights[name] for name in theirs]) for ours, theirs in names.items()}


def names_in_blocks(
    ours: str, theirs: str, num_blocks: int, parts: Mapping[str, Sequence[str]], kinds: Sequence[str] = ("weight",)
) -> dict[str, tuple[str, ...]]:
    """Returns `names` for `renamed` for the parts of all blocks. Prefixes have `{}` for the block's number."""
    return {
        f"{ours.format(k)}.{part}.{kind}": tuple(f"{theirs.format(k)}.{name}.{kind}" for name in names)
        for k in range(num_blocks)
        for part, names in parts.items()
        for kind in kinds
    }
