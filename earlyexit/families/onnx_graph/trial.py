"""A graph tried out: how large its tensors are, what its answer is, and whether its blocks compute what it does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from earlyexit.errors import GraphError
from earlyexit.families.base import Backbone
from earlyexit.families.onnx_graph.backbone import Array, OnnxBackbone, enter, fed, layout_feeds, open_graph
from earlyexit.families.onnx_graph.config import DTYPES, Axes, Crossing, GraphConfig, Size
from earlyexit.families.onnx_graph.file import in_plain_words
from earlyexit.families.onnx_graph.inputs import Entry
from earlyexit.families.own import examples
from earlyexit.layout import Layout
from earlyexit.piece import Tensors

SHAPES = ((2, 3), (3, 3), (2, 5))
"""Inputs and tokens of the trials from which sizes follow: of any two, one number is the same."""
BATCHES = (1, 2, 7)
"""Of the trials of blocks."""
LENGTHS = (5, 1, 9, 3, 5, 7, 2)
"""Of their inputs, in tokens, as far as the graph takes them."""
TOLERANCE = 1e-4
"""Between blocks and the uncut graph, and between an input alone and among others; of numbers above 1, their share."""


class Whole:
    """The uncut graph; any of its tensors can be looked at."""

    def __init__(self, model: Any, folder: Path, entry: Entry, names: Sequence[str]) -> None:
        """Raises GraphError for operators that ONNX Runtime does not have."""
        import onnx

        looked_at = onnx.ModelProto()
        looked_at.CopyFrom(model)
        del looked_at.graph.output[:]
        looked_at.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names))
        self._session = open_graph(looked_at, folder, quiet=True)
        self._entry = entry
        self._names = list(dict.fromkeys(names))

    def run(self, values: Tensors, layout: Layout) -> dict[str, Array]:
        """The tensors of inputs as the codec gives them; raises GraphError where the graph does not take them."""
        codec = [each for each in self._entry.inputs if each.source == "codec"]
        entered = enter(values, self._entry.pixels)
        feeds = {each.name: fed(each, rows, layout) for each, rows in zip(codec, entered, strict=True)}
        feeds |= layout_feeds([each for each in self._entry.inputs if each.source != "codec"], layout)
        try:
            results = self._session.run(self._names, feeds)
        except Exception as error:  # ONNX Runtime's have no base of their own
            raise GraphError(
                f"the graph does not take {layout.num_inputs} inputs"
                f"{'' if layout.longest == 1 else f' of {layout.longest} tokens'}: {in_plain_words(error)}"
            ) from error
        return dict(zip(self._names, results, strict=True))

    def check_longest(self) -> None:
        """Raise GraphError, with the length that the graph does take, where inputs may be longer."""
        try:
            self._run_one(self._entry.max_length)
        except GraphError as error:
            lengths = range(SHAPES[0][1], self._entry.max_length)
            longest = bisect_left(lengths, True, key=self._is_too_long) + lengths.start - 1
            raise GraphError(
                f"the graph takes at most {longest} tokens, not {self._entry.max_length}: --max-length {longest}"
            ) from error

    def _is_too_long(self, length: int) -> bool:
        try:
            self._run_one(length)
        except GraphError:
            return True
        return False

    def _run_one(self, length: int) -> None:
        layout = layout_of([length])
        self.run(examples(self._entry.boundary, layout), layout)

    def measured(self) -> list[dict[str, Array]]:
        """The tensors in each of `SHAPES`."""
        shapes = SHAPES if self._entry.max_length > 1 else [(inputs, 1) for inputs, _ in SHAPES[:2]]
        layouts = [layout_of([tokens] * inputs) for inputs, tokens in shapes]
        return [self.run(examples(self._entry.boundary, layout), layout) for layout in layouts]


def layout_of(lengths: Sequence[int]) -> Layout:
    """Of inputs of these lengths."""
    return Layout(np.array(lengths, dtype=np.int32))


def crossing(name: str, trials: Sequence[Array]) -> Crossing:
    """How a tensor crosses, by its shapes in `SHAPES`; raises GraphError where it has no row per input."""
    dtype = str(trials[0].dtype)
    if dtype not in DTYPES:
        raise GraphError(f"the graph's tensor {name!r} is {dtype}; what crosses is {', '.join(DTYPES)}")
    for axes in get_args(Axes):
        found = [_row(trial.shape, axes, *shape) for trial, shape in zip(trials, SHAPES, strict=False)]
        if found[0] is not None and all(row == found[0] for row in found):
            return Crossing(name=name, axes=axes, shape=found[0], dtype=dtype)
    raise GraphError(
        f"the graph's tensor {name!r}, {list(trials[0].shape)} for {SHAPES[0][0]} inputs, has a row neither per input "
        "nor per token: it cannot cross"
    )


def _row(shape: tuple[int, ...], axes: Axes, num_inputs: int, longest: int) -> tuple[int, ...] | None:
    """The shape of a row, if these are the first axes; the trials of one length alone have no tokens."""
    leading = {"BT": (num_inputs, longest), "TB": (longest, num_inputs), "B*T": (num_inputs * longest,)}
    leading |= {"B": (num_inputs,)}
    if axes in leading:
        first = leading[axes]
        return shape[len(first) :] if shape[: len(first)] == first else None
    if not shape or shape[0] % num_inputs:
        return None
    return (shape[0] // num_inputs, *shape[1:])


def sizes_of(name: str, trials: Sequence[Array]) -> Size | tuple[Size, ...]:
    """The numbers of a `Shape` or `Size`, by those of the trials; raises GraphError where they do not follow."""
    if trials[0].ndim == 0:
        return _size(name, [int(trial) for trial in trials])
    return tuple(_size(name, [int(number) for number in numbers]) for numbers in zip(*trials, strict=True))


def _size(name: str, numbers: Sequence[int]) -> Size:
    shapes = [(inputs, tokens if len(numbers) == len(SHAPES) else 1) for inputs, tokens in SHAPES[: len(numbers)]]
    for inputs in range(3):
        for tokens in range(3 if len(numbers) == len(SHAPES) else 1):
            factor, rest = divmod(numbers[0], shapes[0][0] ** inputs * shapes[0][1] ** tokens)
            size = Size(factor=factor, inputs=inputs, tokens=tokens)
            if not rest and all(size.of(*shape) == number for shape, number in zip(shapes, numbers, strict=True)):
                return size
    raise GraphError(f"the size {name!r} in the graph does not follow from the numbers of inputs and tokens")


def check_blocks(backbone: OnnxBackbone, whole: Whole, config: GraphConfig) -> None:
    """Raise GraphError unless blocks give what the uncut graph does, and an input the same alone and together."""
    for count in BATCHES:
        layout = layout_of([min(length, config.max_length) for length in LENGTHS[:count]])
        values = examples(backbone.inputs, layout)
        together = _after_blocks(backbone, values, layout)
        layouts = [layout_of([length]) for length in layout.lengths_B.tolist()]
        alone = [
            _after_blocks(backbone, each, own)
            for each, own in zip(zip(*(_apart(rows, layout) for rows in values), strict=True), layouts, strict=True)
        ]
        for block, (rows, *apart) in enumerate(zip(together, *alone, strict=True)):
            for of_batch, *of_one in zip(rows, *apart, strict=True):
                _check(
                    of_batch, torch.cat(of_one), f"block {block} gives one of {count} inputs other values than alone"
                )
        [last] = config.cuts[-1]
        uncut = whole.run(values, layout)[last.name]
        expected = backbone.answer_of(uncut, layout)
        _check(together[-1][0], expected, f"the blocks give {count} inputs other values than the uncut graph")


def _after_blocks(backbone: Backbone, values: Tensors, layout: Layout) -> list[Tensors]:
    hidden = backbone.embed(values, layout)
    found = []
    for block in range(backbone.num_blocks):
        hidden = backbone.run_block(block, hidden, layout)
        found.append(hidden)
    return found


def _apart(values: Tensor, layout: Layout) -> Sequence[Tensor]:
    return torch.split(values, 1 if len(values) == layout.num_inputs else layout.lengths_B.tolist())


def _check(values: Tensor, expected: Tensor, problem: str) -> None:
    if values.shape != expected.shape:
        raise GraphError(f"{problem}: {list(values.shape)} numbers, not {list(expected.shape)}")
    if not values.numel():
        return
    apart = float((values.double() - expected.double()).abs().max())
    if not apart <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise GraphError(f"{problem} (by {apart:.2g})")
