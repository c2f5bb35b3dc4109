"""User-defined networks, made of ordinary torch modules and named `module:function`; trials of networks.

A trial checks that an input's values do not depend on the other inputs of its batch. The rounding of some kernels, such
as a variance in one pass, depends on the number of inputs. A trial distinguishes this from a network that mixes inputs:
it replaces the other inputs by different ones of the same number and lengths. Rounding then stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.named import import_own, in_one_line
from earlyexit.network.boundary import Boundary, DType, Encoded, TensorSpec, entry_piece, mismatch
from earlyexit.network.piece import Layout, Tensors

MOST_ROWS, ROWS_TOGETHER = 35, 7
"""Maximum number of the user's rows in a trial, and their batch size."""
SAME = 1e-5
"""Maximum deviation, relative to the column, between two batches of the same shape with different other inputs."""
ROUNDED = 0.01
"""Maximum deviation of answers to the user's rows, relative to the column, if the number of inputs affects rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Maximum deviation of an input's values in a batch from its values alone.

    The limits are relative to the largest magnitude in the value's column (class, channel). Thus a column of large
    values, such as a masked class of -1e9, does not hide deviations in others.
    """

    answer: float
    """Limit for answers."""
    inside: float
    """Limit for values between blocks."""
    least_range: float
    """Lower bound of the magnitude of a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The values of one batch in a network: before block 0, and after each block."""

    layout: Layout
    after: tuple[Tensors, ...]


LENGTHS = (2, 7, 4)
"""Lengths of random inputs in tokens. They differ, so that all but the longest input are padded."""
TOLERANCE = Tolerance(answer=1e-4, inside=1e-4, least_range=1.0)
"""A different order of summation causes deviations of about 1e-6."""


@torch.inference_mode()
def check_alone(
    backbone: Backbone,
    rows: Sequence[Encoded] = (),
    batches: Sequence[Sequence[int]] = (LENGTHS,),
    tolerance: Tolerance = TOLERANCE,
) -> list[Trial]:
    """Runs batches of random inputs and compares with each input alone. `batches`: the lengths of inputs in tokens.

    If inputs have no tokens, and the number of inputs affects rounding beyond `tolerance`, then the answers to `rows`,
    the user's own inputs, must stay within `ROUNDED`. Raises GraphError that names the block if inputs of a batch
    depend on each other, if rounding changes the answers to `rows` too much, and if they must be checked but are empty.
    """
    training = backbone.training
    backbone.eval()
    trials = []
    for lengths in batches:
        layout = layout_of([min(length, backbone.max_length) for length in lengths])
        values = examples(backbone.inputs, layout)
        trials.append(_run(backbone, values, layout))
        difference = _difference(trials[-1], _alone(backbone, values, layout), tolerance)
        if difference is None:
            continue
        if backbone.max_length > 1 or _depends_on_others(backbone, values, trials[-1]):
            raise GraphError(f"{difference}; padding and other inputs must not change an input's values")
        _check_rows(backbone, rows, difference, tolerance.least_range)
    backbone.train(training)
    return trials


def examples(inputs: Boundary, layout: Layout, *, seed: int = 0) -> Tensors:
    """Returns random inputs of a network. Equal seeds give equal inputs."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for spec in inputs:
        shape = (layout.num_tokens if spec.per_token else layout.num_inputs, *spec.shape)
        if spec.dtype == "float":  # from 0 to 1, but not 0: networks may take logarithms, or rows of a table by numbers
            tensors.append(1 - torch.rand(shape, generator=generator))
        else:
            integers = torch.randint(0, spec.below or 256, shape, generator=generator)
            tensors.append(integers.to(getattr(torch, spec.dtype)))
    return tuple(tensors)


def layout_of(lengths: Sequence[int]) -> Layout:
    """Returns the layout of inputs with these lengths."""
    return Layout(np.array(lengths, dtype=np.int32))


def named(block: int) -> str:
    """Returns the name of a block in messages; -1 is the embedding."""
    return "the embedding" if block < 0 else f"block {block}"


def _run(backbone: Backbone, values: Tensors, layout: Layout) -> Trial:
    after = [backbone.embed(values, layout)]
    for block in range(backbone.num_blocks):
        after.append(backbone.run_block(block, after[-1], layout))
    for block, tensors in enumerate(after, start=-1):
        for tensor in tensors:
            if len(tensor) not in (layout.num_tokens, layout.num_inputs):
                raise GraphError(
                    f"{named(block)} returns {len(tensor)} rows for {layout.num_inputs} inputs of {layout.num_tokens} "
                    "tokens; one row per input, or one per token, is needed"
                )
    return Trial(layout=layout, after=tuple(after))


def _alone(backbone: Backbone, values: Tensors, layout: Layout) -> list[Trial]:
    """Runs every input in a batch of its own."""
    lengths = layout.lengths_B.tolist()
    columns = (torch.split(tensor, 1 if layout.per_input(tensor) else lengths) for tensor in values)
    inputs = zip(*columns, strict=True)
    return [_run(backbone, tensors, layout_of([length])) for tensors, length in zip(inputs, lengths, strict=True)]


def _difference(together: Trial, alone: Sequence[Trial], tolerance: Tolerance) -> str | None:
    """Returns a description of the first difference beyond the tolerance; None if there is none."""
    last = len(together.after) - 1
    for index, values in enumerate(together.after):
        allowed = tolerance.answer if index == last else tolerance.inside
        for k, of_batch in enumerate(values):
            expected = torch.cat([trial.after[index][k] for trial in alone])
            excess = beyond(of_batch, expected, allowed, tolerance.least_range)
            if excess is not None:
                count = together.layout.num_inputs
                return f"{named(index - 1)} gives one of {count} inputs other values than alone {excess}"
    return None


def beyond(values: Tensor, expected: Tensor, allowed: float, least_range: float) -> str | None:
    """Returns a description of the largest deviation beyond the limit (see `Tolerance`); None if there is none."""
    if values.shape != expected.shape:
        return f"({list(values.shape)} numbers, not {list(expected.shape)})"
    if not values.numel():
        return None
    wanted = expected.double()
    deviation = (values.double() - wanted).abs()
    magnitude = wanted.abs().amax(dim=0).clamp(min=least_range).expand_as(deviation)
    if bool((deviation <= allowed * magnitude).all()):
        return None
    worst = (deviation - allowed * magnitude).argmax()
    largest, of = float(deviation.flatten()[worst]), float(magnitude.flatten()[worst])
    return f"(by {largest:.2g} in a range of {of:.2g}; {100 * allowed:g}% of it is allowed)"


def _depends_on_others(backbone: Backbone, values: Tensors, together: Trial) -> bool:
    """Returns whether an input's values change if the other inputs, but not their number, change."""
    others = examples(backbone.inputs, together.layout, seed=1)
    for parity in range(2):
        kept = torch.arange(together.layout.num_inputs) % 2 == parity
        mixed = tuple(
            torch.where(kept.view(-1, *[1] * (tensor.ndim - 1)), tensor, other)
            for tensor, other in zip(values, others, strict=True)
        )
        with_others = _run(backbone, mixed, together.layout)
        for before, after in zip(together.after, with_others.after, strict=True):
            if any(beyond(b[kept], a[kept], SAME, 0.0) for a, b in zip(before, after, strict=True)):
                return True
    return False


def _check_rows(backbone: Backbone, rows: Sequence[Encoded], difference: str, least_range: float) -> None:
    """Raises GraphError unless the answers to some rows are nearly the same alone and together."""
    problem = f"{difference}: the number of inputs in a batch affects the rounding"
    if not rows:
        raise GraphError(
            f"{problem} of random inputs; provide rows of your own, as with `offramp inject --data`, to check answers"
        )
    if mistake := mismatch(backbone.inputs, rows[0]):
        raise GraphError(mistake)
    sample = rows[:: max(1, len(rows) // MOST_ROWS)][:MOST_ROWS]
    for start in range(0, len(sample), ROWS_TOGETHER):
        piece = entry_piece("", sample[start : start + ROWS_TOGETHER])
        values, layout = tuple(map(torch.from_numpy, piece.tensors)), Layout(piece.lengths_B)
        together, alone = _run(backbone, values, layout), _alone(backbone, values, layout)
        for k, answers in enumerate(together.after[-1]):
            excess = beyond(answers, torch.cat([trial.after[-1][k] for trial in alone]), ROUNDED, least_range)
            if excess is not None:
                raise GraphError(
                    f"{problem}, and changes the answers to rows of the data {excess}; export the model with operators "
                    "that round less, such as LayerNormalization (opset 17) instead of a variance in one pass"
                )


class OwnBackbone(Backbone):
    """Base of backbones made of ordinary torch modules.

    Linear layers keep their weights' layout, because modules may read the weights. For the CPU speed of the built-in
    families, write a subclass of `Backbone` for packed tensors instead.
    """

    reorders_linears: ClassVar[bool] = False

    def __init__(self, *, embed: nn.Module, blocks: Iterable[nn.Module], inputs: Boundary, config: JsonDict) -> None:
        super().__init__()
        self.embedding = embed
        self.blocks = nn.ModuleList(blocks)
        self.num_blocks = len(self.blocks)
        self.inputs = inputs
        self._config = config

    def boundary(self, block: int) -> Boundary:
        return self._boundaries[block]

    def to_config(self) -> JsonDict:
        return dict(self._config)

    @cached_property
    def _boundaries(self) -> tuple[Boundary, ...]:
        """The boundaries after all blocks, from a run with one random input."""
        layout = layout_of([min(2, self.max_length)])
        training = self.training
        self.eval()
        with torch.inference_mode():
            hidden = self.embed(examples(self.inputs, layout), layout)
            boundaries = []
            for index in range(self.num_blocks):
                hidden = self.run_block(index, hidden, layout)
                boundaries.append(self._specs(index, hidden))
        self.train(training)
        return tuple(boundaries)

    def _specs(self, block: int, hidden: Tensors) -> Boundary:
        weights_dtype = next(self.parameters()).dtype
        known: dict[torch.dtype, DType] = {weights_dtype: "float", torch.int32: "int32", torch.uint8: "uint8"}
        specs = []
        for k, tensor in enumerate(hidden):
            if tensor.dtype not in known:
                raise ModelFolderError(
                    f"{named(block)} returns {tensor.dtype}; the weights' float type, int32 or uint8 is needed"
                )
            shape, dtype = tuple(tensor.shape[1:]), known[tensor.dtype]
            specs.append(TensorSpec(name=f"hidden_{k}", shape=shape, dtype=dtype, per_token=self.max_length > 1))
        return tuple(specs)


class PaddedBackbone(OwnBackbone):
    """Modules over padded tokens.

    `embed(token_ids_BT, mask_BT)` returns the hidden state (B, T, ...) before the first block. `block(hidden, mask_BT)`
    returns the hidden state after a block, whose trailing shape may change from block to block. The mask is True for
    tokens and False for padding. Ids of padding are 0, and its hidden states are arbitrary. Padding must not influence
    tokens: an input's answer must not depend on the lengths of other inputs. `check_alone` tests this.
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
        """`config`: JSON arguments with which the user's function makes an equal, untrained backbone."""
        ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True, below=vocab_size or 2)
        super().__init__(embed=embed, blocks=blocks, inputs=(ids,), config=config)
        self.max_length = max_length

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return (layout.unpad(self.embedding(layout.pad(inputs[0].long()), layout.mask_BT)),)

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return (layout.unpad(self.blocks[index](layout.pad(hidden[0]), layout.mask_BT)),)


class TensorBackbone(OwnBackbone):
    """Modules over tensors with a row per input, such as images, spectra or table rows.

    `embed(*inputs)` gets the codec's tensors, (B, ...), which `inputs` describes. `block(*hidden)` gets the result of
    the previous module. Each module returns a tensor (B, ...) of any shape, or a tuple, of which exits use the first.
    """

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return _as_tuple(self.embedding(*inputs))

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return _as_tuple(self.blocks[index](*hidden))


class OwnFamily(Family):
    """A family that is a user's function.

    With the arguments of `Backbone.to_config`, the function returns an untrained backbone. Without arguments, it
    returns the backbone from which training starts, which may be pretrained.
    """

    lazy_weights = False

    def __init__(self, name: str) -> None:
        """Import `module:function`; raises ModelFolderError if this fails."""
        self.name = name
        self._make: Callable[..., Any] = import_own(name, called="network")

    def build(self, config: JsonDict, folder: Path | None = None) -> Backbone:
        with in_one_line(f"network {self.name!r} fails"):
            backbone = self._make(**config)
        if not isinstance(backbone, Backbone):
            raise ModelFolderError(
                f"{self.name!r} returned {type(backbone).__name__}; a Backbone is needed, such as "
                "earlyexit.families.own.PaddedBackbone or TensorBackbone around your modules"
            )
        return backbone

    def pretrained(self) -> Pretrained:
        """Returns the network from which training starts. Raises GraphError as `check_alone` does."""
        backbone = self.build({})
        with in_one_line(f"network {self.name!r} fails on random inputs"):
            check_alone(backbone)
        return Pretrained(backbone=backbone, head=None, label_names=None)


def _as_tuple(hidden: Tensor | Tensors) -> Tensors:
    return hidden if isinstance(hidden, tuple) else (hidden,)
