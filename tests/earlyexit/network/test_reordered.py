from __future__ import annotations

from copy import deepcopy
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
from earlyexit.training.ramps import exit_outputs, pack
from tests.earlyexit.families.vision import MODELS, noise
from tests.earlyexit.network.cuts import piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call] # torch's
    reason="this torch has no oneDNN",
)


@torch.inference_mode()
def test_a_reordered_model_gives_the_same_logits_at_every_exit(
    small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    reordered = deepcopy(small_model)
    reorder_linears(reordered)
    values, layout = pack(encoded[:5], small_model.device)
    for end in range(1, small_model.num_blocks + 1):
        if end == small_model.num_blocks or end - 1 in small_model.ramp_indices:
            logits = [
                each.exit_outputs(end - 1, each.run_blocks(0, end, values, layout), layout)
                for each in (small_model, reordered)
            ]
            torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_bfloat16_model_runs_on_every_processor(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    plain = deepcopy(small_model).to(torch.bfloat16)
    reordered = deepcopy(plain)
    reorder_linears(reordered)  # oneDNN multiplies bfloat16 on some processors only
    values, layout = pack(encoded[:5], plain.device)
    last = plain.num_blocks
    logits = [
        each.exit_outputs(last - 1, each.run_blocks(0, last, values, layout), layout) for each in (plain, reordered)
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=0.1, rtol=0.1)


def test_every_linear_layer_is_reordered_and_nothing_else(small_model: EarlyExitModel) -> None:
    kinds = [type(module) for module in small_model.modules()]
    reordered = deepcopy(small_model)
    reorder_linears(reordered)
    expected = [ReorderedLinear if issubclass(kind, nn.Linear) else kind for kind in kinds]
    assert ReorderedLinear in expected
    assert [type(module) for module in reordered.modules()] == expected


def test_a_reordered_model_says_that_it_cannot_be_saved(small_model: EarlyExitModel, tmp_path: Path) -> None:
    reordered = deepcopy(small_model)
    reorder_linears(reordered)
    with pytest.raises(ModelFolderError, match="cannot be saved"):
        save_model(reordered, tmp_path)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_network_over_images_gives_the_same_outputs_at_every_exit(name: str) -> None:
    model, reordered = MODELS[name](), MODELS[name]()
    reorder_convolutions(reordered)
    for number in (1, 7):
        found = exit_outputs(reordered, noise(model, number))
        for block, outputs in exit_outputs(model, noise(model, number)).items():
            torch.testing.assert_close(found[block], outputs, atol=1e-4, rtol=1e-4)
    assert reordered.dtype == torch.float32


def test_norms_of_a_backbone_and_of_its_bridges_are_folded_into_convolutions() -> None:
    model = MODELS["basic, bridges"]()
    reorder_convolutions(model)
    kinds = {type(module) for module in model.modules()}
    assert ReorderedConvolution in kinds
    assert not kinds & {nn.BatchNorm2d, nn.Conv2d}


def test_a_network_over_images_in_bfloat16_stays_as_it_is() -> None:
    model = MODELS["basic"]().to(torch.bfloat16)
    reorder_convolutions(model)
    assert not any(isinstance(module, ReorderedConvolution) for module in model.modules())


def test_reordered_convolutions_say_that_they_cannot_be_saved(tmp_path: Path) -> None:
    model = MODELS["basic"]()
    reorder_convolutions(model)
    with pytest.raises(ModelFolderError, match="reordered convolutions cannot be saved"):
        save_model(model, tmp_path)


@pytest.mark.parametrize("family", ["bert", "mpnet"])
@torch.inference_mode()
def test_rows_filled_up_once_for_all_blocks_change_no_output(family: str) -> None:
    model = small(family=family)
    piece = piece_of(model, ConfidencePolicy(0.5), random_inputs(np.random.default_rng(0), (3, 7, 1, 2)))
    whole = Segment(first=0, end=model.num_blocks, ramp=None)
    _, expected_BC = model.run(whole, piece)
    reorder_linears(model)
    assert isinstance(model.backbone, EncoderBackbone)
    assert model.backbone.fills_rows
    _, found_BC = model.run(whole, piece)
    torch.testing.assert_close(found_BC, expected_BC, atol=1e-5, rtol=0)
    (inside_ND,), _ = model.run(Segment(first=0, end=1, ramp=None), piece)
    assert len(inside_ND) == 13
