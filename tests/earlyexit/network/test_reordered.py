from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.encoder import EncoderBackbone
from earlyexit.network.boundary import Encoded, Segment
from earlyexit.network.layers import ReorderedConvolution, ReorderedLinear, reorder_convolutions, reorder_linears
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.families.vision import MODELS, noise
from tests.earlyexit.network.cuts import piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call] # torch's
    reason="this torch has no oneDNN",
)
TEXTS = {family: partial(small, family=family) for family in ("bert", "mpnet")}


def reordered(make: Callable[[], EarlyExitModel]) -> EarlyExitModel:
    """Another one of the same weights, as it runs on processors."""
    model = make()
    (reorder_linears if isinstance(model.backbone, EncoderBackbone) else reorder_convolutions)(model)
    return model


def inputs_of(model: EarlyExitModel, count: int) -> list[Encoded]:
    if isinstance(model.backbone, EncoderBackbone):
        return random_inputs(np.random.default_rng(count), (3, 7, 1, 2, 20, 9, 5)[:count])
    return noise(model, count)


@pytest.mark.parametrize("name", [*TEXTS, *MODELS])
def test_a_reordered_model_gives_the_same_outputs_at_every_exit(name: str) -> None:
    make = (TEXTS | dict(MODELS))[name]
    model, other = make(), reordered(make)
    for number in (1, 7):
        found = exit_outputs(other, inputs_of(model, number))
        for block, outputs in exit_outputs(model, inputs_of(model, number)).items():
            torch.testing.assert_close(found[block], outputs, atol=1e-4, rtol=1e-4)
    assert other.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "layer", "gone"),
    [
        (small, ReorderedLinear, (nn.Linear,)),
        (MODELS["basic, bridges"], ReorderedConvolution, (nn.BatchNorm2d, nn.Conv2d)),
    ],
    ids=["linear", "convolutions and the norms behind them"],
)
def test_every_such_layer_is_reordered_and_the_model_cannot_be_saved(
    make: Callable[[], EarlyExitModel], layer: type[nn.Module], gone: tuple[type[nn.Module], ...], tmp_path: Path
) -> None:
    model = reordered(make)
    assert any(isinstance(module, layer) for module in model.modules())
    assert not any(isinstance(module, gone) for module in model.modules())
    with pytest.raises(ModelFolderError, match="cannot be saved"):
        save_model(model, tmp_path)


def test_a_bfloat16_model_runs_on_every_processor_one_over_images_as_it_is(encoded: list[Encoded]) -> None:
    plain, other = small().to(torch.bfloat16), small().to(torch.bfloat16)
    reorder_linears(other)  # oneDNN multiplies bfloat16 on some processors only
    last = plain.num_blocks - 1
    found, expected = (exit_outputs(each, encoded[:5])[last] for each in (other, plain))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)
    model = MODELS["basic"]().to(torch.bfloat16)
    reorder_convolutions(model)
    assert not any(isinstance(module, ReorderedConvolution) for module in model.modules())


@torch.inference_mode()
def test_rows_filled_up_once_for_all_blocks_change_no_output() -> None:
    model, other = small(), reordered(small)
    assert isinstance(other.backbone, EncoderBackbone)
    assert other.backbone.fills_rows
    piece = piece_of(model, ConfidencePolicy(0.5), inputs_of(model, 4))
    whole = Segment(first=0, end=model.num_blocks, ramp=None)
    torch.testing.assert_close(other.run(whole, piece)[1], model.run(whole, piece)[1], atol=1e-5, rtol=0)
    (inside_ND,), _ = other.run(Segment(first=0, end=1, ramp=None), piece)
    assert len(inside_ND) == 13
