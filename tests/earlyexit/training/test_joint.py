from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.label import LabelTask
from earlyexit.training.augmentation import Augmentation
from earlyexit.training.joint import JointOptions, train_jointly
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.families.convolutions import pictures
from tests.earlyexit.training.test_ramps import changed, copy_of

ROWS = 40


def resnet(side: int = 8) -> EarlyExitModel:
    return random_model(
        {"depth": 8, "side": side},
        family="resnet",
        codec={"name": "image", "height": side, "width": side},
        ramps=RampOptions(style="mlp", pooling="grid"),
    )


QUICK = JointOptions(epochs=4, batch=16, learning_rate=0.02, optimizer="sgd", augmentation=Augmentation(mirror=False))


class InterruptedTrainingError(Exception):
    """As if the process had ended."""


def interrupted_after(epochs: int, options: JointOptions) -> JointOptions:
    def stop(_: str, done: int, __: int) -> None:
        if done == epochs:
            raise InterruptedTrainingError

    return replace(options, progress=stop)


@pytest.mark.parametrize("options", [QUICK, replace(QUICK, patience=2, optimizer="adamw")], ids=["all", "patience"])
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path, options: JointOptions) -> None:
    whole, broken = resnet(), resnet()
    train_jointly(whole, *pictures(ROWS), options)
    saved = replace(options, saved=tmp_path / "training.pt")
    with pytest.raises(InterruptedTrainingError):
        train_jointly(broken, *pictures(ROWS), interrupted_after(2, saved))
    again, told = resnet(), list[int]()
    train_jointly(again, *pictures(ROWS), replace(saved, progress=lambda _, done, __: told.append(done)))
    assert told[0] == 3, "the first two epochs are not trained again"
    assert changed(again, copy_of(whole)) == set()


@pytest.mark.parametrize("change", ["seed", "rows", "task", "nothing left"])
def test_another_run_is_not_gone_on_with(tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    options = replace(QUICK, epochs=2, saved=tmp_path / "training.pt")
    with pytest.raises(InterruptedTrainingError):
        train_jointly(resnet(), *pictures(ROWS), interrupted_after(1, options))
    if change == "nothing left":
        (tmp_path / "training.pt").write_bytes(b"half")
    model, told = resnet(), list[int]()
    if change == "task":
        model.info = replace(model.info, task=LabelTask(["one", "other"]))
    seed = 1 if change == "seed" else 0
    rows = pictures(ROWS, seed=5 if change == "rows" else 0)
    with caplog.at_level(logging.WARNING):
        train_jointly(model, *rows, replace(options, seed=seed, progress=lambda _, done, __: told.append(done)))
    assert told == [1, 2]
    assert "training.pt" in caplog.text


def test_equal_seeds_train_equal_models_and_others_do_not() -> None:
    models = [resnet() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.manual_seed(len(models))
        train_jointly(model, *pictures(ROWS), replace(QUICK, epochs=1, seed=seed))
        torch.rand(3)
    assert changed(models[0], copy_of(models[1])) == set()
    assert changed(models[0], copy_of(models[2]))


def test_training_stops_where_rows_kept_apart_get_no_better() -> None:
    """Labels that mean nothing: what is learned of them makes other rows worse."""
    encoded, _ = pictures(ROWS)
    labels = np.random.default_rng(1).integers(0, 2, ROWS)
    model, after_epochs = resnet(), list[dict[str, Tensor]]()
    options = JointOptions(
        epochs=30, batch=16, learning_rate=0.05, patience=2, progress=lambda *_: after_epochs.append(copy_of(model))
    )
    train_jointly(model, encoded, labels, options)
    assert len(after_epochs) < 30
    assert changed(model, after_epochs[-1 - 2]) == set(), (
        "two epochs after the best one it stops, with that one's weights"
    )
    assert changed(model, after_epochs[-1])


@pytest.mark.parametrize("came", [False, True], ids=["a new head", "a checkpoint's head"])
def test_only_what_a_checkpoint_brought_learns_slower(came: bool) -> None:
    model = resnet()
    model.info = replace(model.info, provenance={"head": "checkpoint"} if came else {})
    before = copy.deepcopy(model)
    train_jointly(model, *pictures(ROWS), replace(QUICK, epochs=1, backbone_pace=0.0))

    def moved(part: str) -> set[bool]:
        old = dict(before.named_parameters())
        return {not old[name].equal(each) for name, each in model.named_parameters() if name.startswith(f"{part}.")}

    assert moved("backbone") == {False}
    assert moved("head") == {not came}
    assert True in moved("ramps")


def test_exits_that_imitate_answer_as_the_network_did_whatever_the_labels_say() -> None:
    model = resnet()
    encoded, labels = pictures(ROWS)
    train_jointly(model, encoded, labels, replace(QUICK, epochs=12))
    model.info = replace(model.info, provenance={"head": "checkpoint"})
    before = exit_outputs(model, encoded)[2].argmax(1)
    train_jointly(model, encoded, 1 - labels, replace(QUICK, imitate=True, learning_rate=5e-3))
    for outputs in exit_outputs(model, encoded).values():
        assert float((outputs.argmax(1) == before).float().mean()) > 0.9


def test_mixed_precision_keeps_weights_in_full() -> None:
    models = {mixed: resnet() for mixed in (False, True)}
    encoded, labels = pictures(ROWS)
    for mixed, model in models.items():
        train_jointly(model, encoded, labels, replace(QUICK, epochs=10, mixed=mixed))
        assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
        for outputs in exit_outputs(model, pictures(ROWS, seed=1)[0]).values():
            assert (outputs.argmax(1).numpy() == labels).mean() > 0.9
    assert changed(models[False], copy_of(models[True])), "products in bfloat16 are others"


def test_a_last_batch_of_one_input_ruins_no_norm() -> None:
    """Of a 1 x 1 map a norm has no variance; torch refuses it."""
    model = resnet(side=4)
    assert model.boundary(model.num_blocks - 1)[0].shape[1:] == (1, 1)
    encoded, labels = pictures(ROWS, side=4)
    train_jointly(model, encoded[:33], labels[:33], replace(QUICK, epochs=1))
    assert all(bool(tensor.isfinite().all()) for tensor in copy.deepcopy(model).state_dict().values())
