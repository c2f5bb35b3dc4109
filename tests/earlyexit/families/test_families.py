"""Checkpoints of `transformers` and state dicts with torchvision's names answer as the networks they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from earlyexit.codecs import find_codec
from earlyexit.codecs.image import ImageCodec
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.errors import ModelFolderError
from earlyexit.families import find_family
from earlyexit.families.base import Backbone
from earlyexit.families.encoder import bucket
from earlyexit.families.images import ImageBackbone
from earlyexit.families.resnet import ResNetBackbone, cifar_layout
from earlyexit.families.vgg import CONVOLUTIONS
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, load_pretrained, random_model
from earlyexit.network.model import Cut, EarlyExitModel, from_wire
from earlyexit.network.piece import Piece
from earlyexit.network.store import load_model, save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.training.ramps import exit_outputs, pack
from tests.data import data_folder
from tests.earlyexit.families.checkpoints import FAMILIES, hf_inputs, hf_model, resnet_state
from tests.earlyexit.families.published import PublishedResNet, PublishedVgg, as_if_trained
from tests.earlyexit.network.models import SMALL, ramped
from tests.earlyexit.network.tokens import of_tokens, random_inputs, wire_of
from tests.model_cards import change_card

NAMES = ("bad", "fair", "good")
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def mixed(encoded: list[Encoded]) -> list[Encoded]:
    """Eight inputs of different lengths, without the token that RoBERTa takes for padding."""
    return [of_tokens(np.maximum(each.tensors[0], 2)) for each in encoded[:8]]


def hidden_after_every_block(backbone: Backbone, encoded: Sequence[Encoded]) -> list[Tensor]:
    values, layout = pack(encoded, torch.device("cpu"))
    after = [backbone.embed(values, layout)]
    for index in range(backbone.num_blocks):
        after.append(backbone.run_block(index, after[-1], layout))
    return [hidden_ND for (hidden_ND,) in after]


@each_family
@torch.inference_mode()
def test_every_hidden_state_equals_that_of_transformers(family: str, mixed: list[Encoded]) -> None:
    theirs = hf_model(family, classifies=False)
    ours = find_family(family).from_transformers(theirs)
    assert (ours.head, ours.label_names) == (None, None)
    inputs = hf_inputs(mixed)
    expected = theirs(**inputs, output_hidden_states=True).hidden_states
    found = hidden_after_every_block(ours.backbone, mixed)
    assert len(found) == len(expected) == 4
    for hidden_ND, hidden_BTD in zip(found, expected, strict=True):
        torch.testing.assert_close(hidden_ND, hidden_BTD[inputs["attention_mask"].bool()], rtol=0, atol=1e-5)


def test_the_order_of_labels_is_the_checkpoints_not_the_datas() -> None:
    theirs = hf_model("bert", id2label=dict(enumerate(NAMES)))
    theirs.config.id2label = {0: "good", 1: "bad", 2: "fair"}
    pretrained = find_family("bert").from_transformers(theirs)
    model = ramped(pretrained, "bert", LabelTask(NAMES))
    assert model.task.spec()["label_names"] == ["good", "bad", "fair"]
    assert model.info.provenance["head"] == "checkpoint"
    assert model.head.state_dict()["classifier.weight"].equal(theirs.classifier.weight)


def test_random_models_depend_only_on_the_seed() -> None:
    models = [random_model(SMALL | {"num_blocks": 2}, seed=seed) for seed in (0, 0, 1)]
    first, same, other = (torch.nn.utils.parameters_to_vector(model.parameters()) for model in models)
    assert first.equal(same)
    assert not first.equal(other)


@pytest.mark.parametrize("num_buckets", [16, 4])
def test_every_distance_falls_into_the_bucket_that_transformers_has_for_it(num_buckets: int) -> None:
    offset_R = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(offset_R, num_buckets=num_buckets)
    assert bucket(offset_R, num_buckets).tolist() == expected.tolist()


@torch.inference_mode()
def test_inputs_longer_than_the_largest_distance_equal_those_of_transformers() -> None:
    theirs = hf_model("mpnet", classifies=False, noise=0.3, max_position_embeddings=202)
    ours = find_family("mpnet").from_transformers(theirs).backbone
    inputs = random_inputs(np.random.default_rng(0), [200, 3, 150], least=2)
    values, layout = pack(inputs, torch.device("cpu"))
    (hidden_ND,) = ours.run_blocks(0, 3, ours.embed(values, layout), layout)
    padded = hf_inputs(inputs)
    expected = theirs(**padded).last_hidden_state[padded["attention_mask"].bool()]
    torch.testing.assert_close(hidden_ND, expected, rtol=0, atol=1e-5)


NEVER = ConfidencePolicy(2.0)
LENGTHS = ((2, 3), (9, 2), (4, 12), (1, 1), (6, 6))
"""Tokens in the first and the second text of each pair."""
STARS = RegressionTask(scale=4.0, offset=3.0)


def checkpoint(folder: Path, *, family: str = "bert", **config: Any) -> Any:
    """A fine-tuned checkpoint with random weights, saved and as `transformers` has it."""
    model = hf_model(family, noise=0.2, **config)
    model.save_pretrained(folder)
    return model


def ours(folder: Path, task: Task, *, pairs: bool = False) -> EarlyExitModel:
    pretrained, family = load_pretrained(str(folder), pairs=pairs)
    return ramped(pretrained, family, task, codec={"name": "text_pair" if pairs else "text", "max_length": 32})


def some_pairs() -> list[Encoded]:
    rng = np.random.default_rng(0)
    return [
        Encoded(
            sum(lengths),
            (rng.integers(2, 100, sum(lengths), dtype=np.int32), np.repeat(np.arange(2, dtype=np.int32), lengths)),
        )
        for lengths in LENGTHS
    ]


@torch.inference_mode()
def theirs(hf_model: Any, encoded: Sequence[Encoded]) -> Tensor:
    logits_BC: Tensor = hf_model(**hf_inputs(encoded)).logits
    return logits_BC


def test_pairs_and_single_texts_get_the_logits_of_transformers(tmp_path: Path) -> None:
    hf_model = checkpoint(tmp_path, type_vocab_size=2, id2label=dict(enumerate(NAMES)), hidden_act="gelu_pytorch_tanh")
    model = ours(tmp_path, LabelTask(NAMES), pairs=True)
    found_BC = exit_outputs(model, some_pairs())[2]
    torch.testing.assert_close(found_BC, theirs(hf_model, some_pairs()), atol=1e-4, rtol=0)
    model = ours(tmp_path, LabelTask(NAMES))
    assert [each.name for each in model.takes(0)] == ["token_ids"]
    texts = [Encoded(each.length, each.tensors[:1]) for each in some_pairs()]
    torch.testing.assert_close(exit_outputs(model, texts)[2], theirs(hf_model, texts), atol=1e-4, rtol=0)
    hf_model = checkpoint(tmp_path, family="roberta", id2label=dict(enumerate(NAMES)))
    model = ours(tmp_path, LabelTask(NAMES), pairs=True)
    assert [each.name for each in model.takes(0)] == ["token_ids"]
    pairs = [Encoded(each.length, each.tensors[:1]) for each in some_pairs()]
    torch.testing.assert_close(exit_outputs(model, pairs)[2], theirs(hf_model, pairs), atol=1e-4, rtol=0)


def answers(model: EarlyExitModel, piece: Piece) -> list[object]:
    (step,) = Cut(model, 0, 3, (), NEVER).run(piece)
    return [answer.value for answer in step.answers]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_checkpoint_of_one_number_answers_what_transformers_answers(family: str, tmp_path: Path) -> None:
    hf_model = checkpoint(tmp_path, family=family, num_labels=1)
    model = ours(tmp_path, STARS)
    texts = [Encoded(each.length, each.tensors[:1]) for each in some_pairs()]
    expected = theirs(hf_model, texts)[:, 0].tolist()
    assert max(expected) - min(expected) > 0.1
    assert answers(model, from_wire(model, wire_of(texts), NEVER)) == pytest.approx(expected, abs=1e-4)
    assert model.info.provenance["head"] == "checkpoint"


@pytest.mark.parametrize(
    ("num_labels", "task"),
    [pytest.param(3, STARS, id="labels for a number"), pytest.param(1, LabelTask(NAMES), id="a number for labels")],
)
def test_a_head_for_another_task_is_not_kept(num_labels: int, task: Task, tmp_path: Path) -> None:
    checkpoint(tmp_path, num_labels=num_labels)
    model = ours(tmp_path, task)
    assert (model.info.head_style, model.info.provenance) == ("light", {})
    assert model.task == task


def test_the_expected_error_of_a_number_before_training_is_its_scale(tmp_path: Path) -> None:
    checkpoint(tmp_path, num_labels=1)
    model = ours(tmp_path, STARS)
    outputs_NC = exit_outputs(model, [Encoded(each.length, each.tensors[:1]) for each in some_pairs()])[2]
    assert STARS.score(outputs_NC).tolist() == [0.5] * len(LENGTHS)


SIZE = (40, 72)
SIDES = {"height": SIZE[0], "width": SIZE[1]}
CLASSES = tuple(f"class-{k}" for k in range(5))
PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
"""Parameters of torchvision's ResNets with 1000 classes, from its documentation."""


def resnet(depth: int) -> nn.Module:
    return as_if_trained(PublishedResNet(depth, width=8, classes=5))


def vgg(depth: int, norms: bool = True) -> nn.Module:
    return as_if_trained(PublishedVgg(depth, norms=norms, shrunk=16, hidden=24, classes=5))


NETWORKS = {
    **{f"resnet-{depth}": (resnet, (depth,)) for depth in PARAMETERS},
    **{f"vgg-{depth}": (vgg, (depth, False)) for depth in CONVOLUTIONS},
    **{f"vgg-{depth} with norms": (vgg, (depth, True)) for depth in CONVOLUTIONS},
}


def images(count: int, size: tuple[int, int] = SIZE) -> Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (count, *size, 3), dtype=np.uint8))


def saved(state: object, folder: Path) -> str:
    torch.save(state, folder / "x.pth")
    return str(folder / "x.pth")


def model_of(source: str) -> EarlyExitModel:
    """A network for smaller images than it was trained on, which take less time."""
    pretrained, family = load_pretrained(source)
    assert isinstance(pretrained.backbone, ImageBackbone)
    pretrained.backbone.config = replace(pretrained.backbone.config, height=SIZE[0], width=SIZE[1])
    pretrained.backbone.inputs = (replace(pretrained.backbone.inputs[0], shape=(*SIZE, 3)),)
    codec = {"name": "image", **SIDES}
    return ramped(pretrained, family, LabelTask(CLASSES), codec=codec, ramps=RampOptions(at=(0,)))


def last_outputs(model: EarlyExitModel, images_BHWC: Tensor) -> Tensor:
    encoded = [Encoded(1, (each[None],)) for each in images_BHWC.numpy()]
    return exit_outputs(model, encoded)[model.num_blocks - 1]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_published_network_answers_as_it_did(name: str, tmp_path: Path) -> None:
    make, sizes = NETWORKS[name]
    network = make(*sizes)
    model = model_of(saved(network.state_dict(), tmp_path))
    assert model.info.provenance["head"] == "checkpoint"
    for number in (1, 2, 7):
        with torch.inference_mode():
            expected = network(images(number))
        torch.testing.assert_close(last_outputs(model, images(number)), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_regions_are_dilated_as_in_the_published_networks_for_segmentation() -> None:
    published = PublishedResNet(50, width=8, dilated=2)
    as_if_trained(published)
    pretrained = find_family("resnet").from_state(published.state_dict())
    assert pretrained is not None
    dilated = find_family("resnet").build(pretrained.backbone.to_config() | {"dilated": 2, **SIDES}).eval()
    dilated.load_state_dict(pretrained.backbone.state_dict())
    assert isinstance(dilated, ResNetBackbone)
    hidden, expected = dilated.stem(images(2)), published.features(images(2))
    for block in dilated.blocks:
        hidden = block(hidden)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5 * float(expected.max()))
    assert tuple(hidden.shape[1:]) == dilated.boundary(15)[0].shape == (256, 5, 9)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_state_dicts_may_be_nested_and_from_data_parallel_training(key: str, tmp_path: Path) -> None:
    network = resnet(18)
    state = {f"module.{name}": tensor for name, tensor in network.state_dict().items()}
    model = model_of(saved({key: state, "epoch": 3}, tmp_path))
    with torch.inference_mode():
        torch.testing.assert_close(last_outputs(model, images(2)), network(images(2)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet-18", "vgg-11"])
def test_images_are_resized_for_the_network(name: str, tmp_path: Path) -> None:
    make, sizes = NETWORKS[name]
    pretrained, _ = load_pretrained(saved(make(*sizes).state_dict(), tmp_path))
    assert pretrained.codec == {"name": "image", "height": 224, "width": 224, "shortest_edge": 256}
    assert pretrained.backbone.inputs[0].shape == (224, 224, 3)
    codec = find_codec(pretrained.codec, tmp_path)
    assert codec.inputs[1].shape == (224, 224, 3)


@pytest.mark.parametrize(
    "content", [b"hello world", b"PK\x03\x04 half", b"\x80\x02}q\x00."], ids=["text", "zip", "pickle"]
)
def test_files_that_torch_cannot_read_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"x\.pth cannot be read as weights"):
        load_pretrained(str(tmp_path / "x.pth"))


TEST_IMAGES = "cifar10/lossless/cifar10_test_5000_webp.zip"


def reference_logits(state: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """He et al., section 4.2, option A, on tensors as the usual implementation names them; images (B, H, W, 3)."""

    def norm(values: Tensor, name: str) -> Tensor:
        mean, variance, scale, shift = (
            state[f"{name}.{kind}"].view(1, -1, 1, 1) for kind in ("running_mean", "running_var", "weight", "bias")
        )
        return (values - mean) / (variance + 1e-5).sqrt() * scale + shift

    pixels = images.movedim(-1, 1).double() / 255
    mean, deviation = (
        torch.tensor(c).double().view(1, 3, 1, 1) for c in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    hidden = norm(conv2d((pixels - mean) / deviation, state["conv1.weight"], padding=1), "bn1").clamp(min=0)
    for stage in (1, 2, 3):
        block = 0
        while (name := f"layer{stage}.{block}") + ".conv1.weight" in state:
            weight = state[f"{name}.conv1.weight"]
            wider = len(weight) - hidden.shape[1]
            inner = norm(conv2d(hidden, weight, padding=1, stride=2 if wider else 1), f"{name}.bn1").clamp(min=0)
            inner = norm(conv2d(inner, state[f"{name}.conv2.weight"], padding=1), f"{name}.bn2")
            if wider:
                small = hidden[:, :, ::2, ::2]
                zeros = small.new_zeros(len(small), wider // 2, *small.shape[2:])
                hidden = torch.cat([zeros, small, zeros], dim=1)
            hidden = (inner + hidden).clamp(min=0)
            block += 1
    return hidden.mean((2, 3)) @ state["linear.weight"].T + state["linear.bias"]


def test_logits_are_those_of_the_checkpoints_own_tensors(tmp_path: Path) -> None:
    """A ResNet-14 with random weights, in a file as its authors save one."""
    pixels, state = images(9, (32, 32)), resnet_state(blocks_per_stage=2)
    expected = reference_logits({name: tensor.double() for name, tensor in state.items()}, pixels).float()
    saved = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": saved, "best_prec1": 10.0}, tmp_path / "resnet14.th")
    pretrained, family = load_pretrained(str(tmp_path / "resnet14.th"))
    model = ramped(pretrained, family, LabelTask([f"class-{k}" for k in range(10)]), ramps=RampOptions(pooling="grid"))
    torch.testing.assert_close(last_outputs(model, pixels), expected, rtol=0, atol=1e-4)


def test_cards_of_the_first_version_are_read_as_they_were(tmp_path: Path) -> None:
    """They knew only the 6n + 2 family, by its depth and the side of its images."""
    sizes = asdict(cifar_layout(8))
    model = random_model(sizes, family="resnet", codec={"name": "image", "height": 32, "width": 32})
    save_model(model, tmp_path)
    change_card(tmp_path, backbone={"depth": 8, "side": 32, "mean": sizes["mean"], "std": sizes["std"]})
    loaded = load_model(tmp_path)
    assert loaded.backbone.to_config() == model.backbone.to_config()
    assert last_outputs(loaded, images(5, (32, 32))).equal(last_outputs(model, images(5, (32, 32))))


@pytest.fixture(scope="module")
def unseen() -> LabelledRows:
    folder = data_folder()
    if folder is None or not (folder / TEST_IMAGES).is_file():
        pytest.skip(f"{TEST_IMAGES} is not in OFFRAMP_DATA")
    return read_labelled(folder / TEST_IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "accuracy"), [(20, 0.9142), (32, 0.9226)], ids=["resnet-20", "resnet-32"])
def test_accuracies_are_those_measured_elsewhere(unseen: LabelledRows, depth: int, accuracy: float) -> None:
    folder = data_folder()
    assert folder is not None
    pretrained, family = load_pretrained(str(folder / f"resnet_cifar10/resnet{depth}.th"))
    task = LabelTask(unseen.label_names)
    model = ramped(pretrained, family, task, ramps=RampOptions(at=()))
    codec = ImageCodec(32, 32)
    outputs = exit_outputs(model, codec.encode(codec.from_columns(unseen.columns)))[model.num_blocks - 1]
    found = float((outputs.argmax(-1).numpy() == task.targets(unseen.labels)).mean())
    assert round(found, 4) == accuracy
