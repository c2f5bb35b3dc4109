"""A network whose inputs have no tokens, and whose blocks give tensors of different shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Pretrained
from earlyexit.families.own import TensorBackbone, check_own
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Encoded, Split, TensorSpec
from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained
from earlyexit.network.cut import TorchRunner
from earlyexit.network.model import EarlyExitModel
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import TrainOptions, exit_outputs, train_ramps
from tests.earlyexit.families.convolutions import PIXELS, SHAPES, build, pictures
from tests.earlyexit.network.cuts import answers_alone

NAME = "tests.earlyexit.families.convolutions:build"
CODEC = {"name": "image", "height": 8, "width": 8}
QUICK = TrainOptions(epochs=100, batch=32, learning_rate=2e-2)


def fresh_model() -> EarlyExitModel:
    pretrained, family = load_pretrained(NAME)
    return with_ramps(pretrained, family, CODEC)


def with_ramps(pretrained: Pretrained, family: str, codec: NamedSpec) -> EarlyExitModel:
    task = LabelTask(("left", "right"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = add_ramps(
            pretrained, name="own", family=family, codec=codec, task=task, ramps=RampOptions(pooling="grid")
        )
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    """Trained ramps: some pictures leave at each."""
    model = fresh_model()
    encoded, labels = pictures(96)
    train_ramps(model, encoded, np.array(labels), QUICK)
    return model


@pytest.fixture(scope="module")
def encoded() -> list[Encoded]:
    return pictures(20, seed=1)[0]


def test_what_crosses_is_known_by_trying(model: EarlyExitModel) -> None:
    assert model.boundary(-1) == (PIXELS,)
    assert tuple(tuple(each.shape for each in model.boundary(block)) for block in range(4)) == SHAPES
    assert {each.per_token for block in range(4) for each in model.boundary(block)} == {False}
    assert model.max_length == 1


def test_the_network_is_tried_without_moving_its_statistics() -> None:
    backbone = build().train()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    check_own(backbone)
    assert backbone.boundary(3)[0].shape == (10,)
    assert backbone.training
    assert all(tensor.equal(before[name]) for name, tensor in backbone.state_dict().items())


# What a network over tensors must keep to, what may cross between its blocks, and in what precision


class Centred(nn.Module):
    """Looks at its batch-mates."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0, keepdim=True)


class Masking(nn.Module):
    """Never gives the last class, as models with padded classes do."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden[:, :-1], torch.full_like(hidden[:, -1:], self.value)], dim=1)


class Twice(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, hidden])


class Counting(nn.Module):
    """Gives whole numbers beside the others."""

    def forward(self, hidden: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, (hidden > 0).sum(1, dtype=torch.int32)


class Doubled(nn.Module):
    def forward(self, hidden: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden.double()


def rows_of_three(*blocks: nn.Module, embed: nn.Module | None = None) -> TensorBackbone:
    """A network over rows of three numbers."""
    spec = TensorSpec(name="row", shape=(3,))
    return TensorBackbone(embed=embed or nn.Linear(3, 3), blocks=blocks, inputs=(spec,), config={})


def of_numbers(count: int) -> list[Encoded]:
    values = np.random.default_rng(0).standard_normal((count, 1, 3), dtype=np.float32)
    return [Encoded(1, (row,)) for row in values]


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        pytest.param(
            lambda: rows_of_three(nn.Tanh(), Centred()),
            "block 1 gives one of 3 inputs other values than alone",
            id="leaks",
        ),
        *(
            pytest.param(
                lambda value=value: rows_of_three(nn.Sequential(Centred(), Masking(value))),
                "block 0 gives one of 3 inputs other values than alone",
                id=f"leaks beside a class of {value:g}",
            )
            for value in (-1e4, -1e9, float(np.finfo(np.float32).min))
        ),
        pytest.param(
            lambda: rows_of_three(Twice()),
            "block 0 gives 6 rows for 3 inputs of 3 tokens; one per input",
            id="too many",
        ),
        pytest.param(
            lambda: rows_of_three(nn.Tanh(), embed=Twice()), "the embedding gives 6 rows", id="of the embedding"
        ),
    ],
)
def test_a_network_that_does_not_keep_to_rows_is_refused(backbone: Callable[[], TensorBackbone], message: str) -> None:
    with pytest.raises(ModelFolderError, match=message):
        check_own(backbone())


def model_of(backbone: TensorBackbone) -> EarlyExitModel:
    return with_ramps(Pretrained(backbone=backbone, head=None, label_names=None), "none", {"name": "tensor"})


def test_whole_numbers_may_cross_and_are_described_as_such() -> None:
    backbone = rows_of_three(Counting(), Counting())
    check_own(backbone)
    model = model_of(backbone)
    assert [(each.dtype, each.shape) for each in model.boundary(0)] == [("float", (3,)), ("int32", ())]
    warm_up = TorchRunner(model, ConfidencePolicy(2.0)).warm_up_pieces(Split(first=1, end=2, batch=4), 4)
    assert [values.dtype for values in warm_up.tensors] == [torch.float32, torch.int32]


def test_a_type_that_cannot_cross_is_refused() -> None:
    with pytest.raises(ModelFolderError, match=r"block 0 gives torch\.float64; what crosses is of the weights' float"):
        model_of(rows_of_three(Doubled(), Doubled()))


def test_numbers_enter_a_network_in_its_own_precision() -> None:
    model = model_of(rows_of_three(nn.Linear(3, 3), nn.Tanh())).to(torch.bfloat16)
    answers = answers_alone(model, ConfidencePolicy(2.0), of_numbers(4))
    assert {answer.exit for answer in answers.values()} == {1}
    assert exit_outputs(model, of_numbers(4))[1].shape == (4, 2)
