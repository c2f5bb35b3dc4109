"""What a network over tensors must keep to, what may cross between its blocks, and in what precision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from earlyexit.boundary import TensorSpec
from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Pretrained
from earlyexit.families.own import TensorBackbone, check_alone
from earlyexit.model import EarlyExitModel
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.record import exit_outputs
from earlyexit.runner import TorchRunner
from earlyexit.signature import Encoded
from earlyexit.split import Split
from tests.earlyexit.cuts import answers_alone
from tests.earlyexit.test_tensor_family import with_ramps


class Centred(nn.Module):
    """Looks at its batch-mates."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0, keepdim=True)


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
            lambda: rows_of_three(nn.Tanh(), Centred()), "block 1 gives an input other values among others", id="leaks"
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
        check_alone(backbone())


def model_of(backbone: TensorBackbone) -> EarlyExitModel:
    return with_ramps(Pretrained(backbone=backbone, head=None, label_names=None), "none", {"name": "tensor"})


def test_whole_numbers_may_cross_and_are_described_as_such() -> None:
    backbone = rows_of_three(Counting(), Counting())
    check_alone(backbone)
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
