"""Reading ONNX files: what their tensors weigh, and that nothing is loaded of what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, helper, numpy_helper

from earlyexit.errors import GraphError
from earlyexit.foreign.onnx_model import read_onnx
from tests.earlyexit.foreign.found import LIGHT, PACKAGED, model_file
from tests.earlyexit.foreign.tiny import beside, graph_of, saved, two_layers, weight


def test_bytes_are_those_of_one_input_whatever_the_batch_is(tmp_path: Path) -> None:
    for batch in ("batch", 1, 5):
        file = read_onnx(saved(tmp_path, two_layers(weight("w", 4, 6), ("x", TensorProto.FLOAT, (batch, 4)))))
        assert file.flow.bytes_per_input == {"x": 16, "a": 24, "y": 8}
        assert file.flow.batch == (5 if batch == 5 else 1)


def test_axes_left_open_have_the_size_that_is_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, two_layers(weight("w", 4, 6), ("x", TensorProto.FLOAT, ("batch", "tokens", 4))))
    assert read_onnx(path, open_size=10).flow.bytes_per_input["a"] == 10 * 24
    assert read_onnx(path).flow.shapes["a"] == (1, 128, 6)


def test_weights_are_named_and_no_inputs_although_old_files_list_them(tmp_path: Path) -> None:
    model = graph_of([("Add", "x w", "y")], ["x", ("w", TensorProto.FLOAT, (4,))], ["y"], [weight("w", 4)])
    flow = read_onnx(saved(tmp_path, model)).flow
    assert flow.inputs == ("x",)
    assert flow.weights == flow.free == frozenset({"w"})


def test_an_embedding_is_work_and_picking_a_token_is_not(tmp_path: Path) -> None:
    nodes = [("Gather", "table ids", "a"), ("Gather", "a first", "y")]
    weights = [weight("table", 9, 4), numpy_helper.from_array(np.array(0), "first")]
    model = graph_of(nodes, [("ids", TensorProto.INT64, ("batch", "tokens"))], ["y"], weights)
    assert [operator.kind for operator in read_onnx(saved(tmp_path, model)).flow.operators] == ["work", "light"]


def test_an_operator_of_somebody_elses_is_work_by_whatever_name(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], domain="their.own")
    [operator] = read_onnx(saved(tmp_path, graph_of([node], ["x"], ["y"]))).flow.operators
    assert (operator.op, operator.kind) == ("their.own.Relu", "work")


def test_functions_of_a_file_are_its_steps(tmp_path: Path) -> None:
    model = graph_of([helper.make_node("Twice", ["x"], ["y"], domain="own")], ["x"], ["y"])
    opsets = [helper.make_opsetid("", 18)]
    body = [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Exp", ["b"], ["c"])]
    model.functions.append(helper.make_function("own", "Twice", ["a"], ["c"], body, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert [operator.op for operator in read_onnx(saved(tmp_path, model)).flow.operators] == ["Relu", "Exp"]


def test_nodes_without_a_name_or_with_that_of_another_get_one(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Exp", ["a"], ["b"], name="n")]
    model = graph_of([*nodes, helper.make_node("Log", ["b"], ["y"], name="n")], ["x"], ["y"])
    file = read_onnx(saved(tmp_path, model))
    assert [operator.name for operator in file.flow.operators] == [node.name for node in file.proto.graph.node]
    assert len({operator.name for operator in file.flow.operators}) == 3


def test_weights_beside_the_file_are_told_and_not_loaded(tmp_path: Path) -> None:
    file = read_onnx(saved(tmp_path, two_layers(beside(weight("w", 4, 6), "weights/w.bin"))))
    assert file.beside == (tmp_path / "weights" / "w.bin",)
    assert file.flow.shapes["a"] == (1, 6)


def test_weights_behind_a_link_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(96))
    (folder / "w.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(GraphError, match="outside the model's folder"):
        read_onnx(saved(folder, two_layers(beside(weight("w", 4, 6), "w.bin"))))


def test_pickles_are_refused_without_being_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "loaded",)

    path = tmp_path / "model.onnx"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(GraphError, match="is a pickle or a zip"):
        read_onnx(path)
    assert not (tmp_path / "loaded").exists()


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
