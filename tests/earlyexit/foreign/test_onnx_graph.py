"""Graphs from elsewhere, in blocks: what they answer beside their own file's answers, uncut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from earlyexit.backends import open_segments
from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.foreign.onnx_backbone import OnnxBackbone
from earlyexit.network.boundary import Budget, Encoded, Segment
from earlyexit.network.cut import cut_out
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Layout
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.foreign import onnx_graphs
from tests.earlyexit.foreign.onnx_graphs import (
    Array,
    pictures_graph,
    pictures_taken,
    saved,
    with_ramps,
    words_graph,
    words_taken,
)
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, every_bounds, piece_of

LENGTHS = (5, 1, 16, 3, 5, 9, 2, 12, 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, the model that was made of it, and inputs."""

    path: Path
    model: EarlyExitModel
    encoded: list[Encoded]
    feeds: Callable[[Encoded], Mapping[str, Array]]

    @property
    def expected(self) -> Array:
        answer = onnx_graphs.uncut(self.path)
        return np.concatenate([answer(self.feeds(each)) for each in self.encoded])


@pytest.fixture(scope="module", params=["pictures", "words"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "pictures":
        path = saved(pictures_graph(), folder / "from")
        pretrained, encoded, feeds = (
            pictures_taken(path, folder),
            onnx_graphs.random_pictures(9),
            onnx_graphs.picture_feeds,
        )
    else:
        path = saved(words_graph(), folder / "from")
        pretrained, encoded, feeds = (
            words_taken(path, folder),
            onnx_graphs.random_words(LENGTHS),
            onnx_graphs.words_feeds,
        )
    return Case(path=path, model=with_ramps(pretrained), encoded=encoded, feeds=feeds)


def halves(model: EarlyExitModel, encoded: Sequence[Encoded]) -> ConfidencePolicy:
    """About half of the inputs are surer than this at every ramp."""
    thresholds = {}
    for block, outputs_NC in exit_outputs(model, encoded).items():
        scores = sorted(model.task.score(outputs_NC).tolist())
        thresholds[block] = (scores[len(scores) // 2 - 1] + scores[len(scores) // 2]) / 2
    return ConfidencePolicy(thresholds)


@pytest.mark.parametrize("bounds", [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)], ids=str)
def test_blocks_in_any_sessions_give_the_files_own_outputs(case: Case, bounds: Sequence[int]) -> None:
    never = ConfidencePolicy(2.0)
    piece = piece_of(case.model, never, case.encoded)
    for first, end in pairwise(bounds):
        with torch.inference_mode():
            hidden, outputs_BC = case.model.run(Segment(first=first, end=end, ramp=None), piece)
        if outputs_BC is None:
            (step,) = cut_out(case.model, first, end, (), never).run(piece)
            assert step.survivors is not None
            piece = step.survivors
            assert all(a.equal(b) for a, b in zip(hidden, piece.tensors, strict=True))
        else:
            np.testing.assert_allclose(outputs_BC.numpy(), case.expected, atol=1e-4)


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


def test_a_skip_crosses_in_a_cut_of_two_tensors(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from")
    model = with_ramps(pictures_taken(path, tmp_path, cuts=(("c1", "r0"), ("r1", "c2"), ("r2",))))
    assert [each.name for each in model.boundary(0)] == ["c1", "r0"]
    encoded = onnx_graphs.random_pictures(7)
    never = ConfidencePolicy(2.0)
    expected = answers_alone(model, never, encoded)
    for seed, bounds in enumerate(every_bounds(4)):
        assert_same(answers_in_cuts(model, never, encoded, bounds, seed=seed), expected, within=1e-4)
    answer = onnx_graphs.uncut(path)
    outputs_NC = exit_outputs(model, encoded)[3].numpy()
    np.testing.assert_allclose(
        outputs_NC, np.concatenate([answer(onnx_graphs.picture_feeds(each)) for each in encoded]), atol=1e-4
    )


def test_a_tensor_may_cross_several_blocks(tmp_path: Path) -> None:
    graph = pictures_graph()
    cuts = (("c1", "r0"), ("a1", "r0"), ("r1",))
    # r0 is of no use after a1, and crosses there all the same.
    model = with_ramps(pictures_taken(saved(graph, tmp_path / "from"), tmp_path, cuts=cuts))
    piece = piece_of(model, ConfidencePolicy(2.0), onnx_graphs.random_pictures(2))
    with torch.inference_mode():
        first, _ = model.run(Segment(first=0, end=1, ramp=None), piece)
        second = model.run_blocks(1, 2, first, Layout(np.ones(2, dtype=np.int32)))
    assert second[1].equal(first[1])


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


def test_a_batch_that_is_built_into_the_graph_is_taken_out_of_it(tmp_path: Path) -> None:
    path = saved(pictures_graph(end="reshaped", batch="1"), tmp_path / "from")
    model = with_ramps(pictures_taken(path, tmp_path))
    encoded = onnx_graphs.random_pictures(7)
    answer = onnx_graphs.uncut(path)
    expected = np.concatenate([answer(onnx_graphs.picture_feeds(each)) for each in encoded])
    np.testing.assert_allclose(exit_outputs(model, encoded)[2].numpy(), expected, atol=1e-4)


def test_weights_beside_the_file_come_along(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from", beside=True)
    assert (tmp_path / "from" / "theirs.bin").stat().st_size > 1000
    model = with_ramps(pictures_taken(path, tmp_path / "model"))
    save_model(model, tmp_path / "model")
    (tmp_path / "from" / "theirs.bin").unlink()
    encoded = onnx_graphs.random_pictures(2)
    assert exit_outputs(load_model(tmp_path / "model"), encoded)[2].equal(exit_outputs(model, encoded)[2])


@pytest.mark.parametrize("form", ["B*T", "TB"])
def test_tokens_cross_packed_however_the_graph_holds_them(tmp_path: Path, form: str) -> None:
    path = saved(onnx_graphs.turned_words_graph(form), tmp_path / "from")
    model = with_ramps(words_taken(path, tmp_path, cuts=[["seen"]]))
    assert [(each.shape, each.dtype, each.per_token) for each in model.boundary(0)] == [((8,), "float", True)]
    encoded = onnx_graphs.random_words(LENGTHS)
    answer = onnx_graphs.uncut(path)
    expected = np.concatenate([answer(onnx_graphs.words_feeds(each)) for each in encoded])
    np.testing.assert_allclose(exit_outputs(model, encoded)[1].numpy(), expected, atol=1e-4)


def test_windows_of_a_picture_cross_as_one_row(tmp_path: Path) -> None:
    body = """rows = Constant <value_ints = [-1, 3, 4, 8]> () windows = Reshape(x, rows) seen = Tanh(windows)
        whole = Constant <value_ints = [-1, 192]> () flat = Reshape(seen, whole) logits = Gemm(flat, head, bias)"""
    graph = onnx_graphs.small_graph(
        f"windows (float[B, 3, 8, 8] x) => (float[B, 3] logits) {{ {body} }}", head=(192, 3), bias=(3,)
    )
    path = saved(graph, tmp_path / "from")
    model = with_ramps(pictures_taken(path, tmp_path, cuts=[["seen"]]))
    assert [(each.shape, each.per_token) for each in model.boundary(0)] == [((2, 3, 4, 8), False)]
    encoded = onnx_graphs.random_pictures(5)
    answer = onnx_graphs.uncut(path)
    expected = np.concatenate([answer(onnx_graphs.picture_feeds(each)) for each in encoded])
    np.testing.assert_allclose(exit_outputs(model, encoded)[1].numpy(), expected, atol=1e-4)


def test_what_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    path = saved(pictures_graph(), tmp_path / "from")
    model = with_ramps(pictures_taken(path, tmp_path / "model"))
    save_model(model, tmp_path / "model")
    before = {each.name: each.read_bytes() for each in (tmp_path / "model").iterdir()}
    assert set(before) == {"graph.onnx", "graph.onnx.data", "model.json", "model.safetensors"}
    with pytest.raises(GraphError):
        pictures_taken(path, tmp_path / "model", cuts=[["c1"]])
    assert {each.name: each.read_bytes() for each in (tmp_path / "model").iterdir()} == before
