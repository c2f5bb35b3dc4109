"""Writes and reads the files of a calibration, and refuses those of another model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from earlyexit.errors import DataError, ModelFolderError
from earlyexit.network.store import ModelCard, read_card, weights_file_sha256
from offramp.commands.output import command
from optimizer.calibration_file import (
    BESIDE,
    CALIBRATION_FILE,
    RECORDS_FILE,
    CalibrationCard,
    members_in,
    read_calibration_file,
)
from profiles.networks import ALONE_FILE
from profiles.records import ExitRecords


def members_of(folder: Path, card: ModelCard) -> list[dict[str, str]]:
    """Returns names and hashes of the weights (with temperatures) of a folder's models: of a chain, or the only one."""
    members = zip(card.chain.names, card.members(folder), strict=True)
    return [{"name": name, "sha256": weights_file_sha256(member)} for name, member in members]


def check_members(provenance: Mapping[str, Any] | None, folder: Path, path: Path) -> None:
    """Raises ModelFolderError if a file was made with other models than the folder has now.

    Files without that information pass.
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
            f"calibrate {'again' if card.chain.is_one else 'the chain again'}"
        )


def save_calibration(card: CalibrationCard, records: ExitRecords | None, folder: Path) -> None:
    """Writes a calibration, and its records unless they are those of the parent folder (None)."""
    folder.mkdir(exist_ok=True)
    if records is not None:
        records.save(folder / RECORDS_FILE)
    (folder / CALIBRATION_FILE).write_text(card.to_json(), encoding="utf-8")


def forget_calibration(folder: Path) -> None:
    """Removes thresholds and records before the model changes, since they promise nothing about another one."""
    for name in (CALIBRATION_FILE, RECORDS_FILE, ALONE_FILE):
        for each in (folder, *(folder / beside for beside in BESIDE)):
            (each / name).unlink(missing_ok=True)


def read_calibration(folder: Path, beside: Path | None = None) -> CalibrationCard:
    """Returns a model's calibration: its own, or the one in the folder `beside` it.

    Raises ModelFolderError if there is none, or one of another schema or of other models.
    """
    path = (beside or folder) / CALIBRATION_FILE
    if not path.is_file():
        raise ModelFolderError(f"{folder} is not calibrated; run: {calibrate_command(folder)}")
    try:
        card = read_calibration_file(path)
    except DataError as error:
        raise ModelFolderError(str(error)) from error
    check_members(card.provenance, folder, path)
    return card


def calibrate_command(folder: Path) -> str:
    """Returns the command that calibrates a model."""
    return command("calibrate", folder, "--data", "VALIDATION_FILE")


def fitted_exits(exits: Iterable[int], provenance: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the exits whose temperatures are fitted: all, but not the last of a model that keeps its answers."""
    *ramps, last = sorted(exits)
    return tuple(ramps) if keeps_answers(provenance) else (*ramps, last)


def keeps_answers(provenance: Mapping[str, Any]) -> bool:
    """Returns whether the full model's scores stay as they came: it was injected, or ramps imitate its own head."""
    imitated = provenance.get("imitate") and provenance.get("head") == "checkpoint" and not provenance.get("joint")
    return "cuts" in provenance or bool(imitated)
