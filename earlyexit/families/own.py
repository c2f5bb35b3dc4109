"""A user's own network: ordinary torch modules, named `module:function` where a family is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.named import import_own
from earlyexit.network.boundary import Boundary, DType, TensorSpec
from earlyexit.network.layout import Layout
from earlyexit.network.piece import Tensors

LENGTHS = (2, 7, 4)
"""Of the example inputs. They differ, so that all but the longest are padded."""
TOLERANCE = 1e-4
"""Between an input alone and among others; another order of summation alone gives about 1e-6."""


class OwnBackbone(Backbone):
    """A backbone made of modules that know nothing of Offramp.

    Linear layers stay as they are, since modules may read their weights. A network that is to be as fast on a CPU as
    the built-in families works on packed tensors, as a subclass of `Backbone`.
    """

    reorders_linears: ClassVar[bool] = False

    def __init__(self, *, embed: nn.Module, blocks: Iterable[nn.Module], inputs: Boundary, config: JsonDict) -> None:
        super().__init__()
        self.embedding = embed
        self.blocks = nn.ModuleList(blocks)
        self.num_blocks = len(self.blocks)
        self._inputs = inputs
        self._config = config

    @property
    def inputs(self) -> Boundary:
        return self._inputs

    def boundary(self, block: int) -> Boundary:
        return self._boundaries[block]

    def to_config(self) -> JsonDict:
        return dict(self._config)

    @cached_property
    def _boundaries(self) -> tuple[Boundary, ...]:
        """What the blocks give for one example input."""
        layout = _layout([min(2, self.max_length)])
        training = self.training
        self.eval()
        with torch.inference_mode():
            hidden = self.embed(examples(self.inputs, layout), layout)
            boundaries = []
            for index in range(self.num_blocks):
                hidden = self.run_block(index, hidden, layout)
                boundaries.append(self._described(index, hidden))
        self.train(training)
        return tuple(boundaries)

    def _described(self, block: int, hidden: Tensors) -> Boundary:
        known: dict[torch.dtype, DType] = {
            next(self.parameters()).dtype: "float",
            torch.int32: "int32",
            torch.uint8: "uint8",
        }
        strange = [str(each.dtype) for each in hidden if each.dtype not in known]
        if strange:
            raise ModelFolderError(
                f"{_named(block)} gives {strange[0]}; what crosses is of the weights' float type, int32 or uint8"
            )
        return tuple(
            TensorSpec(
                name=f"hidden_{k}",
                shape=tuple(each.shape[1:]),
                dtype=known[each.dtype],
                per_token=self.max_length > 1,
            )
            for k, each in enumerate(hidden)
        )


class PaddedBackbone(OwnBackbone):
    """Modules over padded tokens.

    `embed(token_ids_BT, mask_BT)` gives the hidden state (B, T, ...) before the first block, `block(hidden, mask_BT)`
    that after each, whose trailing shape may change from block to block. The mask is True where there is a token;
    behind an input's last token, ids are 0 and hidden states are arbitrary. They must not influence the tokens: an
    input's answer must not depend on the lengths of its batch-mates. `check_alone` tests that.
    """

    def __init__(
        self,
        *,
        embed: nn.Module,
        blocks: Iterable[nn.Module],
        max_length: int,
        config: JsonDict,
        vocab_size: int | None = None,
    ) -> None:
        """`config`: the arguments with which the function that made this makes an equal, untrained one; JSON."""
        ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True, below=vocab_size or 2)
        super().__init__(embed=embed, blocks=blocks, inputs=(ids,), config=config)
        self.max_length = max_length

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return (layout.unpad(self.embedding(layout.pad(inputs[0].long()), layout.mask_BT)),)

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return (layout.unpad(self.blocks[index](layout.pad(hidden[0]), layout.mask_BT)),)


class TensorBackbone(OwnBackbone):
    """Modules over tensors with a row per input: images, spectra, table rows.

    `embed(*inputs)` takes what the codec gives, tensors (B, ...) described by `inputs`; `block(*hidden)` takes what the
    one before it gave. Each gives a tensor (B, ...) or a tuple of them, of any trailing shape; exits look at the first.
    """

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return _as_tuple(self.embedding(*inputs))

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return _as_tuple(self.blocks[index](*hidden))


class OwnFamily(Family):
    """A user's function: with the arguments of `Backbone.to_config` it makes an untrained backbone.

    Without arguments it makes the backbone that training begins with, which may bring weights.
    """

    lazy_weights = False

    def __init__(self, name: str) -> None:
        """Import `module:function`; raises ModelFolderError where that fails."""
        self.name = name
        self._make: Callable[..., Any] = import_own(name, called="network")

    def build(self, config: JsonDict, folder: Path | None = None) -> Backbone:
        backbone = self._make(**config)
        if not isinstance(backbone, Backbone):
            raise ModelFolderError(
                f"{self.name!r} gave {type(backbone).__name__}; a Backbone is needed, such as "
                "earlyexit.families.own.PaddedBackbone or TensorBackbone around your modules"
            )
        return backbone

    def pretrained(self) -> Pretrained:
        """Returns the network that training begins with; raises ModelFolderError where `check_alone` does."""
        backbone = self.build({})
        check_alone(backbone)
        return Pretrained(backbone=backbone, head=None, label_names=None)


@torch.inference_mode()
def check_alone(backbone: Backbone) -> None:
    """Raise ModelFolderError, naming the block, where an input's values among others differ from its values alone."""
    layout = _layout([min(length, backbone.max_length) for length in LENGTHS])
    training = backbone.training
    backbone.eval()
    together = examples(backbone.inputs, layout)
    layouts = [_layout([length]) for length in layout.lengths_B.tolist()]
    alone = list(zip(*(_apart(values, layout) for values in together), strict=True))
    for block in range(-1, backbone.num_blocks):
        together = _step(backbone, block, together, layout)
        alone = [_step(backbone, block, each, own) for each, own in zip(alone, layouts, strict=True)]
        _check_rows(together, layout, block)
        for values, *apart in zip(together, *alone, strict=True):
            difference = float((values - torch.cat(apart)).abs().max())
            if not difference <= TOLERANCE:
                raise ModelFolderError(
                    f"{_named(block)} gives an input other values among others than alone (by {difference:.2g}): it "
                    "lets the padding, or other inputs, through; of tokens mask_BT says where they are"
                )
    backbone.train(training)


def _step(backbone: Backbone, block: int, values: Tensors, layout: Layout) -> Tensors:
    return backbone.embed(values, layout) if block < 0 else backbone.run_block(block, values, layout)


def _check_rows(hidden: Tensors, layout: Layout, block: int) -> None:
    for values in hidden:
        if len(values) not in (layout.num_tokens, layout.num_inputs):
            raise ModelFolderError(
                f"{_named(block)} gives {len(values)} rows for {layout.num_inputs} inputs of {layout.num_tokens} "
                "tokens; one per input, or one per token, is needed"
            )


def examples(inputs: Boundary, layout: Layout) -> Tensors:
    """Returns random inputs of a network, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return tuple(_example(each, layout, generator) for each in inputs)


def _example(spec: TensorSpec, layout: Layout, generator: torch.Generator) -> Tensor:
    shape = (layout.num_tokens if spec.per_token else layout.num_inputs, *spec.shape)
    if spec.dtype == "float":
        return torch.randn(shape, generator=generator)
    dtype = getattr(torch, spec.dtype)
    return torch.randint(0, spec.below or 256, shape, generator=generator).to(dtype)


def _apart(values: Tensor, layout: Layout) -> Sequence[Tensor]:
    return torch.split(values, 1 if len(values) == layout.num_inputs else layout.lengths_B.tolist())


def _as_tuple(given: Tensor | Tensors) -> Tensors:
    return given if isinstance(given, tuple) else (given,)


def _layout(lengths: list[int]) -> Layout:
    return Layout(np.array(lengths, dtype=np.int32))


def _named(block: int) -> str:
    return "the embedding" if block < 0 else f"block {block}"
