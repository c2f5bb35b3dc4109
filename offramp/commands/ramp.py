"""Fine-tuned classifiers of `transformers`: served as they are, and given ramps by `offramp ramp`."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.codecs import find_codec
from earlyexit.data.rows import has_labels
from earlyexit.errors import DataError, InputError, ModelFolderError
from earlyexit.network.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained
from earlyexit.network.store import CARD_FILE, read_card, save_model
from earlyexit.tasks.label import LabelTask
from offramp.commands.calibrate import calibrate
from offramp.commands.jobs import CalibrateJob, ProfileJob, RampJob, TrainJob
from offramp.commands.machine import KEPT_FILE, kept_profile
from offramp.commands.output import warn
from offramp.commands.packaged import cache_folder
from offramp.commands.progress import progress_bars, provenance
from offramp.commands.train import in_place_of, train
from offramp.commands.worth import calibration_warnings

if TYPE_CHECKING:
    from earlyexit.data.rows import LabelledRows
    from optimizer.calibration_file import CalibrationCard
    from profiles.latency import LatencyProfile

CLASSIFIERS = ("bert", "distilbert", "mpnet", "roberta")
"""Architectures whose fine-tuned classifiers are taken over with their heads."""
CONFIG = "config.json"
CLASSIFIER = "ForSequenceClassification"


def checkpoint_labels(folder: Path) -> tuple[str, ...]:
    """Returns the labels of a fine-tuned classifier, in the order of its outputs, by its configuration alone.

    Raises ModelFolderError, in one line that says what to do, for any other folder.
    """
    if (folder / CARD_FILE).is_file():
        raise InputError(f"{folder} is a model folder already; for its exits: offramp calibrate {folder} --data ROWS")
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
    rest = f"--out runs/{_name_of(folder)}"
    if kind not in CLASSIFIERS:
        raise ModelFolderError(
            f"{folder}: a {kind} model is not served as it is, only {', '.join(CLASSIFIERS)}; write a function that "
            f"returns the module and example inputs, then: offramp inject MODULE:FUNCTION --data ROWS --tokenizer "
            f"{folder} {rest}"
        )
    labels = says.get("id2label") or {str(each): f"LABEL_{each}" for each in range(says.get("num_labels", 2))}
    several = says.get("problem_type") == "multi_label_classification"
    is_number = says.get("problem_type") == "regression" or len(labels) < 2
    if CLASSIFIER not in architecture or several or is_number:
        what = "several labels at once" if several else "a number" if CLASSIFIER in architecture else "another task"
        raise ModelFolderError(
            f"{folder}: {architecture} is of {what}; what is served as it is answers one label; to train a classifier "
            f"on this network: offramp train --backbone {folder} --data LABELLED_ROWS {rest}"
        )
    names = tuple(labels.values())
    if sorted(labels) != sorted(map(str, range(len(labels)))) or len(set(names)) < len(names):
        raise ModelFolderError(f"{path}: id2label must name outputs 0 to {len(names) - 1}, each by a label of its own")
    return tuple(labels[str(each)] for each in range(len(names)))


def model_folder_of(model: Path) -> Path:
    """Returns a model's folder, made of a fine-tuned classifier where that is given.

    The folder has no ramps, and stays in the cache until the checkpoint's files change. Raises ModelFolderError as
    `checkpoint_labels`, and for weights or a tokenizer that cannot be loaded.
    """
    if (model / CARD_FILE).is_file():
        return model
    labels = checkpoint_labels(model)
    folder = cache_folder() / "checkpoints" / _state_of(model) / _name_of(model)
    if not (folder / CARD_FILE).is_file():
        _take_over(model, labels, folder)
    return folder


def _take_over(model: Path, labels: tuple[str, ...], folder: Path) -> None:
    pretrained, family = load_pretrained(str(model))
    found = add_ramps(
        pretrained,
        name=folder.name,
        family=family,
        codec={"name": "text", "max_length": pretrained.backbone.max_length},
        task=LabelTask(labels),
        ramps=RampOptions(at=()),
        provenance=provenance(backbone=str(model)),
    )
    with in_place_of(folder) as made:
        copy_tokenizer(str(model), made)
        save_model(found, made)


def _name_of(folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-") or "model"


def _state_of(folder: Path) -> str:
    """Returns a digest of the folder's place and its files' sizes and times; to hash the weights would take longer."""
    files = sorted(each for each in folder.resolve().iterdir() if each.is_file())
    seen = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def run(job: RampJob) -> None:
    """Train ramps that imitate the checkpoint, calibrate them on other rows, and print what they save."""
    labels = checkpoint_labels(job.folder)
    out, source = job.out or Path("runs") / _name_of(job.folder), str(job.data)
    promise = CalibrateJob(
        budget=job.budget, confidence=job.confidence, seed=job.seed, source=source, latency=out / KEPT_FILE
    )
    rows = _rows(job, labels)
    learned, held = _divided(rows, promise)
    training = TrainJob(backbone=str(job.folder), name=_name_of(out), imitate=True, seed=job.seed, source=source)
    with progress_bars() as progress:
        train(training, _unlabelled(learned), out, progress=progress)
        lengths = [each.length for each in held.encode(find_codec(read_card(out).codec, out))]
        measured = ProfileJob(backend="auto", lengths=(max(1, round(np.mean(lengths))),))
        profile = kept_profile(out, measured, lambda said: print(said, file=sys.stderr))
        card, _ = calibrate(out, held, promise, progress=progress)
    saved = saved_share(card, profile)
    if job.as_json:
        print(json.dumps({"saved": saved, "rows": len(rows), "thresholds": card.thresholds, "tested": card.tested}))
    else:
        _tell(card, saved, len(rows), labelled=held.are_labelled)
        print(f"next: offramp serve {out}")
    for each in calibration_warnings(card, {}, read_card(out).provenance, None, labelled=held.are_labelled):
        warn(each)


def _rows(job: RampJob, labels: tuple[str, ...]) -> LabelledRows:
    """Returns the log's rows, with labels where it has the checkpoint's."""
    without = job.label_column is None and not has_labels(job.data, part=job.part)
    rows = job.read(job.data, label_column=None if without else job.label_column or "label")
    if strange := sorted(set(rows.label_names) - {*labels, ""}):
        warn(f"{job.data}: labels are not looked at: {strange[0]!r} is none of the checkpoint's {len(labels)}")
        return _unlabelled(rows)
    return rows


def _unlabelled(rows: LabelledRows) -> LabelledRows:
    return rows.with_labels("" for _ in rows.labels)


def _divided(rows: LabelledRows, promise: CalibrateJob) -> tuple[LabelledRows, LabelledRows]:
    """Returns the rows to train on and the rows to calibrate on, half of all or what the promise needs, if more.

    Raises DataError where there are too few for both.
    """
    tested, learned = promise.least_rows, promise.guarantee.least_inputs
    if len(rows) < tested + learned:
        raise DataError(
            f"{promise.source}: {len(rows)} rows; {tested} rows are needed for {_percent(1 - promise.budget)} at "
            f"{_percent(promise.confidence)}, and {learned} others to train ramps on"
        )
    order = np.random.default_rng(promise.seed).permutation(len(rows))
    at = min(len(rows) // 2, len(rows) - tested)
    return rows.select(sorted(order[:at].tolist())), rows.select(sorted(order[at:].tolist()))


def saved_share(card: CalibrationCard, profile: LatencyProfile) -> float:
    """Returns the share of the full model's time that exits save, ramps included, at the largest measured batch."""
    table = profile.tables[profile.lengths[0]]
    block_s, ramp_s = table.block_s_NB[:, -1], dict(zip(profile.ramps, table.ramp_s_EB[:, -1], strict=True))
    survival = card.tested["survival"]
    spent_s = np.dot(survival, block_s) + sum(survival[ramp] * ramp_s[ramp] for ramp in card.thresholds)
    return float(1 - spent_s / block_s.sum())


def _tell(card: CalibrationCard, saved: float, num_rows: int, *, labelled: bool) -> None:
    tested = card.tested
    print(
        f"{_percent(round(abs(saved), 2))} {'less' if saved > 0 else 'more'} of the model's processor time; at least "
        f"{_percent(1 - card.budget)} of the answers stay the same, with {_percent(card.confidence)} confidence"
    )
    print(
        f"tested on {tested['inputs']:,} of {num_rows:,} rows: {_percent(tested['agreement'])} of the answers were the "
        f"same, after {tested['mean_blocks']:.2f} of {tested['num_blocks']} blocks"
    )
    if labelled:
        print(f"{_percent(tested['accuracy'])} as labelled, {_percent(tested['full_accuracy'])} by the checkpoint")


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
