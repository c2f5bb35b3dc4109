"""A network that brings its own classifier: its last block gives the outputs, and its backbone never changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from earlyexit.errors import ModelFolderError
from earlyexit.families import FLOAT32_ONLY
from earlyexit.families.base import Backbone, FinalHead, Pretrained
from earlyexit.families.own import TensorBackbone
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.training.joint import train_jointly
from earlyexit.training.ramps import TrainOptions, exit_outputs, train_ramps
from tests.earlyexit.families.convolutions import PIXELS, Convolution, Flat, Pixels, pictures
from tests.earlyexit.network.models import ramped, small
from tests.model_cards import a_card

NAME = "tests.earlyexit.families.test_given_head:build"
GIVEN = FinalHead(style="given", pooling="mean", num_outputs=2, weights={})
SIDES = LabelTask(("left", "right"))


class WithClassifier(TensorBackbone):
    """It runs in float32 only."""

    float32_only: ClassVar[bool] = True


def build() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [Convolution(4, 6, stride=2), Convolution(6, 8, stride=2), nn.Sequential(Flat(), nn.Linear(10, 2))]
        return WithClassifier(embed=Pixels(), blocks=blocks, inputs=(PIXELS,), config={})


def model_of(label_names: tuple[str, ...] | None, task: Task = SIDES) -> EarlyExitModel:
    pretrained = Pretrained(backbone=build(), head=GIVEN, label_names=label_names)
    return ramped(pretrained, NAME, task, codec={"name": "image", "height": 8, "width": 8})


@pytest.fixture
def model() -> EarlyExitModel:
    return model_of(("left", "right"))


def test_outputs_are_what_the_last_block_gives_by_the_temperature(model: EarlyExitModel) -> None:
    encoded, _ = pictures(5)
    before = exit_outputs(model, encoded)[2]
    model.temperatures_E[2] = 2.0
    assert before.shape == (5, 2)
    torch.testing.assert_close(exit_outputs(model, encoded)[2], before / 2)


def test_training_changes_ramps_and_leaves_the_networks_own_answers(model: EarlyExitModel) -> None:
    encoded, labels = pictures(32)
    before = exit_outputs(model, encoded)
    train_ramps(model, encoded, labels, TrainOptions(epochs=2, batch=16, imitate=True))
    after = exit_outputs(model, encoded)
    assert after[2].equal(before[2])
    assert not after[0].equal(before[0])


def test_a_task_of_as_many_labels_takes_the_outputs_in_their_order() -> None:
    model = model_of(None)
    assert (model.info.head_style, model.info.provenance["head"]) == ("given", "checkpoint")


@pytest.mark.parametrize("task", [LabelTask(("a", "b", "c")), RegressionTask(1.0)], ids=["three labels", "a number"])
def test_another_task_gets_a_head_of_its_own(task: Task) -> None:
    model = model_of(None, task)
    assert (model.info.head_style, "head" in model.info.provenance) == ("light", False)


def test_given_outputs_that_are_not_the_tasks_are_refused(model: EarlyExitModel, tmp_path: Path) -> None:
    model.info = replace(model.info, task=LabelTask(("a", "b", "c")))
    save_model(model, tmp_path)
    with pytest.raises(ModelFolderError, match="gives 2 outputs, the task has 3"):
        load_model(tmp_path)


def test_a_backbone_without_weights_is_not_trained() -> None:
    model = small()
    model.backbone = model.backbone.requires_grad_(False)
    for module in model.backbone.modules():
        module._parameters.clear()
    with pytest.raises(ModelFolderError, match="bert stays as it is: train its ramps alone"):
        train_jointly(model, [], np.array([], dtype=np.int64))


def test_the_families_that_refuse_other_float_types_are_those_whose_backbones_do() -> None:
    from earlyexit.foreign.onnx_backbone import OnnxBackbone
    from earlyexit.foreign.torch_backbone import ExportedBackbone

    backbones: dict[str, type[Backbone]] = {"exported": ExportedBackbone, "onnx": OnnxBackbone}
    assert {name for name, backbone in backbones.items() if backbone.float32_only} == set(FLOAT32_ONLY)
    card = a_card(family="onnx")
    card.check_dtype("float32")
    with pytest.raises(ModelFolderError, match="intents: onnx models run in float32, not bfloat16"):
        card.check_dtype("bfloat16")
