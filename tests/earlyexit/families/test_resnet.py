"""ResNets beside a forward pass written anew on the checkpoint's own tensors, and beside published accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from earlyexit.codecs.image import ImageCodec
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.families.resnet import cifar_layout
from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import exit_outputs
from tests.data import data_folder
from tests.earlyexit.families.checkpoints import resnet_state
from tests.earlyexit.network.refusals import change_card

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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A ResNet-14 with random weights, as its authors save one."""
    path = tmp_path / "resnet14.th"
    state = {f"module.{name}": tensor for name, tensor in resnet_state(blocks_per_stage=2).items()}
    torch.save({"state_dict": state, "best_prec1": 10.0}, path)
    return path


def model_of(checkpoint: Path, ramps: RampOptions | None = None) -> EarlyExitModel:
    pretrained, family = load_pretrained(str(checkpoint))
    assert pretrained.codec is not None
    names = [f"class-{k}" for k in range(10)]
    return add_ramps(
        pretrained,
        name="m",
        family=family,
        codec=pretrained.codec,
        task=LabelTask(names),
        ramps=ramps or RampOptions(pooling="grid"),
    )


def images(count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))


def uncut_logits(model: EarlyExitModel, pixels: Tensor) -> Tensor:
    codec = ImageCodec(32, 32)
    return exit_outputs(model, codec.encode(list(pixels.numpy())))[model.num_blocks - 1]


def test_logits_are_those_of_the_checkpoints_own_tensors(checkpoint: Path) -> None:
    pixels = images(9)
    state = {name: tensor.double() for name, tensor in resnet_state(blocks_per_stage=2).items()}
    expected = reference_logits(state, pixels).float()
    torch.testing.assert_close(uncut_logits(model_of(checkpoint), pixels), expected, rtol=0, atol=1e-4)


def test_cards_of_the_first_version_are_read_as_they_were(tmp_path: Path) -> None:
    """They knew only the 6n + 2 family, by its depth and the side of its images."""
    sizes = asdict(cifar_layout(8))
    model = random_model(sizes, family="resnet", codec={"name": "image", "height": 32, "width": 32})
    save_model(model, tmp_path)
    change_card(tmp_path, backbone={"depth": 8, "side": 32, "mean": sizes["mean"], "std": sizes["std"]})
    loaded = load_model(tmp_path)
    assert loaded.backbone.to_config() == model.backbone.to_config()
    assert uncut_logits(loaded, images(5)).equal(uncut_logits(model, images(5)))


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
    assert pretrained.codec is not None
    task = LabelTask(unseen.label_names)
    model = add_ramps(pretrained, name="m", family=family, codec=pretrained.codec, task=task, ramps=RampOptions(at=()))
    codec = ImageCodec(32, 32)
    outputs = exit_outputs(model, codec.encode(codec.from_columns(unseen.columns)))[model.num_blocks - 1]
    found = float((outputs.argmax(-1).numpy() == task.targets(unseen.labels)).mean())
    assert round(found, 4) == accuracy
