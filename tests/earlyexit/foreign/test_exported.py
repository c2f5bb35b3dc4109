"""Ordinary torch modules that are traced, cut and stored as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from earlyexit.data.rows import PAIR, TEXT
from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Pretrained
from earlyexit.families.own import examples, layout_of
from earlyexit.foreign import open_foreign, read_foreign
from earlyexit.foreign.dataflow import find_sites
from earlyexit.foreign.model import ForeignModel, ForeignOptions
from earlyexit.foreign.torch_backbone import GRAPH_FILE, ExportedBackbone
from earlyexit.foreign.torch_module import values_of
from earlyexit.network.boundary import Encoded
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import CARD_FILE, WEIGHTS_FILE, load_model, save_model
from earlyexit.training.ramps import pack
from tests.earlyexit.foreign import modules as foreign
from tests.earlyexit.network.cuts import every_bounds
from tests.earlyexit.network.models import ramped
from tests.earlyexit.network.tokens import of_tokens


@cache
def taken(name: str) -> Pretrained:
    """The module, cut at every site."""
    graph = foreign.traced(name)
    return cut_at(graph, [site.tensors for site in find_sites(graph.flow)])


def cut_at(graph: ForeignModel, cuts: Sequence[Sequence[str]] = (), **codec: int) -> Pretrained:
    return open_foreign(graph, codec, Path("of no use")).build(cuts)


def model_of(name: str) -> EarlyExitModel:
    codec = None if name == "texts" else {"name": "image", "height": 8, "width": 8}
    return ramped(taken(name), "exported", codec=codec)


def inputs_of(name: str, count: int, seed: int = 0) -> list[Encoded]:
    rng = np.random.default_rng(seed)
    if name == "texts":
        lengths = rng.integers(1, 9, count)
        return [of_tokens(rng.integers(1, foreign.VOCABULARY, length).tolist()) for length in lengths]
    return [Encoded(1, (each[None],)) for each in rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)]


def whole(name: str, encoded: list[Encoded]) -> Tensor:
    """Returns the outputs of the module itself for one batch; texts are padded."""
    network, _ = getattr(foreign, name)()
    values, layout = pack(encoded, torch.device("cpu"))
    given = (values[0],) if name != "texts" else (layout.pad(values[0]).long(), layout.mask_BT.long())
    with torch.no_grad():
        result: Tensor = network(*given)
    return result


@torch.inference_mode()
def in_pieces(backbone: ExportedBackbone, encoded: list[Encoded], bounds: tuple[int, ...]) -> Tensor:
    values, layout = pack(encoded, torch.device("cpu"))
    hidden = backbone.embed(values, layout)
    for first, end in pairwise(bounds):
        hidden = backbone.run_blocks(first, end, hidden, layout)
    return hidden[0]


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("name", ["pictures", "texts"])
def test_outputs_equal_the_modules_bit_by_bit_for_every_cut(name: str, count: int) -> None:
    backbone, encoded = taken(name).backbone, inputs_of(name, count)
    assert isinstance(backbone, ExportedBackbone)
    assert backbone.num_blocks >= 3
    for bounds in every_bounds(backbone.num_blocks):
        assert in_pieces(backbone, encoded, bounds).equal(whole(name, encoded))


def test_a_softmax_becomes_its_logits_and_other_probabilities_their_logarithms() -> None:
    answers = dict[str, Tensor]()
    for name in ("probable", "separate"):
        backbone = taken(name).backbone
        assert isinstance(backbone, ExportedBackbone)
        answers[name] = in_pieces(backbone, inputs_of(name, 4), (0, backbone.num_blocks))
    assert answers["probable"].softmax(-1).equal(whole("probable", inputs_of("probable", 4)))
    torch.testing.assert_close(answers["separate"].exp(), whole("separate", inputs_of("separate", 4)))


def test_crossing_tensors_are_described() -> None:
    backbone = taken("texts").backbone
    assert [(each.name, each.dtype, each.per_token, each.below) for each in backbone.inputs] == [
        ("input_ids", "int32", True, foreign.VOCABULARY)
    ]
    assert backbone.max_length == 24, "as far as there are positions"
    boundaries = [backbone.boundary(block) for block in range(backbone.num_blocks)]
    assert all(len(each) == 1 for each in boundaries)
    assert (boundaries[0][0].per_token, boundaries[-1][0].per_token, boundaries[-1][0].shape) == (True, False, (3,))


def test_other_weights_or_another_graph_in_the_folder_are_refused(tmp_path: Path) -> None:
    model = model_of("pictures")
    model.info = replace(model.info, provenance={"backbone_sha256": model.backbone.sha256()})
    save_model(model, tmp_path)
    load_model(tmp_path)
    weights = load_file(tmp_path / WEIGHTS_FILE)
    next(tensor for name, tensor in weights.items() if name.startswith("backbone.")).view(-1)[0] += 1
    save_file(weights, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ModelFolderError, match="ramps were trained on another backbone"):
        load_model(tmp_path)
    save_model(model_of("pictures"), tmp_path)
    graph = json.loads((tmp_path / GRAPH_FILE).read_text())
    graph["graphs"][0]["calls"].pop()
    (tmp_path / GRAPH_FILE).write_text(json.dumps(graph))
    with pytest.raises(ModelFolderError, match="is not the graph that the model's card was written for"):
        load_model(tmp_path)


def rewritten(folder: Path, graph: object) -> None:
    """Writes another graph to a model's folder, and its hash to the card."""
    text = json.dumps(graph, separators=(",", ":")) + "\n"
    (folder / GRAPH_FILE).write_text(text)
    card = json.loads((folder / CARD_FILE).read_text())
    card["backbone"]["graph"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / CARD_FILE).write_text(json.dumps(card))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Returns a model's folder and the text of its graph."""
    folder = tmp_path_factory.mktemp("pictures")
    save_model(model_of("pictures"), folder)
    return folder, (folder / GRAPH_FILE).read_text()


CODE = "x=__import__('pathlib').Path('touched').touch(), y"
NO_OPERATORS = (
    *("aten.__class__.__class__", "aten.__init__.__getattribute__", "aten.__dict__.__setitem__"),
    *("aten.relu.__class__", "aten.relu.default.__class__", "aten.relu.redispatch"),
    *("aten.relu_.default", "aten.save.default", "os.system.default", "aten", ""),
)


@pytest.mark.parametrize(
    "call",
    [
        ["aten.zeros.default", [[1]], {"**print(), pin_memory": False}],
        ["aten.relu.default", [{"tensor": "x"}], {CODE: 1}],
        ["add", [{"tensor": "x"}], {CODE: 1}],
        ["aten.from_file.default", ["weights"], {"size": 4}],
        *([name, [{"tensor": "x"}], {}] for name in NO_OPERATORS),
    ],
    ids=str,
)
def test_a_graph_that_does_more_than_compute_is_not_loaded(kept: tuple[Path, str], call: list[object]) -> None:
    folder, text = kept
    graph = json.loads(text)
    rewritten(folder, graph)
    load_model(folder)  # a whole folder, whatever wrote it
    graph["graphs"][-1]["calls"].insert(0, ["zz", *call])
    rewritten(folder, graph)
    with pytest.raises(ModelFolderError, match=r"the graph's call 'zz' of|is not an operator"):
        load_model(folder)


def test_a_shared_weight_is_kept_once(tmp_path: Path) -> None:
    save_model(model_of("texts"), tmp_path)
    names = [name for name in load_model(tmp_path).state_dict() if "tokens" in name or "again" in name]
    assert len(names) == 1


def test_the_fingerprint_covers_weights_of_any_type() -> None:
    backbone = taken("indexed").backbone
    assert backbone.inputs[0].below == foreign.VOCABULARY
    before = backbone.sha256()
    weights = backbone.state_dict()
    next(each for each in weights.values() if each.dtype == torch.bfloat16).add_(1)
    after = backbone.sha256()
    next(each for each in weights.values() if each.dtype == torch.bfloat16).sub_(1)
    assert (before == after, before == backbone.sha256()) == (False, True)


def test_integers_and_bools_of_arrays_are_features() -> None:
    graph = read_foreign(f"{foreign.__name__}:categories", ForeignOptions(arrays=True), open_size=1)
    inputs = cut_at(graph).backbone.inputs
    assert [(each.shape, each.dtype) for each in inputs] == [((2,), "int32"), ((1,), "uint8")]


def test_random_inputs_are_positive_and_below_the_rows_of_tables() -> None:
    graph = read_foreign(f"{foreign.__name__}:positive", ForeignOptions(arrays=True), open_size=1)
    backbone, layout = cut_at(graph).backbone, layout_of([1] * 9)
    [hidden] = backbone.run_blocks(0, 1, backbone.embed(examples(backbone.inputs, layout), layout), layout)
    assert hidden.isfinite().all()


def test_masks_among_arrays_are_data() -> None:
    (network, given), options = foreign.texts(), ForeignOptions(arrays=True)
    graph = read_foreign(f"{foreign.__name__}:texts", options, open_size=1)
    assert [each.name for each in graph.inputs] == list(given)
    cuts = [site.tensors for site in graph.sites(sets=True, measure=False)]
    assert len(cuts[0]) == 2, "the mask crosses too"
    backbone, layout = cut_at(graph, cuts).backbone, layout_of([1, 1])
    [answers] = backbone.run_blocks(0, len(cuts) + 1, backbone.embed(tuple(given.values()), layout), layout)
    torch.testing.assert_close(answers, network(**given))


@pytest.mark.parametrize("place", ["types", "weights"])
@pytest.mark.parametrize("dtype", ["float33", "nn"])
def test_types_that_torch_does_not_have_are_refused_when_loaded(kept: tuple[Path, str], place: str, dtype: str) -> None:
    folder, text = kept
    graph = json.loads(text)
    name = next(iter(graph[place]))
    graph[place][name] = dtype if place == "types" else [dtype, graph[place][name][1]]
    rewritten(folder, graph)
    with pytest.raises(ModelFolderError, match=f"has tensors of '{dtype}', which is no torch dtype"):
        load_model(folder)


def test_a_recurrent_layer_and_any_number_of_arguments_are_traced() -> None:
    assert [foreign.traced(name).codec_inputs for name in ("recurrent", "added")] == [
        ("values",),
        ("values", "others_0"),
    ]


def test_a_codec_does_not_provide_masks_and_positions() -> None:
    assert [each.name for each in taken("placed").backbone.inputs] == ["input_ids"]
    graph = replace(foreign.traced("placed_second_texts"), options=ForeignOptions(columns=(TEXT, PAIR)))
    assert graph.codec_inputs == ("input_ids", "token_type_ids")
    cut_at(graph)  # what the codec gives may be anything


def test_traced_modules_run_with_kernels_whose_results_have_other_strides() -> None:
    graph = foreign.traced("texts")
    with torch.inference_mode():
        expected = values_of(graph.module, *graph.examples.values())
        with sdpa_kernel(SDPBackend.MATH):
            found = values_of(graph.module, *graph.examples.values())
    torch.testing.assert_close(*([each[name] for name in graph.flow.outputs] for each in (found, expected)))
