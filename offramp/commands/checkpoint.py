"""Checks of model folders; fine-tuned classifiers of `transformers`, served without ramps from a folder in a cache.

Torch is imported only when such a folder is made.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from earlyexit.codecs import find_codec
from earlyexit.errors import InputError, ModelFolderError
from earlyexit.named import import_own, is_own
from earlyexit.network.store import CARD_FILE, WEIGHTS_FILE, ModelCard, read_card
from offramp.commands.output import command
from offramp.commands.packaged import cache_folder

CLASSIFIERS = ("bert", "distilbert", "mpnet", "roberta")
"""Architectures whose fine-tuned classifiers are supported, with their heads."""
CONFIG = "config.json"
CLASSIFIER = "ForSequenceClassification"
KEPT = 8
"""Maximum number of folders in the cache; the least recently used ones are removed."""


def checkpoint_labels(folder: Path) -> tuple[str, ...]:
    """Returns the labels of a fine-tuned classifier in the order of its outputs, read from its configuration.

    Raises InputError for a model folder, and ModelFolderError with advice for other folders.
    """
    if (folder / CARD_FILE).is_file():
        calibrate = command("calibrate", folder, "--data", "ROWS")
        raise InputError(f"{folder} is a model folder already; to calibrate its exits: {calibrate}")
    path = folder / CONFIG
    if not path.is_file():
        raise ModelFolderError(
            f"{folder} is neither a model folder (it has no {CARD_FILE}) nor a checkpoint of transformers (it has no "
            f"{CONFIG})"
        )
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind, [architecture, *_] = str(config["model_type"]), config["architectures"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(f"{path}: the model_type and architectures of transformers are missing") from error
    out = ("--out", f"runs/{model_name_for(folder)}")
    if kind not in CLASSIFIERS:
        inject = command("inject", "MODULE:FUNCTION", "--data", "ROWS", "--tokenizer", folder, *out)
        raise ModelFolderError(
            f"{folder}: {kind} models are not supported directly, only {', '.join(CLASSIFIERS)}; write a function that "
            f"returns the module and example inputs, then: {inject}"
        )
    labels = config.get("id2label") or {str(each): f"LABEL_{each}" for each in range(config.get("num_labels", 2))}
    several = config.get("problem_type") == "multi_label_classification"
    is_number = config.get("problem_type") == "regression" or len(labels) < 2
    if CLASSIFIER not in architecture or several or is_number:
        task = "several labels at once" if several else "a number" if CLASSIFIER in architecture else "another task"
        raise ModelFolderError(
            f"{folder}: {architecture} predicts {task}; only classifiers with one label are supported directly; to "
            f"train one on this network: {command('train', '--backbone', folder, '--data', 'LABELLED_ROWS', *out)}"
        )
    names = tuple(labels.values())
    if sorted(labels) != sorted(map(str, range(len(labels)))) or len(set(names)) < len(names):
        raise ModelFolderError(f"{path}: id2label must give outputs 0 to {len(names) - 1} different labels")
    return tuple(labels[str(each)] for each in range(len(names)))


def check_tokenizer(folder: Path) -> None:
    """Raises ModelFolderError if a checkpoint's tokenizer cannot be loaded. Reading `tokenizer.json` needs no torch."""
    from earlyexit.codecs.text import TOKENIZER_FILE, read_tokenizer

    if (folder / TOKENIZER_FILE).is_file():
        read_tokenizer(folder)
    else:
        from earlyexit.network.checkpoint import copy_tokenizer

        with TemporaryDirectory() as scratch:
            copy_tokenizer(str(folder), Path(scratch))


def check_model(folder: Path) -> ModelCard:
    """Returns a model folder's card.

    Raises ModelFolderError if files are missing, if the header of the weights or the codec's files cannot be read, and
    if functions of the user cannot be imported.
    """
    from safetensors import SafetensorError, safe_open

    card = read_card(folder)
    for member in card.members(folder):
        network = read_card(member)
        try:
            with safe_open(member / WEIGHTS_FILE, framework="numpy") as weights:
                weights.keys()
        except (OSError, SafetensorError) as error:
            raise ModelFolderError(f"{member / WEIGHTS_FILE} cannot be read: {error}") from error
        if missing := [name for name in network.network_files if not (member / name).is_file()]:
            raise ModelFolderError(f"{member} has no {missing[0]}, which its network needs")
        for called, name in (("network", network.family), ("task", network.task["name"])):
            if is_own(name):
                import_own(name, called=called)
    find_codec(card.codec, folder)
    return card


def model_folder_for(model: Path) -> Path:
    """Returns the folder of a model; a fine-tuned classifier gets one in the cache, without ramps.

    The cached folder is used until the checkpoint's files change. Raises the errors of `checkpoint_labels`, and
    ModelFolderError for weights or a tokenizer that cannot be loaded.
    """
    if (model / CARD_FILE).is_file():
        return model
    labels, cache = checkpoint_labels(model), cache_folder() / "checkpoints"
    # Identified by the paths, sizes and times of its files, because hashing the weights would take longer.
    files = sorted(each for each in model.resolve().iterdir() if each.is_file())
    identity = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    folder = cache / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16] / model_name_for(model)
    if (folder / CARD_FILE).is_file():
        folder.parent.touch()
    else:
        from offramp.commands.train import save_classifier

        check_tokenizer(model)
        save_classifier(model, labels, folder)
        by_use = sorted((each for each in cache.iterdir() if each.is_dir()), key=lambda each: each.stat().st_mtime_ns)
        for old in by_use[:-KEPT]:
            shutil.rmtree(old)
    return folder


def model_name_for(folder: Path) -> str:
    """Returns the folder's name without characters that model names cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-") or "model"
