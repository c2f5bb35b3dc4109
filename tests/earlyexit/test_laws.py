"""Laws of every network: cuts, other inputs, files, a coarser float type and ONNX Runtime change no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from earlyexit.backends.onnx import OnnxSegments, export
from earlyexit.errors import ModelFolderError
from earlyexit.foreign import open_foreign
from earlyexit.foreign.dataflow import find_sites
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Answer, Encoded, Segment, stack_values
from earlyexit.network.checkpoint import RampOptions, load_pretrained
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import exit_outputs, pack
from tests.earlyexit.families.vision import MODELS, noise
from tests.earlyexit.foreign.modules import traced
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, every_bounds, piece_of
from tests.earlyexit.network.models import ramped, small
from tests.earlyexit.network.tokens import random_inputs

LENGTHS = (9, 1, 8, 4, 4, 7, 2, 9, 3, 1, 6, 5, 9, 2)
NUMBER = len(LENGTHS)


def of_torch(name: str, codec: NamedSpec, folder: Path) -> EarlyExitModel:
    """A torch module, cut at every site."""
    graph = traced(name)
    cuts = [site.tensors for site in find_sites(graph.flow)]
    return ramped(open_foreign(graph, {}, folder).build(cuts), "exported", codec=codec)


def of_onnx(name: str, codec: NamedSpec, folder: Path) -> EarlyExitModel:
    """An ONNX file in three blocks."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from tests.earlyexit.foreign import onnx_graphs

    if name == "words":
        path = onnx_graphs.saved(onnx_graphs.words_graph(), folder / "from")
        return ramped(onnx_graphs.words_taken(path, folder), "onnx", codec=codec)
    path = onnx_graphs.saved(onnx_graphs.pictures_graph(), folder / "from")
    return ramped(onnx_graphs.pictures_taken(path, folder), "onnx", codec=codec)


def own(name: str, codec: NamedSpec | None = None) -> EarlyExitModel:
    """A network as a user would write it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ramped(*load_pretrained(name), LabelTask(("left", "right")), codec=codec)


TEXT, IMAGE = {"name": "text", "max_length": 16}, {"name": "image", "height": 8, "width": 8}
NETWORKS: Mapping[str, Callable[[], EarlyExitModel]] = {
    **{family: partial(small, family=family) for family in ("bert", "distilbert", "roberta", "mpnet")},
    "pairs": partial(small, token_types=2, num_blocks=2, ramps=RampOptions(pooling="last")),
    "own, padded": partial(own, "tests.earlyexit.families.test_own_family:build"),
    "own, of tensors": partial(own, "tests.earlyexit.families.convolutions:build", IMAGE),
    **MODELS,
}
FOREIGN: Mapping[str, Callable[[Path], EarlyExitModel]] = {
    "torch module, images": partial(of_torch, "pictures", IMAGE),
    "torch module, texts": partial(of_torch, "texts", TEXT),
    "ONNX file, images": partial(of_onnx, "pictures", IMAGE),
    "ONNX file, texts": partial(of_onnx, "words", TEXT),
}
Made = Callable[[str], EarlyExitModel]
each_network = pytest.mark.parametrize("name", [*NETWORKS, *FOREIGN])
QUICK = {"pairs", "own, of tensors", "segmentation, bridges"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Networks by name. Each is built once, because tracing a module takes seconds."""
    return cache(lambda name: FOREIGN[name](tmp_path_factory.mktemp("made")) if name in FOREIGN else NETWORKS[name]())


def inputs_of(model: EarlyExitModel, count: int) -> list[Encoded]:
    """Images, texts of different lengths, or pairs of texts."""
    if model.max_length == 1:
        return noise(model, count)
    rng = np.random.default_rng(3)
    texts = random_inputs(rng, LENGTHS[:count], least=2)
    below = model.takes(0)[0].below or 10
    texts = [replace(each, tensors=(each.tensors[0] % below,)) for each in texts]
    if len(model.takes(0)) == 1:
        return texts
    return [replace(each, tensors=(*each.tensors, each.tensors[0] % 2)) for each in texts]


def some_leave(model: EarlyExitModel) -> ConfidencePolicy:
    """Returns thresholds with which two more inputs leave at every ramp, and the others run to the end."""
    thresholds, inside = {}, np.arange(NUMBER)
    outputs = exit_outputs(model, inputs_of(model, NUMBER))
    for block in model.ramp_indices:
        scores = model.task.score(outputs[block]).numpy()
        lowest, *_ = surest = np.sort(scores[inside])[-3:]
        thresholds[block] = float(lowest + surest[1]) / 2
        inside = inside[scores[inside] < thresholds[block]]
        if len(inside) < 4:
            break
    return ConfidencePolicy({block: thresholds.get(block, 2.0) for block in model.ramp_indices})


def assert_nearly_same(task: Task, answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Checks that exits are equal and scores nearly; in maps, few pixels may depend on the order of a sum."""
    assert answers.keys() == expected.keys()
    assert {name: each.exit for name, each in answers.items()} == {name: each.exit for name, each in expected.items()}
    scores = np.array([[answers[name].score, each.score] for name, each in expected.items()])
    np.testing.assert_allclose(scores[:, 0], scores[:, 1], atol=1e-5)
    found, right = (stack_values([each[name].value for name in expected]) for each in (answers, expected))
    assert task.loss(found, right).max() < 2e-3


@each_network
def test_answers_do_not_depend_on_cuts_or_other_inputs(name: str, made: Made) -> None:
    model = made(name)
    policy, encoded = some_leave(model), inputs_of(model, NUMBER)
    expected = answers_alone(model, policy, encoded)
    assert len({answer.exit for answer in expected.values()}) > min(2, len(model.ramp_indices))
    blocks = model.num_blocks
    others = (0, 1, blocks - 1, blocks) if blocks > 2 else (0, 1, blocks)
    some = [(0, blocks), (0, blocks // 2, blocks), others, tuple(range(blocks + 1))]
    for seed, bounds in enumerate(every_bounds(blocks) if blocks <= 4 else some):
        assert_nearly_same(model.task, answers_in_cuts(model, policy, encoded, bounds, seed=seed), expected)


@each_network
def test_outputs_are_the_same_in_batches_of_one_two_and_seven(name: str, made: Made) -> None:
    model = made(name)
    encoded = inputs_of(model, 7)
    alone = [exit_outputs(model, [each]) for each in encoded]
    for batch in (2, 7):
        for block, outputs in exit_outputs(model, encoded, batch=batch).items():
            assert outputs.shape == (7, *model.task.output_shape)
            torch.testing.assert_close(outputs, torch.cat([each[block] for each in alone]), rtol=1e-4, atol=1e-5)


@each_network
@torch.inference_mode()
def test_hidden_states_have_the_shapes_of_the_boundaries(name: str, made: Made) -> None:
    model = made(name)
    values, layout = pack(inputs_of(model, 3), torch.device("cpu"))
    hidden = model.backbone.embed(values, layout)
    for block in range(model.num_blocks):
        hidden = model.backbone.run_block(block, hidden, layout)
        rows = [layout.num_tokens if each.per_token else 3 for each in model.takes(block + 1)]
        assert [tuple(each.shape) for each in hidden] == [
            (count, *each.shape) for count, each in zip(rows, model.takes(block + 1), strict=True)
        ]


@each_network
def test_a_saved_model_answers_the_same_up_to_its_dtype(name: str, made: Made, tmp_path: Path) -> None:
    model = made(name)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert (loaded.info, loaded.backbone.to_config()) == (model.info, model.backbone.to_config())
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    found, expected = exit_outputs(loaded, inputs_of(model, 4)), exit_outputs(model, inputs_of(model, 4))
    assert all(outputs.equal(expected[block]) for block, outputs in found.items())
    if model.backbone.float32_only:
        with pytest.raises(ModelFolderError, match="models run in float32, not bfloat16"):
            load_model(tmp_path / "model", dtype=torch.bfloat16)
        return
    coarse = exit_outputs(load_model(tmp_path / "model", dtype=torch.bfloat16), inputs_of(model, 4))
    for block, outputs in expected.items():
        assert float((coarse[block].float() - outputs).abs().max()) < 0.1 * float(outputs.abs().max())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]
)
def test_onnx_runtime_and_torch_agree_in_all_batch_sizes(name: str, made: Made, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = made(name)
    segments = OnnxSegments(model, tmp_path)
    export(model, segments.file)
    last, middle = model.num_blocks, model.num_blocks // 2
    halves = (Segment(first=0, end=middle, ramp=middle - 1), Segment(first=middle, end=last, ramp=None))
    blocks = [Segment(first=block, end=block + 1, ramp=None) for block in range(last)]
    segments.prepare([*halves, *blocks])
    for number, parts in ((1, halves), (2, halves), (7, halves), (7, blocks)):
        piece = piece_of(model, ConfidencePolicy(2.0), inputs_of(model, number))
        for segment in parts:
            with torch.inference_mode():
                hidden, outputs = model.run(segment, piece)
            found, answered = segments.run(segment, piece)
            assert (outputs is None) == (answered is None)
            exits = [] if outputs is None or answered is None else [(outputs, answered)]
            for ours, theirs in (*zip(hidden, found, strict=True), *exits):
                np.testing.assert_allclose(theirs.numpy(), ours.numpy(), rtol=1e-3, atol=1e-4)
            piece = replace(piece, next_block=segment.end, tensors=hidden)
