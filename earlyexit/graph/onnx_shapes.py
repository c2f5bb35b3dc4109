"""The shapes of an ONNX model's tensors for inputs of one size, found without running it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALL = 4096
"""Values of a tensor that is computed here, to know the shapes that it says."""
ROUNDS = 8
"""Of inferring shapes, computing what they say, and inferring more."""
OWN_INITIALIZERS = 4
"""The first version of ONNX's files in which weights need not be inputs too."""
_EXACT = """Constant Identity Cast Gather Squeeze Unsqueeze Concat Slice Split Reshape Flatten Transpose Add Sub Mul Div
    Mod Neg Min Max Floor Ceil Sqrt Pow Equal Less Greater LessOrEqual GreaterOrEqual Not And Or Where ReduceProd
    ReduceSum ReduceMax ReduceMin Range ConstantOfShape Expand"""
_FOLDED = frozenset(_EXACT.split())
"""Operators of which graphs make shapes."""
_Values = dict[str, NDArray[Any]]


def with_shapes(proto: Any, open_size: int) -> Any:
    """The graph with the shapes that follow: for one input where it leaves the first axis open, `open_size` elsewhere.

    onnx infers shapes from shapes. Where a graph computes a shape from the size of another tensor, by more than onnx
    follows, that small computation is done here, its operators replaced by what they give, and onnx asked again.
    """
    import onnx

    known = _structure(proto)
    weights = {each.name for each in known.graph.initializer}
    _close_axes([each for each in known.graph.input if each.name not in weights], open_size)
    small = [each for each in proto.graph.initializer if _is_small(each)]
    values = {each.name: onnx.numpy_helper.to_array(each) for each in small}
    inferred = known.graph
    for _ in range(ROUNDS):
        try:
            inferred = onnx.shape_inference.infer_shapes(known, data_prop=True).graph
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
            break
        if not _fold(known, dict(known_shapes(inferred)), values):
            break
    return inferred


def _structure(proto: Any) -> Any:
    """The model with the sizes and types of its large weights in their place, and no shape but its inputs'."""
    import onnx

    graph = onnx.GraphProto(name=proto.graph.name, node=proto.graph.node, input=proto.graph.input)
    graph.sparse_initializer.extend(proto.graph.sparse_initializer)
    for each in proto.graph.initializer:
        sizes = onnx.TensorProto(name=each.name, dims=each.dims, data_type=each.data_type)
        graph.initializer.append(each if _is_small(each) else sizes)
    for each in proto.graph.output:
        graph.output.append(each)
        graph.output[-1].type.tensor_type.ClearField("shape")
    version = max(proto.ir_version, OWN_INITIALIZERS)
    return onnx.ModelProto(graph=graph, opset_import=proto.opset_import, ir_version=version)


def known_shapes(graph: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a graph all of whose axes are known."""
    for each in (*graph.input, *graph.value_info, *graph.output):
        shape = each.type.tensor_type.shape
        if each.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in shape.dim):
            yield each.name, tuple(dim.dim_value for dim in shape.dim)


def _close_axes(inputs: Sequence[Any], open_size: int) -> None:
    """Give every open axis a size: one input, or as many as another input of the model always has."""
    firsts = [each.type.tensor_type.shape.dim[0] for each in inputs if each.type.tensor_type.shape.dim]
    batch = next((dim.dim_value for dim in firsts if dim.dim_value > 0), 1)
    counts_inputs = {dim.dim_param for dim in firsts} - {""}
    for each in inputs:
        for axis, dim in enumerate(each.type.tensor_type.shape.dim):
            if dim.dim_value <= 0:  # some exporters write -1
                dim.dim_value = batch if axis == 0 or dim.dim_param in counts_inputs else open_size


def _fold(model: Any, shapes: Mapping[str, tuple[int, ...]], values: _Values) -> bool:
    """Replace operators by their small results where these are known now; whether there were any."""
    from onnx import numpy_helper

    kept, folded = [], []
    for node in model.graph.node:
        given = _results(node, shapes, values, model.opset_import)
        values |= given
        folded += [numpy_helper.from_array(value, name) for name, value in given.items()]
        kept += [] if given else [node]
    if folded:
        del model.graph.node[:]
        model.graph.node.extend(kept)
        model.graph.initializer.extend(folded)
    return bool(folded)


def _is_small(tensor: Any) -> bool:
    return math.prod(tensor.dims) <= SMALL and not tensor.external_data


def _results(node: Any, shapes: Mapping[str, tuple[int, ...]], values: _Values, opsets: Any) -> _Values:
    """By name, what an operator gives; empty where that is not known, or large."""
    if node.domain not in ("", "ai.onnx"):
        return {}
    if node.op_type == "Shape" and node.input[0] in shapes:
        ends = {each.name: each.i for each in node.attribute}
        part = shapes[node.input[0]][slice(ends.get("start"), ends.get("end"))]
        return {node.output[0]: np.array(part, dtype=np.int64)}
    if node.op_type not in _FOLDED or any(name and name not in values for name in node.input):
        return {}
    if node.op_type in ("ConstantOfShape", "Expand") and math.prod(values[node.input[-1]].tolist()) > SMALL:
        return {}
    given = _computed(node, values, opsets)
    return given if all(value.size <= SMALL for value in given.values()) else {}


def _computed(node: Any, values: _Values, opsets: Any) -> _Values:
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    inputs = [helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(node.input) if name]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    model = helper.make_model(helper.make_graph([node], "one", inputs, outputs), opset_imports=list(opsets))
    try:
        with np.errstate(all="ignore"):
            given = ReferenceEvaluator(model).run(None, {each.name: values[each.name] for each in inputs})
    except Exception:
        return {}
    return {each.name: np.asarray(value) for each, value in zip(outputs, given, strict=True)}
