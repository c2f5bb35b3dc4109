"""Cuts an ONNX graph into blocks: finds out how inputs enter it and how its tensors cross, and tests the blocks.

The graph and its weights are written to a folder, changed to take batches of any size, and run on trial inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pydantic import ValidationError

from earlyexit.backends.onnx import describe_error, one_line, open_session
from earlyexit.codecs import make_codec
from earlyexit.codecs.image import ImageCodec
from earlyexit.codecs.text import TextPairCodec, TokenizedCodec
from earlyexit.errors import GraphError, first_mistake
from earlyexit.families.base import Backbone
from earlyexit.families.own import Tolerance, beyond, check_alone, examples, layout_of
from earlyexit.foreign.dataflow import SHAPE, layout_role
from earlyexit.foreign.model import SURE, Divisible
from earlyexit.foreign.onnx_backbone import (
    FILE,
    INLINE_BYTES,
    WEIGHTS_SUFFIX,
    Array,
    Axes,
    Crossing,
    Entry,
    GraphConfig,
    GraphInput,
    OnnxBackbone,
    Pixels,
    Size,
    Source,
    fingerprint,
    layout_array,
    to_graph_array,
)
from earlyexit.foreign.onnx_file import DTYPES, dataflow_of, dtype_of_input, returning, sizes_of_input, table_rows
from earlyexit.foreign.onnx_model import OnnxModel, declared_input
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Encoded, TensorSpec
from earlyexit.network.piece import Layout, Tensors

SHAPES = ((2, 3), (3, 3), (2, 5))
"""The numbers of inputs and tokens of the trials from which sizes are inferred. Any two share one number."""
BATCHES = (1, 2, 7)
"""The numbers of inputs in the trials of blocks."""
LENGTHS = (5, 1, 9, 3, 5, 7, 2)
"""The lengths of these inputs in tokens, up to the longest that the graph takes."""
TOLERANCE_OF_CUTS = 1e-4
"""The allowed difference between blocks and the uncut graph, relative to the range of a column of answers or 1."""
TOLERANCE_ALONE = Tolerance(answer=1e-3, inside=1e-2, least_range=0.1)
"""The allowed difference between an input alone and in a batch. A graph that mixes inputs exceeds it by far."""
KEPT = 2**16
"""The most numbers of a tensor whose values in the trials are kept."""
CONSTANTS = {"value_int": "int64", "value_ints": "int64", "value_float": "float32", "value_floats": "float32"}
"""The types of constants by the name of their attribute, except for tensors."""
WHOLE = ("int64", "int32", "uint8")
"""Types of images whose values stay integers from 0 to 255, because scaled values would be truncated."""


@dataclass(frozen=True, kw_only=True)
class DivisibleGraph(OnnxModel, Divisible):
    """An ONNX file whose graph was written to a model folder, where it runs inputs of any number from the codec."""

    folder: Path
    entry: Entry
    session: Any
    """Returns the outputs of the file, and all tensors between blocks."""

    def run(self, names: Sequence[str], values: Tensors, layout: Layout) -> dict[str, Array]:
        """Returns tensors, not sequences, for inputs from the codec. Raises GraphError if the graph cannot run them."""
        codec_values = zip(self.entry.codec_inputs, self.entry.enter(values), strict=True)
        feeds = {each.name: to_graph_array(each, rows, layout) for each, rows in codec_values}
        feeds |= {name: layout_array(each, layout) for name, each in self.entry.layout_inputs.items()}
        computed = [name for name in dict.fromkeys(names) if name not in feeds]
        try:
            results = self.session.run(computed, feeds)
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            raise GraphError(
                f"the graph does not take {layout.num_inputs} inputs"
                f"{'' if layout.longest == 1 else f' of {layout.longest} tokens'}: {describe_error(error)}"
            ) from error
        arrays = {name: each for name, each in zip(computed, results, strict=True) if isinstance(each, np.ndarray)}
        return feeds | arrays

    @cached_property
    def trials(self) -> dict[str, list[Array]]:
        """The values of every tensor for each of `SHAPES`. Large ones are zeros, of which only the shape is kept."""
        shapes = _trial_shapes(len(SHAPES) if self.entry.max_length > 1 else 2)
        names = [each.name for each in self.session.get_outputs()]
        trials: dict[str, list[Array]] = defaultdict(list)
        for num_inputs, tokens in shapes:
            layout = layout_of([tokens] * num_inputs)
            for name, value in self.run(names, examples(self.entry.entry, layout), layout).items():
                is_kept = value.size <= KEPT
                trials[name].append(value if is_kept else np.broadcast_to(value.dtype.type(0), value.shape))
        return dict(trials)

    def with_answer(self) -> DivisibleGraph:
        """Returns the graph with the answer as its only output: the user's choice, or the only output that can be.

        Raises GraphError if the graph cannot be run, or if there is not exactly one such output.
        """
        asked = self if self.options.output is None else self.with_outputs(self.options.output)
        trials = {name: self.trials[name][:2] for name in asked.flow.outputs if name in self.trials}
        return self.with_outputs(self.answer_among(trials, [num_inputs for num_inputs, _ in SHAPES[:2]]))

    def specs(self, cut: Sequence[str]) -> list[TensorSpec]:
        for name in self._sizes([cut, self.flow.outputs]):
            sizes_of(name, self.trials[name])
        return [crossing(name, self.trials[name]).spec() for name in cut]

    def blocks(self, cuts: Sequence[Sequence[str]]) -> OnnxBackbone:
        cuts = [*cuts, self.flow.outputs]
        sizes = self._sizes(cuts)
        [output] = self.flow.outputs
        answers = self.trials[output][0].astype(np.float32)
        are_shares = (answers >= 0).all() and (np.abs(answers.sum(1) - 1) < SURE).all()
        config = GraphConfig(
            **dict(self.entry),
            file=FILE,
            sha256=fingerprint(self.folder, FILE),
            cuts=tuple(tuple(crossing(name, self.trials[name]) for name in cut) for cut in cuts),
            outputs="probabilities" if are_shares or self.flow.maker[output].op == "Sigmoid" else "logits",
            sizes={name: sizes_of(name, self.trials[name]) for name in sizes},
        )
        return OnnxBackbone(config, self.folder)

    def compare(self, backbone: Backbone, rows: Sequence[Encoded]) -> None:
        assert isinstance(backbone, OnnxBackbone)
        trials = check_alone(backbone, rows, batches=[LENGTHS[:count] for count in BATCHES], tolerance=TOLERANCE_ALONE)
        types = {each.dtype for cut in backbone.config.cuts for each in cut}
        allowed = TOLERANCE_OF_CUTS * (100 if "float16" in types else 1)  # three digits instead of seven
        for trial in trials:
            results = self.run(self.flow.outputs, examples(backbone.inputs, trial.layout), trial.layout)
            expected = backbone.answer_of(results[self.flow.outputs[0]], trial.layout)
            difference = beyond(trial.after[-1][0], expected, allowed, least_range=1.0)
            if difference is not None:
                is_quantized = any(each.op == "QuantizeLinear" for each in self.flow.operators)
                fault = f"for {trial.layout.num_inputs} inputs, blocks and uncut graph return other values {difference}"
                raise GraphError(f"{fault}; the graph is quantized, use the float32 file" if is_quantized else fault)

    def _sizes(self, cuts: Sequence[Sequence[str]]) -> list[str]:
        """Returns the sizes that blocks must be fed; the last cut is the answer. Raises GraphError for invalid cuts."""
        flow, layout = self.flow, self.entry.layout_inputs
        codec = [each.name for each in self.entry.codec_inputs]
        free = flow.known(layout)
        sizes: set[str] = set()
        before: Sequence[str] = codec
        for block, cut in enumerate(cuts):
            for name in cut:
                if name not in flow.maker and name not in codec:
                    raise GraphError(f"the graph has no tensor {name!r} to cut at")
                if name in free:
                    raise GraphError(f"the graph's tensor {name!r} is the same for all inputs: it has no information")
            try:
                part = flow.part(before, layout, cut)
            except KeyError as error:
                where = "the graph's input" if block == 0 else f"a cut at {', '.join(before)}"
                raise GraphError(
                    f"block {block} also needs the tensor {error}, which is not in {where}; add it, or cut elsewhere"
                ) from error
            if not part.operators:
                raise GraphError(f"block {block} computes nothing: its cuts are at the same tensors")
            sizes.update(part.sizes)
            before = cut
        return sorted(sizes)


def open_onnx(file: OnnxModel, codec: NamedSpec, folder: Path) -> DivisibleGraph:
    """Writes a file's graph to a folder, and returns it with the answer as its only output.

    If it cannot be run because it has a fixed batch size, it is changed to any batch size.
    """
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(file.proto)
    try:
        onnx.load_external_data_for_model(model, str(file.path.parent))
    except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        raise GraphError(f"the weights beside {file.path} cannot be read: {one_line(error)}") from error
    entry = describe_inputs(model.graph, codec, file.options.pixels)
    fixed_batch = _free_sizes(model.graph, entry)
    _weights_from_constants(model.graph)
    beside = FILE + WEIGHTS_SUFFIX
    folder.mkdir(parents=True, exist_ok=True)
    (folder / beside).unlink(missing_ok=True)  # onnx would append to it
    onnx.save_model(model, folder / FILE, save_as_external_data=True, location=beside, size_threshold=INLINE_BYTES)
    (folder / beside).touch()  # the file exists even if the graph has no weights

    def opened() -> DivisibleGraph:
        flow = dataflow_of(model.graph)
        sizes = [name for each in flow.operators if each.op == SHAPE for name in each.outputs]
        tensors = dict.fromkeys((*flow.outputs, *flow.tensors, *sizes))
        session = open_session(returning(model, tensors), folder)
        flow = replace(file.flow, operators=flow.operators, weights=flow.weights)
        facts = vars(file) | {"flow": flow, "folder": folder, "entry": entry, "session": session}
        return DivisibleGraph(**facts, codec=codec).with_answer()

    try:
        return opened()
    except GraphError as error:
        if fixed_batch is None or not _reshape_any_batch(model.graph, entry, fixed_batch):
            raise
        onnx.save_model(model, folder / FILE)
        try:
            return opened()
        except GraphError:
            raise GraphError(
                f"{file.path} was made for batches of {fixed_batch} and cannot be run with other sizes: {error}"
            ) from error


def describe_inputs(graph: Any, codec: NamedSpec, pixels: Mapping[str, Any]) -> Entry:
    """Returns how a codec's tensors become the inputs of a graph. Raises GraphError if they do not fit.

    `pixels`: settings of `Pixels` except size and layout.
    """
    weights = {each.name for each in graph.initializer}
    infos = [each for each in graph.input if each.name not in weights]
    encoder = make_codec(codec)
    if isinstance(encoder, TokenizedCodec):
        has_types = isinstance(encoder, TextPairCodec) and encoder.token_types
        return Entry(inputs=_token_inputs(graph, infos, has_types), max_length=encoder.max_length)
    if isinstance(encoder, ImageCodec):
        return _image_entry(infos, encoder, pixels)
    return Entry(inputs=tuple(declared_input(graph, each) for each in infos))


def _free_sizes(graph: Any, entry: Entry) -> int | None:
    """Makes the batch and token axes of the graph dynamic, and removes the declared shapes of its other tensors.

    Returns the fixed batch size of its inputs, or None.
    """
    fixed_batch = None
    free = {each.name: (0, 1) if each.per_token else (0,) for each in entry.inputs}
    for each in (*graph.input, *graph.output):
        dims = each.type.tensor_type.shape.dim
        for axis in [axis for axis in free.get(each.name, ()) if axis < len(dims)]:
            if axis == 0 and dims[0].dim_value > 0:
                fixed_batch = dims[0].dim_value
            dims[axis].dim_param = "BT"[axis]
    for each in graph.output:
        each.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    return fixed_batch


def _token_inputs(graph: Any, infos: Sequence[Any], codec_has_types: bool) -> tuple[GraphInput, ...]:
    inputs: list[GraphInput] = []
    for info in infos:
        rank, dtype = len(info.type.tensor_type.shape.dim), dtype_of_input(info)
        source: Source = layout_role(info.name) or "codec"
        if rank != 2 or (source == "codec" and dtype not in ("int64", "int32")):
            raise GraphError(f"the input {info.name!r} is {dtype} of {rank} axes; texts are fed as integers (B, T)")
        below = table_rows(graph, info.name) if source in ("codec", "zeros") else None
        source = "codec" if source == "zeros" and codec_has_types else source
        inputs.append(GraphInput(name=info.name, axes="BT", dtype=dtype, source=source, below=below))
    tokens = [each.name for each in inputs if each.source == "codec"]
    if len(tokens) != 1 + codec_has_types:
        names = ", ".join(map(repr, tokens)) or "none"
        raise GraphError(f"{1 + codec_has_types} of the graph's inputs should take tokens; by their names: {names}")
    return tuple(sorted(inputs, key=lambda each: layout_role(each.name) == "zeros"))


def _image_entry(infos: Sequence[Any], codec: ImageCodec, settings: Mapping[str, Any]) -> Entry:
    if len(infos) != 1:
        names = ", ".join(repr(each.name) for each in infos)
        raise GraphError(f"the codec image returns one tensor, the graph takes {names}")
    [info] = infos
    height, width = codec.size.height, codec.size.width
    sizes, dtype = sizes_of_input(info), dtype_of_input(info)
    shapes = {"NCHW": (3, height, width), "NHWC": (height, width, 3)}
    layout = next((name for name, shape in shapes.items() if _fits(sizes, shape)), None)
    if layout is None:
        raise GraphError(
            f"the graph's input {info.name!r} is {list(sizes)}; the codec returns images of {height} x {width} pixels"
        )
    graph_input = GraphInput(name=info.name, shape=shapes[layout], dtype=dtype)
    if dtype in WHOLE:
        if scaled := [each for each in ("scale", "mean", "std") if each in settings]:
            raise GraphError(
                f"pixels: {', '.join(scaled)}: the graph's input {info.name!r} is {dtype}, and takes pixels from 0 to "
                "255 without scaling; only their order can be set"
            )
        settings = {**settings, "scale": 1.0}
    try:
        pixels = Pixels.model_validate({**settings, "height": height, "width": width, "layout": layout})
    except ValidationError as error:
        raise GraphError(f"pixels: {first_mistake(error, 'all')}") from error
    is_unchanged = dtype == "uint8" and layout == "NHWC" and pixels.order == "RGB"
    return Entry(inputs=(graph_input,), pixels=None if is_unchanged else pixels)


def _fits(sizes: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Whether rows of a shape fit an input with axes of these sizes. The first axis is the batch."""
    return len(sizes) == len(shape) + 1 and all(a in (None, b) for a, b in zip(sizes[1:], shape, strict=True))


def _trial_shapes(num_trials: int) -> Sequence[tuple[int, int]]:
    """Returns the numbers of inputs and tokens of each trial. Trials of inputs without tokens are fewer."""
    return SHAPES if num_trials == len(SHAPES) else [(inputs, 1) for inputs, _ in SHAPES[:num_trials]]


def crossing(name: str, trials: Sequence[Array]) -> Crossing:
    """Infers from its trial values how a tensor crosses. Raises GraphError if it cannot."""
    dtype: Any = str(trials[0].dtype)
    if dtype not in DTYPES:
        hint = "; use the float32 file" if dtype == "int8" else ""
        raise GraphError(f"the graph's tensor {name!r} is {dtype}; tensors that cross can be {', '.join(DTYPES)}{hint}")
    for axes in get_args(Axes):
        shapes = zip(trials, _trial_shapes(len(trials)), strict=True)
        rows = [_row(trial.shape, axes, *shape) for trial, shape in shapes]
        if rows[0] is not None and all(row == rows[0] for row in rows):
            return Crossing(name=name, axes=axes, shape=rows[0], dtype=dtype)
    raise GraphError(
        f"the graph's tensor {name!r}, {list(trials[0].shape)} for {SHAPES[0][0]} inputs, has a row neither per input "
        "nor per token: it cannot cross"
    )


def _row(shape: tuple[int, ...], axes: Axes, num_inputs: int, longest: int) -> tuple[int, ...] | None:
    """Returns the shape of a row if a tensor of this shape has these first axes, else None."""
    if axes == "B*n":
        return (shape[0] // num_inputs, *shape[1:]) if shape and not shape[0] % num_inputs else None
    sizes = {"B": num_inputs, "T": longest, "B*T": num_inputs * longest}
    first = tuple(sizes[axis] for axis in ([axes] if "*" in axes else axes))
    return shape[len(first) :] if shape[: len(first)] == first else None


def sizes_of(name: str, trials: Sequence[Array]) -> tuple[Size, ...]:
    """Infers a shape that the graph reads from its trial values. Raises GraphError if it cannot."""
    return tuple(_size(name, [int(number) for number in numbers]) for numbers in zip(*trials, strict=True))


def _size(name: str, numbers: Sequence[int]) -> Size:
    shapes = _trial_shapes(len(numbers))
    for inputs, tokens in product(range(3), repeat=2):
        factor = numbers[0] // (shapes[0][0] ** inputs * shapes[0][1] ** tokens)
        size = Size(factor=factor, inputs=inputs, tokens=tokens)
        if all(size.of(*shape) == number for shape, number in zip(shapes, numbers, strict=True)):
            return size
    raise GraphError(f"the size {name!r} in the graph does not follow from the numbers of inputs and tokens")


def _weights_from_constants(graph: Any) -> None:
    """Makes constants weights, and packs weights stored as lists, so that they can be in another file."""
    from onnx import helper, numpy_helper

    kept = []
    for node in graph.node:
        attribute = node.attribute[0].name if node.op_type == "Constant" and node.attribute else ""
        if attribute == "value":
            weight = graph.initializer.add()
            weight.CopyFrom(node.attribute[0].t)
            weight.name = node.output[0]
        elif attribute in CONSTANTS:
            values = np.array(helper.get_attribute_value(node.attribute[0]), CONSTANTS[attribute])
            graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
    for tensor in graph.initializer:
        if not tensor.HasField("raw_data") and tensor.data_type != tensor.STRING:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))


def _reshape_any_batch(graph: Any, entry: Entry, fixed_batch: int) -> bool:
    """Makes every `Reshape` that names the fixed batch size take any size. Returns whether there was one."""
    from onnx import numpy_helper

    free, weights = dataflow_of(graph).known(entry.layout_inputs), {each.name: each for each in graph.initializer}
    changed = False
    for index, node in enumerate(graph.node):
        if node.op_type != "Reshape" or node.input[0] in free or node.input[1] not in weights:
            continue
        shape = numpy_helper.to_array(weights[node.input[1]])
        if shape.ndim != 1 or not len(shape) or shape[0] != fixed_batch:
            continue
        any_batch = np.array([0, *shape[1:]], dtype=np.int64)
        graph.initializer.append(numpy_helper.from_array(any_batch, f"any_batch_{index}"))
        node.input[1] = f"any_batch_{index}"
        changed = True
    return changed
