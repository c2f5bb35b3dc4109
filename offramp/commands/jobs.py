"""Options of the commands that train, inject, chain, calibrate and profile models. Imports neither torch nor numpy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from cluster.devices import find_device
from earlyexit.backends import BackendName
from earlyexit.errors import DataError, InputError, ModelFolderError, raising
from earlyexit.families import GENERATES
from earlyexit.named import NAME_PATTERN
from earlyexit.policies import Score
from earlyexit.ramps.pooling import Pooling
from offramp.commands.options import Integers, Job, JsonOption, LabelledRowOptions, OutFile, RowOptions, Seed, Sizes
from offramp.commands.output import percent

if TYPE_CHECKING:
    from earlyexit.training.augmentation import Augmentation
    from optimizer.calibration.thresholds import Guarantee
else:
    Augmentation = Any

THREADS_PER_CPU = 4
"""Maximum number of threads per CPU. More threads do not help, and tens of thousands crash the process."""


class ProfileJob(Job):
    """What is measured, and how. Raises PlanError or InputError for a device or options that cannot be measured."""

    device: str = Field(default="cpu", examples=["cpu", "cuda"])
    """Device to measure: cpu, cuda, or the accelerator type of this machine's GPU."""
    backend: BackendName = "torch"
    """Library that runs the model: torch, onnx, or auto (the faster one on this machine)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the model: float32 or bfloat16."""
    batches: Sizes = (1, 2, 4, 8, 16)
    """Batch sizes to measure."""
    lengths: Sizes | None = None
    """Input lengths to measure, in tokens, special tokens included. For a decoder, 1 is one decode step of each
    sequence, and a larger length is a prompt of batch x length tokens. None: 16,32,64, as far as the model takes them;
    for decoders 1,16; for inputs without tokens 1."""
    context: int = Field(default=64, ge=1)
    """For decoders: context tokens before each measured step, whose keys and values it reads."""
    repeats: int = Field(default=7, ge=1)
    """Number of measurement rounds. Results are medians over the rounds."""
    threads: int = Field(default=1, ge=1)
    """Threads of a CPU replica."""
    seed: Seed = 0

    def check(self) -> None:
        find_device(self.device)
        limit = THREADS_PER_CPU * (os.cpu_count() or 1)
        if self.threads > limit:
            raise InputError(f"threads must be at most {limit}, {THREADS_PER_CPU} per CPU here, not {self.threads}")


class ProfileOptions(JsonOption, ProfileJob):
    """Measure the execution time of every block and ramp of a model on this machine."""

    model: Path = Field(json_schema_extra={"argument": "MODEL"})
    """Model folder, as `offramp train` writes it."""
    out: OutFile
    """Latency profile to write (.json), for problem files and service files."""
    jsonl: OutFile | None = None
    """File for all measured points, one JSON line each. None: not written."""


LABEL, TOKEN = "label", "token"
"""Names of the tasks of classifiers and of decoders."""
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".th", ".joblib")
"""Endings of files that can run arbitrary code when they are loaded."""
MAX_BLOCKS = 12
"""Default maximum number of blocks of an injected model. Planners are measured up to 12 blocks."""
RampStyleName = Literal["light", "mlp", "pooler", "reduced", "conv", "maps", "deconv", "bridge", "normed", "adapted"]
"""The ramp styles in `earlyexit.ramps.RAMPS` that can be trained."""


class RampJob(JsonOption, RowOptions):
    """Add ramps to a fine-tuned text classifier of `transformers`: train, calibrate and report in one step."""

    folder: Path = Field(json_schema_extra={"argument": "FOLDER"})
    """Checkpoint folder with its tokenizer, as `save_pretrained` writes it."""
    data: Path
    """Texts like those that the model receives, with or without labels (.csv, .tsv, .jsonl, .txt, CLINC150's .json)."""
    label_column: str | None = None
    """Column that holds the label. None: label if there is such a column, else no labels."""
    out: Path | None = None
    """Folder to write the model to. None: runs/ and the checkpoint's name."""
    budget: float = Field(default=0.01, ge=1e-6)
    """Share of the answers that may differ from the checkpoint's."""
    confidence: float = 0.90
    """Probability that the budget is kept."""
    seed: Seed = 0


def _check_name(name: str) -> str:
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InputError(
            f"invalid model name {name!r}: letters, digits, '.', '_' and '-' are allowed, and it must start with a "
            "letter or digit; --name sets another name than the folder's"
        )
    return name


ModelName = Annotated[str, AfterValidator(_check_name)]


class ChainJob(JsonOption):
    """Chain a small model before a large one: inputs without a confident answer go on to the next model."""

    models: tuple[Path, ...] = Field(json_schema_extra={"argument": "MODELS"})
    """Folders of calibrated models, from the smallest to the reference."""
    out: Path
    """Folder to write the chain to. It refers to the models' folders, and copies nothing."""
    name: ModelName | None = None
    """Model name in URLs. None: the last model's."""


class NewModelJob(Job):
    """How a model with ramps is made from a network. Raises InputError for an invalid model name."""

    backbone: str
    """The network that gets ramps: a checkpoint, a file or your own function."""
    name: ModelName = Field(default="", validate_default=True)
    """Model name in URLs. None: the folder's name."""
    tokenizer: str | None = None
    """Tokenizer: checkpoint folder, hub name, minilm, mpnet or tokenizer.json. None: the backbone's."""
    codec: str | None = None
    """Your own codec (module:function). None: the one that fits the network and the data."""
    ramp_style: RampStyleName = "light"
    """Kind of ramp: light (pooling and a linear layer), mlp (one hidden layer of 64), pooler (DeeBERT's), reduced (two
    layers), conv (over maps), bridge (the first blocks of later regions, before a head like the full model's), or for
    decoders normed or adapted (the default, with two thin layers), which share the model's head."""
    pooling: Pooling = "mean"
    """Pooling before a ramp: mean (over tokens, or over a map), first or last (token), or grid (over a map)."""
    ramps: Integers | None = None
    """Blocks that get a ramp, such as 0,2,4. None: all but the last."""
    max_length: int | None = Field(default=None, ge=2)
    """Maximum input length in tokens. None: the network's."""
    epochs: int | None = Field(default=None, ge=1)
    """Number of epochs. None: depends on the kind of training."""
    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Learning rate of the ramps, or with --joint of all weights. None: depends on the kind of training."""
    seed: Seed = 0
    hold_out: float | None = Field(default=None, gt=0, lt=1)
    """Share of each label's rows that are not used for training, but written to --out as held_out. None: no rows."""
    source: str = Field(default="the data", exclude=True)
    """The origin of the rows, for the provenance of the model."""


HELD_OUT = "held_out"
"""Name, without ending, of the file with the rows that are held out of training."""


class OutputFolderOptions(Job):
    """The folder that a model is written to."""

    out: Path
    """Folder to write the model to."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Adds the model's name and the origin of the rows, and replaces packaged checkpoints by their paths."""
        from offramp.commands.folders import resolve_backbone

        rows, out = data["data"], Path(os.path.realpath(data["out"]))
        if data.get("hold_out") is not None and (Path(os.path.realpath(rows)).parent, rows.stem) == (out, HELD_OUT):
            raise InputError(f"--hold-out would overwrite {rows}; choose another --out, or rename the file")
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        checkpoints = {key: data.get(key) or defaults.get(key) for key in ("backbone", "tokenizer")}
        paths = {key: resolve_backbone(name) for key, name in checkpoints.items() if isinstance(name, str)}
        return {"name": out.name, "source": str(rows)} | data | paths


class TrainJob(NewModelJob):
    """How a model is trained. Raises InputError for options that exclude each other."""

    backbone: str = "minilm"
    """Backbone: checkpoint folder or hub name, 'minilm' or 'mpnet' (packaged), state dict (.th, .pt, .pth),
    configuration of an untrained network (.json), or your own module:function."""
    task: str = Field(default_factory=lambda given: default_task(given["backbone"]))
    """What the model predicts: label, regression, pose (with --joints), segmentation (with --classes), token, or your
    own task (module:function). None: token for decoders and encoder-decoders, else label."""
    answers: int | None = Field(default=None, ge=1)
    """For decoders: train ramps on this many tokens of the model's own answers to the rows. None: on the rows."""
    chat: bool = False
    """For decoders: treat rows as user messages, and apply the chat template."""
    head_style: Literal["light", "mlp", "maps", "deconv"] | None = None
    """Style of the full model's head if the checkpoint has none for these labels: light, mlp, or for maps maps or
    deconv. None: the style of the ramps; light or maps if these are bridges."""
    joint: bool = False
    """Train the whole model, not only its ramps: takes minutes instead of seconds, and is better if no checkpoint was
    trained for your labels (TREC: 94.8 % instead of 89.0 % right, after 3.3 instead of 4.6 blocks)."""
    imitate: bool = False
    """With --joint: train all exits on the outputs of the network before training instead of the labels. Ramps on a
    frozen backbone always learn the full model's outputs."""
    augment: bool | Augmentation = False
    """With --joint: shift and mirror images at random in each epoch."""
    patience: int | None = Field(default=None, ge=1)
    """With --joint: stop after this many epochs without progress on a tenth of the rows. None: never."""
    batch: int | None = Field(default=None, ge=1)
    """Batch size of training. None: depends on the kind of training."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which a frozen backbone computes features: float32 or bfloat16."""

    @property
    def augmentation(self) -> Augmentation | None:
        """How images are augmented; None: not at all."""
        from earlyexit.training.augmentation import Augmentation

        return Augmentation() if self.augment is True else self.augment or None

    def check(self) -> None:
        if self.task != TOKEN and (self.answers is not None or self.chat):
            raise InputError(f"--answers and --chat are only for decoders (--task {TOKEN})")
        if self.task == TOKEN and (self.joint or self.imitate or self.dtype != "float32"):
            raise InputError("--joint, --imitate and --dtype are not for decoders: their ramps train in float32 alone")
        if self.task == TOKEN and {"codec", "head_style", "pooling"} & self.model_fields_set:
            raise InputError("--codec, --head-style and --pooling are not for decoders, whose ramps share their head")
        if self.imitate and not self.joint:
            raise InputError("--imitate goes with --joint: ramps on a frozen backbone always learn the model's outputs")
        if not self.joint and (self.augment or self.patience):
            name = "--augment" if self.augment else "--patience"
            raise InputError(f"{name} goes with --joint: ramps on a frozen backbone see each input once")
        if self.joint and self.dtype != "float32":
            raise InputError(f"--dtype {self.dtype} is only for a frozen backbone: leave it out with --joint")


class TrainOptions(LabelledRowOptions, OutputFolderOptions, TrainJob):
    """Train a model's ramps on a frozen backbone, or with --joint the whole model."""

    data: Path
    """Labelled rows: texts (.csv, .tsv, .jsonl, CLINC150's .json), a folder or .zip with a folder of images per label,
    or arrays with `labels` (.npz)."""


def default_task(backbone: str) -> str:
    """Returns the default task of a backbone: `token` for a decoder's file or checkpoint folder, else `label`.

    Raises ModelFolderError if the checkpoint's config.json is not JSON.
    """
    path = Path(backbone) / "config.json"
    if not path.is_file():
        return TOKEN if backbone.endswith(".gguf") else LABEL
    with raising(ModelFolderError, f"{path}: not JSON", ValueError):
        config = json.loads(path.read_text(encoding="utf-8"))
    return TOKEN if isinstance(config, dict) and config.get("model_type") in GENERATES else LABEL


class InjectJob(NewModelJob):
    """How ramps are added to a foreign model. Raises InputError for files that cannot be loaded safely."""

    backbone: str = Field(json_schema_extra={"argument": "MODEL"})
    """ONNX file, or module:function that returns a torch module and example inputs."""
    from_answers: bool = False
    """Use labels only to name the model's answers; they need not be its answers."""
    image_size: tuple[int, int] | None = None
    """Size of images (HEIGHTxWIDTH), if the ONNX file leaves it open. None: the file's."""
    mean: tuple[float, float, float] | None = None
    """Mean of the pixels that the ONNX file expects, from 0 to 1, such as .485,.456,.406 for red,green,blue (with --bgr
    for blue,green,red). None: 0."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of the pixels, in the same order. None: 1."""
    bgr: bool = False
    """The ONNX file expects the channels blue, green, red."""
    names: tuple[str, ...] | None = Field(default=None, exclude=True)
    """Names of the model's answers, in the order of its outputs. None: the data's labels."""
    output: str | None = None
    """Name of the output that holds the answer, if there are several. None: the only possible one."""
    blocks: int | None = Field(default=None, ge=2)
    """Number of blocks. None: one more than there are sites, up to 12."""
    sets: bool = False
    """Also cut where two or three tensors together carry all information."""

    @field_validator("image_size", mode="before")
    @classmethod
    def _size(cls, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        height, _, width = text.partition("x")
        if not (text.isascii() and height.isdigit() and width.isdigit() and int(height) and int(width)):
            raise InputError(f"--image-size {text!r}: it must be HEIGHTxWIDTH in pixels, such as 224x224")
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
        option = f"--{info.field_name} {text!r}"
        if len(values) != 3 or (info.field_name == "std" and min(values) <= 0):
            raise InputError(f"{option}: three numbers are needed, one per channel, separated by commas")
        if not all(0 <= value <= 1 for value in values):
            raise InputError(f"{option}: pixels range from 0 to 1, so values from 0 to 255 must be divided by 255")
        return values

    def check(self) -> None:
        if self.backbone.endswith(PICKLES):
            raise InputError(
                f"{self.backbone} is a pickle, which can run arbitrary code and is not loaded; give an ONNX file, or "
                "your own module:function that returns example inputs and the module, with weights loaded from "
                "safetensors or by torch.load(..., weights_only=True)"
            )

    @property
    def pixels(self) -> dict[str, Any]:
        """The pixel format of an ONNX file, as settings of `earlyexit.foreign.onnx_backbone.Pixels`."""
        pixels = {"mean": self.mean, "std": self.std, "order": "BGR" if self.bgr else None}
        return {name: value for name, value in pixels.items() if value is not None}


class InjectOptions(RowOptions, OutputFolderOptions, InjectJob):
    """Add ramps to an ONNX file or a torch module: cut the model into blocks, and train ramps on the frozen model."""

    data: Path
    """Rows with or without labels: .csv, .tsv, .jsonl, .json (CLINC150), .txt, .npz, images in a folder or .zip."""
    label_column: str | None = None
    """Column that holds the label. None: label if there is such a column, else no labels."""
    labels: Path | None = None
    """Names of the model's answers, one per line in the order of its outputs. None: the data's labels."""


class SitesJob(JsonOption):
    """List the sites of a model: points at which one tensor carries all information, so that a ramp can be added."""

    model: str = Field(json_schema_extra={"argument": "MODEL"})
    """ONNX file (.onnx), or module:function that returns a torch module and example inputs."""
    sets: bool = False
    """Also list sets of two or three tensors that together carry all information."""
    measure: bool = True
    """Run the model on one CPU thread, to show the share of its time that has passed at each site."""
    outputs: tuple[str, ...] = Field(default=(), alias="output")
    """Output that a site must lead to (may be repeated). None: all outputs."""
    open_size: int = Field(default=128, ge=1)
    """Size of the axes that an ONNX file leaves open: tokens, or the side of an image in pixels."""


DESIGN_SHARE = 0.25
"""Largest share of the inputs that is used to choose candidate thresholds. The other inputs test them."""
BUDGETS = (0.02, 0.05, 0.1, 0.2)
"""Larger budgets that error messages suggest if there are too few rows."""


class CalibrateJob(Job):
    """How thresholds are found. Raises DataError for a guarantee that cannot be given."""

    policy: Score | None = Field(
        default=None,
        description=f"Exit policy: {', '.join(get_args(Score))}. None: that of the records, or by the task: entropy "
        "for labels, share for maps, foreseen for tokens, else confidence.",
    )
    metric: Literal["agreement", "harm"] = "agreement"
    """What the budget limits: disagreement with the full model (agreement), or answers that are wrong where the full
    model is right (harm)."""
    budget: float = Field(default=0.01, ge=1e-6)
    """Largest mean loss (for labels, the share of answers that differ, or with harm of those that got worse)."""
    confidence: float = 0.90
    """Probability that the budget is kept."""
    num_calibrations: int = Field(default=1, exclude=True)
    """Number of calibrations that are tested with the same inputs, as in `Guarantee`."""
    ramps: Integers | Literal["all", "ends"] | None = None
    """Ramps that get thresholds: blocks such as 0,3,5, `all`, or `ends` (the ends of a chain's networks). The guarantee
    holds for every subset of the ramps, so with fewer ramps more inputs may leave at each. None: all; for a chain the
    ends and a few useful ramps, and as a second calibration a few ramps of the last network."""
    latency: Path | None = None
    """Latency profile of the model, to weigh exits by saved time. None: by blocks, or a chain's parameters."""
    ensemble: bool = False
    """For a chain: mix the networks' answers if this improves them (docs/models.md)."""
    prune: float | None = None
    """For a chain: share of the words, such as 0.14, to prune before the next model (calibrated in the folder
    `pruned`, and not with --ensemble)."""
    answers: int | None = Field(default=None, ge=1)
    """For decoders, whose rows are prompts: maximum tokens of an answer. None: as in the training of the ramps."""
    decay: float | None = None
    """For decoders: tokens after which the extra strictness of early thresholds falls to 1/e. None: none is added."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the model: float32 or bfloat16."""
    seed: Seed = 0
    source: str = Field(default="the data", exclude=True)
    """The origin of the rows, for the provenance of the calibration."""

    def check(self) -> None:
        from earlyexit.words import check_share
        from optimizer.plans.plan import check_decay

        _ = self.guarantee
        if self.ensemble and self.prune is not None:
            raise DataError("--ensemble and --prune exclude each other: give one of them")
        if self.prune is not None:
            check_share(self.prune)
        if self.decay is not None:
            check_decay(self.decay)

    @property
    def guarantee(self) -> Guarantee:
        """The budget and the confidence; raises DataError for an impossible combination."""
        from optimizer.calibration.thresholds import Guarantee

        return Guarantee(budget=self.budget, confidence=self.confidence, num_calibrations=self.num_calibrations)

    @property
    def min_rows(self) -> int:
        """Smallest number of rows that leaves enough test rows and at least one design row."""
        from optimizer.calibration.thresholds import design_rows

        guarantee, num_tested = self.guarantee, self.guarantee.least_inputs
        return next(n for n in count(num_tested + 1) if 1 <= design_rows(n, guarantee, DESIGN_SHARE) <= n - num_tested)

    @property
    def guarantee_text(self) -> str:
        """The guarantee as text, such as `99 % at 90 %`."""
        return f"{percent(1 - self.budget)} at {percent(self.confidence)}"


def few_rows_advice(job: CalibrateJob, num_rows: int, needed: Callable[[CalibrateJob], int]) -> str:
    """Returns advice about too few rows: more rows, or a larger budget for which `num_rows` are enough."""
    for budget in BUDGETS:
        larger = job.model_copy(update={"budget": budget})
        if budget > job.budget and needed(larger) <= num_rows:
            needs = f"{needed(larger)} rows for {larger.guarantee_text}"
            return f"give more rows, or use --budget {budget:g}, which needs {needs}"
    return "give more rows"


class CalibrateOptions(JsonOption, LabelledRowOptions, CalibrateJob):
    """Find thresholds with which early answers agree with the full model's, with stated confidence.

    The input is a model and labelled rows, or exit records of any system with exits (docs/models.md#exit-records).
    """

    model: Path | None = Field(default=None, json_schema_extra={"argument": "MODEL"})
    """Model folder, as `offramp train` writes it (not with --records)."""
    data: Path | None = None
    """Rows with labels, which an injected model does not need (not with --records): texts (.csv, .tsv, .jsonl, .json of
    CLINC150), a folder or .zip with a folder of images per label, or arrays with `labels` (.npz)."""
    records: Path | None = None
    """Exit records of another system (.csv, .tsv, .npz), instead of a model and --data. None: the model makes them."""
    scale: float | None = None
    """For records with numbers as answers: the difference that counts as completely wrong. None: answers are labels."""
    out: Path | None = None
    """With --records: folder for calibration.json and exit_records.npz. None: thresholds are only printed."""
    test: Path | None = None
    """Further labelled rows, to report the results on them too."""
    test_part: str | None = Field(default=None, examples=["train", "val", "test"])
    """Part of the data of --test. None: as for --part."""

    def check(self) -> None:
        super().check()
        if self.records is not None:
            if any(other is not None for other in (self.model, self.data, self.test)):
                raise InputError("--records excludes a model, --data and --test")
            if self.ensemble:
                raise InputError("--ensemble needs the outputs of every network, which exit records do not hold")
            if of_models := {"prune", "answers", "dtype", *LabelledRowOptions.model_fields} & self.model_fields_set:
                names = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(of_models))
                raise InputError(f"{names}: for a model and its rows, not for --records")
        elif self.model is None or self.data is None:
            raise InputError("calibrate needs a model's folder and --data FILE, or --records FILE")
        elif self.scale is not None or self.out is not None:
            raise InputError("--scale and --out go with --records; a model's calibration is kept in its folder")
        elif self.model.is_dir() and not os.access(self.model, os.W_OK):
            raise InputError(f"{self.model}: no permission to write the calibration into this folder")
        if self.test_part is not None and self.test is None:
            raise InputError("--test-part goes with --test, the rows of which it is a part")
