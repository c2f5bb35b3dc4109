"""What the inputs of an ONNX graph are to a codec: which tensor feeds which, and how pixels are normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from earlyexit.codecs import make_codec
from earlyexit.codecs.image import ImageCodec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.codecs.text import TextPairCodec, TokenizedCodec
from earlyexit.errors import GraphError
from earlyexit.foreign.dataflow import layout_role
from earlyexit.foreign.onnx_config import DTYPES, GraphInput, Pixels, Source, entry_boundary
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import NUMPY, Boundary
from earlyexit.network.wire import DATATYPES

TRACED = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten")
"""Between ids and the table that they are looked up in."""


WHOLE = ("int64", "int32", "uint8")
"""Types of images that are numbers from 0 to 255: a scaled one would be cut off to whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How inputs enter a graph."""

    inputs: tuple[GraphInput, ...]
    pixels: Pixels | None = None
    max_length: int = 1

    @property
    def boundary(self) -> Boundary:
        """What the codec gives."""
        return entry_boundary(self.inputs, self.pixels)


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


def free_sizes(graph: Any, entry: Entry) -> int | None:
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
    sizes, dtype = _sizes(info), _dtype(info)
    planes = {"NCHW": (3, height, width), "NHWC": (height, width, 3)}
    layout = next((name for name, shape in planes.items() if _fits(sizes, shape)), None)
    if layout is None:
        raise GraphError(
            f"the graph's input {info.name!r} is {list(sizes)}; the codec gives images of {height} x {width} pixels"
        )
    taken = GraphInput(name=info.name, shape=planes[layout], dtype=dtype)
    if dtype in WHOLE:
        settings = _of_whole_pixels(info.name, dtype, settings)
    try:
        pixels = Pixels.model_validate({**settings, "height": height, "width": width, "layout": layout})
    except ValidationError as error:
        first = error.errors()[0]
        raise GraphError(f"pixels: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    as_they_are = dtype == "uint8" and layout == "NHWC" and pixels.order == "RGB"
    return Entry(inputs=(taken,), pixels=None if as_they_are else pixels)


def _of_whole_pixels(name: str, dtype: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    scaled = [each for each in ("scale", "mean", "std") if each in settings]
    if scaled:
        raise GraphError(
            f"pixels: {', '.join(scaled)}: the graph's input {name!r} is {dtype}, and takes pixels from 0 to 255 as "
            "they are; only their order can be said"
        )
    return {**settings, "scale": 1.0}


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
    """An input with a row per input, of the shape that the graph says, or of one that fits it."""
    sizes, dtype = _sizes(info), _dtype(info)
    shape = tuple(size or 0 for size in sizes[1:]) if shape is None else shape
    if not _fits(sizes, shape) or not all(shape):
        raise GraphError(f"the graph's input {info.name!r} is {list(sizes)}; rows of {list(shape)} do not fit it")
    below = _rows_looked_up(graph, info.name) if dtype in ("int64", "int32") else None
    return GraphInput(name=info.name, shape=shape, dtype=dtype, below=below)


def _rows_looked_up(graph: Any, name: str) -> int:
    """How many rows the table has that an input's numbers are looked up in; 2 where there is none."""
    weights = {each.name: each for each in graph.initializer}
    same = {name}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[1] in same and node.input[0] in weights:
            return int(weights[node.input[0]].dims[0])
        if node.op_type in TRACED and node.input[0] in same:
            same.update(node.output)
    return 2


def _sizes(info: Any) -> tuple[int | None, ...]:
    """Of every axis; None where the graph leaves it open."""
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in info.type.tensor_type.shape.dim)


def _fits(sizes: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Whether rows of a shape are an input of these sizes, whose first axis is that of inputs."""
    return len(sizes) == len(shape) + 1 and all(a in (None, b) for a, b in zip(sizes[1:], shape, strict=True))


def _dtype(info: Any) -> str:
    from onnx import helper

    dtype = str(np.dtype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)))
    if dtype not in DTYPES:
        raise GraphError(f"the graph's input {info.name!r} is {dtype}; {', '.join(DTYPES)} are fed")
    return dtype
