"""Graphs that cannot be served, or not as they were asked for: one line each, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper

from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.families.base import Pretrained
from earlyexit.foreign.onnx_backbone import read_graph
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Encoded
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.foreign import onnx_graphs
from tests.earlyexit.foreign.onnx_graphs import (
    LETTERS,
    pictures_graph,
    pictures_taken,
    rounding_graph,
    saved,
    small_graph,
    with_ramps,
    words_graph,
    words_taken,
)

NUMBERS = {"name": "tensor", "columns": [{"name": "x", "datatype": "FP32", "shape": [4]}]}


def numbers_graph(body: str, *, inputs: str = "float[B, 4] x", output: str = "float[B, 4] logits") -> Any:
    return small_graph(f"numbers ({inputs}) => ({output}) {{ {body} }}", w=(4, 4), b=(4,))


def refused(graph: Any, folder: Path, **options: Any) -> str:
    with pytest.raises(GraphError) as error:
        taken(graph, folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def taken(
    graph: Any,
    folder: Path,
    cuts: Sequence[Sequence[str]] = (),
    codec: NamedSpec = NUMBERS,
    rows: Sequence[Encoded] = (),
    **asked: Any,
) -> Pretrained:
    return onnx_graphs.read_graph(saved(graph, folder / "from"), **asked).take(cuts, codec, folder, rows)


def test_whole_numbers_cross_but_no_exit_looks_at_them(tmp_path: Path) -> None:
    text = """numbers (float[B, 4] x) => (float[B, 4] logits) {
        h = Gemm(x, w, b) bytes = Cast <to = 2> (h) back = Cast <to = 1> (bytes) logits = Gemm(back, w, b) }"""
    path = saved(small_graph(text, w=(4, 4), b=(4,)), tmp_path / "from")
    model, cuts = onnx_graphs.read_graph(path), [["h"], ["bytes"]]
    why = "exits look at floating point numbers, and 'bytes' is uint8"
    assert model.refused(cuts, NUMBERS) == {("bytes",): why}
    with pytest.raises(ModelFolderError, match=f"no ramp can sit after block 1: {why}"):
        with_ramps(model.take(cuts, NUMBERS, tmp_path / "model"))


def test_one_of_several_outputs_is_chosen(tmp_path: Path) -> None:
    graph = numbers_graph("other = Relu(x) logits = Gemm(other, w, b)", output="float[B, 4] logits, float[B, 4] other")
    head = taken(graph, tmp_path, output="logits").head
    assert head is not None
    assert head.num_outputs == 4


@pytest.mark.parametrize(("others", "is_taken"), [pytest.param(3e-4, True, id="rounding"), pytest.param(0.05, False)])
def test_rounding_by_the_batch_is_no_dependence_on_others(tmp_path: Path, others: float, is_taken: bool) -> None:
    """Every input gets a share of the batch's largest number, as kernels round by what is beside an input."""
    graph = numbers_graph(
        f"most = ReduceMax<keepdims=0>(x) share = Constant<value = float {{{others}}}>() more = Mul(most, share) "
        "y = Add(x, more) logits = Gemm(y, w, b)"
    )
    if is_taken:
        assert taken(graph, tmp_path).head is not None
    else:
        said = refused(graph, tmp_path)
        assert "block 0 gives one of 2 inputs other values than alone (by " in said
        assert "0.1% of it is allowed" in said


LETTERED = {"name": "tensor", "columns": [{"name": "bytes", "datatype": "INT32", "shape": [128]}]}


def rows_below(end: int, count: int = 40) -> list[Encoded]:
    """Whole numbers from 0 to end - 1, as the codec gives them."""
    numbers = np.random.default_rng(1).integers(0, end, (count, 1, 128), dtype=np.int32)
    return [Encoded(1, (each,)) for each in numbers]


def test_where_the_number_of_inputs_rounds_the_users_rows_decide(tmp_path: Path) -> None:
    path, cuts = saved(rounding_graph(), tmp_path / "from"), [["normed"]]
    graph = onnx_graphs.read_graph(path)
    with pytest.raises(GraphError, match=r"block 0 .* than alone \(by .* rounds it, .* give rows .* inject --data"):
        graph.take(cuts, LETTERED, tmp_path)
    with pytest.raises(GraphError, match=r"so it does the answers to rows of the data \(by .*; 1% of it is allowed"):
        graph.take(cuts, LETTERED, tmp_path, rows_below(2))
    rows = rows_below(LETTERS)
    model = with_ramps(graph.take(cuts, LETTERED, tmp_path, rows))
    answers = exit_outputs(model, rows)[model.num_blocks - 1]
    wanted = onnxruntime.InferenceSession(path).run(None, {"bytes": np.concatenate([each.tensors[0] for each in rows])})
    assert np.allclose(answers.softmax(1), torch.from_numpy(wanted[0]).softmax(1), atol=1e-4)


@pytest.mark.parametrize(
    "mixing",
    [
        "most = ReduceMax<keepdims=0>(h) m = Add(h, most)",
        "first = CumSum(h, zero) m = Add(h, first)",
        "q, scale, offset = DynamicQuantizeLinear(h) m = DequantizeLinear(q, scale, offset)",
    ],
    ids=["the largest of the batch", "the inputs before", "quantized by the batch"],
)
def test_inputs_that_mix_are_refused_whatever_the_users_rows_are(tmp_path: Path, mixing: str) -> None:
    zero = "zero = Constant<value = int64 {0}>()"
    graph = numbers_graph(f"{zero} h = Gemm(x, w, b) {mixing} logits = Gemm(m, w, b)")
    alike = [Encoded(1, (np.ones((1, 4), np.float32),))] * 40
    with pytest.raises(GraphError, match=r"block 0 gives one of 2 inputs other values than alone \([^)]*\)$"):
        taken(graph, tmp_path, rows=alike)


def test_a_text_graph_that_ignores_its_mask_is_refused(tmp_path: Path) -> None:
    graph = words_graph(num_blocks=1)
    [node] = [each for each in graph.graph.node if each.output[0] == "b0"]
    node.CopyFrom(onnx.helper.make_node("Identity", ["s0"], ["b0"]))
    path = saved(graph, tmp_path / "from")
    with pytest.raises(GraphError, match="block 0 gives one of 2 inputs other values than alone"):
        words_taken(path, tmp_path, cuts=[["h0"]])


def test_a_batch_that_cannot_be_taken_out_is_said(tmp_path: Path) -> None:
    graph = numbers_graph(
        "flat = Constant <value_ints = [8]> () t = Reshape(x, flat) back = Constant <value_ints = [2, 4]> ()"
        " s = Reshape(t, back) logits = Gemm(s, w, b)",
        inputs="float[2, 4] x",
    )
    assert "was made for batches of 2 and cannot be run in others" in refused(graph, tmp_path)


@pytest.mark.parametrize("place", ["branch", "attribute", "sparse"])
def test_weights_outside_a_models_folder_are_refused_wherever_the_graph_has_them(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "model"
    pictures_taken(saved(pictures_graph(), tmp_path / "from"), folder)
    outside = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4])
    outside.data_location = onnx.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="../secret.bin")
    made = onnx.helper.make_node("Constant", [], ["v"], value=outside)
    branch = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["v"])], "b", [], [], [outside])
    model = onnx.load(folder / "graph.onnx", load_external_data=False)
    if place == "attribute":
        model.graph.node.append(made)
    elif place == "branch":
        model.graph.node.append(onnx.helper.make_node("If", ["c"], ["o"], then_branch=branch, else_branch=branch))
    else:
        model.graph.sparse_initializer.add(values=outside)
    onnx.save_model(model, folder / "graph.onnx")
    with pytest.raises(ModelFolderError, match=r"has weights in '../secret.bin', which is not its own file"):
        read_graph(folder, "graph.onnx")


def test_missing_weights_are_said(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from", beside=True)
    (tmp_path / "from" / "theirs.bin").unlink()
    with pytest.raises(GraphError, match=r"the weights beside .* cannot be read"):
        pictures_taken(path, tmp_path / "model")


def test_several_inputs_are_taken_where_the_codec_has_them(tmp_path: Path) -> None:
    graph = numbers_graph("s = Add(x, y) logits = Gemm(s, w, b)", inputs="float[B, 4] y, float[B, 4] x")
    columns = [{"name": name, "datatype": "FP32", "shape": [4]} for name in ("x", "y")]
    codec = {"name": "tensor", "columns": columns}
    backbone = taken(graph, tmp_path, [["s"]], codec).backbone
    assert [each.name for each in backbone.inputs] == ["x", "y"]


def test_numbers_held_one_by_one_and_large_constants_are_weights_too(tmp_path: Path) -> None:
    graph = pictures_graph()
    [weight] = [each for each in graph.graph.initializer if each.name == "w1"]
    values = numpy_helper.to_array(weight)
    graph.graph.initializer.remove(weight)
    graph.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w1"], value=numpy_helper.from_array(values)))
    [weight] = [each for each in graph.graph.initializer if each.name == "w2"]
    values = numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.helper.make_tensor("w2", onnx.TensorProto.FLOAT, values.shape, values.flatten().tolist()))
    pictures_taken(saved(graph, tmp_path / "from"), tmp_path)
    assert (tmp_path / "graph.onnx.data").stat().st_size == 4 * (6 * 6 * 9 + 8 * 6 * 9)
