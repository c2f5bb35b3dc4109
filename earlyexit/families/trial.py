"""Trials of a network in blocks: an input's values must not depend on the inputs beside it.

Some kernels round by the number of inputs in a batch, a variance in one pass for instance. Such rounding is told apart
from a network that mixes inputs: with other inputs beside it, as many and as long, an input's values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from earlyexit.families.base import Backbone
from earlyexit.network.boundary import Boundary, Encoded, entering, misfit
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
        mixed = tuple(_where(kept, each, other) for each, other in zip(values, others, strict=True))
        beside_others = _run(backbone, mixed, together.layout)
        for one, other in zip(together.after, beside_others.after, strict=True):
            if any(beyond(b[kept], a[kept], SAME, 0.0) for a, b in zip(one, other, strict=True)):
                return True
    return False


def _where(kept: Tensor, values: Tensor, others: Tensor) -> Tensor:
    return torch.where(kept.view(-1, *[1] * (values.ndim - 1)), values, others)


def _check_rows(backbone: Backbone, rows: Sequence[Encoded], difference: str, least_range: float) -> None:
    """Raise TrialError unless the answers to some rows are nearly the same alone and together."""
    why = f"{difference}: the number of inputs in a batch rounds it"
    if not rows:
        raise TrialError(
            f"{why}, for random inputs; give rows of your own, as `offramp inject --data` does: their answers decide"
        )
    if (strange := misfit(backbone.inputs, rows[0])) is not None:
        raise TrialError(strange)
    tried = rows[:: max(1, len(rows) // MOST_ROWS)][:MOST_ROWS]
    for begin in range(0, len(tried), ROWS_TOGETHER):
        piece = entering("", tried[begin : begin + ROWS_TOGETHER])
        values, layout = tuple(map(torch.from_numpy, piece.tensors)), Layout(piece.lengths_B)
        together, alone = _run(backbone, values, layout), _alone(backbone, values, layout)
        for k, answers in enumerate(together.after[-1]):
            said = beyond(answers, torch.cat([each.after[-1][k] for each in alone]), ROUNDED, least_range)
            if said is not None:
                raise TrialError(
                    f"{why}, and so it does the answers to rows of the data {said}; export the model with operators "
                    "that round less, such as LayerNormalization (opset 17) instead of a variance in one pass"
                )
