"""Anybody's network: ordinary torch modules over padded tensors, named `module:function` where a family is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.layout import Layout

LENGTHS = (2, 7, 4)
"""Of the inputs by which a network is tried: none as long as all, so that every one but one is padded."""
TOLERANCE = 1e-4
"""Between an input alone and among others; the order of a sum alone gives some 1e-6."""


class PaddedBackbone(Backbone):
    """A backbone made of modules that know nothing of Offramp.

    `embed(token_ids_BT, mask_BT)` gives the hidden state (B, T, D) before the first block, `block(hidden_BTD, mask_BT)`
    that after each. The mask is True where there is a token; behind an input's last token ids are 0 and hidden states
    are whatever was left there. What a module does there must not reach the tokens: an input's answer must not depend
    on how long the others of its batch are. `check_alone` tries it.

    Linear layers stay as they are, since modules may read their weights. A network that is to be as fast on a CPU as
    the built-in families works on packed tensors, as a subclass of `Backbone`.
    """

    packs_linears: ClassVar[bool] = False

    def __init__(
        self, *, embed: nn.Module, blocks: Iterable[nn.Module], hidden_size: int, max_length: int, config: JsonDict
    ) -> None:
        """`config`: the arguments with which the function that made this makes an equal, untrained one; JSON."""
        super().__init__()
        self.embedding = embed
        self.blocks = nn.ModuleList(blocks)
        self.num_blocks = len(self.blocks)
        self.hidden_size = hidden_size
        self.max_length = max_length
        self._config = config

    def embed(self, token_ids_N: Tensor, layout: Layout) -> Tensor:
        return layout.unpad(self.embedding(layout.pad(token_ids_N.long()), layout.mask_BT))

    def run_block(self, index: int, hidden_ND: Tensor, layout: Layout) -> Tensor:
        return layout.unpad(self.blocks[index](layout.pad(hidden_ND), layout.mask_BT))

    def to_config(self) -> JsonDict:
        return dict(self._config)


class OwnFamily(Family):
    """A function of the user's: with the arguments of `Backbone.to_config` it makes an untrained backbone.

    Without arguments it makes the one to begin training with, which may bring weights.
    """

    lazy_weights = False

    def __init__(self, name: str) -> None:
        """Import `module:function`; raises ModelFolderError where that fails."""
        self.name = name
        module, _, attribute = name.partition(":")
        try:
            self._make: Callable[..., Any] = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ModelFolderError(
                f"network {name!r} cannot be imported: {error}; the folder of its module belongs into PYTHONPATH"
            ) from error

    def build(self, config: JsonDict) -> Backbone:
        backbone = self._make(**config)
        if not isinstance(backbone, Backbone):
            raise ModelFolderError(
                f"{self.name!r} gave {type(backbone).__name__}; a Backbone is needed, such as "
                "earlyexit.families.own.PaddedBackbone around your modules"
            )
        return backbone

    def from_transformers(self, hf_model: Any) -> Pretrained:
        raise ModelFolderError(f"{self.name!r} is no family of transformers checkpoints")

    def pretrained(self) -> Pretrained:
        """The network to begin with, tried; raises ModelFolderError where `check_alone` does."""
        backbone = self.build({})
        check_alone(backbone)
        return Pretrained(backbone=backbone, head=None, label_names=None)


@torch.inference_mode()
def check_alone(backbone: Backbone) -> None:
    """Raise ModelFolderError, naming the block, where an input comes out otherwise among others than alone."""
    lengths = [min(length, backbone.max_length) for length in LENGTHS]
    training = backbone.training
    backbone.eval()
    token_ids = [torch.ones(length, dtype=torch.int32) for length in lengths]
    together, layout = torch.cat(token_ids), _layout(lengths)
    alone, layouts = token_ids, [_layout([length]) for length in lengths]
    for block in range(-1, backbone.num_blocks):
        together = _step(backbone, block, together, layout)
        alone = [_step(backbone, block, each, own) for each, own in zip(alone, layouts, strict=True)]
        _check_shape(together, backbone, layout, block)
        difference = float((together - torch.cat(alone)).abs().max())
        if not difference <= TOLERANCE:
            raise ModelFolderError(
                f"{_named(block)} gives an input other values among longer ones than alone (by {difference:.2g}): it "
                "lets the padding, or other inputs, through; mask_BT says where tokens are"
            )
    backbone.train(training)


def _step(backbone: Backbone, block: int, values: Tensor, layout: Layout) -> Tensor:
    return backbone.embed(values, layout) if block < 0 else backbone.run_block(block, values, layout)


def _check_shape(hidden_ND: Tensor, backbone: Backbone, layout: Layout, block: int) -> None:
    wanted = (layout.num_tokens, backbone.hidden_size)
    if tuple(hidden_ND.shape) != wanted:
        raise ModelFolderError(
            f"{_named(block)} gives {list(hidden_ND.shape[1:])} values for a token; {wanted[1]} are its hidden_size"
        )


def _layout(lengths: list[int]) -> Layout:
    return Layout(np.array(lengths, dtype=np.int32))


def _named(block: int) -> str:
    return "the embedding" if block < 0 else f"block {block}"
