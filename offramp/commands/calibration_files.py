"""Reads and writes the files of a calibration, and refuses those of another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from earlyexit.errors import DataError, InputError, ModelFolderError
from earlyexit.network.store import CARD_FILE, ModelCard, read_card, weights_file_sha256
from offramp.commands.output import command, make_folder
from optimizer.calibration.calibration_file import (
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
    """Returns the names of a folder's networks, and the hashes of their weights, temperatures included."""
    members = zip(card.chain.names, card.members(folder), strict=True)
    return [{"name": name, "sha256": weights_file_sha256(member)} for name, member in members]


def check_members(provenance: Mapping[str, Any] | None, folder: Path, path: Path) -> None:
    """Raises ModelFolderError if a file was made with other models than the folder has now.

    Files without this information are accepted.
    """
    recorded = members_in(provenance)
    if not recorded:
        return
    card = read_card(folder)
    names = [each["name"] for each in recorded]
    if names != list(card.chain.names):
        before, now = (" and ".join(each) for each in (names, card.chain.names))
        raise ModelFolderError(f"{path} was made with {before}, but {folder} has {now}: calibrate again")
    pairs = zip(members_of(folder, card), recorded, strict=True)
    if changed := [member["name"] for member, before in pairs if member != before]:
        again = "again" if card.chain.is_one else "the chain again"
        raise ModelFolderError(
            f"{path}: {' and '.join(changed)} in {folder} was trained or calibrated since: calibrate {again}"
        )


def save_calibration(card: CalibrationCard, records: ExitRecords | None, folder: Path) -> None:
    """Writes a calibration and its records; None if they are those of the parent folder."""
    folder.mkdir(exist_ok=True)
    if records is not None:
        records.save(folder / RECORDS_FILE)
    (folder / CALIBRATION_FILE).write_text(card.to_json(), encoding="utf-8")


def forget_calibration(folder: Path) -> None:
    """Deletes all calibrations in a model folder, which are not valid for another model."""
    for name in (CALIBRATION_FILE, RECORDS_FILE, ALONE_FILE):
        for each in (folder, *(folder / inner for inner in BESIDE)):
            (each / name).unlink(missing_ok=True)


def read_calibration(folder: Path, calibration_folder: Path | None = None) -> CalibrationCard:
    """Returns a model's own calibration, or the one in `calibration_folder`.

    Raises ModelFolderError if there is none, or if it has another schema or is of other models.
    """
    path = (calibration_folder or folder) / CALIBRATION_FILE
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


def keeps_answers(provenance: Mapping[str, Any]) -> bool:
    """Returns whether the full model's scores are unchanged: it was injected, or ramps imitate its own head."""
    imitated = provenance.get("imitate") and provenance.get("head") == "checkpoint" and not provenance.get("joint")
    return "cuts" in provenance or bool(imitated)


@contextmanager
def replacing_model(out: Path) -> Iterator[Path]:
    """Yields a temporary folder for a model. Its files then replace the model in `out`, unless an error is raised.

    The calibration of the old model is deleted. After an error, `out` is removed if it is new and empty. Raises
    InputError if `out` cannot be a folder, or is a checkpoint's folder.
    """
    if (out / "config.json").is_file() and not (out / CARD_FILE).is_file():
        raise InputError(f"{out} is a checkpoint of transformers, which would be overwritten; choose another --out")
    is_new = not out.exists()
    make_folder(out)
    try:
        with TemporaryDirectory(dir=out, prefix=".made-") as made:
            yield Path(made)
            forget_calibration(out)
            for path in sorted(Path(made).iterdir(), key=lambda path: path.name == CARD_FILE):  # the card last
                path.replace(out / path.name)
    except BaseException:
        if is_new and not any(out.iterdir()):
            out.rmdir()
        raise
