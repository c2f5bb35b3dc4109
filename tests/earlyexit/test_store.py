from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from earlyexit.checkpoint import RampOptions, random_model
from earlyexit.errors import ModelFolderError
from earlyexit.model import EarlyExitModel
from earlyexit.record import exit_outputs
from earlyexit.signature import Encoded
from earlyexit.store import TensorCard, load_model, read_card, save_model


@pytest.fixture
def folder(small_model: EarlyExitModel, tmp_path: Path) -> Path:
    """A folder that holds the small model, calibrated."""
    small_model.temperatures_E.copy_(torch.tensor([0.5, 1.0, 2.0, 4.0]))
    save_model(small_model, tmp_path / "model")
    return tmp_path / "model"


def change_card(folder: Path, **changes: Any) -> None:
    path = folder / "model.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**card, **changes}), encoding="utf-8")


def test_a_loaded_model_gives_the_logits_of_the_saved_one(
    folder: Path, small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    loaded = load_model(folder)
    expected = exit_outputs(small_model, encoded)
    found = exit_outputs(loaded, encoded)
    assert list(found) == list(expected) == [0, 1, 2, 3]
    assert all(found[block].equal(expected[block]) for block in expected)
    assert loaded.info == small_model.info


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_every_family_and_any_ramps_can_be_saved(family: str, tmp_path: Path) -> None:
    config = {"vocab_size": 100, "hidden_size": 32, "num_blocks": 4, "num_heads": 4, "intermediate_size": 64}
    saved = random_model(config, family=family, ramps=RampOptions(style="pooler", pooling="first", at=(2,)))
    save_model(saved, tmp_path)
    loaded = load_model(tmp_path)
    assert (loaded.info, loaded.ramp_indices) == (saved.info, (2,))
    assert loaded.backbone.to_config() == saved.backbone.to_config()


def test_a_loaded_model_only_infers(folder: Path) -> None:
    loaded = load_model(folder)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_weights_can_be_loaded_in_another_dtype_and_temperatures_stay_exact(folder: Path) -> None:
    loaded = load_model(folder, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert loaded.temperatures_E.tolist() == [0.5, 1.0, 2.0, 4.0]
    assert loaded.temperatures_E.dtype == torch.float32


def test_the_card_says_what_the_model_is(folder: Path) -> None:
    card = read_card(folder)
    assert (card.name, card.family, card.label_names) == ("random", "bert", ("a", "b", "c"))
    assert (card.num_blocks, card.ramps, card.max_length) == (4, (0, 1, 2), 32)


def test_the_card_says_what_the_network_takes_and_may_leave_it_out(folder: Path) -> None:
    token_ids = TensorCard(name="token_ids", shape=(), dtype="int32", per_token=True, below=100)
    assert read_card(folder).inputs == (token_ids,)
    card = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    del card["inputs"]
    (folder / "model.json").write_text(json.dumps(card), encoding="utf-8")
    assert read_card(folder).inputs is None
    load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"schema_version": 3}, "schema_version: Input should be 2", id="another schema"),
        pytest.param({"colour": "red"}, "colour: Extra inputs are not permitted", id="unknown key"),
        pytest.param({"codec": {"max_length": 8}}, "codec: Value error, a name is needed", id="a codec without a name"),
        pytest.param({"codec": {"name": "text", "max_length": 0}}, "codec: .*max_length must be", id="no length"),
        pytest.param({"task": {"name": "label", "label_names": "ab"}}, "task: .*must be a list", id="no list"),
        pytest.param({"boundaries": []}, "boundaries are those of 0 blocks, num_blocks is 4", id="nothing crosses"),
        pytest.param({"name": "../x"}, "name: String should match pattern", id="a name that is a path"),
    ],
)
def test_a_card_of_another_form_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_card(folder, **changes)
    with pytest.raises(ModelFolderError, match=message):
        read_card(folder)


def test_a_task_of_one_label_is_refused(folder: Path) -> None:
    change_card(folder, task={"name": "label", "label_names": ["a"]})
    with pytest.raises(ModelFolderError, match=r"task 'label' does not take .*at least two different labels"):
        load_model(folder)


def test_a_card_that_is_not_json_is_refused(folder: Path) -> None:
    (folder / "model.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"model\.json: the file: Invalid JSON"):
        read_card(folder)


def test_a_folder_without_a_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"is not a model folder: it has no model\.json"):
        load_model(tmp_path)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"model\.safetensors does not fit model\.json"):
        load_model(folder)


@pytest.mark.parametrize("content", [b"", b"not weights at all"], ids=["empty", "other bytes"])
def test_weights_that_cannot_be_read_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors does not fit model\.json"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"ramps": [0, 1]}, id="weights of more ramps"),
        pytest.param({"task": {"name": "label", "label_names": ["a", "b"]}}, id="weights of more labels"),
    ],
)
def test_weights_that_the_card_does_not_describe_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    change_card(folder, **changes)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors does not fit model\.json"):
        load_model(folder)


def test_an_unknown_family_is_refused(folder: Path) -> None:
    change_card(folder, family="gpt2")
    with pytest.raises(ModelFolderError, match="unknown model family 'gpt2'"):
        load_model(folder)


def test_a_backbone_with_sizes_that_the_family_does_not_know_is_refused(folder: Path) -> None:
    change_card(folder, backbone={"width": 32})
    with pytest.raises(ModelFolderError, match="backbone"):
        load_model(folder)
