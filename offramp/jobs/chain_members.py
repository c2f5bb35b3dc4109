"""The models of a chain: how large their blocks are, and whether they are still those that a file was made with."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from earlyexit.errors import ModelFolderError
from earlyexit.store import WEIGHTS_FILE, ModelCard, read_card
from optimizer.calibration_file import members_in

OF_BLOCK = re.compile(r"backbone\.blocks\.(\d+)\.")
"""Weights of a block, in a model's file."""


def parameters_by_block(folder: Path, card: ModelCard) -> list[float] | None:
    """How large every block is, which is what it costs where nobody measured; None where a network does not tell."""
    sizes = [_block_sizes(member / WEIGHTS_FILE) for member in card.members(folder)]
    told = all(len(each) == length for each, length in zip(sizes, card.chain.lengths, strict=True))
    return [of_block for each in sizes for _, of_block in sorted(each.items())] if told else None


def _block_sizes(weights: Path) -> dict[int, float]:
    """By block, the numbers in the weights that are called so."""
    from safetensors import safe_open

    sizes = dict[int, float]()
    with safe_open(weights, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            if found := OF_BLOCK.match(name):
                sizes[int(found[1])] = sizes.get(int(found[1]), 0.0) + prod(file.get_slice(name).get_shape())
    return sizes


def members_of(folder: Path, card: ModelCard) -> list[dict[str, str]]:
    """A chain's models by name and by what their networks consist of; empty for a single model."""
    if card.chain.is_one:
        return []
    members = zip(card.chain.names, card.members(folder), strict=True)
    return [{"name": name, "sha256": _sha256(member, read_card(member))} for name, member in members]


def check_members(provenance: Mapping[str, Any] | None, folder: Path, path: Path) -> None:
    """Raise ModelFolderError where a file is of other models than a folder has now.

    Files that do not say, such as those of single models, pass.
    """
    made = members_in(provenance)
    if not made:
        return
    card = read_card(folder)
    names = [each["name"] for each in made]
    if names != list(card.chain.names):
        of, has = (" before ".join(each) for each in (names, card.chain.names))
        raise ModelFolderError(f"{path} is of {of}, {folder} of {has}: calibrate again")
    changed = [now["name"] for now, then in zip(members_of(folder, card), made, strict=True) if now != then]
    if changed:
        raise ModelFolderError(
            f"{path}: {' and '.join(changed)} of {folder} is not what it was then, trained or calibrated since: "
            "calibrate the chain again"
        )


def _sha256(folder: Path, card: ModelCard) -> str:
    """Of the weights, temperatures among them, and of what else the network consists of."""
    digest = hashlib.sha256()
    for name in (WEIGHTS_FILE, *card.network_files):
        path = folder / name
        if not path.is_file():
            raise ModelFolderError(f"{folder} has no {name}")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
