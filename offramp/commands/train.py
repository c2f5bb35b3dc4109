"""`offramp train`: trains ramps on a backbone with labelled rows, and writes a model folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from earlyexit.codecs import find_codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.data.rows import PAIR, LabelledRows, write_labelled
from earlyexit.errors import DataError, InputError, ModelFolderError
from earlyexit.families.base import Backbone, Pretrained
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.families.seq2seq import Seq2SeqBackbone
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import takes_images
from earlyexit.network.checkpoint import RampOptions, add_ramps, copy_tokenizer, end_ids, load_pretrained, start_id
from earlyexit.network.model import EarlyExitModel, check_inputs
from earlyexit.network.store import CARD_FILE, save_model
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.token import TokenTask
from earlyexit.training.joint import JOINT_FINE, JOINT_IMAGES, JOINT_MAPS, JOINT_OPTIONS, JointOptions, train_jointly
from earlyexit.training.ramps import Progress, exit_features, exit_outputs, no_progress, train_ramps
from earlyexit.training.ramps import TrainOptions as RampTraining
from earlyexit.training.tokens import TOKEN_OPTIONS, GenerationOptions, generate, token_states, train_token_ramps
from offramp.commands.calibration_files import forget_calibration
from offramp.commands.codec_and_task import BY_DATA, codec_for, load_codec, task_for
from offramp.commands.jobs import TOKEN, CalibrateJob, TrainJob, TrainOptions
from offramp.commands.output import make_folder, warn
from offramp.commands.progress import progress_bars, provenance
from offramp.commands.recording import choose_score, records_from_outputs
from offramp.commands.thresholds import constant_accuracy, likely_thresholds, warnings_of, work_share

HELD_OUT = "held_out"
"""Name, without ending, of the file with the rows that are held out of training."""
DECODER_STYLES = ("adapted", "normed")
NUM_DECODER_RAMPS = 4
"""Default number of a decoder's ramps, each of which takes memory in training and time for every token."""
MAX_PROMPT_TOKENS = 128
"""Maximum number of tokens of a text in the training of a decoder's ramps."""


def train(
    job: TrainJob,
    data: LabelledRows,
    out: Path,
    *,
    held_out: LabelledRows | None = None,
    progress: Progress = no_progress,
    on_warning: Callable[[str], None] = lambda _: None,
) -> EarlyExitModel:
    """Trains a model and saves it, which replaces a model in the folder.

    `on_warning` is called if the model or its exits are of little use on the rows held out, or without them on the
    rows on which ramps were trained. Raises DataError, ModelFolderError or InputError before anything is trained.
    """
    with replacing_model(out) as folder:
        if job.task == TOKEN:
            return train_tokens(job, data, folder, progress)
        model, features, targets = _train(job, data, folder, progress)
    for each in _warnings(model, features, targets, held_out, out, progress):
        on_warning(each)
    return model


def _train(
    job: TrainJob, data: LabelledRows, folder: Path, progress: Progress
) -> tuple[EarlyExitModel, dict[int, Tensor] | None, ValueArray]:
    """Trains and saves a model; returns it, the exits' features if the backbone was frozen, and the targets."""
    model, options = _build_model(job, data, progress)
    codec = load_codec(model.info.codec, job, folder)
    targets = data.targets(model.task, codec) if data.are_labelled else None
    if targets is not None:
        model.task.check_coverage(targets)
    encoded = data.encode(codec)
    check_inputs(model, encoded[0])
    features = None
    if isinstance(options, JointOptions):
        assert targets is not None, "joint training needs labels"
        train_jointly(model, encoded, targets, options)
    else:
        features = exit_features(_in_dtype(model, job), encoded, progress=progress)
        if targets is None:
            last = model.num_blocks - 1
            targets = outputs_of_features(model, {last: features[last]})[last].argmax(1).numpy()
        train_ramps(model, encoded, targets, options, features=features)
    save_model(model, folder)
    return model, features, targets


def _warnings(
    model: EarlyExitModel,
    features: dict[int, Tensor] | None,
    targets: ValueArray,
    held_out: LabelledRows | None,
    out: Path,
    progress: Progress,
) -> list[str]:
    if model.task.large:
        return []
    if held_out is not None and len(held_out):
        codec = find_codec(model.info.codec, out)
        targets = held_out.targets(model.task, codec)
        outputs = exit_outputs(model, held_out.encode(codec), progress=progress)
    elif features is not None:
        outputs = outputs_of_features(model, features)
    else:
        return []
    return warnings_on(outputs, model.task, targets, model.info.provenance, block_costs=None)


def warnings_on(
    outputs: Mapping[int, Tensor],
    task: Task,
    truth_N: ValueArray,
    model: Mapping[str, Any],
    *,
    block_costs: Sequence[float] | None,
) -> list[str]:
    """Returns reasons against serving a trained model, with advice, from its outputs (N, C) by block.

    The work that exits save is estimated with thresholds that fit these rows.
    """
    if not len(truth_N):
        return []
    if any(bool(each.isnan().any()) for each in outputs.values()):
        return ["the model's outputs are NaN, because training diverged: train again with a lower --learning-rate"]
    if task.large:
        return []
    records = records_from_outputs(outputs, choose_score(task, None), task, truth_N)
    try:
        outcome = records.outcome(likely_thresholds(records, CalibrateJob().budget, block_costs))
    except DataError:  # too few rows for an estimate
        saved = None
    else:
        saved = 1 - work_share(outcome.survival, block_costs)
    return warnings_of(records.outcome({}).full_accuracy, constant_accuracy(task, truth_N), saved, model)


def outputs_of_features(model: EarlyExitModel, features: Mapping[int, Tensor], batch: int = 256) -> dict[int, Tensor]:
    """Returns the outputs (N, C) of every exit by block, computed from the result of `exit_features`."""
    with torch.inference_mode():
        return {
            block: torch.cat(
                [model.exit_head(block).classify(part.to(model.device)).cpu() for part in torch.split(of_block, batch)]
            )
            for block, of_block in features.items()
        }


def _in_dtype(model: EarlyExitModel, job: TrainJob) -> EarlyExitModel:
    """Returns the model in the data type of the job; raises ModelFolderError if it cannot run in that type."""
    if job.dtype == "float32":
        return model
    if model.backbone.float32_only:
        raise ModelFolderError(f"{model.info.name}: {model.info.family} models run in float32, not {job.dtype}")
    return deepcopy(model).to(getattr(torch, job.dtype))


def _build_model(job: TrainJob, data: LabelledRows, progress: Progress) -> tuple[EarlyExitModel, RampTraining]:
    """Returns the model before training, with new weights drawn by the seed, and the options of training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        by_data = job.task in BY_DATA and data.are_labelled
        early = task_for(job, data, ()) if by_data else None  # checks the labels before a network is loaded
        pretrained, family = load_pretrained(job.backbone, pairs=PAIR in data.columns)
        backbone, ramps = pretrained.backbone, job.ramp_options
        facts: dict[str, Any]
        codec: NamedSpec
        if job.task == TOKEN:
            task: Task = _token_task(job, backbone)
            style = "adapted" if ramps.style == RampOptions().style else ramps.style
            if style not in DECODER_STYLES:
                raise InputError(f"--ramp-style {style}: the ramps of a decoder must be {' or '.join(DECODER_STYLES)}")
            ramps = replace(ramps, style=style, pooling="last", at=ramps.at or default_ramps(backbone.num_blocks))
            options = job.training_options(TOKEN_OPTIONS, progress=progress)
            codec = {"name": PromptCodec.name, "max_length": job.max_length or backbone.max_length}
            facts = {"answers": job.answers, "chat": job.chat} | ({} if job.epochs is None else {"epochs": job.epochs})
        else:
            if data.are_labelled:
                task = early or task_for(job, data, backbone.inputs)
            elif job.imitate and not job.joint and pretrained.head and pretrained.label_names:
                task = LabelTask(pretrained.label_names)  # ramps imitate the checkpoint's own classifier
            else:
                source = job.source or "the data"
                raise DataError(f"{source}: rows without labels; only ramps that imitate a classifier need none")
            options = _options(job, task, pretrained, progress)
            if job.codec is None and pretrained.codec is not None:
                codec = pretrained.codec
            else:
                codec = codec_for(job, backbone.inputs, data, longest=backbone.max_length)
            dtype = {} if job.dtype == "float32" else {"dtype": job.dtype}
            trained = {name: getattr(options, name) for name in ("epochs", "batch", "learning_rate")}
            facts = {"joint": job.joint, "imitate": job.imitate} | trained | dtype
        facts = provenance(backbone=job.backbone, data=job.source, rows=len(data), **facts, seed=job.seed)
        model = add_ramps(
            pretrained, name=job.name, family=family, codec=codec, task=task, ramps=ramps, provenance=facts
        )
    return model, options


def train_tokens(job: TrainJob, data: LabelledRows, folder: Path, progress: Progress) -> EarlyExitModel:
    """Trains a decoder's ramps and saves the model; raises what `train` raises."""
    model, options = _build_model(job, data, progress)
    model.requires_grad_(False)
    codec, task = load_codec(model.info.codec, job, folder), model.task
    assert isinstance(codec, PromptCodec)
    assert isinstance(task, TokenTask)
    texts = prompts_of(codec, data, task, chat=job.chat)
    prompt_lengths = [1] * len(texts)
    if job.answers is not None:
        answers = generate(model, texts, GenerationOptions(max_tokens=job.answers, ends=frozenset(task.ends)), progress)
        texts, prompt_lengths = [tuple(each.tokens) for each in answers], [len(each.prompt) for each in answers]
    train_token_ramps(model, token_states(model, texts, prompt_lengths, options), options)
    save_model(model, folder)
    return model


def prompts_of(codec: PromptCodec, data: LabelledRows, task: TokenTask, *, chat: bool) -> list[tuple[int, ...]]:
    """Returns the tokens of each row's text, at most `MAX_PROMPT_TOKENS`, or with `chat` of a user message.

    Those of an encoder-decoder end with the token that starts answers. Raises InputError if there is no chat template.
    """
    start = () if task.start is None else (task.start,)
    if not chat:
        return [codec.tokens(text)[:MAX_PROMPT_TOKENS] + start for text in data.texts]
    return [codec.chat([{"role": "user", "content": text}]) + start for text in data.texts]


def _token_task(job: TrainJob, backbone: Backbone) -> TokenTask:
    if not isinstance(backbone, DecoderBackbone):
        raise ModelFolderError(f"{job.backbone} is not a decoder: --task token is for models that generate")
    if isinstance(backbone, Seq2SeqBackbone) and job.answers is None:
        raise InputError("the ramps of an encoder-decoder train on its own answers: set their length with --answers")
    return TokenTask(backbone.config.vocab_size, end_ids(job.backbone), start_id(job.backbone))


def default_ramps(num_blocks: int) -> tuple[int, ...]:
    """Returns the default ramps of a decoder, which divide its blocks evenly."""
    blocks = (round(num_blocks * k / (NUM_DECODER_RAMPS + 1)) - 1 for k in range(1, NUM_DECODER_RAMPS + 1))
    return tuple(sorted({block for block in blocks if 0 <= block < num_blocks - 1}))


def describe_head(model: EarlyExitModel) -> str:
    """Returns a text on how the full model's head and the backbone were trained."""
    facts = model.info.provenance
    if facts.get("head") != "checkpoint":
        backbone = "with its backbone" if facts.get("joint") else "its backbone unchanged (--joint trains it too)"
        return f"trained on these rows, {backbone}"
    return "the checkpoint's, trained further" if facts.get("joint") else "the checkpoint's"


def _options(job: TrainJob, task: Task, pretrained: Pretrained, progress: Progress) -> RampTraining:
    """Returns the options of training: the job's, and the defaults for this kind of training."""
    options: RampTraining = RampTraining()
    if job.joint:
        if task.large:
            joint = JOINT_MAPS
        elif takes_images(pretrained.backbone.inputs):
            joint = JOINT_IMAGES if pretrained.head is None else JOINT_FINE
        else:
            joint = JOINT_OPTIONS
        options = replace(joint, augmentation=job.augmentation, patience=job.patience)
    return job.training_options(options, imitate=job.imitate, progress=progress)


def save_classifier(checkpoint: Path, labels: tuple[str, ...], folder: Path) -> None:
    """Saves a checkpoint's classifier as a model folder without ramps."""
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


@contextmanager
def replacing_model(out: Path) -> Iterator[Path]:
    """Yields a temporary folder for a model. Its files then replace the model in `out`, unless an error is raised.

    The calibration of the old model is deleted. After an error, `out` is removed if it is new and empty. Raises
    InputError if `out` cannot be a folder, or is a checkpoint's folder.
    """
    if (out / "config.json").is_file() and not (out / CARD_FILE).is_file():
        raise InputError(f"{out} is a checkpoint of transformers, which would be overwritten; choose another --out")
    is_new = not out.exists()
    make_folder(out)
    try:
        with TemporaryDirectory(dir=out, prefix=".made-") as made:
            yield Path(made)
            forget_calibration(out)
            for path in sorted(Path(made).iterdir(), key=lambda path: path.name == CARD_FILE):  # the card last
                path.replace(out / path.name)
    except BaseException:
        if is_new and not any(out.iterdir()):
            out.rmdir()
        raise


def run(job: TrainOptions) -> None:
    """Trains a model, and prints the result."""
    rows = job.read(job.data, label_column=None if job.task == TOKEN else job.label_column)
    held = None
    if job.hold_out is not None:
        if rows.part_names:
            raise InputError("--hold-out is not for images with joints or maps: choose the rows with --part")
        num_rows = len(rows)
        rows, held = rows.divide(job.hold_out, job.seed)
        make_folder(job.out)
        print(f"{len(held)} of {num_rows} rows held out: {write_labelled(held, job.out, HELD_OUT)}")
    elif old := sorted(job.out.glob(f"{HELD_OUT}.*")):
        warn(f"{old[0]} was held out of an earlier training; calibrate with rows that this one does not use")
    with progress_bars() as progress:
        model = train(job, rows, job.out, held_out=held, progress=progress, on_warning=warn)
    labels = f" {model.task.num_outputs} labels," if model.task.name == "label" else ""
    print(f"{len(rows)} rows,{labels} ramps after blocks {list(model.ramp_indices)}: {job.out}")
    if model.task.name != "token":
        print(f"head of the full model: {describe_head(model)}")


def unlabelled(rows: LabelledRows) -> LabelledRows:
    """Returns the rows without their labels."""
    return rows.with_labels("" for _ in rows.labels)
