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
from earlyexit.families.resnet import ResNetBackbone
from earlyexit.families.vgg import CONVOLUTIONS
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


@pytest.mark.parametrize(
    "content", [b"hello world", b"PK\x03\x04 half", b"\x80\x02}q\x00."], ids=["text", "zip", "pickle"]
)
def test_files_that_torch_cannot_read_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"x\.pth cannot be read as weights"):
        load_pretrained(str(tmp_path / "x.pth"))
