"""Reads the graph of an ONNX file as a `Dataflow`. Weights in files beside it are not loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from earlyexit.errors import GraphError
from earlyexit.foreign.dataflow import Dataflow, Operator, check_operator, kind_of
from earlyexit.network.boundary import DType

OPEN_SIZE = 128
"""The default size of open axes, such as tokens or the sides of images, but not of the batch axis."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of torch files and of pickles."""
DOMAINS = ("", "ai.onnx", "com.microsoft")
"""The domains of known operators. In other domains the same name may mean another operator."""
GraphDType = Literal["float32", "float16", "int64", "int32", "uint8", "bool"]
DTYPES: Mapping[str, DType] = {
    "float32": "float",
    "float16": "float",
    "int64": "int32",
    "int32": "int32",
    "uint8": "uint8",
    "bool": "uint8",
}
"""The type in which a tensor crosses, by its type in the graph."""


def load_structure(path: Path) -> Any:
    """Returns the onnx.ModelProto of a file, without the weights beside it. Raises GraphError for other files."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        raise GraphError("ONNX files need onnx; run in Offramp's clone: pip install '.[onnx]', or '.[gpu]' for a GPU")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        with path.open("rb") as file:
            start = file.read(4)
        if start.startswith(PICKLES):
            raise GraphError(f"{path} is a pickle or zip file, which could run code and is not loaded; {_EXPECTED}")
        proto = onnx.load(path, "protobuf", load_external_data=False)
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror}; {_EXPECTED}") from error
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        if start[:1] == IR_VERSION:
            size = path.stat().st_size
            raise GraphError(
                f"{path} begins like an ONNX model, but cannot be read to its end: it is damaged or incomplete "
                f"({size} bytes); copy or export it again"
            ) from error
        raise GraphError(f"{path} is no ONNX model; {_EXPECTED}") from error
    if not proto.graph.node:
        raise GraphError(f"{path} is no ONNX model, or has no operators; {_EXPECTED}")
    return proto


IR_VERSION = b"\x08"
"""The first byte of an ONNX file: field 1 of ModelProto, `ir_version`, as a varint."""
_EXPECTED = "a model is an .onnx file, or module:function that returns a torch module and example inputs"


def weights_beside(proto: Any, path: Path) -> tuple[Path, ...]:
    """Returns the files beside a model that hold its weights. Raises GraphError for one outside its folder."""
    folder = path.resolve().parent
    files: dict[Path, None] = {}
    for name, location in locations(proto):
        file = (folder / location).resolve()
        if not location or not file.is_relative_to(folder) or file == folder:
            raise GraphError(
                f"{path}: weights of {name!r} are at {location!r}, outside the model's folder; put them beside the file"
            )
        files[file] = None
    return tuple(files)


def locations(proto: Any) -> Iterator[tuple[str, str]]:
    """Yields the name and the location of every tensor whose values are outside the model's file."""
    for tensor in _tensors(proto):
        if tensor.data_location == tensor.EXTERNAL:
            yield tensor.name, next((each.value for each in tensor.external_data if each.key == "location"), "")


def _tensors(message: Any) -> Iterator[Any]:
    """Yields every onnx.TensorProto in a message and its subgraphs."""
    import onnx
    from google.protobuf.message import Message

    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in (value,) if isinstance(value, Message) else value:
                yield from _tensors(each)


def check_operators(graph: Any, path: Path) -> None:
    """Gives every node a unique name. Raises GraphError for operators that prevent cuts."""
    if others := [each.name for each in graph.input if not each.type.HasField("tensor_type")]:
        raise GraphError(f"{path}: the input {others[0]!r} is not a tensor; only tensors can be fed")
    names = Counter(node.name for node in graph.node)
    known = {each.name for each in (*graph.input, *graph.initializer)} | {
        each.values.name for each in graph.sparse_initializer
    }
    for index, node in enumerate(graph.node):
        if not node.name or names[node.name] > 1:
            node.name = f"{node.op_type}#{index}"
        has_graph = any(attribute.HasField("g") for attribute in node.attribute)
        check_operator(str(path), node.op_type, node.name, has_graph=has_graph)
        if missing := [name for name in node.input if name and name not in known]:
            raise GraphError(f"{path}: {node.name} reads {missing[0]!r}, which no operator before it computes")
        known.update(node.output)


def dataflow_of(graph: Any) -> Dataflow:
    """Returns an onnx.GraphProto as a dataflow, without shapes."""
    weights = {each.name for each in graph.initializer} | {each.values.name for each in graph.sparse_initializer}
    return Dataflow(
        operators=tuple(_operators(graph, weights)),
        inputs=tuple(each.name for each in graph.input if each.name not in weights),
        outputs=tuple(each.name for each in graph.output),
        weights=frozenset(weights),
    )


def _operators(graph: Any, weights: set[str]) -> Iterator[Operator]:
    constants = set(weights)
    for node in graph.node:
        op = node.op_type if node.domain in DOMAINS else f"{node.domain}.{node.op_type}"
        inputs = tuple(filter(None, node.input))
        if constants.issuperset(inputs):
            constants.update(node.output)
        is_embedding = op == "Gather" and inputs[0] in constants
        yield Operator(
            name=node.name,
            op=op,
            kind="work" if is_embedding else kind_of(op),
            inputs=inputs,
            outputs=tuple(filter(None, node.output)),
        )


def sizes_of_input(info: Any) -> tuple[int | None, ...]:
    """Returns the sizes of an input's axes; None for an open axis."""
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in info.type.tensor_type.shape.dim)


def dtype_of_input(info: Any) -> GraphDType:
    """Returns the numpy name of an input's type. Raises GraphError for a type that inputs cannot have."""
    from onnx import helper

    dtype = str(np.dtype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)))
    if dtype not in DTYPES:
        raise GraphError(f"the graph's input {info.name!r} is {dtype}; inputs can be {', '.join(DTYPES)}")
    return cast(GraphDType, dtype)


def table_rows(graph: Any, name: str) -> int:
    """Returns the rows of the smallest table in which an input's integers are looked up; 2 if there is no table."""
    rows = {each.name: int(each.dims[0]) for each in graph.initializer if each.dims}
    return min((rows[table] for table in dataflow_of(graph).tables(name) if table in rows), default=2)


def arbitrary_inputs(inputs: Sequence[Any], open_size: int) -> dict[str, Any]:
    """Returns random numbers from 0 to 1, or ones for integers, for inputs (ValueInfoProtos) of a graph.

    Open axes have the size `open_size`. Open batch axes have the batch size of another input, or 1.
    """
    import onnx

    first_axes = [each.type.tensor_type.shape.dim[0] for each in inputs if each.type.tensor_type.shape.dim]
    batch = next((dim.dim_value for dim in first_axes if dim.dim_value > 0), 1)
    batch_names = {dim.dim_param for dim in first_axes} - {""}
    generator, values = np.random.default_rng(0), {}
    for each in inputs:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
        shape = [
            dim.dim_value  # some exporters write -1 for an open axis
            if dim.dim_value > 0
            else batch
            if axis == 0 or dim.dim_param in batch_names
            else open_size
            for axis, dim in enumerate(each.type.tensor_type.shape.dim)
        ]
        is_float = np.issubdtype(dtype, np.floating)
        values[each.name] = (1 - generator.random(shape) if is_float else np.ones(shape)).astype(dtype)
    return values


def returning(proto: Any, tensors: Iterable[str]) -> Any:
    """Returns a copy of an onnx.ModelProto whose outputs are these tensors."""
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(proto)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(tensors))
    return model
