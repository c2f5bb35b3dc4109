"""Fine-tuned classifiers of `transformers`: which are served as they are, and the model folders made of them.

Torch is loaded only when a folder is made.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from earlyexit.errors import InputError, ModelFolderError
from earlyexit.network.store import CARD_FILE
from offramp.commands.output import command
from offramp.commands.packaged import cache_folder

CLASSIFIERS = ("bert", "distilbert", "mpnet", "roberta")
"""Architectures whose fine-tuned classifiers are taken over with their heads."""
CONFIG = "config.json"
CLASSIFIER = "ForSequenceClassification"
KEPT = 8
"""Folders that stay in the cache: when another one is made, those that were served longest ago are removed."""


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is a checkpoint of `transformers` and no model folder."""
    return (folder / CONFIG).is_file() and not (folder / CARD_FILE).is_file()


def checkpoint_labels(folder: Path) -> tuple[str, ...]:
    """Returns the labels of a fine-tuned classifier, in the order of its outputs, by its configuration alone.

    Raises ModelFolderError, in one line that says what to do, for any other folder.
    """
    if (folder / CARD_FILE).is_file():
        again = command("calibrate", folder, "--data", "ROWS")
        raise InputError(f"{folder} is a model folder already; for its exits: {again}")
    path = folder / CONFIG
    if not path.is_file():
        raise ModelFolderError(
            f"{folder} is not a model folder: it has no {CARD_FILE}; nor is it a checkpoint of transformers: it has "
            f"no {CONFIG}"
        )
    try:
        says: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind, [architecture, *_] = str(says["model_type"]), says["architectures"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(f"{path} names no model_type and architectures, as transformers writes it") from error
    out = ("--out", f"runs/{name_of(folder)}")
    if kind not in CLASSIFIERS:
        cut = command("inject", "MODULE:FUNCTION", "--data", "ROWS", "--tokenizer", folder, *out)
        raise ModelFolderError(
            f"{folder}: a {kind} model is not served as it is, only {', '.join(CLASSIFIERS)}; write a function that "
            f"returns the module and example inputs, then: {cut}"
        )
    labels = says.get("id2label") or {str(each): f"LABEL_{each}" for each in range(says.get("num_labels", 2))}
    several = says.get("problem_type") == "multi_label_classification"
    is_number = says.get("problem_type") == "regression" or len(labels) < 2
    if CLASSIFIER not in architecture or several or is_number:
        what = "several labels at once" if several else "a number" if CLASSIFIER in architecture else "another task"
        raise ModelFolderError(
            f"{folder}: {architecture} is of {what}; what is served as it is answers one label; to train a classifier "
            f"on this network: {command('train', '--backbone', folder, '--data', 'LABELLED_ROWS', *out)}"
        )
    names = tuple(labels.values())
    if sorted(labels) != sorted(map(str, range(len(labels)))) or len(set(names)) < len(names):
        raise ModelFolderError(f"{path}: id2label must name outputs 0 to {len(names) - 1}, each by a label of its own")
    return tuple(labels[str(each)] for each in range(len(names)))


def check_tokenizer(folder: Path) -> None:
    """Raises ModelFolderError where a checkpoint's tokenizer cannot be loaded; a `tokenizer.json` needs no torch."""
    from earlyexit.codecs.text import TOKENIZER_FILE, read_tokenizer

    if (folder / TOKENIZER_FILE).is_file():
        read_tokenizer(folder)
    else:
        from earlyexit.network.checkpoint import copy_tokenizer

        with TemporaryDirectory() as scratch:
            copy_tokenizer(str(folder), Path(scratch))


def model_folder_of(model: Path) -> Path:
    """Returns a model's folder; a fine-tuned classifier gets one in the cache, without ramps.

    That folder is used until the checkpoint's files change or `KEPT` others were used since. Raises ModelFolderError as
    `checkpoint_labels`, and for weights or a tokenizer that cannot be loaded.
    """
    if (model / CARD_FILE).is_file():
        return model
    labels, cache = checkpoint_labels(model), cache_folder() / "checkpoints"
    # By its place and its files' sizes and times; to hash the weights would take longer.
    files = sorted(each for each in model.resolve().iterdir() if each.is_file())
    seen = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    folder = cache / hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16] / name_of(model)
    if (folder / CARD_FILE).is_file():
        folder.parent.touch()
    else:
        from offramp.commands.train import take_over

        check_tokenizer(model)
        take_over(model, labels, folder)
        by_use = sorted((each for each in cache.iterdir() if each.is_dir()), key=lambda each: each.stat().st_mtime_ns)
        for old in by_use[:-KEPT]:
            shutil.rmtree(old)
    return folder


def name_of(folder: Path) -> str:
    """Returns a model's name for a folder: its own, without characters that names cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-") or "model"
