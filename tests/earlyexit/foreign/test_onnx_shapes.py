"""Shapes that a graph computes of the sizes of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from earlyexit.foreign.onnx_model import read_onnx
from tests.earlyexit.foreign.found import LIGHT, PACKAGED, model_file
from tests.earlyexit.foreign.tiny import graph_of, saved

ROW = np.zeros((1, 4), dtype=np.float32)


def whole(name: str, numbers: int | list[int]) -> Any:
    return numpy_helper.from_array(np.array(numbers, dtype=np.int64), name)


def test_a_shape_that_is_computed_of_sizes_is_followed(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "sizes"),
        ("Gather", "sizes one", "tokens"),
        ("Mul", "tokens two", "twice"),
        ("Reshape", "twice minus_one", "twice_as_a_list"),
        helper.make_node("Concat", ["minus_one", "twice_as_a_list", "three"], ["shape"], axis=0),
        ("Reshape", "x shape", "y"),
    ]
    numbers = [whole("one", 1), whole("two", 2), whole("minus_one", [-1]), whole("three", [3])]
    model = graph_of(nodes, [("x", TensorProto.FLOAT, ("batch", "tokens", 6))], ["y"], numbers)
    flow = read_onnx(saved(tmp_path, model), open_size=5).flow
    assert flow.shapes["y"] == (1, 10, 3)
    assert flow.bytes_per_input["y"] == 120


def test_a_large_constant_is_not_made_for_its_shape(tmp_path: Path) -> None:
    nodes = [("ConstantOfShape", "huge", "zeros"), ("MatMul", "x zeros", "y")]
    model = graph_of(nodes, ["x"], ["y"], [whole("huge", [4, 2**40])])
    assert read_onnx(saved(tmp_path, model)).flow.shapes["y"] == (1, 2**40)


def test_an_expansion_as_torch_exports_it_is_followed(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "sizes"),
        ("Gather", "sizes first", "inputs"),
        helper.make_node("Concat", ["inputs", "minus_one"], ["wanted"], axis=0),
        ("Shape", "wanted", "axes"),
        helper.make_node(
            "ConstantOfShape", ["axes"], ["ones"], value=helper.make_tensor("", TensorProto.INT64, [1], [1])
        ),
        ("Mul", "ones minus_one", "kept"),
        ("Equal", "wanted kept", "is_kept"),
        ("Where", "is_kept ones wanted", "shape"),
        ("Expand", "row shape", "rows"),
        ("Add", "x rows", "y"),
    ]
    model = graph_of(
        nodes, ["x"], ["y"], [whole("first", [0]), whole("minus_one", [-1]), numpy_helper.from_array(ROW, "row")]
    )
    assert read_onnx(saved(tmp_path, model)).flow.shapes["y"] == (1, 4)


def test_an_operator_that_onnx_defines_by_others_has_a_shape(tmp_path: Path) -> None:
    nodes = [("LessOrEqual", "x x", "same"), ("Where", "same x x", "y")]
    model = graph_of(nodes, ["x"], ["y"])
    model.opset_import[0].version = 14
    assert read_onnx(saved(tmp_path, model)).flow.shapes["y"] == (1, 4)


def test_no_shape_is_guessed_from_values_beside_the_model(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["axis", "axis"], ["shape"], axis=0), ("Reshape", "x shape", "y")]
    model = graph_of(nodes, ["x"], ["y"], [whole("axis", [2])])
    path = tmp_path / "beside.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="beside.bin", size_threshold=0)
    assert "y" not in read_onnx(path).flow.shapes


def test_a_graph_whose_shapes_cannot_be_inferred_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = graph_of([("Relu", "x", "a"), ("Relu", "x", "a"), ("Relu", "a", "y")], ["x"], ["y"])
    assert read_onnx(saved(tmp_path, model)).flow.shapes["y"] == (1, 4)
    assert "not all shapes are known" in caplog.text


@pytest.mark.parametrize("name", [*LIGHT, *PACKAGED])
def test_every_tensor_that_crosses_from_operator_to_operator_has_a_shape(name: str) -> None:
    flow = read_onnx(model_file(name), open_size=48 if name == "ocr_recognition" else 128).flow
    read = {each for operator in flow.live for each in operator.inputs} - flow.free
    assert read - set(flow.shapes) == set()
