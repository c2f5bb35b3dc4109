from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from earlyexit.families import FAMILIES, GENERATES, MEASURES_IMPORTANCE, find_family
from earlyexit.network.boundary import TensorSpec
from earlyexit.network.checkpoint import SkipMetaInit
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import check_prunable, load_model, read_card, save_model
from tests.earlyexit.network.models import SMALL
from tests.model_cards import GONE, chain_of, change_card


@pytest.fixture
def folder(small_model: EarlyExitModel, tmp_path: Path) -> Path:
    """A folder that holds the small model, calibrated."""
    small_model.temperatures_E.copy_(torch.tensor([0.5, 1.0, 2.0, 4.0]))
    save_model(small_model, tmp_path / "model")
    return tmp_path / "model"


def test_weights_can_be_loaded_in_another_dtype_and_temperatures_stay_exact(folder: Path) -> None:
    loaded = load_model(folder, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert loaded.temperatures_E.tolist() == [0.5, 1.0, 2.0, 4.0]
    assert loaded.temperatures_E.dtype == torch.float32


def test_the_weights_file_has_the_permissions_of_the_card(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_mode == (folder / "model.json").stat().st_mode


def test_the_card_declares_the_networks_inputs(folder: Path) -> None:
    token_ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True, below=100)
    assert read_card(folder).inputs == (token_ids,)
    change_card(folder, inputs=GONE)
    assert read_card(folder).inputs is None
    load_model(folder)
    found = {}
    for max_length in (32, 1):
        for per_token in (True, False):
            inputs: list[dict[str, Any]] = [
                {"name": "token_ids", "shape": [], "dtype": "int32", "per_token": per_token}
            ]
            change_card(folder, codec={"name": "text", "max_length": max_length}, inputs=inputs)
            found[max_length, per_token] = read_card(folder).has_tokens
    assert found == {(32, True): True, (32, False): True, (1, True): True, (1, False): False}


def test_texts_can_be_pruned_after_a_network_that_measures_attention(tmp_path: Path) -> None:
    folder = chain_of(tmp_path)
    check_prunable(folder, {1: 0.7})
    check_prunable(folder / "nowhere", {})


BUILT = sorted(set(FAMILIES) - {"exported", "onnx"})


def test_models_load_without_torchs_compiler() -> None:
    sizes = {family: SMALL if family in MEASURES_IMPORTANCE else {} for family in BUILT}
    code = (
        "import sys, torch; from earlyexit.families import find_family; "
        "from earlyexit.network.checkpoint import SkipMetaInit\n"
        "with torch.device('meta'), SkipMetaInit():\n"
        f"    for family, sizes in {sizes}.items(): find_family(family).build(sizes)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_weights_outside_the_file_are_drawn_except_on_the_meta_device() -> None:
    with torch.device("cpu"), SkipMetaInit():
        assert nn.init.normal_(torch.zeros(9)).all()


@pytest.mark.parametrize("family", BUILT)
def test_the_lists_of_families_are_those_of_their_backbones(family: str) -> None:
    sizes = {name: value for name, value in SMALL.items() if family in MEASURES_IMPORTANCE}
    with torch.device("meta"), SkipMetaInit():  # some are large
        backbone = find_family(family).build(sizes)
    assert backbone.measures_importance == (family in MEASURES_IMPORTANCE)
    assert (backbone.kept_bytes > 0) == (family in GENERATES)
