"""A user's own network: ordinary torch modules, named `module:function` where a family is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.families.trial import Tolerance, TrialError, check_alone, examples, layout_of, named
from earlyexit.named import import_own
from earlyexit.network.boundary import Boundary, DType, Encoded, TensorSpec
from earlyexit.network.piece import Layout, Tensors

LENGTHS = (2, 7, 4)
"""Of the example inputs. They differ, so that all but the longest are padded."""
TOLERANCE = Tolerance(answer=1e-4, inside=1e-4, least_range=1.0)
"""Another order of summation alone gives about 1e-6."""


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
        layout = layout_of([min(2, self.max_length)])
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
                f"{named(block)} gives {strange[0]}; what crosses is of the weights' float type, int32 or uint8"
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
    input's answer must not depend on the lengths of its batch-mates. `check_own` tests that.
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
        """Returns the network that training begins with; raises ModelFolderError where `check_own` does."""
        backbone = self.build({})
        check_own(backbone)
        return Pretrained(backbone=backbone, head=None, label_names=None)


def check_own(backbone: Backbone, rows: Sequence[Encoded] = ()) -> None:
    """Raise ModelFolderError, naming the block, where an input's values depend on the inputs beside it.

    `rows`: inputs of the user, as in `trial.check_alone`.
    """
    try:
        check_alone(backbone, [LENGTHS], TOLERANCE, rows)
    except TrialError as error:
        raise ModelFolderError(
            f"{error}; padding and other inputs must not change an input's values: mask_BT says where tokens are"
        ) from error


def _as_tuple(given: Tensor | Tensors) -> Tensors:
    return given if isinstance(given, tuple) else (given,)
