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
    _check_temperatures(folder)
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


def _check_temperatures(folder: Path) -> None:
    """Raises ModelFolderError if an earlier version fitted the last exit's temperature to the model's own answers."""
    from earlyexit.network.store import CARD_FILE, WEIGHTS_FILE, read_card
    from earlyexit.tasks.label import LabelTask, is_at_bound

    if not (folder / CARD_FILE).is_file():
        return
    card = read_card(folder)
    for model in [folder] if card.chain.is_one else card.members(folder):
        own, temperature = read_card(model), _last_temperature(model / WEIGHTS_FILE)
        if own.task["name"] != LabelTask.name or temperature is None:
            continue
        last = own.chain.num_blocks - 1
        if is_at_bound(temperature) or (last not in fitted_exits([last], own.provenance) and temperature != 1):
            raise ModelFolderError(
                f"{model}: an earlier version calibrated it with temperature {temperature:.3g} for the last exit, "
                f"which makes its scores wrong; calibrate again: {calibrate_command(model)}"
            )


def _last_temperature(weights: Path) -> float | None:
    """Returns None if the file has none, or cannot be read: loading the model refuses it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy") as tensors:
            return float(tensors.get_tensor("temperatures_E")[-1])
    except (FileNotFoundError, SafetensorError):
        return None
