"""Graphs from elsewhere, in blocks: what they answer beside their own file's answers, uncut."""

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

from earlyexit.backends import open_segments
from earlyexit.backends.onnx import quiet_exporter
from earlyexit.errors import ModelFolderError
from earlyexit.families.resnet import BlockSizes, ResidualBlock
from earlyexit.foreign.dataflow import carriers, find_sites
from earlyexit.foreign.onnx_backbone import OnnxBackbone
from earlyexit.foreign.onnx_model import read_onnx
from earlyexit.foreign.torch_module import read_torch
from earlyexit.network.boundary import Budget, Encoded, Segment
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.families.checkpoints import hf_model
from tests.earlyexit.foreign import networks, onnx_graphs
from tests.earlyexit.foreign.onnx_graphs import (
    Array,
    pictures_graph,
    pictures_taken,
    read_graph,
    saved,
    small_graph,
    turned_words_graph,
    with_ramps,
    words_graph,
    words_taken,
)
from tests.earlyexit.foreign.removal import carriers_by_removal
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
    """A file, the model that was made of it, and inputs."""

    path: Path
    model: EarlyExitModel
    encoded: list[Encoded]
    feeds: Callable[[Encoded], Mapping[str, Array]]

    @property
    def expected(self) -> Array:
        """The file's own answers."""
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
    """Two widths of residual blocks."""

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
    """Of a classifier of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def exported(module: nn.Module, inputs: Mapping[str, Tensor], path: Path, *, by_dynamo: bool) -> Path:
    """As torch's exporters write it, with all their `Shape` operators; open to any batch, and texts to any length."""
    open_axes = {name: (0, 1) if values.dtype == torch.int64 else (0,) for name, values in inputs.items()}
    settings: dict[str, Any] = {
        "dynamic_axes": {name: {axis: f"{name}_{axis}" for axis in axes} for name, axes in open_axes.items()}
    }
    if by_dynamo:
        dynamic = torch.export.Dim.DYNAMIC
        settings = {"dynamic_shapes": {name: dict.fromkeys(axes, dynamic) for name, axes in open_axes.items()}}
    with quiet_exporter(), warnings.catch_warnings():
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
    """What operators of a kind give, in order."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    return [node.output[0] for node in nodes if node.op_type == operator]


def resnet(folder: Path, *, by_dynamo: bool = False) -> Case:
    torch.manual_seed(0)
    path = exported(Residual(), {"x": torch.randn(2, 3, 12, 12)}, folder / "theirs.onnx", by_dynamo=by_dynamo)
    stem, _, first, _, second, _, _ = joins(path, "Relu")
    model = with_ramps(read_graph(path).take([[stem], [first], [second]], ROWS, folder / "model"))
    rng = np.random.default_rng(0)
    encoded = [Encoded(1, (rng.standard_normal((1, 3, 12, 12)).astype(np.float32),)) for _ in range(8)]
    return Case(path=path, model=model, encoded=encoded, feeds=lambda each: {"x": each.tensors[0]})


def bert(folder: Path, *, by_dynamo: bool = False) -> Case:
    ids = torch.randint(1, 50, (2, 5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    path = exported(Logits(hf_model("bert", num_labels=3)), inputs, folder / "theirs.onnx", by_dynamo=by_dynamo)
    embedded, *norms = joins(path, "LayerNormalization")
    cuts = [[embedded], *([norm] for norm in norms[1:-1:2])]
    model = with_ramps(read_graph(path).take(cuts, onnx_graphs.TEXT, folder / "model"))
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
    "all tokens in one row": (
        partial(of_words, partial(turned_words_graph, "B*T"), cuts=[["seen"]]),
        [TOKENS],
    ),
    "tokens before texts": (partial(of_words, partial(turned_words_graph, "TB"), cuts=[["seen"]]), [TOKENS]),
    "resnet": (resnet, [((16, 12, 12), False)]),
    "bert": (bert, [((32,), True)]),
    "resnet, dynamo": (partial(resnet, by_dynamo=True), [((16, 12, 12), False)]),
    "bert, dynamo": (partial(bert, by_dynamo=True), [((32,), True)]),
}
"""By a name: what makes it in a folder, and the shapes that cross behind its first block, and whether per token."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if "dynamo" in each else each for each in CASES]
)
def test_every_cut_answers_as_the_file_itself(name: str, tmp_path: Path) -> None:
    make, crosses = CASES[name]
    case = make(tmp_path)
    model, last = case.model, case.model.num_blocks - 1
    assert [(each.shape, each.per_token) for each in model.boundary(0)] == crosses
    np.testing.assert_allclose(exit_outputs(model, case.encoded)[last].numpy(), case.expected, atol=1e-4)
    policy = halves(model, case.encoded)
    for count in (1, 2, 7):
        alone = answers_alone(model, policy, case.encoded[:count])
        for seed, bounds in enumerate(each for each in every_bounds(last + 1) if len(each) <= 4):
            answers = answers_in_cuts(model, policy, case.encoded[:count], bounds, seed=seed)
            assert_same(answers, alone, within=1e-4)


@pytest.mark.parametrize("name", ["plain", "resnet14", "small_bert"])
def test_an_exported_module_has_the_sites_of_the_module(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, examples = getattr(networks, name)()
    named = examples if isinstance(examples, dict) else {"images": examples[0]}
    flow = read_onnx(exported(network, named, tmp_path / "model.onnx", by_dynamo=True), open_size=7).flow
    assert list(carriers(flow)) == carriers_by_removal(flow)
    torch.manual_seed(0)
    traced = find_sites(read_torch(f"tests.earlyexit.foreign.networks:{name}").flow)
    assert [site.bytes_per_input for site in find_sites(flow)] == [site.bytes_per_input for site in traced]


@pytest.fixture(scope="module", params=["pictures", "words"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    make, _ = CASES[request.param]
    return make(tmp_path_factory.mktemp(request.param))


def test_a_saved_model_answers_the_same_and_has_no_weights_of_the_graph(case: Case, tmp_path: Path) -> None:
    from safetensors import safe_open

    save_model(case.model, tmp_path / "copy")
    with safe_open(tmp_path / "copy" / "model.safetensors", "pt") as tensors:
        assert {name.split(".")[0] for name in tensors.keys()} == {"ramps", "temperatures_E"}  # noqa: SIM118 # no mapping
    loaded = load_model(tmp_path / "copy")
    assert (loaded.info, loaded.dtype) == (case.model.info, torch.float32)
    for block, outputs_NC in exit_outputs(loaded, case.encoded).items():
        assert outputs_NC.equal(exit_outputs(case.model, case.encoded)[block])
    card = read_card(tmp_path / "copy")
    assert (card.family, card.head_style, len(card.boundaries)) == ("onnx", "given", 3)
    save_model(loaded, tmp_path / "copy")
    assert exit_outputs(load_model(tmp_path / "copy"), case.encoded)[2].equal(outputs_NC)


@pytest.mark.parametrize("name", ["graph.onnx", "graph.onnx.data"])
def test_another_graph_or_other_weights_are_refused(case: Case, tmp_path: Path, name: str) -> None:
    save_model(case.model, tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelFolderError, match="are not those that the model was made of"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["graph.onnx", "graph.onnx.data"])
def test_files_that_are_replaced_after_loading_are_not_opened(case: Case, tmp_path: Path, name: str) -> None:
    save_model(case.model, tmp_path)
    backbone = load_model(tmp_path).backbone
    assert isinstance(backbone, OnnxBackbone)
    backbone.prepare([(0, 1)], "cpu")
    other = tmp_path / "other"
    other.write_bytes((tmp_path / name).read_bytes())
    other.replace(tmp_path / name)
    with pytest.raises(ModelFolderError, match="changed after the model was loaded"):
        backbone.prepare([(1, 2)], "cpu")


def test_a_folder_without_its_graph_is_refused(case: Case, tmp_path: Path) -> None:
    save_model(case.model, tmp_path)
    (tmp_path / "graph.onnx").unlink()
    with pytest.raises(ModelFolderError, match=r"has no graph.onnx, which its network consists of"):
        load_model(tmp_path)


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_sessions_are_prepared_whatever_the_backend_and_the_plan_before_last_is_closed(
    case: Case, tmp_path: Path, backend: str
) -> None:
    save_model(case.model, tmp_path)
    model = load_model(tmp_path)
    segments = open_segments(backend, model, tmp_path, 1)
    whole = [Segment(first=0, end=3, ramp=None)]
    parts = [Segment(first=0, end=1, ramp=0), Segment(first=1, end=3, ramp=None)]
    segments.prepare(dict.fromkeys(whole, Budget(inputs=4)))
    assert segments.is_ready(whole[0])
    assert not segments.is_ready(parts[0])
    segments.prepare(dict.fromkeys(parts, Budget(inputs=4)))
    assert all(map(segments.is_ready, [*whole, *parts]))
    policy = halves(case.model, case.encoded)
    expected = answers_alone(case.model, policy, case.encoded)
    assert_same(answers_in_cuts(model, policy, case.encoded, (0, 1, 3), segments=segments), expected, within=1e-4)
    # Training and probes run other sessions; as many stay as there are blocks.
    exit_outputs(model, case.encoded)
    segments.prepare(dict.fromkeys(parts, Budget(inputs=4)))
    segments.prepare({Segment(first=2, end=3, ramp=None): Budget(inputs=4)})
    segments.prepare({})
    backbone = model.backbone
    assert isinstance(backbone, OnnxBackbone)
    spans = [(first, end) for first in range(3) for end in range(first + 1, 4)]
    assert sum(backbone.is_ready(first, end, "cpu") for first, end in spans) <= 1 + model.num_blocks


def test_probabilities_are_answered_as_their_logarithm(tmp_path: Path) -> None:
    path = saved(pictures_graph(end="probabilities"), tmp_path / "from")
    model = with_ramps(pictures_taken(path, tmp_path))
    encoded = onnx_graphs.random_pictures(4)
    answer = onnx_graphs.uncut(path)
    expected = np.concatenate([answer(onnx_graphs.picture_feeds(each)) for each in encoded])
    outputs_NC = exit_outputs(model, encoded)[2]
    np.testing.assert_allclose(outputs_NC.softmax(1).numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(outputs_NC.exp().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize(("layout", "dtype"), [("NCHW", "uint8"), ("NHWC", "uint8"), ("NCHW", "int32")])
def test_pixels_that_enter_as_whole_numbers_stay_what_they_are(
    tmp_path: Path, layout: str, dtype: str, order: str
) -> None:
    path = saved(onnx_graphs.bytes_graph(layout, dtype=dtype), tmp_path / "from")
    pixels_of = {} if order == "RGB" else {"order": order}
    taken = onnx_graphs.read_graph(path, pixels=pixels_of).take([["r0"]], onnx_graphs.CODEC, tmp_path)
    model = with_ramps(taken)
    for encoded in onnx_graphs.random_pictures(3):
        [pixels] = encoded.tensors
        pixels = pixels if order == "RGB" else pixels[..., ::-1]
        pixels = pixels if layout == "NHWC" else pixels.transpose(0, 3, 1, 2)
        expected = onnx_graphs.uncut(path)({"x": np.ascontiguousarray(pixels.astype(dtype))})
        np.testing.assert_allclose(exit_outputs(model, [encoded])[1], expected, rtol=1e-5, atol=1e-4)


def test_weights_beside_the_file_come_along(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from", beside=True)
    assert (tmp_path / "from" / "theirs.bin").stat().st_size > 1000
    model = with_ramps(pictures_taken(path, tmp_path / "model"))
    save_model(model, tmp_path / "model")
    (tmp_path / "from" / "theirs.bin").unlink()
    encoded = onnx_graphs.random_pictures(2)
    assert exit_outputs(load_model(tmp_path / "model"), encoded)[2].equal(exit_outputs(model, encoded)[2])
