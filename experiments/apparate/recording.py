"""Records streams: the outputs of every ramp and of the full model for every input, kept in runs/apparate.

Ramps are trained on a frozen model to imitate its answers (Apparate sections 3.1 and 4). The first 10 % of a stream is
the bootstrap: half of it trains the ramps, half tunes the thresholds. The rest is served. Ramps for images also learn
from some of the network's own training images (in the paper: data that the user provides).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments.apparate import images, texts
from experiments.data import RUNS, require_data
from offramp.commands.folders import resolve_backbone
from offramp.commands.jobs import TrainJob
from offramp.commands.output import progress_bars, provenance
from profiles.records import ExitRecords, IntArray

if TYPE_CHECKING:
    from earlyexit.network.boundary import Encoded
    from earlyexit.network.model import EarlyExitModel

Kind = Literal["vision", "text"]
RampKind = Literal["light", "mlp"]
"""`light`: Apparate's ramp, a mean and one linear layer. `mlp`: a ramp of two layers."""

FOLDER = RUNS / "apparate"
KINDS: Mapping[str, Kind] = {**dict.fromkeys(images.STREAMS, "vision"), **dict.fromkeys(texts.STREAMS, "text")}
"""The kind of every stream, by its name."""
NEEDS = (*images.FILES, "resnet_cifar10/resnet32.th", *texts.FILES)
"""Required files of OFFRAMP_DATA."""
BOOTSTRAP_SHARE = 0.1
NUM_TEXTS = 8_000
MAX_LENGTH = 64
LEAST_STEPS = 1200
"""Minimum number of training steps. With few inputs, this means more epochs."""
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """A recorded stream."""

    name: str
    kind: Kind
    records: ExitRecords
    """Records of all inputs, in order of arrival."""

    @property
    def num_bootstrap(self) -> int:
        """Number of inputs in the bootstrap."""
        return round(len(self.records) * BOOTSTRAP_SHARE)

    @property
    def initial(self) -> ExitRecords:
        """The records that tune the first thresholds: the half of the bootstrap that does not train ramps."""
        return self.records.subset(np.arange(self.num_bootstrap // 2, self.num_bootstrap))

    @property
    def served(self) -> ExitRecords:
        """The records after the bootstrap."""
        return self.records.subset(np.arange(self.num_bootstrap, len(self.records)))


def streams(names: Sequence[str] = tuple(KINDS), *, ramps: RampKind = "light", folder: Path = FOLDER) -> list[Stream]:
    """Returns recorded streams. Missing recordings are made, which takes minutes each."""
    return [
        Stream(name=name, kind=KINDS[name], records=ExitRecords.load(recorded(name, ramps, folder))) for name in names
    ]


def recorded(name: str, ramps: RampKind = "light", folder: Path = FOLDER) -> Path:
    """Returns the file of a stream's records, and makes it if it is missing.

    Exits the process with a message if the data is missing.
    """
    path = folder / f"{name}{'' if ramps == 'light' else f'-{ramps}'}.npz"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        material = MAKERS[KINDS[name]](name, folder)
        half = path.with_name(f"{os.getpid()}-{path.name}")  # another study may record the same stream at the same time
        record(material, ramps, stream=name, learnt_from=len(material.learn)).save(half)
        half.replace(path)
    return path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Material:
    """The model and the inputs from which a stream is recorded."""

    model: EarlyExitModel
    """The model without ramps."""
    inputs: Sequence[Encoded]
    learn: Sequence[Encoded]
    """The inputs that train the ramps."""


def record(
    material: Material, ramps: RampKind, truth_N: IntArray | None = None, epochs: int | None = None, **facts: Any
) -> ExitRecords:
    """Trains ramps and returns the outputs of all ramps for all inputs.

    `truth_N`: the labels of the inputs; without them, the full model counts as right. `facts`: the provenance.
    """
    from earlyexit.training.ramps import FitOptions, exit_outputs, train_ramps
    from offramp.commands.calibrate import join_records

    ramped = with_ramps(material.model, ramps)
    unknown_N = np.zeros(max(len(material.inputs), len(material.learn)), dtype=np.int64)
    with progress_bars() as progress:
        if epochs is None:
            batches = math.ceil(len(material.learn) / FitOptions().batch)
            epochs = max(FitOptions().epochs, LEAST_STEPS // batches)
        options = FitOptions(epochs=epochs, seed=SEED, progress=progress)
        train_ramps(ramped, material.learn, unknown_N[: len(material.learn)], options)
        outputs = exit_outputs(ramped, material.inputs, progress=progress)
    given_N = unknown_N[: len(material.inputs)] if truth_N is None else truth_N
    made = provenance(ramps=ramps, seed=SEED, **facts)
    records = join_records([(range(len(given_N)), outputs)], "confidence", ramped.task, given_N, provenance=made)
    return replace(records, true_losses_NE=None) if truth_N is None else records


def with_ramps(model: EarlyExitModel, kind: RampKind) -> EarlyExitModel:
    """Returns a model with the same blocks and head, and with untrained ramps after every block but the last."""
    import torch

    from earlyexit.network.checkpoint import assemble

    facts = {**model.info.provenance, "head": "checkpoint"}  # the head must not be trained again
    info = replace(model.info, ramp_style=kind, provenance=facts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        ramped = assemble(info, model.backbone, None)
    ramped.head.load_state_dict(model.head.state_dict())
    ramped.requires_grad_(False)
    return ramped


def beginning(inputs: Sequence[Encoded]) -> Sequence[Encoded]:
    """Returns the part of a stream that trains the ramps."""
    return inputs[: round(len(inputs) * BOOTSTRAP_SHARE) // 2]


def _text_stream(name: str, folder: Path) -> Material:
    """Returns the sentiment model and a stream's encoded sentences."""
    from earlyexit.codecs import find_codec
    from earlyexit.data.rows import LabelledRows
    from earlyexit.network.store import load_model

    rng = np.random.default_rng(SEED)
    known, phrases = texts.read_phrases(rng)
    model_folder = folder / "sentiment"
    if not (model_folder / "model.json").is_file():
        train_sentiment(known, model_folder)
    model = load_model(model_folder)
    sentences = texts.STREAMS[name](texts.read_pools(phrases, rng), NUM_TEXTS, rng)
    rows = LabelledRows.of_texts(sentences, [""] * len(sentences))
    encoded = rows.encode(find_codec(model.info.codec, model_folder))
    return Material(model=model, inputs=encoded, learn=beginning(encoded))


def train_sentiment(known: Any, folder: Path) -> None:
    """Trains the whole of MiniLM on phrases of SST-2, without ramps, as a model that was not made for early exits."""
    from offramp.commands.train import train  # needs torch

    job = TrainJob(
        backbone=resolve_backbone("minilm"),
        name="sentiment",
        ramps=(),
        joint=True,
        epochs=1,
        learning_rate=1e-4,
        max_length=MAX_LENGTH,
        seed=SEED,
        source=texts.SST2,
    )
    with progress_bars() as progress:
        train(job, known, folder, progress=progress)


def _image_stream(name: str, _folder: Path) -> Material:
    """Returns CIFAR-10's ResNet-32 and a stream's encoded images."""
    from earlyexit.codecs.image import ImageCodec

    codec = ImageCodec(height=images.SIDE, width=images.SIDE)
    rng = np.random.default_rng(SEED)
    inputs = codec.encode(list(images.STREAMS[name](rng, BOOTSTRAP_SHARE)))
    known = codec.encode(list(images.known_images(rng)))
    learn = known if name in images.OF_CIFAR else [*known, *beginning(inputs)]
    return Material(model=cifar_network(), inputs=inputs, learn=learn)


def cifar_network() -> EarlyExitModel:
    """Returns the published ResNet-32, without ramps."""
    from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained
    from earlyexit.tasks.label import LabelTask

    pretrained, family = load_pretrained(str(require_data("resnet_cifar10/resnet32.th")))
    return add_ramps(
        pretrained,
        name="cifar",
        family=family,
        codec={"name": "image", "height": images.SIDE, "width": images.SIDE},
        task=LabelTask([f"class{index}" for index in range(10)]),
        ramps=RampOptions(at=()),
    )


MAKERS = {"vision": _image_stream, "text": _text_stream}
