"""Invalid model cards and folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.network.boundary import Encoded, check_fit
from earlyexit.network.model import ChainNetwork
from earlyexit.network.store import check_prunable, load_model, save_model
from earlyexit.tasks.label import LabelTask
from tests.earlyexit.network.chains import renamed
from tests.earlyexit.network.models import small
from tests.model_cards import GONE, chain_of, change_card

Read = Callable[[Path], object]
AB = {"name": "label", "label_names": ["a", "b"]}
IMAGE = {"name": "image", "height": 8, "width": 8}


def card(**changes: Any) -> Read:
    def read(folder: Path) -> object:
        save_model(small(), folder)
        change_card(folder, **changes)
        return load_model(folder)

    return read


def file(name: str, content: bytes | None) -> Read:
    """Returns a folder in which a file has another content, or is missing."""

    def read(folder: Path) -> object:
        save_model(small(), folder)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        return load_model(folder)

    return read


def inputs(count: int, dtype: type[np.generic], rows: int, value: int = 0) -> Read:
    return lambda _: check_fit(small().takes(0), [Encoded(3, (np.full(rows, value, dtype),) * count)])


REFUSED: dict[str, Read] = {
    "inputs: two tensors": inputs(2, np.int32, 3),
    "inputs: another dtype": inputs(1, np.int64, 3),
    "inputs: rows": inputs(1, np.int32, 2),
    "inputs: a token beyond the table": inputs(1, np.int32, 3, 10**6),
    "inputs: a token below the table": inputs(1, np.int32, 3, -1),
    "card: another schema": card(schema_version=3),
    "card: the first schema": card(schema_version=1),
    "card: no number of blocks": card(num_blocks=GONE),
    "card: unknown key": card(colour="red"),
    "card: another ramp": card(ramp_style="deep"),
    "card: another pooling": card(pooling="max"),
    "card: a codec without a name": card(codec={"max_length": 8}),
    "card: no length": card(codec={"name": "text", "max_length": 0}),
    "card: no list": card(task={"name": "label", "label_names": "ab"}),
    "card: nothing crosses": card(boundaries=[]),
    "card: a name that is a path": card(name="../x"),
    "card: one label": card(task={"name": "label", "label_names": ["a"]}),
    "card: unknown family": card(family="gpt2"),
    "card: unknown sizes": card(backbone={"width": 32}),
    "card: weights of more ramps": card(ramps=[0, 1]),
    "card: weights of more labels": card(task=AB),
    "prune: a network that does not tell": lambda folder: check_prunable(chain_of(folder, family="resnet"), {1: 0.7}),
    "prune: no texts": lambda folder: check_prunable(chain_of(folder, codec=IMAGE), {1: 0.7}),
    "chain: other answers": lambda _: ChainNetwork([small(), renamed(small(LabelTask(("a", "c", "b"))), "other")]),
    "chain: one name": lambda _: ChainNetwork([small(), small(num_blocks=2)]),
    "folder: no card": file("model.json", None),
    "folder: a card that is not JSON": file("model.json", b"{"),
    "folder: no weights": file("model.safetensors", None),
    "folder: empty weights": file("model.safetensors", b""),
    "folder: other weights": file("model.safetensors", b"not weights at all"),
}
