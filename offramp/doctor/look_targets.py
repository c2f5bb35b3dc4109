"""What was named on the command line, read by the readers that the service itself uses."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cluster.devices import find_device
from earlyexit.codecs import find_codec
from earlyexit.errors import InputError, ModelFolderError, OfframpError
from earlyexit.store import WEIGHTS_FILE, read_card
from offramp.doctor.machine import Target
from offramp.jobs.calibration import read_calibration
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE


def look_at_target(path: Path) -> Target:
    """A model folder or a service file; what is wrong with it is its reader's message."""
    if not path.exists():
        return Target(path=str(path), kind="neither", problem="no such file or folder")
    kind: Literal["model", "service"] = "model" if path.is_dir() else "service"
    try:
        return _model(path) if kind == "model" else _service(path)
    except OfframpError as error:
        return Target(path=str(path), kind=kind, problem=str(error))


def _model(folder: Path) -> Target:
    card = read_card(folder)
    for member in card.members(folder):
        _check_network(member)
    find_codec(card.codec, folder)
    calibrated = (folder / CALIBRATION_FILE).is_file()
    if calibrated:
        _check_calibration(folder, card.ramps)
    answers = f"{len(card.label_names)} labels" if card.label_names else f"task {card.task['name']}"
    kind = card.family if card.chain.is_one else f"a chain of {' and '.join(card.chain.names)}"
    words = f"{card.name}, {kind}, {card.num_blocks} blocks, {answers}"
    return Target(path=str(folder), kind="model", calibrated=calibrated, words=words)


def _check_network(folder: Path) -> None:
    _check_weights(folder)
    missing = [name for name in read_card(folder).network_files if not (folder / name).is_file()]
    if missing:
        raise ModelFolderError(f"{folder} has no {missing[0]}, which its network consists of")


def _check_weights(folder: Path) -> None:
    """Raise ModelFolderError where the weights' header cannot be read; the weights themselves stay unread."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS_FILE, framework="numpy") as weights:
            weights.keys()
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error


def _check_calibration(folder: Path, ramps: tuple[int, ...]) -> None:
    from profiles.records import ExitRecords

    card = read_calibration(folder)
    records = ExitRecords.load(folder / RECORDS_FILE)
    if not set(card.thresholds) <= set(ramps) or not set(records.ramps) <= set(ramps):
        raise InputError(f"{folder / CALIBRATION_FILE} is of another model: its ramps are not {list(ramps)}")


def _service(path: Path) -> Target:
    """With its first plan not made: that may take minutes."""
    from offramp.service.parts import read_parts

    parts = read_parts(path)
    counts = parts.inventory.counts
    gpus = sum(count for name, count in counts.items() if "num_gpus" in find_device(name).actor_options)
    cluster = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Target(
        path=str(path),
        kind="service",
        words=f"{parts.document.name}, {parts.card.name} on {cluster}",
        gpus=gpus,
        port=parts.document.ingress.port,
    )
