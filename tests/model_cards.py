"""Model cards for tests that need a card and no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from earlyexit.network.boundary import TensorSpec
from earlyexit.network.store import CARD_FILE, ModelCard

GONE = object()
"""Stands for a key that a card does not have."""


def a_card(labels: tuple[str, ...] = ("bill", "card"), **changes: Any) -> ModelCard:
    """Returns the card of a text classifier with two blocks of eight numbers per token and a ramp between them."""
    num_blocks = changes.get("num_blocks", 2)
    facts: dict[str, Any] = {
        "name": "intents",
        "family": "bert",
        "backbone": {},
        "codec": {"name": "text", "max_length": 8},
        "task": {"name": "label", "label_names": list(labels)},
        "boundaries": ((TensorSpec(name="hidden", shape=(8,), per_token=True),),) * num_blocks,
        "ramp_style": "light",
        "pooling": "mean",
        "head_style": "light",
        "head_pooling": "mean",
        "ramps": tuple(range(num_blocks - 1)),
        "num_blocks": num_blocks,
        "provenance": {},
    }
    return ModelCard(**facts | changes)


def chain_of(folder: Path, **first: Any) -> Path:
    """Returns the folder of a chain of two networks of two blocks each; `first` overrides fields of the first card."""
    write_card(folder / "small", name="small", **first)
    write_card(folder / "large", name="large")
    backbone = {"models": ["../small", "../large"], "names": ["small", "large"], "blocks": [2, 2]}
    return write_card(folder / "chain", name="large", family="chain", backbone=backbone, num_blocks=4, ramps=(0, 1, 2))


def write_card(folder: Path, **facts: Any) -> Path:
    """Writes a card into a new folder; returns the folder."""
    folder.mkdir()
    (folder / CARD_FILE).write_text(a_card(**facts).model_dump_json(), encoding="utf-8")
    return folder


def change_card(folder: Path, **changes: Any) -> None:
    """Changes a model's card. A key with the value `GONE` is removed."""
    path = folder / CARD_FILE
    card = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({name: value for name, value in card.items() if value is not GONE}), encoding="utf-8")
