"""The options of the commands that train, inject, chain, calibrate and profile models. Without torch and numpy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cluster.devices import find_device
from earlyexit.backends import BackendName
from earlyexit.errors import DataError, InputError, ModelFolderError
from earlyexit.families import GENERATES
from earlyexit.named import NAME_PATTERN
from earlyexit.ramps.pooling import Pooling
from offramp.commands.options import Integers, Job, LabelledRows, OutFile, Printed, Rows, Seed, Sizes
from offramp.commands.output import percent

if TYPE_CHECKING:
    from earlyexit.network.checkpoint import RampOptions
    from earlyexit.training.augmentation import Augmentation
    from earlyexit.training.ramps import TrainOptions as RampTraining
    from optimizer.risk import Guarantee

    TrainingT = TypeVar("TrainingT", bound=RampTraining)
else:
    Augmentation = Any

THREADS_PER_CPU = 4
"""Most threads per CPU: more only wait for each other, and tens of thousands end the process."""
CONTEXT = 64
"""Default tokens of context of a step."""


class ProfileJob(Job):
    """Everything that decides what is measured. Raises PlanError or InputError for what cannot be measured."""

    device: str = Field(default="cpu", examples=["cpu", "cuda"])
    """Device to measure on: cpu, cuda, or the accelerator type of this machine's GPU."""
    backend: BackendName = "torch"
    """Library that runs the model: torch, onnx, or auto (whichever is faster here)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the model computes: float32 or bfloat16."""
    batches: Sizes = (1, 2, 4, 8, 16)
    """Batch sizes to measure."""
    lengths: Sizes | None = None
    """Input lengths to measure, in tokens with special tokens. For a decoder, 1 is one step of each sequence, and a
    larger length is a prompt of batch x length tokens. None: 16,32,64; for decoders 1,16; for inputs without tokens 1.
    """
    context: int | None = Field(default=None, ge=1)
    """For decoders: tokens before each measured step, whose keys and values it reads. None: 64."""
    repeats: int = Field(default=7, ge=1)
    """Number of rounds. Figures are medians over the rounds."""
    threads: int = Field(default=1, ge=1)
    """Threads of a CPU replica."""
    seed: Seed = 0

    @model_validator(mode="after")
    def _can_be_measured(self) -> ProfileJob:
        find_device(self.device)
        most = THREADS_PER_CPU * (os.cpu_count() or 1)
        if self.threads > most:
            raise InputError(f"threads must be at most {most}, {THREADS_PER_CPU} per CPU here, not {self.threads}")
        return self

    @property
    def steps_after(self) -> int:
        """Tokens of context."""
        return CONTEXT if self.context is None else self.context


class ProfileOptions(Printed, ProfileJob):
    """Measure the seconds of every block and ramp of a model on this machine."""

    model: Path = Field(json_schema_extra={"argument": "MODEL"})
    """Model folder, as `offramp train` writes it."""
    out: OutFile
    """Latency profile to write (.json), which a plan problem can name."""
    jsonl: OutFile | None = None
    """File for all measured points, one JSON line each. None: not written."""

    @model_validator(mode="after")
    def _two_files(self) -> ProfileOptions:
        if self.jsonl is not None and self.jsonl.resolve() == self.out.resolve():
            raise InputError(f"--out and --jsonl are both {self.out}; two files are needed")
        return self


LABEL, TOKEN = "label", "token"
"""The tasks of most models, and of decoders."""
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".th", ".joblib")
"""Endings of files that may run foreign code while they are loaded."""
MOST_BLOCKS = 12
"""Default number of blocks; a transformer of that many layers is the largest that planners are measured on."""
RampStyleName = Literal["light", "mlp", "pooler", "reduced", "conv", "maps", "deconv", "bridge", "normed", "adapted"]
"""Names of `earlyexit.ramps.RAMPS` that can be trained for any head."""


class RampJob(Printed, Rows):
    """Add ramps to a fine-tuned text classifier of `transformers`: train, calibrate and report in one step."""

    folder: Path = Field(json_schema_extra={"argument": "FOLDER"})
    """Checkpoint folder, as `save_pretrained` writes it, with its tokenizer."""
    data: Path
    """Texts like those that the model receives, with labels or without (.csv, .tsv, .jsonl, .txt, CLINC150's .json)."""
    label_column: str | None = None
    """Column with the label. None: label, where there is one; else no labels."""
    out: Path | None = None
    """Folder to write the model to. None: runs/ and the checkpoint's name."""
    budget: float = Field(default=0.01, ge=1e-6)
    """Share of the answers that may differ from the checkpoint's."""
    confidence: float = 0.90
    """Probability that the budget is kept."""
    seed: Seed = 0


class ChainJob(Printed):
    """Put small models before a large one: inputs that a model is not sure of go on to the next."""

    models: tuple[Path, ...] = Field(json_schema_extra={"argument": "MODELS"})
    """Folders of calibrated models, the smallest first, the reference last."""
    out: Path
    """Folder to write the chain to, which names the models' folders."""
    name: str | None = None
    """Model name in URLs. None: the last model's."""


class NewModel(Job):
    """A model that gets ramps. Raises InputError for a name that `model.json` cannot hold."""

    backbone: str
    """The network that gets ramps: a checkpoint, a file or your own."""
    name: str = ""
    """Model name in URLs. None: the folder's."""
    tokenizer: str | None = None
    """Checkpoint folder, hub name, minilm, mpnet or tokenizer.json. None: the backbone's."""
    codec: str | None = None
    """Your own codec, module:function. None: what fits the network and the data."""
    ramp_style: RampStyleName = "light"
    """Kind of ramp: light (pooling and linear), mlp (one hidden layer of 64), pooler (DeeBERT's), reduced (two layers),
    conv (over maps), bridge (first blocks of later regions, before a head like the full model's), or for decoders
    normed or adapted (the default, with two thin layers), which share the model's head."""
    pooling: Pooling = "mean"
    """Pooling before a ramp: mean (of tokens, or of a map), first (token) or grid (of a map)."""
    ramps: Integers | None = None
    """Blocks that get a ramp, like 0,2,4. None: all but the last."""
    max_length: int | None = Field(default=None, ge=2)
    """Longest input in tokens. None: the network's."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows. None: what suits the training."""
    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Learning rate of the ramps, or with --joint of all weights. None: what suits the training."""
    seed: Seed = 0
    source: str = Field(default="", exclude=True)
    """Where the rows came from, for the record."""

    @property
    def ramp_options(self) -> RampOptions:
        """The ramps that the model gets."""
        from earlyexit.network.checkpoint import RampOptions

        head_style = getattr(self, "head_style", None)
        return RampOptions(style=self.ramp_style, head_style=head_style, pooling=self.pooling, at=self.ramps)

    def training(self, default: TrainingT, **more: Any) -> TrainingT:
        """Returns the options of training: the default with `more`, and with the job's own."""
        said = {name: getattr(self, name, None) for name in ("epochs", "learning_rate", "batch")}
        given = {name: value for name, value in said.items() if value is not None}
        return replace(default, seed=self.seed, **given, **more)


class HoldsOut(Job):
    """Rows of which some are kept from training."""

    hold_out: float | None = Field(default=None, gt=0, lt=1)
    """Share of each label's rows to keep from training, written to --out as held_out. None: no rows."""


class IntoFolder(Job):
    """Rows that are trained on, and the folder that the model is written to."""

    out: Path
    """Folder to write the model to."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Fills in the name by the folder and the source by the rows, and finds packaged checkpoints."""
        from offramp.commands.packaged import resolve_backbone

        defaults = {name: field.default for name, field in cls.model_fields.items()}
        asked = {key: given.get(key) or defaults.get(key) for key in ("backbone", "tokenizer")}
        places = {key: resolve_backbone(name) for key, name in asked.items() if isinstance(name, str)}
        named = {"name": given["out"].resolve().name, "source": str(given["data"])}
        return named | given | places


class TrainJob(NewModel):
    """Everything that decides what a training run gives. Raises InputError for options that exclude each other."""

    backbone: str = "minilm"
    """Checkpoint folder or hub name, 'minilm' or 'mpnet' (packaged), state dict (.th, .pt, .pth), configuration of an
    untrained network (.json), or your own module:function."""
    task: str = ""
    """What the model answers: label, regression, pose (with --joints), segmentation (with --classes), token, or your
    own task (module:function). None: token for decoders and encoder-decoders, else label."""
    answers: int | None = Field(default=None, ge=1)
    """For decoders: train ramps on this many tokens of the model's own answers to the rows. None: on the rows."""
    chat: bool = False
    """For decoders: rows are user messages, for the chat template."""
    head_style: Literal["light", "mlp", "maps", "deconv"] | None = None
    """Style of the full model's head if the checkpoint has none: light, mlp, or for maps maps or deconv. None: the
    ramps' style, with bridges light or maps."""
    joint: bool = False
    """Train the whole model, not only its ramps: minutes instead of seconds, better if no checkpoint was trained for
    your labels (TREC: 94.8 % instead of 89.0 % right, after 3.3 instead of 4.6 blocks)."""
    imitate: bool = False
    """Train ramps on the full model's outputs instead of the labels; with --joint, all exits learn the outputs of the
    network before training."""
    augment: bool = False
    """With --joint: shift and mirror images at random in each epoch."""
    augmentation: Augmentation | None = Field(default=None, exclude=True)
    """How images are changed each time. None: as `augment` says."""
    patience: int | None = Field(default=None, ge=1)
    """With --joint: stop after this many epochs without progress on a tenth of the rows. None: never."""
    batch: int | None = Field(default=None, ge=1)
    """Inputs of one training step. None: what suits the training."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which a frozen backbone computes its features: float32 or bfloat16."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if given.get("augment"):
            from earlyexit.training.augmentation import Augmentation

            given = {"augmentation": Augmentation()} | given
        if given.get("task"):
            return given
        return given | {"task": default_task(given.get("backbone") or cls.model_fields["backbone"].default)}

    @model_validator(mode="after")
    def _agrees(self) -> TrainJob:
        check_name(self.name)
        if self.task != TOKEN and (self.answers is not None or self.chat):
            raise InputError(f"--answers and --chat are of decoders, --task {TOKEN}")
        if self.task == TOKEN and (self.joint or self.imitate or self.dtype != "float32"):
            raise InputError(
                "a decoder's ramps learn in float32 of what the full model says: --joint, --imitate and --dtype are "
                "not for them"
            )
        if not self.joint and (self.augmentation or self.patience):
            name = "--augment" if self.augmentation else "--patience"
            raise InputError(f"{name} goes with --joint: ramps on a frozen backbone see each input once")
        if self.joint and self.dtype != "float32":
            raise InputError(f"--dtype {self.dtype} is of a frozen backbone: joint training chooses by itself")
        return self


class TrainOptions(LabelledRows, HoldsOut, IntoFolder, TrainJob):
    """Train a model's ramps (on a frozen backbone, or --joint with it)."""

    data: Path
    """Labelled rows: texts (.csv, .tsv, .jsonl, CLINC150's .json), a folder or .zip of a folder of images per label, or
    arrays with `labels` (.npz)."""


def default_task(backbone: str) -> str:
    """A backbone's default task: `token` for a decoder's file or checkpoint folder, else `label`.

    Raises ModelFolderError where the checkpoint's config.json is not JSON.
    """
    config = Path(backbone) / "config.json"
    if not config.is_file():
        return TOKEN if backbone.endswith(".gguf") else LABEL
    try:
        says = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{config}: not JSON: {error}") from error
    return TOKEN if isinstance(says, dict) and says.get("model_type") in GENERATES else LABEL


def check_name(name: str) -> None:
    """Raise InputError for a model's name that `model.json` cannot hold."""
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InputError(
            f"a model cannot be named {name!r}: letters, digits, '.', '_' and '-' are allowed, a letter or digit "
            "first; --name gives another than the folder's"
        )


class InjectJob(HoldsOut, NewModel):
    """Everything that decides what an injection gives. Raises InputError for what cannot be a model."""

    backbone: str = Field(json_schema_extra={"argument": "MODEL"})
    """ONNX file, or module:function that returns a torch module and example inputs."""
    from_answers: bool = False
    """Train ramps on the model's own answers; labels then only name the answers."""
    image_size: tuple[int, int] | None = None
    """HEIGHTxWIDTH of images, if the ONNX file leaves it open. None: the file's."""
    mean: tuple[float, float, float] | None = None
    """Mean of the pixels that the ONNX file expects, from 0 to 1, such as .485,.456,.406 for red,green,blue (with --bgr
    for blue,green,red). None: 0."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of the pixels, in the same order. None: 1."""
    bgr: bool = False
    """The ONNX file takes blue, green, red."""
    names: tuple[str, ...] | None = Field(default=None, exclude=True)
    """Of the model's answers, in its order. None: the data's."""
    output: str | None = None
    """Name of the output that is the answer, if there are several. None: the only possible one."""
    blocks: int | None = Field(default=None, ge=2)
    """Number of blocks. None: one more than there are sites, up to 12."""
    sets: bool = False
    """Cut also where two or three tensors together carry everything."""

    @field_validator("image_size", mode="before")
    @classmethod
    def _size(cls, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        height, _, width = text.partition("x")
        if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
            raise InputError(f"--image-size {text!r}; HEIGHTxWIDTH in pixels is needed, like 224x224")
        return int(height), int(width)

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _channels(cls, text: Any, info: ValidationInfo) -> Any:
        if not isinstance(text, str):
            return text
        try:
            values = tuple(map(float, text.split(",")))
        except ValueError:
            values = ()
        given = f"--{info.field_name} {text!r}"
        if len(values) != 3 or (info.field_name == "std" and min(values) <= 0):
            raise InputError(f"{given}; three numbers are needed, one for each channel, by commas")
        if not all(0 <= value <= 1 for value in values):
            raise InputError(f"{given}; pixels count from 0 to 1 here: divide numbers that are out of 255 by 255")
        return values

    @model_validator(mode="after")
    def _can_be_a_model(self) -> InjectJob:
        check_name(self.name)
        if self.backbone.endswith(PICKLES):
            raise InputError(
                f"{self.backbone} is a pickle, which may run foreign code and is not loaded; give an ONNX file, or "
                "your own module:function that returns the module, its weights from safetensors or by "
                "torch.load(..., weights_only=True), and example inputs"
            )
        return self

    @property
    def pixels(self) -> dict[str, Any]:
        """How an ONNX file takes pixels: settings of `earlyexit.foreign.onnx_backbone.Pixels`."""
        given = {"mean": self.mean, "std": self.std, "order": "BGR" if self.bgr else None}
        return {name: value for name, value in given.items() if value is not None}


class InjectOptions(Rows, IntoFolder, InjectJob):
    """Add ramps to an ONNX file or a torch module: cut the model into blocks, and train the ramps with it frozen."""

    data: Path
    """Rows, labelled or not: .csv, .tsv, .jsonl, .json (CLINC150), .txt, .npz, images in a folder or .zip."""
    label_column: str | None = None
    """Column with the label. None: label, where there is one; else no labels."""
    labels: Path | None = None
    """Names of the model's answers in its order, a line each. None: the data's."""


class SitesJob(Printed):
    """List the sites of a model: places where one tensor carries everything, so that a ramp can be put there."""

    model: str = Field(json_schema_extra={"argument": "MODEL"})
    """ONNX file (.onnx), or module:function that returns a torch module and example inputs."""
    sets: bool = False
    """List also sets of two or three tensors that together carry everything."""
    measure: bool = True
    """Run the model on one CPU thread, to show the share of time at each site."""
    outputs: tuple[str, ...] = Field(default=(), alias="output")
    """Output that a site must lead to (may be repeated). None: all outputs."""
    open_size: int = Field(default=128, ge=1)
    """Size of axes that an ONNX file leaves open: tokens, or pixels of a side."""


BUDGETS = (0.02, 0.05, 0.1, 0.2)
"""Larger budgets that are named where rows are too few."""


class CalibrateJob(Job):
    """Everything that decides what a calibration gives. Raises DataError for what cannot be promised."""

    policy: Literal["entropy", "confidence", "share", "foreseen", "similar"] | None = None
    """Exit policy: entropy, confidence, share, foreseen or similar. None: that of the records, or by the task: entropy
    for labels, share for maps, foreseen for tokens, else confidence."""
    metric: Literal["agreement", "harm"] = "agreement"
    """What the budget limits: disagreement with the full model (agreement), or answers that are wrong where the full
    model is right (harm)."""
    budget: float = Field(default=0.01, ge=1e-6)
    """Largest mean loss (for labels, the share of different answers, or of harmed ones)."""
    confidence: float = 0.90
    """Probability that the budget is kept."""
    among: int = Field(default=1, exclude=True)
    """Number of calibrations that the same inputs test, as in `optimizer.risk.Guarantee`."""
    design_share: float = Field(default=0.25, exclude=True)
    """Share of the inputs that lays the path of thresholds, at most; the rest tests it. A quarter costs nothing."""
    ramps: Integers | Literal["all", "ends"] | None = None
    """Ramps that get thresholds: blocks such as 0,3,5, `all`, or `ends` (the ends of a chain's networks). The promise
    holds for every subset of them, so fewer ramps may each let more inputs leave. None: all; for a chain the ends and
    the few ramps that are worth it, and beside these a few of the last network's."""
    latency: Path | None = None
    """Latency profile of the model, by whose seconds exits are valued. None: by blocks, or a chain's parameters."""
    ensemble: bool = False
    """For a chain: mix the networks' answers if that pays (docs/models.md)."""
    prune: float | None = None
    """For a chain: share of the words, such as 0.14, to prune before the next model (calibrated in the folder
    `pruned`, and not with --ensemble). None: none."""
    answers: int | None = Field(default=None, ge=1)
    """For decoders, whose rows are prompts: most tokens of an answer. None: as in the training of the ramps."""
    decay: float | None = None
    """For decoders: tokens in which the extra strictness of early thresholds falls to 1/e. None: none is added."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the model computes: float32 or bfloat16."""
    seed: Seed = 0
    source: str = Field(default="", exclude=True)
    """Where the rows came from, for the record."""

    @model_validator(mode="after")
    def _can_be_promised(self) -> CalibrateJob:
        from earlyexit.words import check_share
        from optimizer.plan import check_decay

        _ = self.guarantee
        if self.ensemble and self.prune is not None:
            raise DataError("an ensemble of networks that read pruned texts is not calibrated: choose one of the two")
        if self.prune is not None:
            check_share(self.prune)
        if self.decay is not None:
            check_decay(self.decay)
        if not 0 < self.design_share < 1:
            raise DataError(f"the design share must be between 0 and 1, not {self.design_share}")
        return self

    @property
    def guarantee(self) -> Guarantee:
        """The promise; raises DataError."""
        from optimizer.risk import Guarantee

        return Guarantee(budget=self.budget, confidence=self.confidence, among=self.among)

    @property
    def least_rows(self) -> int:
        """Fewest rows that leave enough test rows and at least one design row."""
        from optimizer.thresholds import design_rows

        least = self.guarantee.least_inputs
        designs = ((rows, design_rows(rows, self.guarantee, self.design_share)) for rows in count(least + 1))
        return next(rows for rows, design in designs if design >= 1 and rows - design >= least)

    @property
    def in_words(self) -> str:
        """The promise, such as `99 % at 90 %`."""
        return f"{percent(1 - self.budget)} at {percent(self.confidence)}"

    def taken(self, ramps: Sequence[int]) -> tuple[int, ...]:
        """Returns which of these ramps get thresholds; `ramps` names a chain's ends by their blocks."""
        return tuple(ramp for ramp in ramps if not isinstance(self.ramps, tuple) or ramp in self.ramps)


def what_to_do(job: CalibrateJob, num_rows: int, needed: Callable[[CalibrateJob], int]) -> str:
    """Returns what to do about too few rows: more rows, or a larger budget that so many rows are enough for."""
    larger = (job.model_copy(update={"budget": budget}) for budget in BUDGETS if budget > job.budget)
    enough = next((each for each in larger if needed(each) <= num_rows), None)
    if enough is None:
        return "give more rows"
    return f"give more rows, or --budget {enough.budget:g}: {needed(enough)} rows are needed for {enough.in_words}"


class CalibrateOptions(Printed, LabelledRows, CalibrateJob):
    """Find thresholds that agree with the full model often enough, with stated confidence.

    For a model and labelled rows, or for exit records of anything that has exits (docs/models.md#exit-records).
    """

    model: Path | None = Field(default=None, json_schema_extra={"argument": "MODEL"})
    """Model folder, as `offramp train` writes it. None: none, with --records."""
    data: Path | None = None
    """Labelled rows: texts (.csv, .tsv, .jsonl, CLINC150's .json), a folder or .zip of a folder of images per label, or
    arrays with `labels` (.npz), which rows of an injected model do not need. None: none, with --records."""
    records: Path | None = None
    """Exit records from elsewhere (.csv, .tsv, .npz), instead of a model and --data. None: the model makes them."""
    scale: float | None = None
    """For records whose answers are numbers: the difference that counts as wholly wrong. None: answers are labels."""
    out: Path | None = None
    """With --records: folder for calibration.json and exit_records.npz. None: thresholds are only printed."""
    test: Path | None = None
    """Labelled rows for a further report. None: none."""
    test_part: str | None = Field(default=None, examples=["train", "val", "test"])
    """Which part of the test data. None: all."""

    @model_validator(mode="before")
    @classmethod
    def _sourced(cls, given: Any) -> Any:
        return given | {"source": str(given.get("records") or given.get("data"))}

    @model_validator(mode="after")
    def _agrees(self) -> CalibrateOptions:
        if self.records is not None:
            if any(other is not None for other in (self.model, self.data, self.test)):
                raise InputError("--records excludes a model, --data and --test")
            if self.ensemble:
                raise InputError(
                    "--ensemble needs what every network says, which exit records do not hold: give the chain"
                )
        elif self.model is None or self.data is None:
            raise InputError("calibrate needs a model's folder and --data FILE, or --records FILE")
        elif self.scale is not None or self.out is not None:
            raise InputError("--scale and --out go with --records; a model's calibration is kept in its folder")
        return self
