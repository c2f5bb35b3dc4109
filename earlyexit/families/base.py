"""The contract of a family: what a network must offer to be cut and left early."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """A chain of blocks over tensors that have a row per token of all inputs, or a row per input.

    Blocks must treat every input on its own: an input's values may depend on its own rows only. Exits look at the first
    tensor of a boundary.
    """

    reorders_linears: ClassVar[bool] = True
    """Whether its linear layers are only called, with two-dimensional values, so that a CPU may keep their weights in
    another layout."""
    float32_only: ClassVar[bool] = False
    """Whether it computes in float32 whatever type is asked for; it may then be without parameters."""
    measures_importance: ClassVar[bool] = False
    """Whether `run_blocks` takes and gives one tensor more, `importance` (N,): what attention every token has received,
    to which each block adds."""
    vocabulary: str | None = None
    """Of a decoder whose head has the embedding's weights: the name of these; None where a head has its own."""
    own_segments: ClassVar[str | None] = None
    """Where what computes its segments is, as in `BACKENDS`, whichever backend is named; None where that one does."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "packs_linears" in vars(cls):  # ignored, it would let an own network fail where it is served
            raise ModelFolderError(f"{cls.__name__}: packs_linears is called reorders_linears")

    num_blocks: int
    inputs: Boundary
    """What `embed` takes."""
    max_length: int = 1
    """The longest input in tokens, special tokens included; 1 where inputs have none."""

    @property
    def kept_bytes(self) -> int:
        """What it keeps of every token of a sequence until that ends; 0: nothing, and inputs have no sequence."""
        return 0

    def open_memory(self, tokens: int, fill: Fill = "compute") -> Memory[Piece]:
        """Room for so many tokens of sequences, which it then uses: before anything runs, where it keeps something.

        `fill`: how it comes to what a token that left early should have left behind. On the weights' device, in their
        type. Raises InputError for too few tokens, ModelFolderError where it keeps nothing.
        """
        raise ModelFolderError("this network keeps nothing of sequences")

    @abstractmethod
    def boundary(self, block: int) -> Boundary:
        """What crosses after a block."""

    @abstractmethod
    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        """The model's inputs to what crosses before block 0."""

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        """Runs one block on what crosses before it, to what crosses after it; a class defines this or `run_blocks`."""
        if type(self).run_blocks is Backbone.run_blocks:
            raise ModelFolderError(f"{type(self).__name__} needs run_block or run_blocks")
        return self.run_blocks(index, index + 1, hidden, layout)

    def run_blocks(self, first: int, end: int, hidden: Tensors, layout: Layout) -> Tensors:
        """Blocks first to end - 1, with nothing to decide between them."""
        for index in range(first, end):
            hidden = self.run_block(index, hidden, layout)
        return hidden

    def is_ready(self, first: int, end: int, device_type: str) -> bool:
        """Whether blocks first to end - 1 run at once, without seconds of preparation."""
        return True

    def prepare(self, spans: Collection[tuple[int, int]], device_type: str) -> None:
        """Prepare spans of blocks `(first, end)`; others may run at the same time."""

    def bridge(self, block: int) -> nn.Module | None:
        """What makes of a boundary's first tensor after `block`, (B, ...), one of the shape after the last block.

        New at every call, with the weights of the blocks that it is a copy of; an identity where nothing has to be
        made of it. None where the family has no bridges. It treats every input on its own.
        """
        return None

    @abstractmethod
    def to_config(self) -> JsonDict:
        """What `build` of the family needs to make an equal, untrained backbone; JSON."""

    def sha256(self) -> str:
        """What tells that it is still the network it was: of its weights, wherever these are."""
        digest = hashlib.sha256()
        for part in weight_bytes(self):
            digest.update(part)
        return digest.hexdigest()

    def write_files(self, folder: Path) -> None:
        """Put what `build` reads of a model's folder there, if it is not there already; for most that is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalHead:
    """The head that a checkpoint carries: that of a ramp style, with its weights."""

    style: RampStyle
    pooling: Pooling
    num_outputs: int
    weights: Mapping[str, Tensor]
    """As that style names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """What a checkpoint gave."""

    backbone: Backbone
    head: FinalHead | None
    """None where the checkpoint is a bare encoder."""
    label_names: tuple[str, ...] | None
    """In the order of the head's outputs; None where the checkpoint does not say: the order is then the alphabet's."""
    codec: NamedSpec | None = None
    """How its inputs are encoded; None where the data says it."""


class Family(ABC):
    """A way from a configuration or a checkpoint to a backbone."""

    name: str
    lazy_weights: bool = True
    """Whether all its tensors come from the saved weights, so that building may leave them out."""

    @abstractmethod
    def build(self, config: JsonDict, folder: Path | None = None) -> Backbone:
        """Returns a backbone with random weights for `Backbone.to_config`; missing keys get the family's defaults.

        `folder` is the model's folder, for families that keep files of their own there (`Backbone.write_files`); None
        where there is none. Raises ModelFolderError for files that do not fit the configuration.
        """

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Returns the same network as a loaded `transformers` model of this family.

        `pairs`: inputs are pairs of texts, told apart by token types where the model has them. Raises ModelFolderError
        for models that the family cannot run; without this method it takes none.
        """
        raise ModelFolderError(f"{self.name!r} networks do not come as transformers checkpoints: see docs/models.md")

    def from_state(self, weights: Mapping[str, Tensor]) -> Pretrained | None:
        """Returns the network of a state dict, by tensor name; None for tensors of another family.

        Raises ModelFolderError where tensors are missing or have the wrong shape; its message continues a sentence that
        begins with the file's name.
        """
        return None


def weight_bytes(module: nn.Module) -> Iterator[bytes | memoryview]:
    """Yields a module's state for a digest: names, types, shapes and numbers."""
    for name, tensor in module.state_dict().items():
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data  # numpy has not every type of torch's


def put_together(weights: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Returns a checkpoint's weights by our names, each the concatenation of the tensors that `names` lists."""
    return {ours: torch.cat([weights[each] for each in theirs]) for ours, theirs in names.items()}


def names_in_blocks(
    ours: str, theirs: str, num_blocks: int, parts: Mapping[str, Sequence[str]], kinds: Sequence[str] = ("weight",)
) -> dict[str, tuple[str, ...]]:
    """Returns `names` for `put_together`: the parts of every block, whose prefixes have `{}` for the block's number."""
    return {
        f"{ours.format(k)}.{part}.{kind}": tuple(f"{theirs.format(k)}.{name}.{kind}" for name in names)
        for k in range(num_blocks)
        for part, names in parts.items()
        for kind in kinds
    }
