"""Foreign ONNX graphs in blocks, compared with the answers of the uncut files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
from onnx import numpy_helper

from earlyexit.backends import open_segments
from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.families.base import Pretrained
from earlyexit.families.resnet import BlockSizes, ResidualBlock
from earlyexit.foreign import open_foreign
from earlyexit.foreign.dataflow import cut_tensors, find_sites
from earlyexit.foreign.onnx_backbone import OnnxBackbone
from earlyexit.foreign.onnx_backbone import read_graph as read_kept
from earlyexit.foreign.onnx_model import read_onnx
from earlyexit.foreign.torch_module import values_of
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Budget, Encoded, Segment
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.families.checkpoints import hf_model
from tests.earlyexit.foreign import modules, onnx_graphs
from tests.earlyexit.foreign.flows import carriers_by_removal
from tests.earlyexit.foreign.onnx_graphs import (
    LETTERS,
    Array,
    pictures_graph,
    pictures_taken,
    read_graph,
    rounding_graph,
    saved,
    small_graph,
    turned_words_graph,
    with_ramps,
    words_graph,
    words_taken,
)
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, every_bounds, halves

LENGTHS = (5, 1, 16, 3, 5, 9, 2, 12, 4)
ROWS = {"name": "tensor", "columns": [{"name": "x", "datatype": "FP32", "shape": [3, 12, 12]}]}
WINDOWS = """
windows (float[B, 3, 8, 8] x) => (float[B, 3] logits) {
    rows = Constant <value_ints = [-1, 3, 4, 8]> ()
    windows = Reshape(x, rows)
    seen = Tanh(windows)
    whole = Constant <value_ints = [-1, 192]> ()
    flat = Reshape(seen, whole)
    logits = Gemm(flat, head, bias)
}
"""
Cuts = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, the model built from it, and inputs."""

    path: Path
    model: EarlyExitModel
    encoded: list[Encoded]
    feeds: Callable[[Encoded], Mapping[str, Array]]

    @property
    def expected(self) -> Array:
        """The answers of the uncut file."""
        answer = onnx_graphs.uncut(self.path)
        return np.concatenate([answer(self.feeds(each)) for each in self.encoded])


def of_pictures(graph: Callable[[], onnx.ModelProto], folder: Path, cuts: Cuts = (("r0",), ("r1",))) -> Case:
    path = saved(graph(), folder / "from")
    model = with_ramps(pictures_taken(path, folder, cuts))
    return Case(path=path, model=model, encoded=onnx_graphs.random_pictures(9), feeds=onnx_graphs.picture_feeds)


def of_words(graph: Callable[[], onnx.ModelProto], folder: Path, cuts: Cuts = (("h0",), ("h1",))) -> Case:
    path = saved(graph(), folder / "from")
    model = with_ramps(words_taken(path, folder, cuts))
    return Case(path=path, model=model, encoded=onnx_graphs.random_words(LENGTHS), feeds=onnx_graphs.words_feeds)


class Residual(nn.Module):
    """Residual blocks of two widths."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 16, 1), (16, 32, 2), (32, 32, 1)]
        blocks = [ResidualBlock(BlockSizes(before=a, inner=b, after=b, stride=stride)) for a, b, stride in sizes]
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *blocks)
        self.classifier = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x).mean((2, 3)))
        return logits


class Logits(nn.Module):
    """Returns a classifier of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def exported(module: nn.Module, inputs: Mapping[str, Tensor], path: Path, *, by_dynamo: bool) -> Path:
    """Exports a module with torch, which adds many `Shape` operators, for any batch size and any length of texts."""
    open_axes = {name: (0, 1) if values.dtype == torch.int64 else (0,) for name, values in inputs.items()}
    settings: dict[str, Any] = {
        "dynamic_axes": {name: {axis: f"{name}_{axis}" for axis in axes} for name, axes in open_axes.items()}
    }
    if by_dynamo:
        dynamic = torch.export.Dim.DYNAMIC
        settings = {"dynamic_shapes": {name: dict.fromkeys(axes, dynamic) for name, axes in open_axes.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            path,
            dynamo=by_dynamo,
            input_names=list(inputs),
            output_names=["logits"],
            verbose=False,
            **settings,
        )
    return path


def joins(path: Path, operator: str) -> list[str]:
    """Returns the outputs of operators of a kind, in order."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    return [node.output[0] for node in nodes if node.op_type == operator]


def resnet(folder: Path, *, by_dynamo: bool = False) -> Case:
    torch.manual_seed(0)
    path = exported(Residual(), {"x": torch.randn(2, 3, 12, 12)}, folder / "theirs.onnx", by_dynamo=by_dynamo)
    stem, _, first, _, second, _, _ = joins(path, "Relu")
    model = with_ramps(open_foreign(read_graph(path), ROWS, folder / "model").build([[stem], [first], [second]]))
    rng = np.random.default_rng(0)
    encoded = [Encoded(1, (rng.standard_normal((1, 3, 12, 12)).astype(np.float32),)) for _ in range(8)]
    return Case(path=path, model=model, encoded=encoded, feeds=lambda each: {"x": each.tensors[0]})


def bert(folder: Path, *, by_dynamo: bool = False) -> Case:
    ids = torch.randint(1, 50, (2, 5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    path = exported(Logits(hf_model("bert", num_labels=3)), inputs, folder / "theirs.onnx", by_dynamo=by_dynamo)
    embedded, *norms = joins(path, "LayerNormalization")
    cuts = [[embedded], *([norm] for norm in norms[1:-1:2])]
    model = with_ramps(open_foreign(read_graph(path), onnx_graphs.TEXT, folder / "model").build(cuts))
    return Case(path=path, model=model, encoded=onnx_graphs.random_words(LENGTHS), feeds=onnx_graphs.words_feeds)


MAP, TOKENS = ((6, 8, 8), False), ((8,), True)
CASES: dict[str, tuple[Callable[[Path], Case], list[tuple[tuple[int, ...], bool]]]] = {
    "pictures": (partial(of_pictures, pictures_graph), [MAP]),
    "a skip crosses in a cut of two tensors": (
        partial(of_pictures, pictures_graph, cuts=(("c1", "r0"), ("r1", "c2"), ("r2",))),
        [MAP, MAP],
    ),
    # r0 is of no use after a1, and crosses there all the same.
    "a tensor crosses several blocks": (
        partial(of_pictures, pictures_graph, cuts=(("c1", "r0"), ("a1", "r0"), ("r1",))),
        [MAP, MAP],
    ),
    "a batch is built in": (partial(of_pictures, partial(pictures_graph, end="reshaped", batch="1")), [MAP]),
    "windows of a picture cross as one row": (
        partial(of_pictures, partial(small_graph, WINDOWS, head=(192, 3), bias=(3,)), cuts=[["seen"]]),
        [((2, 3, 4, 8), False)],
    ),
    "words": (partial(of_words, words_graph), [TOKENS]),
    "all tokens in one row": (partial(of_words, partial(turned_words_graph, "B*T"), cuts=[["seen"]]), [TOKENS]),
    "tokens before texts": (partial(of_words, partial(turned_words_graph, "TB"), cuts=[["seen"]]), [TOKENS]),
    "resnet": (resnet, [((16, 12, 12), False)]),
    "bert": (bert, [((32,), True)]),
    "resnet, dynamo": (partial(resnet, by_dynamo=True), [((16, 12, 12), False)]),
    "bert, dynamo": (partial(bert, by_dynamo=True), [((32,), True)]),
}
"""Functions that build graphs in a folder; the shapes after the first block, and whether they are per token."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if "dynamo" in each else each for each in CASES]
)
def test_every_cut_answers_like_the_uncut_file(name: str, tmp_path: Path) -> None:
    make, crosses = CASES[name]
    case = make(tmp_path)
    model, last = case.model, case.model.num_blocks - 1
    assert [(each.shape, each.per_token) for each in model.takes(1)] == crosses
    np.testing.assert_allclose(exit_outputs(model, case.encoded)[last].numpy(), case.expected, atol=1e-4)
    policy = halves(model, case.encoded)
    for count in (1, 2, 7):
        alone = answers_alone(model, policy, case.encoded[:count])
        for seed, bounds in enumerate(each for each in every_bounds(last + 1) if len(each) <= 4):
            answers = answers_in_cuts(model, policy, case.encoded[:count], bounds, seed=seed)
            assert_same(answers, alone, within=1e-4)


@pytest.mark.parametrize("name", ["plain", "resnet8", "small_bert"])
def test_an_exported_module_has_the_sites_of_the_module(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, examples = getattr(modules, name)()
    named = examples if isinstance(examples, dict) else {"images": examples[0]}
    flow = read_onnx(exported(network, named, tmp_path / "model.onnx", by_dynamo=True), open_size=7).flow
    module = modules.traced(name).flow
    for each in (flow, module):
        assert list(cut_tensors(each)) == carriers_by_removal(each)
    assert module.live[0].kind == "work" or name == "resnet8"
    sizes, expected = ([each.bytes_of(site.tensors) for site in find_sites(each)] for each in (flow, module))
    assert sizes == expected


def test_a_residual_network_has_a_site_after_its_stem_and_after_each_block() -> None:
    flow = modules.traced("resnet8").flow
    sizes = [16 * 32 * 32] * 2 + [32 * 16 * 16, 64 * 8 * 8]
    assert [flow.bytes_of(site.tensors) for site in find_sites(flow)] == [4 * size for size in sizes]


def test_a_bert_has_sites_around_its_attentions_and_layers() -> None:
    graph = modules.traced("small_bert")
    assert [graph.flow.bytes_of(site.tensors) for site in find_sites(graph.flow)] == [4 * 7 * 32] * 5 + [4 * 32]
    assert list(graph.examples) == ["input_ids", "attention_mask"]
    given = values_of(graph.module, *[torch.ones(3, 5, dtype=torch.long)] * 2)
    assert [given[name].shape for name in graph.flow.outputs] == [(3, 2)]


def test_traced_graphs_have_neither_in_place_writes_nor_getitem_operators() -> None:
    flow = modules.traced("plain").flow
    assert not any(operator.op.endswith("_.default") or operator.op == "getitem" for operator in flow.operators)
    assert len(find_sites(flow)) == 2


@pytest.fixture(scope="module", params=["pictures", "words"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    make, _ = CASES[request.param]
    return make(tmp_path_factory.mktemp(request.param))


def test_a_model_saved_twice_answers_the_same_and_has_no_weights_of_the_graph(case: Case, tmp_path: Path) -> None:
    from safetensors import safe_open

    save_model(case.model, tmp_path / "copy")
    with safe_open(tmp_path / "copy" / "model.safetensors", "pt") as tensors:
        assert {name.split(".")[0] for name in tensors.keys()} == {"ramps", "temperatures_E"}  # noqa: SIM118 # no mapping
    card = read_card(tmp_path / "copy")
    assert (card.family, card.head_style, len(card.boundaries)) == ("onnx", "given", 3)
    save_model(load_model(tmp_path / "copy"), tmp_path / "copy")
    for block, outputs_NC in exit_outputs(load_model(tmp_path / "copy"), case.encoded).items():
        assert outputs_NC.equal(exit_outputs(case.model, case.encoded)[block])


@pytest.mark.parametrize("name", ["graph.onnx", "graph.onnx.data"])
def test_a_folder_without_its_graph_or_with_another_one_is_refused(case: Case, tmp_path: Path, name: str) -> None:
    save_model(case.model, tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelFolderError, match="are not those of which the model was made"):
        load_model(tmp_path)
    path.unlink()
    with pytest.raises(ModelFolderError, match=f"has no {name}, which its network needs"):
        load_model(tmp_path)


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_sessions_are_prepared_by_all_backends_and_old_ones_closed(case: Case, tmp_path: Path, backend: str) -> None:
    save_model(case.model, tmp_path)
    model = load_model(tmp_path)
    backbone, segments = model.backbone, open_segments(backend, model, tmp_path)
    assert isinstance(backbone, OnnxBackbone)
    whole = [Segment(first=0, end=3, ramp=None)]
    parts = [Segment(first=0, end=1, ramp=0), Segment(first=1, end=3, ramp=None)]
    segments.prepare(dict.fromkeys(whole, Budget(inputs=4)))
    assert backbone.sessions.find((0, 3, "cpu")) is not None
    assert backbone.sessions.find((0, 1, "cpu")) is None
    segments.prepare(dict.fromkeys(parts, Budget(inputs=4)))
    assert None not in map(backbone.sessions.find, [(0, 3, "cpu"), (0, 1, "cpu"), (1, 3, "cpu")])
    policy = halves(case.model, case.encoded)
    expected = answers_alone(case.model, policy, case.encoded)
    assert_same(answers_in_cuts(model, policy, case.encoded, (0, 1, 3), segments=segments), expected, within=1e-4)
    # Training and probes run other sessions; as many stay as there are blocks.
    exit_outputs(model, case.encoded)
    segments.prepare(dict.fromkeys(parts, Budget(inputs=4)))
    segments.prepare({Segment(first=2, end=3, ramp=None): Budget(inputs=4)})
    segments.prepare({})
    spans = [(first, end, "cpu") for first in range(3) for end in range(first + 1, 4)]
    assert sum(backbone.sessions.find(span) is not None for span in spans) <= 1 + model.num_blocks


@pytest.mark.parametrize("end", ["probabilities", "separate"])
def test_probabilities_become_their_logarithm(tmp_path: Path, end: str) -> None:
    case = of_pictures(partial(pictures_graph, end=end), tmp_path)
    outputs_NC = exit_outputs(case.model, case.encoded)[2]
    np.testing.assert_allclose(outputs_NC.exp().numpy(), case.expected, atol=1e-5)


@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize(("layout", "dtype"), [("NCHW", "uint8"), ("NHWC", "uint8"), ("NCHW", "int32")])
def test_integer_pixels_are_unchanged(tmp_path: Path, layout: str, dtype: str, order: str) -> None:
    path = saved(onnx_graphs.bytes_graph(layout, dtype=dtype), tmp_path / "from")
    pixels_of = {} if order == "RGB" else {"order": order}
    taken = open_foreign(read_graph(path, pixels=pixels_of), onnx_graphs.CODEC, tmp_path).build([["r0"]])
    model = with_ramps(taken)
    for encoded in onnx_graphs.random_pictures(3):
        [pixels] = encoded.tensors
        pixels = pixels if order == "RGB" else pixels[..., ::-1]
        pixels = pixels if layout == "NHWC" else pixels.transpose(0, 3, 1, 2)
        expected = onnx_graphs.uncut(path)({"x": np.ascontiguousarray(pixels.astype(dtype))})
        np.testing.assert_allclose(exit_outputs(model, [encoded])[1], expected, rtol=1e-5, atol=1e-4)


def test_weights_beside_the_file_are_copied_into_the_model(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from", beside=True)
    assert (tmp_path / "from" / "theirs.bin").stat().st_size > 1000
    model = with_ramps(pictures_taken(path, tmp_path / "model"))
    save_model(model, tmp_path / "model")
    (tmp_path / "from" / "theirs.bin").unlink()
    encoded = onnx_graphs.random_pictures(2)
    assert exit_outputs(load_model(tmp_path / "model"), encoded)[2].equal(exit_outputs(model, encoded)[2])
    with pytest.raises(GraphError, match=r"the weights beside .* cannot be read"):
        pictures_taken(path, tmp_path / "model")


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
    return open_foreign(read_graph(saved(graph, folder / "from"), **asked), codec, folder).build(cuts, rows)


def test_integers_can_cross_but_cannot_have_an_exit(tmp_path: Path) -> None:
    text = """numbers (float[B, 4] x) => (float[B, 4] logits) {
        h = Gemm(x, w, b) bytes = Cast <to = 2> (h) back = Cast <to = 1> (bytes) logits = Gemm(back, w, b) }"""
    path = saved(small_graph(text, w=(4, 4), b=(4,)), tmp_path / "from")
    model, cuts = open_foreign(read_graph(path), NUMBERS, tmp_path / "model"), [["h"], ["bytes"]]
    why = "an exit needs floating point numbers; 'bytes' is uint8"
    assert model.refused(cuts) == {("bytes",): why}
    with pytest.raises(ModelFolderError, match=f"no ramp can be after block 1: {why}"):
        with_ramps(model.build(cuts))


def test_one_of_several_outputs_can_be_chosen_and_several_inputs_used(tmp_path: Path) -> None:
    graph = numbers_graph("other = Relu(x) logits = Gemm(other, w, b)", output="float[B, 4] logits, float[B, 4] other")
    head = taken(graph, tmp_path, output="logits").head
    assert head is not None
    assert head.num_outputs == 4
    graph = numbers_graph("s = Add(x, y) logits = Gemm(s, w, b)", inputs="float[B, 4] y, float[B, 4] x")
    columns = [{"name": name, "datatype": "FP32", "shape": [4]} for name in ("y", "x")]
    codec = {"name": "tensor", "columns": columns}
    backbone = taken(graph, tmp_path, [["s"]], codec).backbone
    assert [each.name for each in backbone.inputs] == ["y", "x"], "in the order of the graph"


@pytest.mark.parametrize(("others", "is_taken"), [pytest.param(3e-4, True, id="rounding"), pytest.param(0.05, False)])
def test_rounding_by_the_batch_is_not_a_dependence_on_other_inputs(
    tmp_path: Path, others: float, is_taken: bool
) -> None:
    """Adds a share of the batch's largest number to every input, as if rounding depended on other inputs."""
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
    """Returns integers from 0 to end - 1 from the codec."""
    numbers = np.random.default_rng(1).integers(0, end, (count, 1, 128), dtype=np.int32)
    return [Encoded(1, (each,)) for each in numbers]


def test_where_the_number_of_inputs_rounds_the_users_rows_decide(tmp_path: Path) -> None:
    path, cuts = saved(rounding_graph(), tmp_path / "from"), [["normed"]]
    graph = open_foreign(read_graph(path), LETTERED, tmp_path)
    with pytest.raises(GraphError, match=r"block 0 .* than alone \(by .* affects .* rows .* inject --data"):
        graph.build(cuts)
    with pytest.raises(GraphError, match=r"changes the answers to rows of the data \(by .*; 1% of it is allowed"):
        graph.build(cuts, rows_below(2))
    rows = rows_below(LETTERS)
    model = with_ramps(graph.build(cuts, rows))
    answers = exit_outputs(model, rows)[model.num_blocks - 1]
    wanted = onnxruntime.InferenceSession(path).run(None, {"bytes": np.concatenate([each.tensors[0] for each in rows])})
    assert np.allclose(answers.softmax(1), torch.from_numpy(wanted[0]).softmax(1), atol=1e-4)


@pytest.mark.parametrize(
    "mixing",
    ["most = ReduceMax<keepdims=0>(h) m = Add(h, most)", "first = CumSum(h, zero) m = Add(h, first)"],
    ids=["the largest of the batch", "the inputs before"],
)
def test_mixed_inputs_are_refused_for_all_rows(tmp_path: Path, mixing: str) -> None:
    zero = "zero = Constant<value = int64 {0}>()"
    graph = numbers_graph(f"{zero} h = Gemm(x, w, b) {mixing} logits = Gemm(m, w, b)")
    alike = [Encoded(1, (np.ones((1, 4), np.float32),))] * 40
    with pytest.raises(GraphError, match=r"block 0 gives one of 2 inputs other values than alone \([^)]*\); pad"):
        taken(graph, tmp_path, rows=alike)


def test_a_text_graph_that_ignores_its_mask_is_refused(tmp_path: Path) -> None:
    graph = words_graph(num_blocks=1)
    [node] = [each for each in graph.graph.node if each.output[0] == "b0"]
    node.CopyFrom(onnx.helper.make_node("Identity", ["s0"], ["b0"]))
    path = saved(graph, tmp_path / "from")
    with pytest.raises(GraphError, match="block 0 gives one of 2 inputs other values than alone"):
        words_taken(path, tmp_path, cuts=[["h0"]])


def test_a_fixed_batch_size_that_cannot_be_changed_is_an_error(tmp_path: Path) -> None:
    graph = numbers_graph(
        "flat = Constant <value_ints = [8]> () t = Reshape(x, flat) back = Constant <value_ints = [2, 4]> ()"
        " s = Reshape(t, back) logits = Gemm(s, w, b)",
        inputs="float[2, 4] x",
    )
    assert "was made for batches of 2 and cannot be run with other sizes" in refused(graph, tmp_path)


@pytest.mark.parametrize("place", ["branch", "attribute", "sparse"])
def test_weights_outside_a_models_folder_are_refused_in_subgraphs_too(tmp_path: Path, place: str) -> None:
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
        read_kept(folder, "graph.onnx")


def test_unpacked_tensors_and_large_constants_become_weights(tmp_path: Path) -> None:
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
