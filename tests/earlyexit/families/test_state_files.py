"""State dicts with torchvision's names, beside networks written with the same names in `published.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from earlyexit.codecs import find_codec
from earlyexit.errors import ModelFolderError
from earlyexit.families import find_family
from earlyexit.families.resnet import ResNetBackbone, find_config
from earlyexit.families.vgg import CONVOLUTIONS, VggBackbone, VggConfig
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.families.published import PublishedResNet, PublishedVgg, as_if_trained

SIZE = (40, 72)
CLASSES = tuple(f"class-{k}" for k in range(5))
PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
"""Of torchvision's networks with 1000 classes, as its documentation has them."""
VGG_PARAMETERS = {11: 132_863_336, 13: 133_047_848, 16: 138_357_544, 19: 143_667_240}
VGG_NORM_PARAMETERS = {11: 132_868_840, 13: 133_053_736, 16: 138_365_992, 19: 143_678_248}


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


def model_of(source: str, *, ramps: RampOptions | None = None) -> EarlyExitModel:
    pretrained, family = load_pretrained(source, size=SIZE)
    assert pretrained.codec is not None
    return add_ramps(
        pretrained,
        name="m",
        family=family,
        codec=pretrained.codec,
        task=LabelTask(CLASSES),
        ramps=ramps or RampOptions(at=(0,)),
    )


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


@pytest.mark.parametrize("depth", PARAMETERS)
def test_resnets_have_as_many_weights_as_the_published_ones(depth: int) -> None:
    with torch.device("meta"):
        published = PublishedResNet(depth)
        backbone = ResNetBackbone(find_config(published.state_dict(), None))
    classifier = sum(each.numel() for each in published.fc.parameters())
    assert sum(each.numel() for each in backbone.parameters()) + classifier == PARAMETERS[depth]
    assert sum(each.numel() for each in published.parameters()) == PARAMETERS[depth]
    assert backbone.config.depth == depth


@pytest.mark.parametrize("norms", [False, True], ids=["without norms", "with norms"])
@pytest.mark.parametrize("depth", CONVOLUTIONS)
def test_vggs_have_as_many_weights_as_the_published_ones(depth: int, norms: bool) -> None:
    with torch.device("meta"):
        backbone = VggBackbone(VggConfig(convolutions=CONVOLUTIONS[depth], norms=norms))
        published = PublishedVgg(depth, norms=norms)
    classifier = 4096 * 1000 + 1000
    expected = (VGG_NORM_PARAMETERS if norms else VGG_PARAMETERS)[depth]
    assert sum(each.numel() for each in backbone.parameters()) + classifier == expected
    assert sum(each.numel() for each in published.parameters()) == expected
    assert backbone.config.depth == depth


@torch.inference_mode()
def test_regions_are_dilated_as_in_the_published_networks_for_segmentation() -> None:
    published = PublishedResNet(50, width=8, dilated=2)
    as_if_trained(published)
    pretrained = find_family("resnet").from_state(published.state_dict(), SIZE)
    assert pretrained is not None
    dilated = find_family("resnet").build(pretrained.backbone.to_config() | {"dilated": 2}).eval()
    dilated.load_state_dict(pretrained.backbone.state_dict())
    assert isinstance(dilated, ResNetBackbone)
    hidden, expected = dilated.stem(images(2)), published.features(images(2))
    for block in dilated.blocks:
        hidden = block(hidden)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5 * float(expected.max()))
    assert tuple(hidden.shape[1:]) == dilated.boundary(15)[0].shape == (256, 5, 9)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_state_dicts_stand_beside_other_facts_and_may_have_been_trained_in_parallel(key: str, tmp_path: Path) -> None:
    network = resnet(18)
    state = {f"module.{name}": tensor for name, tensor in network.state_dict().items()}
    model = model_of(saved({key: state, "epoch": 3}, tmp_path))
    with torch.inference_mode():
        torch.testing.assert_close(last_outputs(model, images(2)), network(images(2)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet-18", "vgg-11"])
def test_images_come_to_what_the_network_was_made_for(name: str, tmp_path: Path) -> None:
    make, sizes = NETWORKS[name]
    pretrained, _ = load_pretrained(saved(make(*sizes).state_dict(), tmp_path))
    assert pretrained.codec == {"name": "image", "height": 224, "width": 224, "shortest_edge": 256}
    assert pretrained.backbone.inputs[0].shape == (224, 224, 3)
    codec = find_codec(pretrained.codec, tmp_path)
    assert codec.inputs[1].shape == (224, 224, 3)


@pytest.mark.parametrize("name", ["resnet-18", "vgg-11 with norms"])
def test_a_tensor_too_few_or_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    make, sizes = NETWORKS[name]
    state = make(*sizes).state_dict()
    bias = "layer2.1.bn2.bias" if "resnet" in name else "features.5.bias"
    ours = r"blocks\.3\.norm_2\.bias" if "resnet" in name else r"blocks\.1\.norm\.bias"
    called = "ResNet-18" if "resnet" in name else "VGG-11"
    whole = state[bias]
    state[bias] = whole[:-1]
    with pytest.raises(ModelFolderError, match=rf"x\.pth does not fit a {called}: .*{ours}"):
        load_pretrained(saved(state, tmp_path))
    del state[bias]
    with pytest.raises(ModelFolderError, match=rf"x\.pth does not fit a {called}: .*{ours}"):
        load_pretrained(saved(state, tmp_path))


@pytest.mark.parametrize(
    "content", [b"hello world", b"PK\x03\x04 half", b"\x80\x02}q\x00."], ids=["text", "zip", "pickle"]
)
def test_files_that_torch_cannot_read_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"x\.pth cannot be read as weights"):
        load_pretrained(str(tmp_path / "x.pth"))


def test_grouped_convolutions_are_refused_by_name(tmp_path: Path) -> None:
    state = resnet(50).state_dict()
    state["layer1.0.conv2.weight"] = state["layer1.0.conv2.weight"][:, :1]  # ResNeXt's
    with pytest.raises(ModelFolderError, match=r"does not fit a ResNet-50: .*blocks\.0\.convolution_2\.weight"):
        load_pretrained(saved(state, tmp_path))
