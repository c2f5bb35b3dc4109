"""How inputs enter an ONNX file and its tensors cross, and its graph in a model's folder.

A graph is put into the folder with its weights beside it, opened to batches of any size, and tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
from pydantic import ValidationError

from earlyexit.codecs import make_codec
from earlyexit.codecs.image import ImageCodec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.codecs.text import TextPairCodec, TokenizedCodec
from earlyexit.errors import GraphError, first_mistake
from earlyexit.families.own import Tolerance, TrialError, beyond, check_alone, examples, layout_of
from earlyexit.foreign.dataflow import Dataflow, UncutError, layout_role
from earlyexit.foreign.model import SURE, ForeignOptions, Looked, longest_taken, or_why, the_answer
from earlyexit.foreign.onnx_backbone import (
    DTYPES,
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
    fed,
    fingerprint,
    in_plain_words,
    of_layout,
    one_line,
    open_graph,
    read_graph,
    weights_of,
)
from earlyexit.foreign.onnx_file import dataflow_of, sizes_of_input
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import DATATYPES, NUMPY, Encoded, TensorSpec
from earlyexit.network.piece import Layout, Tensors

SHAPES = ((2, 3), (3, 3), (2, 5))
"""Inputs and tokens of the trials from which sizes follow; any two share one number."""
BATCHES = (1, 2, 7)
"""Numbers of inputs in the trials of blocks."""
LENGTHS = (5, 1, 9, 3, 5, 7, 2)
"""Lengths of these inputs in tokens, as far as the graph takes them."""
TOLERANCE_OF_CUTS = 1e-4
"""Allowed between blocks and the uncut graph, as a share of an answer's column; magnitudes count as 1 at least."""
TOLERANCE_ALONE = Tolerance(answer=1e-3, inside=1e-2, least_range=0.1)
"""Allowed between an input alone and in a batch; a graph that mixes inputs is far beyond."""
TRACED = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten")
"""Operators between ids and the table in which they are looked up."""
WHOLE = ("int64", "int32", "uint8")
"""Types of images with values from 0 to 255; scaled values would be cut off to whole numbers."""


def opened(
    proto: Any,
    path: Path,
    asked: ForeignOptions,
    codec: NamedSpec,
    look: Callable[[Opened], Looked],
    folder: Path | None = None,
) -> Looked:
    """Returns what is seen in the graph, in a folder; where that fails, once it takes any number of inputs.

    `proto`: an onnx.ModelProto without the weights beside the file `path`.
    """
    if folder is None:
        with TemporaryDirectory() as made:
            return opened(proto, path, asked, codec, look, Path(made))
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(proto)
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        raise GraphError(f"the weights beside {path} cannot be read: {one_line(error)}") from error
    entry = describe_inputs(model.graph, codec, asked.pixels)
    made_for = _free_sizes(model.graph, entry)
    _weights_from_constants(model.graph)
    beside = FILE + WEIGHTS_SUFFIX
    onnx.save_model(model, folder / FILE, save_as_external_data=True, location=beside, size_threshold=INLINE_BYTES)
    (folder / beside).touch()  # a graph without weights has the file as well
    try:
        return look(Opened.opened(folder, entry, asked.output))
    except GraphError as error:
        if made_for is None or not _reshape_any_batch(folder, entry, made_for):
            raise
        try:
            return look(Opened.opened(folder, entry, asked.output))
        except GraphError:
            raise GraphError(
                f"{path} was made for batches of {made_for} and cannot be run in others: {error}"
            ) from error


def describe_inputs(graph: Any, codec: NamedSpec, pixels: Mapping[str, Any]) -> Entry:
    """How what a codec gives becomes a graph's inputs; `pixels` are settings of `Pixels` beside its size and layout.

    Raises GraphError where that cannot be told, or does not fit.
    """
    weights = {each.name for each in graph.initializer}
    infos = [each for each in graph.input if each.name not in weights]
    made = make_codec(codec)
    if isinstance(made, TokenizedCodec):
        types = isinstance(made, TextPairCodec) and made.token_types
        return Entry(inputs=_token_inputs(graph, infos, types), max_length=made.max_length)
    if isinstance(made, ImageCodec):
        return _image_entry(infos, made, pixels)
    if isinstance(made, TensorCodec):
        return Entry(inputs=tuple(_column_inputs(graph, infos, made)))
    return Entry(inputs=tuple(_as_declared(graph, each) for each in infos))


def _free_sizes(graph: Any, entry: Entry) -> int | None:
    """Let the graph take any number of inputs, and of tokens; gives the number of inputs that it was made for, if one.

    What it says of the shapes inside it goes, which may hold that number.
    """
    fixed = None
    free = {each.name: (0, 1) if each.per_token else (0,) for each in entry.inputs}
    for each in (*graph.input, *graph.output):
        dims = each.type.tensor_type.shape.dim
        for axis in [axis for axis in free.get(each.name, ()) if axis < len(dims)]:
            if axis == 0 and dims[0].dim_value > 0:
                fixed = dims[0].dim_value
            dims[axis].dim_param = "BT"[axis]
    for each in graph.output:
        each.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    return fixed


def _token_inputs(graph: Any, infos: Sequence[Any], types_of_codec: bool) -> tuple[GraphInput, ...]:
    found: list[GraphInput] = []
    for info in infos:
        rank, dtype = len(info.type.tensor_type.shape.dim), _dtype(info)
        source: Source = layout_role(info.name) or "codec"
        if rank != 2 or (source == "codec" and dtype not in ("int64", "int32")):
            raise GraphError(
                f"the graph's input {info.name!r} is {dtype} of {rank} axes; texts are fed as whole numbers (B, T)"
            )
        below = _rows_looked_up(graph, info.name) if source in ("codec", "zeros") else None
        source = "codec" if source == "zeros" and types_of_codec else source
        found.append(GraphInput(name=info.name, axes="BT", dtype=dtype, source=source, below=below))
    tokens = [each.name for each in found if each.source == "codec"]
    if len(tokens) != 1 + types_of_codec:
        named = ", ".join(map(repr, tokens)) or "none"
        raise GraphError(f"of the graph's inputs {1 + types_of_codec} should take tokens, by their names: {named}")
    ids_first = sorted(found, key=lambda each: layout_role(each.name) == "zeros")
    return tuple(ids_first)


def _image_entry(infos: Sequence[Any], codec: ImageCodec, settings: Mapping[str, Any]) -> Entry:
    if len(infos) != 1:
        names = ", ".join(repr(each.name) for each in infos)
        raise GraphError(f"the codec image gives one tensor, the graph takes {names}")
    [info] = infos
    height, width = codec.size.height, codec.size.width
    sizes, dtype = sizes_of_input(info), _dtype(info)
    planes = {"NCHW": (3, height, width), "NHWC": (height, width, 3)}
    layout = next((name for name, shape in planes.items() if _fits(sizes, shape)), None)
    if layout is None:
        raise GraphError(
            f"the graph's input {info.name!r} is {list(sizes)}; the codec gives images of {height} x {width} pixels"
        )
    taken = GraphInput(name=info.name, shape=planes[layout], dtype=dtype)
    if dtype in WHOLE:
        if scaled := [each for each in ("scale", "mean", "std") if each in settings]:
            raise GraphError(
                f"pixels: {', '.join(scaled)}: the graph's input {info.name!r} is {dtype}, and takes pixels from 0 to "
                "255 as they are; only their order can be said"
            )
        settings = {**settings, "scale": 1.0}
    try:
        pixels = Pixels.model_validate({**settings, "height": height, "width": width, "layout": layout})
    except ValidationError as error:
        raise GraphError(f"pixels: {first_mistake(error, 'all')}") from error
    as_they_are = dtype == "uint8" and layout == "NHWC" and pixels.order == "RGB"
    return Entry(inputs=(taken,), pixels=None if as_they_are else pixels)


def _column_inputs(graph: Any, infos: Sequence[Any], codec: TensorCodec) -> list[GraphInput]:
    columns = {column.name: column for column in codec.inputs}
    by_name = {info.name: info for info in infos}
    if len(columns) == len(infos) == 1:
        by_name = dict(zip(columns, infos, strict=True))
    if columns.keys() != by_name.keys():
        raise GraphError(f"the codec has the columns {', '.join(columns)}; the graph takes {', '.join(by_name)}")
    found = []
    for name, column in columns.items():
        given = _as_declared(graph, by_name[name], column.shape)
        crosses = NUMPY[DTYPES[given.dtype]]
        if DATATYPES[column.datatype] != crosses:
            raise GraphError(f"the column {name!r} is {column.datatype}; the graph takes {crosses}")
        found.append(given)
    return found


def _as_declared(graph: Any, info: Any, shape: tuple[int, ...] | None = None) -> GraphInput:
    """Returns an input with a row per input, of the graph's shape, or of one that fits it."""
    sizes, dtype = sizes_of_input(info), _dtype(info)
    shape = tuple(size or 0 for size in sizes[1:]) if shape is None else shape
    if not _fits(sizes, shape) or not all(shape):
        raise GraphError(f"the graph's input {info.name!r} is {list(sizes)}; rows of {list(shape)} do not fit it")
    below = _rows_looked_up(graph, info.name) if dtype in ("int64", "int32") else None
    return GraphInput(name=info.name, shape=shape, dtype=dtype, below=below)


def _rows_looked_up(graph: Any, name: str) -> int:
    """Returns the rows of the table in which an input's numbers are looked up; 2 where there is none."""
    weights = {each.name: each for each in graph.initializer}
    same = {name}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[1] in same and node.input[0] in weights:
            return int(weights[node.input[0]].dims[0])
        if node.op_type in TRACED and node.input[0] in same:
            same.update(node.output)
    return 2


def _fits(sizes: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Whether rows of a shape fit an input of these sizes, whose first axis counts inputs."""
    return len(sizes) == len(shape) + 1 and all(a in (None, b) for a, b in zip(sizes[1:], shape, strict=True))


def _dtype(info: Any) -> str:
    from onnx import helper

    dtype = str(np.dtype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)))
    if dtype not in DTYPES:
        raise GraphError(f"the graph's input {info.name!r} is {dtype}; {', '.join(DTYPES)} are fed")
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A graph in a folder, ready to be tried."""

    model: Any
    folder: Path
    entry: Entry
    flow: Dataflow
    output: str
    """The tensor that is the answer."""
    answers: Array
    """The answers of the first trial."""

    @classmethod
    def opened(cls, folder: Path, entry: Entry, output: str | None) -> Opened:
        """Raises GraphError where it cannot be run, or gives no classification, or several and `output` is None."""
        model = read_graph(folder, FILE)
        flow = dataflow_of(model.graph, model.graph)
        names = [output] if output is not None else [each.name for each in model.graph.output]
        if output is not None and output not in flow.maker:
            others = ", ".join(each.name for each in model.graph.output)
            raise GraphError(f"the graph has no tensor {output!r}; its outputs are {others}")
        trials = Whole(model, folder, entry, names).measured()

        def can_be(name: str) -> bool:
            first, other, *_ = trials[name]
            if first.dtype.kind != "f" or first.ndim != 2 or (len(first), len(other)) != (2, 3):
                return False
            return bool(first.shape[1] >= 2 and first.shape[1] == other.shape[1])

        answer = the_answer("the graph", {name: trials[name][0].shape for name in names}, can_be, batch=2)
        return cls(model=model, folder=folder, entry=entry, flow=flow, output=answer, answers=trials[answer][0])

    def taken(self, cuts: Sequence[Sequence[str]], rows: Sequence[Encoded]) -> GraphConfig:
        """Returns all that is needed to run its blocks, which were tried; raises GraphError."""
        cuts = [*cuts, [self.output]]
        sizes = self._sizes(cuts)
        whole = self._whole([*(name for cut in cuts for name in cut), *sizes])
        of_name = whole.measured()
        sums = np.abs(self.answers.sum(1) - 1)
        config = GraphConfig(
            **dict(self.entry),
            file=FILE,
            sha256=fingerprint(self.folder, FILE),
            cuts=tuple(tuple(crossing(name, of_name[name]) for name in cut) for cut in cuts),
            outputs="probabilities" if (self.answers >= 0).all() and (sums < SURE).all() else "logits",
            sizes={name: sizes_of(name, of_name[name]) for name in sizes},
        )
        longest_taken("the graph", self.entry.max_length, whole.runs, least=SHAPES[0][1], must=True)
        # Blocks give what the uncut graph does, and an input the same alone and together.
        backbone, [last] = OnnxBackbone(config, self.folder), config.cuts[-1]
        try:
            trials = check_alone(backbone, [LENGTHS[:count] for count in BATCHES], TOLERANCE_ALONE, rows)
        except TrialError as error:
            raise GraphError(str(error)) from error
        for trial in trials:
            uncut = whole.run(examples(backbone.inputs, trial.layout), trial.layout)[last.name]
            expected = backbone.answer_of(uncut, trial.layout)
            said = beyond(trial.after[-1][0], expected, TOLERANCE_OF_CUTS, least_range=1.0)
            if said is not None:
                count = trial.layout.num_inputs
                raise GraphError(f"the blocks give {count} inputs other values than the uncut graph {said}")
        return config

    def specs(self, cuts: Sequence[Sequence[str]]) -> list[list[TensorSpec] | str]:
        """Returns what crosses at each of these cuts, each for itself, or why nothing can; measured at once."""
        sizes = [or_why(self._sizes, [cut, [self.output]]) for cut in cuts]
        readable = [(cut, read) for cut, read in zip(cuts, sizes, strict=True) if not isinstance(read, str)]
        of_name = self._whole([name for cut, read in readable for name in (*cut, *read)] or [self.output]).measured()

        def measured(cut: Sequence[str], read: list[str] | str) -> list[TensorSpec]:
            if isinstance(read, str):
                raise GraphError(read)
            found = [crossing(name, of_name[name]).spec() for name in cut]
            for name in read:
                sizes_of(name, of_name[name])
            return found

        return list(map(or_why, [measured] * len(cuts), cuts, sizes))

    def _sizes(self, cuts: Sequence[Sequence[str]]) -> list[str]:
        """Returns the sizes that its blocks are fed; raises GraphError where the cuts do not part it."""
        codec = [each.name for each in self.entry.codec_inputs]
        return sizes_needed(self.flow, cuts, codec, self.entry.layout_inputs)

    def _whole(self, names: Sequence[str]) -> Whole:
        return Whole(self.model, self.folder, self.entry, names)


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
        """Returns tensors for inputs as the codec gives them; raises GraphError where the graph does not take them."""
        entered = zip(self._entry.codec_inputs, self._entry.enter(values), strict=True)
        feeds = {each.name: fed(each, rows, layout) for each, rows in entered}
        feeds |= {name: of_layout(each, layout) for name, each in self._entry.layout_inputs.items()}
        try:
            results = self._session.run(self._names, feeds)
        except Exception as error:  # ONNX Runtime's have no base of their own
            raise GraphError(
                f"the graph does not take {layout.num_inputs} inputs"
                f"{'' if layout.longest == 1 else f' of {layout.longest} tokens'}: {in_plain_words(error)}"
            ) from error
        return dict(zip(self._names, results, strict=True))

    def runs(self, length: int) -> bool:
        """Whether the graph takes an input of so many tokens."""
        layout = layout_of([length])
        return not isinstance(or_why(self.run, examples(self._entry.entry, layout), layout), str)

    def measured(self) -> dict[str, list[Array]]:
        """Returns the values of every tensor for each of `SHAPES`."""
        shapes = SHAPES if self._entry.max_length > 1 else [(inputs, 1) for inputs, _ in SHAPES[:2]]
        layouts = [layout_of([tokens] * inputs) for inputs, tokens in shapes]
        trials = [self.run(examples(self._entry.entry, layout), layout) for layout in layouts]
        return {name: [trial[name] for trial in trials] for name in self._names}


def crossing(name: str, trials: Sequence[Array]) -> Crossing:
    """Returns how a tensor crosses, by its shapes in the trials; raises GraphError where it has no row per input."""
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
    """Returns the shape of a row, if these are the first axes; trials of one length have no tokens."""
    leading = {"BT": (num_inputs, longest), "TB": (longest, num_inputs), "B*T": (num_inputs * longest,)}
    leading |= {"B": (num_inputs,)}
    if axes in leading:
        first = leading[axes]
        return shape[len(first) :] if shape[: len(first)] == first else None
    if not shape or shape[0] % num_inputs:
        return None
    return (shape[0] // num_inputs, *shape[1:])


def sizes_of(name: str, trials: Sequence[Array]) -> Size | tuple[Size, ...]:
    """Returns the numbers of a `Shape` or `Size`, by the trials; raises GraphError where they do not follow."""
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


def sizes_needed(
    flow: Dataflow, cuts: Sequence[Sequence[str]], codec: Sequence[str], layout: Collection[str]
) -> list[str]:
    """Returns the sizes that blocks are fed; blocks that run as one piece need no others.

    Raises GraphError unless every cut parts the graph, in this order; the last is the graph's answer.
    """
    free = flow.known(layout)
    sizes: set[str] = set()
    before: Sequence[str] = codec
    for block, cut in enumerate(cuts):
        for name in cut:
            if name not in flow.maker and name not in codec:
                raise GraphError(f"the graph has no tensor {name!r} to cut at")
            if name in free:
                raise GraphError(f"the graph's tensor {name!r} is the same for all inputs: nothing crosses in it")
        try:
            part = flow.part(before, layout, cut)
        except UncutError as error:
            where = "the graph's input" if block == 0 else f"a cut at {', '.join(before)}"
            raise GraphError(
                f"block {block} also needs the graph's tensor {error.name!r}, which does not cross in {where}; it has "
                "to cross as well, or the cut to be elsewhere"
            ) from error
        if not part.operators:
            raise GraphError(f"block {block} computes nothing: its cuts are at the same tensors")
        sizes.update(part.sizes)
        before = cut
    return sorted(sizes)


def _weights_from_constants(graph: Any) -> None:
    """Turn large constants into weights, which may lie in another file, and so numbers that are stored one by one."""
    from onnx import numpy_helper

    for tensor in graph.initializer:
        if not tensor.HasField("raw_data") and tensor.data_type != tensor.STRING:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    kept = []
    for node in graph.node:
        value = next((each.t for each in node.attribute if each.name == "value"), None)
        if node.op_type == "Constant" and value is not None and len(value.raw_data) >= INLINE_BYTES:
            weight = graph.initializer.add()
            weight.CopyFrom(value)
            weight.name = node.output[0]
        else:
            kept.append(node)
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)


def _reshape_any_batch(folder: Path, entry: Entry, made_for: int) -> bool:
    """Let every `Reshape` that names the number of inputs take any number; returns whether there was one."""
    import onnx
    from onnx import numpy_helper

    model = read_graph(folder, FILE)
    graph = model.graph
    free = dataflow_of(graph, graph).known(entry.layout_inputs)
    changed = False
    for index, node in enumerate(graph.node):
        if node.op_type != "Reshape" or node.input[0] in free:
            continue
        shape = _constant(graph, node.input[1])
        if shape is None or shape.ndim != 1 or not len(shape) or shape[0] != made_for:
            continue
        opened = graph.initializer.add()
        opened.CopyFrom(numpy_helper.from_array(np.array([0, *shape[1:]], dtype=np.int64), f"any_batch_{index}"))
        node.input[1] = opened.name
        changed = True
    if changed:
        onnx.save_model(model, folder / FILE)
    return changed


def _constant(graph: Any, name: str) -> Array | None:
    from onnx import numpy_helper

    node = next((each for each in graph.node if name in each.output), None)
    tensor = weights_of(graph).get(name)
    if node is not None and node.op_type == "Constant":
        [value] = node.attribute
        if value.name == "value_ints":
            return np.array(value.ints)
        tensor = value.t if value.name == "value" else None
    return None if tensor is None else np.asarray(numpy_helper.to_array(tensor))
