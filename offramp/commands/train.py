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
from earlyexit.sequences.offline import GenerationOptions, generate
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.token import TokenTask
from earlyexit.training.joint import JOINT_FINE, JOINT_IMAGES, JOINT_MAPS, JOINT_OPTIONS, JointOptions, train_jointly
from earlyexit.training.ramps import Progress, exit_features, exit_outputs, no_progress, train_ramps
from earlyexit.training.ramps import TrainOptions as RampTraining
from earlyexit.training.tokens import TOKEN_OPTIONS, token_states, train_token_ramps
from offramp.commands.calibrated import forget_calibration
from offramp.commands.jobs import TOKEN, CalibrateJob, TrainJob, TrainOptions
from offramp.commands.kinds import BY_DATA, codec_for, load_codec, task_for
from offramp.commands.output import make_folder, warn
from offramp.commands.progress import progress_bars, provenance
from offramp.commands.recording import records_from_outputs, score_of
from offramp.commands.thresholds import constant_accuracy, likely_thresholds, warnings_of, work_share

HELD_OUT = "held_out"
"""Name, without ending, of the file with rows that are kept from training."""
SAVED = "training.pt"
"""File in the model's folder with the state of a joint training that is not finished."""


STYLES = ("adapted", "normed")
FEW = 4
"""Default number of a decoder's ramps: each costs memory in training, and time for every token."""
LONGEST = 128
"""Most tokens of a text that ramps learn from."""


def train(
    job: TrainJob,
    data: LabelledRows,
    out: Path,
    *,
    held_out: LabelledRows | None = None,
    progress: Progress = no_progress,
    on_warning: Callable[[str], None] = lambda _: None,
) -> EarlyExitModel:
    """Trains a model and saves it, in place of a model that the folder holds.

    `on_warning` is called where the model or its exits are of little use on the rows held out, or without them on
    the rows that ramps on a frozen backbone learned from. Raises DataError, ModelFolderError or InputError for what
    cannot be used, before anything is trained.
    """
    with in_place_of(out) as folder:
        if job.task == TOKEN:
            return train_tokens(job, data, folder, progress)
        model, features, targets = _train(job, data, folder, progress, saved=out / SAVED)
    for each in _warnings(model, features, targets, held_out, out, progress):
        on_warning(each)
    return model


def _train(
    job: TrainJob, data: LabelledRows, folder: Path, progress: Progress, *, saved: Path
) -> tuple[EarlyExitModel, dict[int, Tensor] | None, ValueArray]:
    """Returns the model, the exits' features if the backbone was frozen, and the targets of training.

    `saved`: where a joint training keeps its state until it is finished.
    """
    model, options = _untrained(job, data, progress)
    codec = load_codec(model.info.codec, job, folder)
    targets = data.targets(model.task, codec) if data.are_labelled else None
    if targets is not None:
        model.task.check_taught(targets)
    encoded = data.encode(codec)
    check_inputs(model, encoded[0])
    features = None
    if isinstance(options, JointOptions):
        assert targets is not None, "a joint training imitates no checkpoint's head"
        train_jointly(model, encoded, targets, replace(options, saved=saved))
    else:
        features = exit_features(_computing(model, job), encoded, progress=progress)
        if targets is None:
            last = model.num_blocks - 1
            targets = outputs_of_features(model, {last: features[last]})[last].argmax(1).numpy()
        train_ramps(model, encoded, targets, options, features=features)
    save_model(model, folder)
    saved.unlink(missing_ok=True)
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
    """Returns reasons against serving a trained model, from its outputs (N, C) by block, with what to do.

    The saving of exits is estimated with thresholds that these rows choose.
    """
    if not len(truth_N):
        return []
    if any(bool(each.isnan().any()) for each in outputs.values()):
        return ["the model's outputs are not numbers: its training diverged; train again with a lower --learning-rate"]
    if task.large:
        return []
    records = records_from_outputs(outputs, score_of(task, None), task, truth_N)
    try:
        outcome = records.outcome(likely_thresholds(records, CalibrateJob().budget, block_costs))
    except DataError:  # too few rows to estimate anything
        saved = None
    else:
        saved = 1 - work_share(outcome.survival, block_costs)
    return warnings_of(records.outcome({}).full_accuracy, constant_accuracy(task, truth_N), saved, model)


def outputs_of_features(model: EarlyExitModel, features: Mapping[int, Tensor], batch: int = 256) -> dict[int, Tensor]:
    """Returns every exit's outputs (N, C) by block, computed from what `exit_features` returns."""
    with torch.inference_mode():
        return {
            block: torch.cat(
                [model.exit_head(block).classify(part.to(model.device)).cpu() for part in torch.split(of_block, batch)]
            )
            for block, of_block in features.items()
        }


def _computing(model: EarlyExitModel, job: TrainJob) -> EarlyExitModel:
    """Returns the model in the type for features; raises ModelFolderError if it cannot run in that type."""
    if job.dtype == "float32":
        return model
    if model.backbone.float32_only:
        raise ModelFolderError(f"{model.info.name}: {model.info.family} models run in float32, not {job.dtype}")
    return deepcopy(model).to(getattr(torch, job.dtype))


def _untrained(job: TrainJob, data: LabelledRows, progress: Progress) -> tuple[EarlyExitModel, RampTraining]:
    """Returns the model before training, with random weights by the seed, and the options of training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        by_data = job.task in BY_DATA and data.are_labelled
        early = task_for(job, data, ()) if by_data else None  # refused before a network is loaded
        pretrained, family = load_pretrained(job.backbone, pairs=PAIR in data.columns)
        backbone, ramps = pretrained.backbone, job.ramp_options
        facts: dict[str, Any]
        codec: NamedSpec
        if job.task == TOKEN:
            task: Task = _token_task(job, backbone)
            style = "adapted" if ramps.style == RampOptions().style else ramps.style
            if style not in STYLES:
                raise InputError(
                    f"--ramp-style {style}: a decoder's ramps are {' or '.join(STYLES)}, which share its head"
                )
            ramps = replace(ramps, style=style, pooling="last", at=ramps.at or spread(backbone.num_blocks))
            options = job.training(TOKEN_OPTIONS, progress=progress)
            codec = {"name": PromptCodec.name, "max_length": job.max_length or backbone.max_length}
            facts = {"answers": job.answers, "chat": job.chat} | ({} if job.epochs is None else {"epochs": job.epochs})
        else:
            if data.are_labelled:
                task = early or task_for(job, data, backbone.inputs)
            elif job.imitate and not job.joint and pretrained.head and pretrained.label_names:
                task = LabelTask(pretrained.label_names)  # of the checkpoint's own classifier, which ramps imitate
            else:
                source = job.source or "the data"
                raise DataError(f"{source}: rows without labels; only ramps of a classifier learn without any")
            options = _options(job, task, pretrained, progress)
            if job.codec is None and pretrained.codec is not None:
                codec = pretrained.codec
            else:  # as asked for, else by the network and the data
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
    model, options = _untrained(job, data, progress)
    model.requires_grad_(False)
    codec, task = load_codec(model.info.codec, job, folder), model.task
    assert isinstance(codec, PromptCodec)
    assert isinstance(task, TokenTask)
    texts = prompts_of(codec, data, task, chat=job.chat)
    given = [1] * len(texts)
    if job.answers is not None:
        asked = GenerationOptions(max_tokens=job.answers, ends=frozenset(task.ends))
        found = generate(model, texts, asked, progress)
        texts, given = [tuple(each.tokens) for each in found], [len(each.prompt) for each in found]
    train_token_ramps(model, token_states(model, texts, given, options), options)
    save_model(model, folder)
    return model


def prompts_of(codec: PromptCodec, data: LabelledRows, task: TokenTask, *, chat: bool) -> list[tuple[int, ...]]:
    """Returns tokens of every row's text, at most `LONGEST`; for a chat as a user message in the chat template.

    An encoder-decoder's end in the token that answers start with. Raises InputError where a model that has no template
    is to chat.
    """
    start = () if task.start is None else (task.start,)
    if not chat:
        return [codec.tokens(text)[:LONGEST] + start for text in data.texts]
    return [codec.chat([{"role": "user", "content": text}]) + start for text in data.texts]


def _token_task(job: TrainJob, backbone: Backbone) -> TokenTask:
    if not isinstance(backbone, DecoderBackbone):
        raise ModelFolderError(f"{job.backbone} is no decoder: --task token is of models that generate")
    if isinstance(backbone, Seq2SeqBackbone) and job.answers is None:
        raise InputError("an encoder-decoder's ramps learn of its own answers: say of how many tokens by --answers")
    return TokenTask(backbone.config.vocab_size, end_ids(job.backbone), start_id(job.backbone))


def spread(num_blocks: int) -> tuple[int, ...]:
    """Returns a few blocks that divide a model evenly."""
    places = (round(num_blocks * k / (FEW + 1)) - 1 for k in range(1, FEW + 1))
    return tuple(sorted({place for place in places if 0 <= place < num_blocks - 1}))


def head_in_words(model: EarlyExitModel) -> str:
    """Returns where the full model's head comes from, and whether the backbone was trained with it."""
    facts = model.info.provenance
    if facts.get("head") != "checkpoint":
        backbone = "with its backbone" if facts.get("joint") else "its backbone as it came (--joint trains that too)"
        return f"trained on these rows, {backbone}"
    return "the checkpoint's, trained further" if facts.get("joint") else "the checkpoint's"


def _options(job: TrainJob, task: Task, pretrained: Pretrained, progress: Progress) -> RampTraining:
    """Returns the options of training: as asked for, else what suits the kind of training."""
    options: RampTraining = RampTraining()
    if job.joint:
        of_images = JOINT_IMAGES if pretrained.head is None else JOINT_FINE
        of_labels = of_images if takes_images(pretrained.backbone.inputs) else JOINT_OPTIONS
        joint = JOINT_MAPS if task.large else of_labels
        options = replace(joint, augmentation=job.augmentation, patience=job.patience)
    return job.training(options, imitate=job.imitate, progress=progress)


def take_over(checkpoint: Path, labels: tuple[str, ...], folder: Path) -> None:
    """Saves a checkpoint's classifier as a model without ramps."""
    pretrained, family = load_pretrained(str(checkpoint))
    found = add_ramps(
        pretrained,
        name=folder.name,
        family=family,
        codec={"name": "text", "max_length": pretrained.backbone.max_length},
        task=LabelTask(labels),
        ramps=RampOptions(at=()),
        provenance=provenance(backbone=str(checkpoint)),
    )
    with in_place_of(folder) as made:
        copy_tokenizer(str(checkpoint), made)
        save_model(found, made)


@contextmanager
def in_place_of(out: Path) -> Iterator[Path]:
    """Yields a folder to make a model in, whose files replace those in `out` unless an error is raised.

    The calibration of the model before goes then, too; an error leaves no new folder that is empty. Raises InputError
    where `out` cannot be a folder, and for a checkpoint's own folder, whose weights would be overwritten.
    """
    if (out / "config.json").is_file() and not (out / CARD_FILE).is_file():
        raise InputError(
            f"{out} is a checkpoint of transformers, which would be overwritten; name another folder by --out"
        )
    new = not out.exists()
    make_folder(out)
    try:
        with TemporaryDirectory(dir=out, prefix=".made-") as made:
            yield Path(made)
            forget_calibration(out)
            for path in sorted(Path(made).iterdir(), key=lambda path: path.name == CARD_FILE):  # which says what is new
                path.replace(out / path.name)
    except BaseException:
        if new and not any(out.iterdir()):
            out.rmdir()
        raise


def run(job: TrainOptions) -> None:
    """Trains, and prints the result."""
    rows = job.read(job.data, label_column=None if job.task == TOKEN else job.label_column)
    held = None
    if job.hold_out is not None:
        if rows.part_names:
            raise InputError(
                "--hold-out writes rows and their labels; of images with joints or maps --part names a part"
            )
        num_rows = len(rows)
        rows, held = rows.divide(job.hold_out, job.seed)
        make_folder(job.out)
        print(f"{len(held)} of {num_rows} rows held out: {write_labelled(held, job.out, HELD_OUT)}")
    elif old := sorted(job.out.glob(f"{HELD_OUT}.*")):
        warn(f"{old[0]} was held out of an earlier training; calibrate with rows that this one does not see")
    with progress_bars() as progress:
        model = train(job, rows, job.out, held_out=held, progress=progress, on_warning=warn)
    labels = f" {model.task.num_outputs} labels," if model.task.name == "label" else ""
    print(f"{len(rows)} rows,{labels} ramps after blocks {list(model.ramp_indices)}: {job.out}")
    if model.task.name != "token":
        print(f"head of the full model: {head_in_words(model)}")


def unlabelled(rows: LabelledRows) -> LabelledRows:
    """Returns the rows without their labels."""
    return rows.with_labels("" for _ in rows.labels)
