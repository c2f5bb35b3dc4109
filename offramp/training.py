"""`offramp train`: labelled texts and a backbone in, a model folder out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from earlyexit.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained
from earlyexit.store import save_model
from earlyexit.tokenizer import TextTokenizer
from earlyexit.train import JOINT_OPTIONS, Progress, TrainOptions, no_progress, train_jointly, train_ramps
from offramp.provenance import provenance

if TYPE_CHECKING:
    from earlyexit.dataset import LabelledTexts
    from earlyexit.model import EarlyExitModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """Everything that decides what a training run gives."""

    backbone: str
    """Checkpoint folder or hub name."""
    name: str
    ramps: RampOptions = field(default_factory=RampOptions)
    joint: bool = False
    """Train backbone, ramps and head together instead of the ramps on a frozen backbone."""
    max_length: int | None = None
    epochs: int | None = None
    seed: int = 0
    source: str = ""
    """Where the texts came from, for the record."""


def train(job: TrainJob, data: LabelledTexts, out: Path, *, progress: Progress = no_progress) -> EarlyExitModel:
    """Train and save; raises DataError or ModelFolderError for what cannot be used."""
    pretrained, family = load_pretrained(job.backbone)
    options = _options(job, progress)
    model = add_ramps(
        pretrained,
        name=job.name,
        family=family,
        label_names=data.label_names,
        ramps=job.ramps,
        max_length=job.max_length,
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
    out.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(job.backbone, out)
    encoded = TextTokenizer.load(out, model.info.max_length).encode(data.texts, truncate=True)
    learn = train_jointly if job.joint else train_ramps
    learn(model, encoded, data.label_indices(model.info.label_names), options)
    save_model(model, out)
    return model


def _options(job: TrainJob, progress: Progress) -> TrainOptions:
    options = replace(JOINT_OPTIONS if job.joint else TrainOptions(), seed=job.seed, progress=progress)
    return options if job.epochs is None else replace(options, epochs=job.epochs)
