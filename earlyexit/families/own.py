"""A user's own network: ordinary torch modules, named `module:function` where a family is named. Trials of networks.

A trial checks that an input's values do not depend on the inputs beside it. Some kernels round by the number of inputs
in a batch, a variance in one pass for instance. Such rounding is told apart from a network that mixes inputs: with as
many other inputs beside it, each as long, an input's values are the same.
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

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.named import import_own
from earlyexit.network.boundary import Boundary, DType, Encoded, TensorSpec, entry_piece, mismatch
from earlyexit.network.piece import Layout, Tensors

MOST_ROWS, ROWS_TOGETHER = 35, 7
"""Rows of the user's data that are tried, and how many at a time."""
SAME = 1e-5
"""How far values may be apart, as a share of their column, beside other inputs in a batch of the same shape."""
ROUNDED = 0.01
"""How far answers to the user's rows may be apart, as a share of their column, where the number of inputs rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far an input's values in a batch may be from its values alone.

    The limits are shares of the largest magnitude of the value's column (class, channel), so that one large column,
    such as a masked class of -1e9, hides nothing in the others.
    """

    answer: float
    inside: float
    """For the values between blocks."""
    least_range: float
    """Columns of smaller magnitude count as if they had this one."""


class TrialError(Exception):
    """An input's values depend on its batch; the message says where and how much, without naming the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A batch in a network: the values before block 0 and after each block."""

    layout: Layout
    after: tuple[Tensors, ...]


@torch.inference_mode()
def check_alone(
    backbone: Backbone, batches: Sequence[Sequence[int]], tolerance: Tolerance, rows: Sequence[Encoded] = ()
) -> list[Trial]:
    """Run batches of random inputs of these lengths, in tokens; returns what the network gives them.

    Where inputs have no tokens and the number of inputs rounds values beyond `tolerance`, the answers to `rows`, a
    user's own inputs, decide. Raises TrialError where inputs of a batch depend on each other, and where rounding
    changes the answers to `rows`, or there are none.
    """
    training = backbone.training
    backbone.eval()
    trials = []
    for lengths in batches:
        layout = layout_of([min(length, backbone.max_length) for length in lengths])
        values = examples(backbone.inputs, layout)
        trials.append(_run(backbone, values, layout))
        difference = _apart(trials[-1], _alone(backbone, values, layout), tolerance)
        if difference is None:
            continue
        if backbone.max_length > 1 or _depends_on_others(backbone, values, trials[-1]):
            raise TrialError(difference)
        _check_rows(backbone, rows, difference, tolerance.least_range)
    backbone.train(training)
    return trials


def examples(inputs: Boundary, layout: Layout, *, seed: int = 0) -> Tensors:
    """Returns random inputs of a network, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(shape, generator=generator)
        if spec.dtype == "float"
        else torch.randint(0, spec.below or 256, shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in inputs
        for shape in [(layout.num_tokens if spec.per_token else layout.num_inputs, *spec.shape)]
    )


def layout_of(lengths: Sequence[int]) -> Layout:
    """Returns the layout of inputs of these lengths."""
    return Layout(np.array(lengths, dtype=np.int32))


def named(block: int) -> str:
    """Returns what a message calls a block; -1 is what comes before block 0."""
    return "the embedding" if block < 0 else f"block {block}"


def _run(backbone: Backbone, values: Tensors, layout: Layout) -> Trial:
    after = [backbone.embed(values, layout)]
    for block in range(backbone.num_blocks):
        after.append(backbone.run_block(block, after[-1], layout))
    for block, tensors in enumerate(after, start=-1):
        for each in tensors:
            if len(each) not in (layout.num_tokens, layout.num_inputs):
                raise TrialError(
                    f"{named(block)} gives {len(each)} rows for {layout.num_inputs} inputs of {layout.num_tokens} "
                    "tokens; one per input, or one per token, is needed"
                )
    return Trial(layout=layout, after=tuple(after))


def _alone(backbone: Backbone, values: Tensors, layout: Layout) -> list[Trial]:
    """Every input in a batch of its own."""
    lengths = layout.lengths_B.tolist()
    apart = (torch.split(each, 1 if layout.per_input(each) else lengths) for each in values)
    layouts = (layout_of([length]) for length in lengths)
    return [_run(backbone, own, each) for own, each in zip(zip(*apart, strict=True), layouts, strict=True)]


def _apart(together: Trial, alone: Sequence[Trial], tolerance: Tolerance) -> str | None:
    """Returns what first differs beyond the tolerance; None where nothing does."""
    last = len(together.after) - 1
    for index, values in enumerate(together.after):
        allowed = tolerance.answer if index == last else tolerance.inside
        for k, of_batch in enumerate(values):
            expected = torch.cat([trial.after[index][k] for trial in alone])
            said = beyond(of_batch, expected, allowed, tolerance.least_range)
            if said is not None:
                count = together.layout.num_inputs
                return f"{named(index - 1)} gives one of {count} inputs other values than alone {said}"
    return None


def beyond(values: Tensor, expected: Tensor, allowed: float, least_range: float) -> str | None:
    """Returns how far values are from the expected ones, where that is beyond `Tolerance`'s limits; else None."""
    if values.shape != expected.shape:
        return f"({list(values.shape)} numbers, not {list(expected.shape)})"
    if not values.numel():
        return None
    wanted = expected.double()
    apart = (values.double() - wanted).abs()
    reached = wanted.abs().amax(dim=0).clamp(min=least_range).expand_as(apart)
    if bool((apart <= allowed * reached).all()):
        return None
    worst = (apart - allowed * reached).argmax()
    by, of = float(apart.flatten()[worst]), float(reached.flatten()[worst])
    return f"(by {by:.2g} in a range of {of:.2g}; {100 * allowed:g}% of it is allowed)"


def _depends_on_others(backbone: Backbone, values: Tensors, together: Trial) -> bool:
    """Whether an input's values change with the inputs beside it, their number being the same."""
    others = examples(backbone.inputs, together.layout, seed=1)
    for parity in range(2):
        kept = torch.arange(together.layout.num_inputs) % 2 == parity
        mixed = tuple(
            torch.where(kept.view(-1, *[1] * (each.ndim - 1)), each, other)
            for each, other in zip(values, others, strict=True)
        )
        beside_others = _run(backbone, mixed, together.layout)
        for one, other in zip(together.after, beside_others.after, strict=True):
            if any(beyond(b[kept], a[kept], SAME, 0.0) for a, b in zip(one, other, strict=True)):
                return True
    return False


def _check_rows(backbone: Backbone, rows: Sequence[Encoded], difference: str, least_range: float) -> None:
    """Raise TrialError unless the answers to some rows are nearly the same alone and together."""
    why = f"{difference}: the number of inputs in a batch rounds it"
    if not rows:
        raise TrialError(
            f"{why}, for random inputs; give rows of your own, as `offramp inject --data` does: their answers decide"
        )
    if (strange := mismatch(backbone.inputs, rows[0])) is not None:
        raise TrialError(strange)
    tried = rows[:: max(1, len(rows) // MOST_ROWS)][:MOST_ROWS]
    for begin in range(0, len(tried), ROWS_TOGETHER):
        piece = entry_piece("", tried[begin : begin + ROWS_TOGETHER])
        values, layout = tuple(map(torch.from_numpy, piece.tensors)), Layout(piece.lengths_B)
        together, alone = _run(backbone, values, layout), _alone(backbone, values, layout)
        for k, answers in enumerate(together.after[-1]):
            said = beyond(answers, torch.cat([each.after[-1][k] for each in alone]), ROUNDED, least_range)
            if said is not None:
                raise TrialError(
                    f"{why}, and so it does the answers to rows of the data {said}; export the model with operators "
                    "that round less, such as LayerNormalization (opset 17) instead of a variance in one pass"
                )


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
        self.inputs = inputs
        self._config = config

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
                name=f"hidden_{k}", shape=tuple(each.shape[1:]), dtype=known[each.dtype], per_token=self.max_length > 1
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
