"""Model folders that an earlier version wrote: their cards knew texts and labels only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from earlyexit.checkpoint import random_model
from earlyexit.errors import ModelFolderError
from earlyexit.model import EarlyExitModel
from earlyexit.record import exit_outputs
from earlyexit.signature import Encoded
from earlyexit.store import load_model, read_card, save_model
from earlyexit.tasks.label import LabelTask

FIRST_CARD = {
    "schema_version": 1,
    "name": "random",
    "family": "bert",
    "backbone": {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_blocks": 4,
        "num_heads": 4,
        "intermediate_size": 64,
        "max_length": 32,
        "position_offset": 0,
        "activation": "gelu",
        "norm_eps": 1e-12,
    },
    "label_names": ["a", "b", "c"],
    "max_length": 24,
    "ramp_style": "light",
    "pooling": "mean",
    "head_style": "light",
    "head_pooling": "mean",
    "ramps": [0, 1, 2],
    "num_blocks": 4,
    "provenance": {"weights": "random", "seed": 1},
}
"""As the first schema has it."""


def write_card(folder: Path, **changes: Any) -> None:
    (folder / "model.json").write_text(json.dumps(FIRST_CARD | changes), encoding="utf-8")


@pytest.fixture
def folder(small_model: EarlyExitModel, tmp_path: Path) -> Path:
    """The small model's weights beside a card of the first schema."""
    save_model(small_model, tmp_path)
    write_card(tmp_path)
    return tmp_path


def test_a_card_of_the_first_schema_is_read_in_the_words_of_the_second(folder: Path) -> None:
    card = read_card(folder)
    assert card.schema_version == 2
    assert card.codec == {"name": "text", "max_length": 24}
    assert card.task == {"name": "label", "label_names": ["a", "b", "c"]}
    assert (card.max_length, card.label_names) == (24, ("a", "b", "c"))
    assert [card.bytes_per_input(block, 10, float_bytes=4) for block in range(4)] == [10 * 32 * 4] * 4


def test_its_model_answers_as_it_did(folder: Path, small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    loaded = load_model(folder)
    assert (loaded.task, loaded.max_length) == (LabelTask(("a", "b", "c")), 24)
    expected = exit_outputs(small_model, encoded)
    assert all(found.equal(expected[block]) for block, found in exit_outputs(loaded, encoded).items())


def test_it_is_saved_in_the_second_schema(folder: Path, tmp_path: Path) -> None:
    save_model(load_model(folder), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "model.json").read_text(encoding="utf-8"))
    assert written["schema_version"] == 2
    assert not {"label_names", "max_length"} & set(written)
    said_anew = {"backbone": None, "inputs": None}
    assert read_card(tmp_path / "again").model_dump() | said_anew == read_card(folder).model_dump() | said_anew


def test_sizes_that_a_card_leaves_out_are_the_familys(tmp_path: Path) -> None:
    sizes = {"vocab_size": 100, "num_blocks": 4, "intermediate_size": 8, "max_length": 32}
    write_card(tmp_path, backbone=sizes)
    save_model(random_model(sizes), tmp_path / "new")
    old, new = read_card(tmp_path), read_card(tmp_path / "new")
    assert old.bytes_per_input(0, 1, float_bytes=4) == new.bytes_per_input(0, 1, float_bytes=4) == 768 * 4


def test_a_network_of_ones_own_must_be_trained_again(folder: Path) -> None:
    write_card(folder, family="word_network:build", backbone={"width": 48})
    with pytest.raises(ModelFolderError, match="did not note what its blocks give: train it again"):
        read_card(folder)


@pytest.mark.parametrize("missing", ["label_names", "max_length", "num_blocks", "backbone", "ramps"])
def test_a_card_that_lacks_something_is_refused(missing: str, tmp_path: Path) -> None:
    card = {key: value for key, value in FIRST_CARD.items() if key != missing}
    (tmp_path / "model.json").write_text(json.dumps(card), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=missing):
        read_card(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"num_blocks": "four"}, {"num_blocks": None}, {"backbone": [1]}, {"max_length": "long"}, {"label_names": 3}],
    ids=str,
)
def test_a_card_with_something_else_in_its_place_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write_card(tmp_path, **changes)
    with pytest.raises(ModelFolderError, match=next(iter(changes))):
        read_card(tmp_path)
