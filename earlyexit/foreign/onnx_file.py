"""Reads the graph of an ONNX file as a `Dataflow`. Weights in files beside it are not loaded."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.errors import GraphError, first_line
from earlyexit.foreign.dataflow import Dataflow, Operator, check_operator, kind_of

logger = logging.getLogger(__name__)

SMALL = 4096
"""Tensors of at most so many values are kept and computed during shape inference, because shapes may depend on them."""
ROUNDS = 8
"""The most rounds of shape inference and constant folding."""
OWN_INITIALIZERS = 4
"""The first version of ONNX's file format in which weights need not be inputs of the graph."""


def with_shapes(proto: Any, open_size: int) -> Any:
    """Returns the graph with inferred shapes for one input. Other open axes have the size `open_size`.

    onnx infers shapes from other shapes. If a graph computes a shape from the size of a tensor, onnxscript folds that
    computation to a constant, and onnx infers again.
    """
    import onnx
    from onnxscript.optimizer import fold_constants

    weights = {each.name: each for each in proto.graph.initializer}
    inputs = [each for each in proto.graph.input if each.name not in weights]
    graph = onnx.GraphProto(name=proto.graph.name, node=proto.graph.node, input=inputs)
    _close_axes(graph.input, open_size)
    graph.sparse_initializer.extend(proto.graph.sparse_initializer)
    graph.initializer.extend(each for each in weights.values() if _is_small(each))
    large = [each for each in weights.values() if not _is_small(each)]  # no shape depends on their values
    graph.input.extend(onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in large)
    for each in proto.graph.output:
        graph.output.append(each)
        graph.output[-1].type.tensor_type.ClearField("shape")
    version = max(proto.ir_version, OWN_INITIALIZERS)
    known = onnx.ModelProto(graph=graph, opset_import=proto.opset_import, ir_version=version)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it warns about operators that it cannot fold
    try:
        with np.errstate(all="ignore"):
            for _ in range(ROUNDS):
                known = onnx.shape_inference.infer_shapes(known, data_prop=True)
                if not fold_constants(known, onnx_shape_inference=True, should_fold=_should_fold).modified:
                    break
    except Exception as error:  # neither library has a common base class of its errors
        logger.warning("some shapes of the graph %r are unknown: %s", proto.graph.name, first_line(error))
    return known.graph


def _should_fold(node: Any) -> bool | None:
    """Folds ConstantOfShape, with which exporters compute shapes, but no large results; None: onnxscript decides."""
    shape = node.outputs[0].shape
    if shape is None or not shape.is_static():
        return None
    if math.prod(shape) > SMALL:
        return False
    return True if node.op_type == "ConstantOfShape" else None


def _close_axes(inputs: Sequence[Any], open_size: int) -> None:
    """Gives every open axis a size: another input's batch size, or 1, for batch axes, and `open_size` for others."""
    first_axes = [each.type.tensor_type.shape.dim[0] for each in inputs if each.type.tensor_type.shape.dim]
    batch = next((dim.dim_value for dim in first_axes if dim.dim_value > 0), 1)
    batch_names = {dim.dim_param for dim in first_axes} - {""}
    for each in inputs:
        for axis, dim in enumerate(each.type.tensor_type.shape.dim):
            if dim.dim_value <= 0:  # some exporters write -1
                dim.dim_value = batch if axis == 0 or dim.dim_param in batch_names else open_size


def _is_small(tensor: Any) -> bool:
    return math.prod(tensor.dims) <= SMALL and not tensor.external_data


OPEN_SIZE = 128
"""The default size of open axes, such as tokens or the sides of images, but not of the batch axis."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of torch files and of pickles."""
DOMAINS = ("", "ai.onnx", "com.microsoft")
"""The domains of known operators. In other domains the same name may mean another operator."""


def load_structure(path: Path) -> Any:
    """Returns the onnx.ModelProto of a file, without the weights beside it. Raises GraphError for other files."""
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        raise GraphError("ONNX files are read with onnx: install offramp[onnx] or offramp[gpu]")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        with path.open("rb") as file:
            start = file.read(4)
        if start.startswith(PICKLES):
            raise GraphError(f"{path} is a pickle or zip file, which could run code and is not loaded; {_EXPECTED}")
        proto = onnx.load(path, load_external_data=False)
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
    names = Counter(node.name for node in graph.node)
    known = {each.name for each in (*graph.input, *graph.initializer)} | {
        each.values.name for each in graph.sparse_initializer
    }
    for index, node in enumerate(graph.node):
        if not node.name or names[node.name] > 1:
            node.name = f"{node.op_type}#{index}"
        has_graph = any(attribute.HasField("g") for attribute in node.attribute)
        check_operator(str(path), node.op_type, node.name, has_graph=has_graph)
        missing = [name for name in node.input if name and name not in known]
        if missing:
            raise GraphError(f"{path}: {node.name} reads {missing[0]!r}, which no operator before it computes")
        known.update(node.output)


def dataflow_of(graph: Any, inferred: Any) -> Dataflow:
    """Returns an onnx.GraphProto as a dataflow. `inferred`: the same graph with inferred shapes."""
    weights = {each.name for each in graph.initializer} | {each.values.name for each in graph.sparse_initializer}
    inputs = tuple(each.name for each in graph.input if each.name not in weights)
    infos = [*inferred.input, *inferred.value_info, *inferred.output]
    types = {each.name: each.type.tensor_type for each in infos}
    shapes = {
        each.name: tuple(dim.dim_value for dim in each.type.tensor_type.shape.dim)
        for each in infos
        if each.name not in weights and _is_known(each.type.tensor_type)
    }
    batch = next((shapes[name][0] for name in inputs if shapes.get(name)), 1) or 1
    return Dataflow(
        operators=tuple(_operators(graph, weights)),
        inputs=inputs,
        outputs=tuple(each.name for each in graph.output),
        weights=frozenset(weights),
        shapes=shapes,
        bytes_per_input={
            name: math.prod(shape) * _item_bytes(types[name].elem_type) // batch for name, shape in shapes.items()
        },
        batch=batch,
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


def _is_known(tensor: Any) -> bool:
    """Whether the sizes of all axes of an onnx.TypeProto.Tensor are known."""
    return bool(tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim))


def _item_bytes(elem_type: int) -> int:
    import onnx

    try:
        return int(onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize)
    except KeyError:  # numpy does not have the type
        return 1


def sizes_of_input(info: Any) -> tuple[int | None, ...]:
    """Returns the sizes of an input's axes; None for an open axis."""
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in info.type.tensor_type.shape.dim)
