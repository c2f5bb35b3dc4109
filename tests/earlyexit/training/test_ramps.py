from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.families import find_family
from earlyexit.families.base import FinalHead, Pretrained
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, add_ramps, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.ramps import RampStyle
from earlyexit.ramps.pooling import Pooling
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.training.joint import JointOptions, train_jointly
from earlyexit.training.ramps import TrainOptions, batches_by_length, exit_outputs, train_ramps
from tests.earlyexit.families.convolutions import pictures
from tests.earlyexit.network.models import SMALL
from tests.earlyexit.network.tokens import of_tokens

SIZES = SMALL | {"vocab_size": 40, "num_blocks": 3, "max_length": 16}
NUM_INPUTS = 96
QUICK = TrainOptions(epochs=30, batch=32, learning_rate=2e-2)


def toy(seed: int) -> tuple[list[Encoded], ValueArray]:
    """Inputs of 4 to 8 tokens; those of class 0 use tokens 1-19, those of class 1 tokens 20-38."""
    rng = np.random.default_rng(seed)
    labels = [k % 2 for k in range(NUM_INPUTS)]
    inputs = [rng.integers(1 + 19 * label, 20 + 19 * label, rng.integers(4, 9), dtype=np.int32) for label in labels]
    return [of_tokens(token_ids) for token_ids in inputs], np.array(labels)


def accuracies(model: EarlyExitModel, seed: int) -> dict[int, float]:
    inputs, labels = toy(seed)
    targets_N = torch.from_numpy(labels)
    return {
        block: float((logits_NC.argmax(1) == targets_N).float().mean())
        for block, logits_NC in exit_outputs(model, inputs).items()
    }


def copy_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(module: torch.nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not tensor.equal(before[name])}


@pytest.mark.parametrize("style", ["light", "pooler"])
def test_every_exit_learns_a_separable_problem_and_the_backbone_stays_as_it_was(style: str) -> None:
    options = RampOptions(style="light" if style == "light" else "pooler")
    model = random_model(SIZES, ramps=options)
    before = copy_of(model.backbone)
    train_ramps(model, *toy(seed=0), QUICK)
    assert changed(model.backbone, before) == set()
    assert min(accuracies(model, seed=1).values()) > 0.92
    assert not model.training


def test_joint_training_changes_the_backbone_too() -> None:
    model = random_model(SIZES)
    before = copy_of(model)
    train_jointly(model, *toy(seed=0), JointOptions(epochs=10, batch=32, learning_rate=3e-3))
    unchanged = set(before) - changed(model, before)
    assert unchanged == {"temperatures_E"}
    assert min(accuracies(model, seed=1).values()) > 0.92
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_head_that_a_checkpoint_brought_is_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"dense.weight": (32, 32), "dense.bias": (32,), "classifier.weight": (2, 32), "classifier.bias": (2,)}
    head = FinalHead(
        style="pooler",
        pooling="first",
        num_outputs=2,
        weights={name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
    )
    pretrained = Pretrained(backbone=find_family("bert").build(SIZES), head=head, label_names=("no", "yes"))
    model = add_ramps(
        pretrained,
        name="m",
        family="bert",
        codec={"name": "text", "max_length": 16},
        task=LabelTask(("no", "yes")),
        ramps=RampOptions(),
    )
    ramps = copy_of(model.ramps)
    train_ramps(model, *toy(seed=0), TrainOptions(epochs=2, batch=32))
    assert changed(model.head, dict(head.weights)) == set()
    assert changed(model.ramps, ramps) == set(ramps)


def test_ramps_that_imitate_answer_as_the_full_model_does_whatever_the_labels_say() -> None:
    model = random_model(SIZES)
    inputs, labels = toy(seed=0)
    train_ramps(model, inputs, labels, QUICK)
    model.info = replace(model.info, provenance={"head": "checkpoint"})
    before = copy_of(model.head)
    train_ramps(model, inputs, 1 - labels, replace(QUICK, imitate=True))
    assert changed(model.head, before) == set()
    assert min(accuracies(model, seed=1).values()) > 0.92


def resnet(
    pooling: Pooling, style: RampStyle = "light", at: tuple[int, ...] | None = None, task: Task | None = None
) -> EarlyExitModel:
    return random_model(
        {"depth": 8, "side": 8},
        family="resnet",
        codec={"name": "image", "height": 8, "width": 8},
        task=task,
        ramps=RampOptions(style=style, pooling=pooling, at=at),
    )


@pytest.mark.parametrize(
    ("style", "pooling"),
    [("light", "mean"), ("light", "grid"), ("mlp", "grid"), ("conv", "mean"), ("reduced", "grid")],
    ids=str,
)
def test_ramps_learn_on_maps_of_a_frozen_network(style: RampStyle, pooling: Pooling) -> None:
    model = resnet(pooling, style)
    before = copy_of(model.backbone)
    train_ramps(model, *pictures(32, seed=0), QUICK)
    assert changed(model.backbone, before) == set(), "its norms keep their statistics"
    inputs, labels = pictures(32, seed=1)
    for outputs_NC in exit_outputs(model, inputs).values():
        assert (outputs_NC.argmax(1).numpy() == labels).mean() > 0.9


@pytest.mark.parametrize("imitate", [False, True], ids=["from labels", "from the model's answers"])
@pytest.mark.parametrize(("style", "pooling"), [("light", "mean"), ("mlp", "grid"), ("conv", "mean")], ids=str)
def test_a_ramp_trained_alone_becomes_the_same_among_others(style: RampStyle, pooling: Pooling, imitate: bool) -> None:
    options = TrainOptions(epochs=4, batch=8, learning_rate=2e-2, imitate=imitate)
    together, alone = resnet(pooling, style), resnet(pooling, style, at=(1,))
    for model in (together, alone):
        train_ramps(model, *pictures(32, seed=0), options)
    for name, tensor in alone.exit_head(1).state_dict().items():
        torch.testing.assert_close(tensor, together.exit_head(1).state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("style", ["maps", "deconv"])
def test_a_ramp_of_maps_trained_alone_becomes_what_it_becomes_among_others(style: RampStyle) -> None:
    task = PoseTask(["nose", "tail"], heatmap_side=8, image_side=8, tolerance=1.0)
    together, alone = (resnet("mean", style, at=at, task=task) for at in ((0, 1), (1,)))
    inputs, _ = pictures(32, seed=0)
    places = np.random.default_rng(0).uniform(0, 7, (len(inputs), 2, 2)).astype(np.float32)
    for before, model in enumerate((together, alone)):
        torch.manual_seed(before)
        for norm in (each for each in model.exit_head(1).modules() if isinstance(each, torch.nn.BatchNorm2d)):
            torch.nn.init.constant_(norm.weight, 1 + before)  # as if something had been learned
        train_ramps(model, inputs, places, TrainOptions(epochs=2, batch=8))
    for name, tensor in alone.exit_head(1).state_dict().items():
        torch.testing.assert_close(tensor, together.exit_head(1).state_dict()[name], rtol=0, atol=1e-6)


def test_ramps_are_drawn_by_the_seed_alone() -> None:
    def trained(seed: int, before: int) -> Tensor:
        torch.manual_seed(before)
        model = random_model(SIZES)
        train_ramps(model, *toy(seed=0), TrainOptions(epochs=1, batch=32, seed=seed))
        weight: Tensor = model.exit_head(0).state_dict()["classifier.weight"]
        return weight

    assert trained(seed=0, before=1).equal(trained(seed=0, before=2))
    assert not trained(seed=1, before=1).equal(trained(seed=0, before=1))


# Exits on known inputs


def test_an_exits_temperature_divides_its_logits(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    before = exit_outputs(small_model, encoded)
    small_model.temperatures_E[1] = 2.0
    after = exit_outputs(small_model, encoded)
    torch.testing.assert_close(after[1] * 2, before[1])
    assert after[2].equal(before[2])


@pytest.mark.parametrize(("factor", "temperature"), [(0.25, 0.25), (1.0, 1.0), (4.0, 4.0), (0.01, 1.0)])
def test_the_temperature_of_scaled_logits_is_recovered_above_the_least(factor: float, temperature: float) -> None:
    # Labels drawn from softmax(logits): the honest temperature is 1, and that of `factor * logits` is the factor.
    rng = np.random.default_rng(0)
    logits_NC = rng.normal(size=(20_000, 3))
    probability_NC = np.exp(logits_NC) / np.exp(logits_NC).sum(1, keepdims=True)
    labels_N = (rng.random((20_000, 1)) > probability_NC.cumsum(1)).sum(1).clip(max=2)
    scaled_NC = torch.tensor(factor * logits_NC, dtype=torch.float32)
    assert LabelTask(("a", "b", "c")).fit_temperature(scaled_NC, labels_N) == pytest.approx(temperature, rel=0.05)


def test_no_temperature_is_fitted_where_the_labels_are_the_outputs_own_answers() -> None:
    logits_NC = torch.tensor(np.random.default_rng(0).normal(size=(200, 3)), dtype=torch.float32)
    assert LabelTask(("a", "b", "c")).fit_temperature(logits_NC, logits_NC.argmax(1).numpy()) == 1.0


def test_batches_are_of_similar_length_longest_first() -> None:
    encoded = [of_tokens([0] * length) for length in (2, 5, 3, 5, 1)]
    assert list(batches_by_length(encoded, 2)) == [[1, 3], [2, 0], [4]]


def test_progress_tells_epochs_and_features() -> None:
    told: list[tuple[str, int, int]] = []
    options = TrainOptions(epochs=2, batch=64, progress=lambda what, done, total: told.append((what, done, total)))
    train_ramps(random_model(SIZES), *toy(seed=0), options)
    assert told == [("features", 64, 96), ("features", 96, 96), ("epochs", 1, 2), ("epochs", 2, 2)]
