"""Model cards for tests that need a card and no model."""

from __future__ import annotations

from typing import Any

from earlyexit.network.boundary import TensorSpec
from earlyexit.network.store import ModelCard


def a_card(labels: tuple[str, ...] = ("bill", "card"), **changes: Any) -> ModelCard:
    """Of a model of texts and labels, two blocks of eight numbers a token and a ramp between them."""
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
