"""The contract of a family: what a network must offer to be cut and left early."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from earlyexit.layout import Layout

JsonDict = dict[str, Any]


class Backbone(nn.Module, ABC):
    """A chain of blocks over a packed hidden state.

    Blocks must treat every input on its own: an input's values may depend on its own tokens only.
    """

    packs_linears: ClassVar[bool] = True
    """Whether its linear layers are only called, with two-dimensional values, so that a CPU may keep their weights in
    another layout."""

    num_blocks: int
    hidden_size: int
    max_length: int
    """The longest input in tokens, special tokens included."""

    @abstractmethod
    def embed(self, token_ids_N: Tensor, layout: Layout) -> Tensor:
        """Token ids, int32 (N,), to the hidden state before block 0, (N, D)."""

    @abstractmethod
    def run_block(self, index: int, hidden_ND: Tensor, layout: Layout) -> Tensor:
        """One block on a packed hidden state, (N, D) to (N, D)."""

    @abstractmethod
    def to_config(self) -> JsonDict:
        """What `build` of the family needs to make an equal, untrained backbone; JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalHead:
    """The classification head that a checkpoint carries: dense, activation, linear on the first token."""

    activation: str
    weights: Mapping[str, Tensor]
    """Keys `dense.weight`, `dense.bias`, `classifier.weight`, `classifier.bias`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """What a checkpoint gave."""

    backbone: Backbone
    head: FinalHead | None
    """None where the checkpoint is a bare encoder."""
    label_names: tuple[str, ...] | None


class Family(ABC):
    """A way from a `transformers` configuration or checkpoint to a backbone."""

    name: str
    lazy_weights: bool = True
    """Whether all its tensors come from the saved weights, so that building may leave them out."""

    @abstractmethod
    def build(self, config: JsonDict) -> Backbone:
        """A backbone with random weights from `Backbone.to_config` (missing keys: the family's defaults)."""

    @abstractmethod
    def from_transformers(self, hf_model: Any) -> Pretrained:
        """The same network as a loaded `transformers` model of this family."""
