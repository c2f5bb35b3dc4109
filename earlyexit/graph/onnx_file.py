"""Reads an ONNX file as a dataflow: its structure only, so weights beside the file are not loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from earlyexit.errors import GraphError
from earlyexit.graph.dataflow import Dataflow, Operator
from earlyexit.graph.onnx_operators import BRANCHING, kind_of
from earlyexit.graph.onnx_shapes import known_shapes, with_shapes

OPEN_SIZE = 128
"""Of axes that a model leaves open, but the first, which counts inputs: tokens of a text, pixels of a side."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How torch's files and bare pickles begin."""
DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Of operators that `onnx_operators` knows; in others the same name may mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """An ONNX file that was read and checked."""

    path: Path
    proto: Any
    """onnx.ModelProto, without functions of its own; weights beside the file are not in it."""
    flow: Dataflow
    """Tensors are named as in `proto`; operators too, all of whose nodes have a name of their own."""
    beside: tuple[Path, ...]
    """Files with weights, in the folder of the model or below it."""


def read_onnx(path: Path, *, open_size: int = OPEN_SIZE) -> OnnxFile:
    """Read a model; axes that it leaves open are `open_size` long where bytes are counted.

    Raises GraphError for what is no ONNX model, for weights outside its folder, and for If, Loop and Scan.
    """
    proto = load_structure(path)
    beside = weights_beside(proto, path)
    if proto.functions:
        import onnx.inliner

        proto = onnx.inliner.inline_local_functions(proto)
    _check_operators(proto.graph, path)
    return OnnxFile(path=path, proto=proto, flow=dataflow_of(proto.graph, with_shapes(proto, open_size)), beside=beside)


def load_structure(path: Path) -> Any:
    """The onnx.ModelProto of a file, without weights that lie beside it; raises GraphError where there is none."""
    if find_spec("onnx") is None:
        raise GraphError("ONNX files are read with onnx: install offramp[onnx] or offramp[gpu]")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        with path.open("rb") as file:
            start = file.read(4)
        if start.startswith(PICKLES):
            raise GraphError(f"{path} is a pickle or a zip, which may run anybody's code and is not loaded; {_WANTED}")
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror}; {_WANTED}") from error
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise GraphError(f"{path} is no ONNX model; {_WANTED}") from error
    if not proto.graph.node:
        raise GraphError(f"{path} is no ONNX model, or one without operators; {_WANTED}")
    return proto


_WANTED = "a model is a file .onnx, or module:function that gives a torch module and example inputs"


def weights_beside(proto: Any, path: Path) -> tuple[Path, ...]:
    """The files beside a model that hold its weights; raises GraphError where one lies outside the model's folder."""
    folder = path.resolve().parent
    found: dict[Path, None] = {}
    for name, location in locations(proto):
        file = (folder / location).resolve()
        if not location or not file.is_relative_to(folder) or file == folder:
            raise GraphError(
                f"{path}: weights of {name!r} lie at {location!r}, outside the model's folder; put them beside the file"
            )
        found[file] = None
    return tuple(found)


def locations(proto: Any) -> Iterator[tuple[str, str]]:
    """The names of a model's tensors whose numbers lie beside it, and where: those of graphs inside it too."""
    for tensor in _tensors(proto):
        if tensor.data_location == tensor.EXTERNAL:
            yield tensor.name, next((each.value for each in tensor.external_data if each.key == "location"), "")


def _tensors(message: Any) -> Iterator[Any]:
    """Every onnx.TensorProto in a message, wherever ONNX has a place for one."""
    import onnx
    from google.protobuf.message import Message

    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in (value,) if isinstance(value, Message) else value:
                yield from _tensors(each)


def _check_operators(graph: Any, path: Path) -> None:
    """Refuse what cannot be cut, and give every node a name of its own."""
    names = Counter(node.name for node in graph.node)
    known = {each.name for each in (*graph.input, *graph.initializer)} | {
        each.values.name for each in graph.sparse_initializer
    }
    for index, node in enumerate(graph.node):
        if not node.name or names[node.name] > 1:
            node.name = f"{node.op_type}#{index}"
        if node.op_type in BRANCHING or any(attribute.HasField("g") for attribute in node.attribute):
            raise GraphError(
                f"{path}: {node.op_type} ({node.name}) runs a graph of its own, by what inputs hold: such models "
                "cannot be cut"
            )
        missing = [name for name in node.input if name and name not in known]
        if missing:
            raise GraphError(f"{path}: {node.name} reads {missing[0]!r}, which nothing before it gives")
        known.update(node.output)


def dataflow_of(graph: Any, inferred: Any) -> Dataflow:
    """Of an onnx.GraphProto, whose shapes are in `inferred`: another of the same tensors, or itself."""
    weights = {each.name for each in graph.initializer} | {each.values.name for each in graph.sparse_initializer}
    inputs = tuple(each.name for each in graph.input if each.name not in weights)
    shapes = dict(known_shapes(inferred))
    types = {
        each.name: each.type.tensor_type.elem_type for each in (*inferred.input, *inferred.value_info, *inferred.output)
    }
    batch = batch_of(shapes, inputs)
    return Dataflow(
        operators=tuple(_operators(graph, weights)),
        inputs=inputs,
        outputs=tuple(each.name for each in graph.output),
        weights=frozenset(weights),
        shapes=shapes,
        bytes_per_input={name: math.prod(shape) * _item_bytes(types[name]) // batch for name, shape in shapes.items()},
        batch=batch,
    )


def _operators(graph: Any, weights: set[str]) -> Iterator[Operator]:
    constants = set(weights)
    for node in graph.node:
        op = node.op_type if node.domain in DOMAINS else f"{node.domain}.{node.op_type}"
        inputs = tuple(filter(None, node.input))
        if constants.issuperset(inputs):
            constants.update(node.output)
        looks_up = op == "Gather" and inputs[0] in constants
        yield Operator(
            name=node.name,
            op=op,
            kind=kind_of(op, looks_up_weights=looks_up),
            inputs=inputs,
            outputs=tuple(filter(None, node.output)),
        )


def batch_of(shapes: Mapping[str, tuple[int, ...]], inputs: tuple[str, ...]) -> int:
    """How many inputs the first axis of the graph's inputs counts."""
    return next((shapes[name][0] for name in inputs if shapes.get(name)), 1) or 1


def _item_bytes(elem_type: int) -> int:
    import onnx

    try:
        return int(onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize)
    except KeyError:  # a type that numpy does not have
        return 1
