"""Ramps behind bridges: PAME's exits, which are copies of some blocks and of the full model's head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.errors import ModelFolderError
from earlyexit.families.resnet import ResNetBackbone, cifar_layout
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.ramps.heads import BridgeRamp
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import TrainOptions, exit_outputs, train_ramps
from tests.earlyexit.families.checkpoints import resnet_state
from tests.earlyexit.network.models import SMALL
from tests.earlyexit.training.test_ramps import changed, copy_of

SIDE = 12
SIZES = {"depth": 14, "side": SIDE}
BRIDGES = RampOptions(style="bridge")
QUICK = TrainOptions(epochs=10, batch=16, learning_rate=1e-2)


def pictures(count: int, *, seed: int = 0) -> tuple[list[Encoded], np.ndarray]:
    """Noise, brighter on its left (label 0) or on its right half (label 1)."""
    rng = np.random.default_rng(seed)
    pixels_NHWC = rng.integers(0, 120, (count, SIDE, SIDE, 3))
    labels_N = np.arange(count) % 2
    pixels_NHWC[labels_N == 0, :, : SIDE // 2] += 100
    pixels_NHWC[labels_N == 1, :, SIDE // 2 :] += 100
    return [Encoded(1, (each[None].astype(np.uint8),)) for each in pixels_NHWC], labels_N


def small(ramps: RampOptions = BRIDGES) -> EarlyExitModel:
    """Six blocks, two in each region."""
    return random_model(SIZES, family="resnet", codec={"name": "image", "height": SIDE, "width": SIDE}, ramps=ramps)


def bridge_ramp(model: EarlyExitModel, block: int) -> BridgeRamp:
    ramp = model.exit_head(block)
    assert isinstance(ramp, BridgeRamp)
    return ramp


def outputs(model: EarlyExitModel, inputs: list[Encoded]) -> dict[int, Tensor]:
    return exit_outputs(model, inputs)


@torch.inference_mode()
def test_a_bridge_gives_from_everywhere_what_the_last_block_gives() -> None:
    backbone = ResNetBackbone(cifar_layout(20, side=15)).eval()
    for block in range(backbone.num_blocks):
        hidden = torch.zeros(2, *backbone.boundary(block)[0].shape)
        assert backbone.bridge(block)(hidden).shape[1:] == backbone.boundary(8)[0].shape


def test_a_bridge_has_the_first_block_of_every_later_region_and_shares_no_weights() -> None:
    backbone = ResNetBackbone(cifar_layout(20))
    firsts = {0: [3, 6], 2: [3, 6], 3: [6], 5: [6], 6: [], 8: []}
    originals = {id(parameter) for parameter in backbone.parameters()}
    for block, expected in firsts.items():
        bridge = backbone.bridge(block)
        assert len(list(bridge.children())) == len(expected)
        for copy, original in zip(bridge.children(), expected, strict=True):
            assert changed(copy, copy_of(backbone.blocks[original])) == set()
        assert not originals & {id(parameter) for parameter in bridge.parameters()}


def test_bridges_of_a_checkpoint_begin_with_its_blocks_and_its_head(tmp_path: Path) -> None:
    torch.save(resnet_state(blocks_per_stage=2), tmp_path / "resnet14.th")
    pretrained, family = load_pretrained(str(tmp_path / "resnet14.th"))
    assert pretrained.codec is not None
    task = LabelTask([f"class-{k}" for k in range(10)])
    model = add_ramps(pretrained, name="m", family=family, codec=pretrained.codec, task=task, ramps=BRIDGES)
    assert (model.info.ramp_style, model.info.head_style) == ("bridge", "light")
    for block in model.ramp_indices:
        assert changed(bridge_ramp(model, block).head, copy_of(model.head)) == set()
        assert changed(bridge_ramp(model, block).bridge, copy_of(model.backbone.bridge(block) or model)) == set()


def test_bridges_learn_on_a_frozen_backbone() -> None:
    model = small()
    before = copy_of(model.backbone)
    inputs, labels = pictures(64)
    train_ramps(model, inputs, labels, QUICK)
    assert changed(model.backbone, before) == set()
    assert changed(bridge_ramp(model, 0).bridge, copy_of(model.backbone.bridge(0) or model))  # it is no longer a copy
    unseen, expected = pictures(64, seed=1)
    for found in outputs(model, unseen).values():
        assert (found.argmax(1).numpy() == expected).mean() > 0.95


def test_a_family_without_regions_has_no_bridges() -> None:
    with pytest.raises(
        ModelFolderError, match=r"EncoderBackbone has no bridges.*take the ramp style of the full model's"
    ):
        random_model(SMALL, ramps=BRIDGES)


def test_a_head_cannot_be_a_bridge() -> None:
    with pytest.raises(ModelFolderError, match="that head needs another style"):
        RampOptions(head_style="bridge")
