"""Graphs that cannot be served, or not as they were asked for: one line each, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from earlyexit.families import find_family
from earlyexit.families.base import Pretrained
from earlyexit.foreign.onnx_backbone import read_graph
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import random_model
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.foreign import onnx_graphs
from tests.earlyexit.foreign.onnx_graphs import (
    LETTERS,
    bytes_graph,
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
GEMM = "hidden = Gemm(x, w, b) r = Relu(hidden) logits = Gemm(r, w, b)"


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


def test_a_skip_that_was_forgotten_is_named(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from")
    with pytest.raises(GraphError, match=r"block 1 also needs the graph's tensor 'r0', .* in a cut at c1;"):
        pictures_taken(path, tmp_path, cuts=[["c1"]])


def test_cuts_out_of_order_are_refused(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from")
    with pytest.raises(GraphError, match="block 1 also needs the graph's tensor"):
        pictures_taken(path, tmp_path, cuts=[["r1"], ["r0"]])


def test_two_cuts_at_one_place_are_refused(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from")
    with pytest.raises(GraphError, match="block 1 computes nothing"):
        pictures_taken(path, tmp_path, cuts=[["r1"], ["r1"]])


def test_a_cut_at_no_tensor_of_the_graph_is_refused(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from")
    with pytest.raises(GraphError, match="the graph has no tensor 'r9' to cut at"):
        pictures_taken(path, tmp_path, cuts=[["r9"]])


def test_a_cut_at_what_follows_from_the_layout_is_refused(tmp_path: Path) -> None:
    path = saved(words_graph(), tmp_path / "from")
    with pytest.raises(GraphError, match="'bias_B1T' is the same for all inputs"):
        words_taken(path, tmp_path, cuts=[["h0", "bias_B1T"]])


def test_whole_numbers_cross_but_no_exit_looks_at_them(tmp_path: Path) -> None:
    text = """numbers (float[B, 4] x) => (float[B, 4] logits) {
        h = Gemm(x, w, b) bytes = Cast <to = 2> (h) back = Cast <to = 1> (bytes) logits = Gemm(back, w, b) }"""
    path = saved(small_graph(text, w=(4, 4), b=(4,)), tmp_path / "from")
    model, cuts = onnx_graphs.read_graph(path), [["h"], ["bytes"]]
    why = "exits look at floating point numbers, and 'bytes' is uint8"
    assert model.refused(cuts, NUMBERS) == {("bytes",): why}
    with pytest.raises(ModelFolderError, match=f"no ramp can sit after block 1: {why}"):
        with_ramps(model.take(cuts, NUMBERS, tmp_path / "model"))


def test_what_has_no_row_per_input_cannot_cross(tmp_path: Path) -> None:
    said = refused(
        numbers_graph("t = Transpose(x) r = Relu(t) s = Transpose(r) logits = Gemm(s, w, b)"), tmp_path, cuts=[["r"]]
    )
    assert "'r', [4, 2] for 2 inputs, has a row neither per input nor per token" in said


def test_operators_that_the_runtime_does_not_have_are_named(tmp_path: Path) -> None:
    graph = numbers_graph("hidden = odd.ops.Fold(x) logits = Gemm(hidden, w, b)")
    assert "ONNX Runtime has no operator odd.ops:Fold" in refused(graph, tmp_path)


@pytest.mark.parametrize(
    ("body", "output", "said"),
    [
        pytest.param("logits = Relu(x)", "float[B, 4, 1] logits", None, id="two numbers or more"),
        pytest.param(
            "one = Constant <value_ints = [1]> () logits = ReduceSum(x, one)",
            "float[B, 1] logits",
            "'logits' [2, 1]",
            id="one number",
        ),
        pytest.param(
            "two = Constant <value_ints = [2]> () logits = Unsqueeze(x, two)",
            "float[B, 4, 1] logits",
            "'logits' [2, 4, 1]",
            id="a map",
        ),
        pytest.param("logits = Shape(x)", "int64[2] logits", "'logits' [2]", id="its size"),
        pytest.param("logits = Cast <to = 7> (x)", "int64[B, 4] logits", "'logits' [2, 4]", id="whole numbers"),
    ],
)
def test_an_answer_that_is_no_classification_is_refused(
    tmp_path: Path, body: str, output: str, said: str | None
) -> None:
    graph = numbers_graph(body, output=output)
    if said is None:
        taken(graph, tmp_path)
        return
    told = refused(graph, tmp_path)
    assert "the graph is no classifier: of 2 inputs it gives" in told
    assert said in told


def test_several_outputs_need_a_choice(tmp_path: Path) -> None:
    graph = numbers_graph("other = Relu(x) logits = Gemm(other, w, b)", output="float[B, 4] logits, float[B, 4] other")
    assert "gives 'logits' [2, 4], 'other' [2, 4]; one output of two or more" in refused(graph, tmp_path)
    head = taken(graph, tmp_path, output="logits").head
    assert head is not None
    assert head.num_outputs == 4
    assert "no tensor 'answer'; its outputs are logits, other" in refused(graph, tmp_path, output="answer")


def test_an_input_whose_answer_depends_on_others_is_refused(tmp_path: Path) -> None:
    path = saved(pictures_graph(end="among others"), tmp_path / "from")
    with pytest.raises(GraphError, match="block 1 gives one of 2 inputs other values than alone"):
        pictures_taken(path, tmp_path, cuts=[["r1"]])


def test_numbers_scaled_by_the_whole_batch_are_refused(tmp_path: Path) -> None:
    body = "q, scale, zero = DynamicQuantizeLinear(x) d = DequantizeLinear(q, scale, zero) logits = Gemm(d, w, b)"
    assert "block 0 gives one of 2 inputs other values than alone" in refused(numbers_graph(body), tmp_path)


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


def test_an_onnx_file_that_was_cut_short_is_called_damaged(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(GraphError, match=r"begins as an ONNX model does, .* damaged or incomplete \(\d+ bytes\)"):
        pictures_taken(path, tmp_path / "model")


def picture(**changes: Any) -> dict[str, Any]:
    return {"codec": onnx_graphs.CODEC | changes}


@pytest.mark.parametrize(
    ("graph", "options", "said"),
    [
        pytest.param(pictures_graph, picture(height=16), "codec gives images of 16 x 8 pixels", id="another size"),
        pytest.param(
            pictures_graph, {"codec": onnx_graphs.TEXT}, "'x' is float32 of 4 axes; texts are fed as", id="texts"
        ),
        pytest.param(
            pictures_graph, picture() | {"pixels": {"mean": [0.5]}}, "pixels: mean.1: Field required", id="one mean"
        ),
        pytest.param(
            pictures_graph,
            picture() | {"pixels": {"order": "GRB"}},
            "pixels: order: Input should be 'RGB' or 'BGR'",
            id="another order",
        ),
        pytest.param(
            lambda: bytes_graph("NCHW"),
            picture() | {"pixels": {"std": (0.2, 0.2, 0.2)}},
            "pixels: std: the graph's input 'x' is uint8, and takes pixels from 0 to 255 as they are",
            id="whole numbers scaled",
        ),
        pytest.param(pictures_graph, {}, "the column 'x'|rows of [4] do not fit", id="columns"),
        pytest.param(
            lambda: numbers_graph("s = Add(x, y) logits = Gemm(s, w, b)", inputs="float[B, 4] x, float[B, 4] y"),
            {},
            "the codec has the columns x; the graph takes x, y",
            id="an input more",
        ),
        pytest.param(
            lambda: numbers_graph(GEMM, inputs="double[B, 4] x"), {}, "'x' is float64; float32, float16", id="doubles"
        ),
        pytest.param(
            words_graph,
            {"codec": {"name": "text_pair", "max_length": 16}},
            "of the graph's inputs 2 should take tokens, by their names: 'input_ids'",
            id="pairs",
        ),
        pytest.param(
            words_graph,
            {"codec": {"name": "text", "max_length": 64}},
            "the graph takes inputs of at most 32 tokens, not 64",
            id="longer",
        ),
    ],
)
def test_inputs_that_the_codec_does_not_give_are_refused(
    tmp_path: Path, graph: Callable[[], Any], options: dict[str, Any], said: str
) -> None:
    told = refused(graph(), tmp_path, **options)
    assert any(each in told for each in said.split("|"))


def test_several_inputs_are_taken_where_the_codec_has_them(tmp_path: Path) -> None:
    graph = numbers_graph("s = Add(x, y) logits = Gemm(s, w, b)", inputs="float[B, 4] y, float[B, 4] x")
    columns = [{"name": name, "datatype": "FP32", "shape": [4]} for name in ("x", "y")]
    codec = {"name": "tensor", "columns": columns}
    backbone = taken(graph, tmp_path, [["s"]], codec).backbone
    assert [each.name for each in backbone.inputs] == ["x", "y"]


def test_a_graph_is_made_of_a_file_and_not_of_sizes() -> None:
    with pytest.raises(ModelFolderError, match="a file in a model's folder"):
        random_model(
            {"sha256": "", "inputs": [{"name": "x"}], "cuts": [[{"name": "y"}]], "outputs": "logits"}, family="onnx"
        )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({}, "sha256: Field required", id="nothing"),
        pytest.param({"cuts": [[]]}, "every block needs a tensor", id="no tensor"),
        pytest.param({"inputs": []}, "an input from the codec is needed", id="no input"),
        pytest.param({"file": "../graph.onnx"}, "outside the model's folder", id="another folder"),
    ],
)
def test_a_card_that_describes_no_graph_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    whole = {"sha256": "", "inputs": [{"name": "x"}], "cuts": [[{"name": "y"}]], "outputs": "logits"} | config
    with pytest.raises(ModelFolderError, match=said):
        find_family("onnx").build(whole if config else {}, tmp_path)


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
