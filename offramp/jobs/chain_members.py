"""The models of a chain, and whether they are still those that a file was made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earlyexit.chain_card import weights_file_sha256
from earlyexit.errors import ModelFolderError
from earlyexit.store import ModelCard, read_card
from optimizer.calibration_file import members_in


def members_of(folder: Path, card: ModelCard) -> list[dict[str, str]]:
    """A chain's models by name and by their weights, temperatures among them; empty for a single model."""
    if card.chain.is_one:
        return []
    members = zip(card.chain.names, card.members(folder), strict=True)
    return [{"name": name, "sha256": weights_file_sha256(member)} for name, member in members]


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
