"""`offramp train`: trains ramps on a backbone with labelled rows, and writes a model folder.

The options choose the codec and the task of a new model. By default they fit its network and data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earlyexit.codecs import CODECS, find_codec, make_codec
from earlyexit.codecs.base import Codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.data.rows import IMAGE, PAIR, TEXT, LabelledRows, write_labelled
from earlyexit.errors import DataError, InputError, ModelFolderError
from earlyexit.families.base import Pretrained
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.families.seq2seq import Seq2SeqBackbone
from earlyexit.named import NamedSpec, is_own
from earlyexit.network.boundary import Boundary, Encoded, check_fit, takes_images
from earlyexit.network.checkpoint import RampOptions, add_ramps, copy_tokenizer, end_ids, load_pretrained
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import CARD_FILE, CHAIN, ModelCard, ModelFolder, chain_card, read_card, save_model
from earlyexit.tasks import find_task
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.segmentation import SegmentationTask
from earlyexit.tasks.token import TokenTask
from earlyexit.training.joint import JOINT_FINE, JOINT_IMAGES, JOINT_MAPS, JOINT_OPTIONS, JointOptions, train_jointly
from earlyexit.training.ramps import FitOptions, Progress, exit_features, exit_outputs, no_progress, train_ramps
from earlyexit.training.tokens import TOKEN_OPTIONS, GenerationOptions, generate, train_token_ramps
from offramp.commands.calibrate import choose_score, join_records, prompts_of
from offramp.commands.folders import calibrate_command, read_calibration, refuse_adapter, replacing_model
from offramp.commands.jobs import HELD_OUT, TOKEN, CalibrateJob, ChainJob, NewModelJob, TrainJob, TrainOptions
from offramp.commands.output import print_result, progress_bars, provenance, warn
from offramp.commands.thresholds import constant_accuracy, likely_thresholds, warnings_of, work_share

DECODER_STYLES = ("adapted", "normed")
NUM_DECODER_RAMPS = 4
"""Default number of a decoder's ramps, each of which takes memory in training and time for every token."""


def train(
    job: TrainJob,
    data: LabelledRows,
    out: Path,
    *,
    held_out: LabelledRows | None = None,
    progress: Progress = no_progress,
    on_warning: Callable[[str], None] = lambda _: None,
) -> EarlyExitModel:
    """Trains a model and saves it with the rows held out, which replaces a model in the folder.

    `on_warning` is called if the model or its exits are of little use on the rows held out, or without them on the
    rows on which ramps were trained. Raises DataError, ModelFolderError or InputError before anything is trained.
    """
    with replacing_model(out) as folder:
        model, options = _build_model(job, data, progress)
        if ignored := model.info.provenance.get("ignored"):
            on_warning(f"{job.backbone}: answers do not follow {', '.join(ignored)} of its generation_config.json")
        codec, task = load_codec(model.info.codec, job, folder), model.task
        if isinstance(task, TokenTask):
            _train_on_tokens(model, codec, data, job, options)
        else:
            features, targets = _train_on_rows(model, codec, data, job, options)
        save_model(model, folder)
        if held_out is not None:
            write_labelled(held_out, folder, HELD_OUT)
    if isinstance(task, TokenTask) or task.large:
        return model
    outputs = outputs_of_features(model, features)
    if held_out is not None and len(held_out):
        targets = held_out.targets(task, codec)
        outputs = exit_outputs(model, held_out.encode(codec), progress=progress)
    for each in warnings_on(outputs, task, targets, model.info.provenance):
        on_warning(each)
    return model


def _train_on_rows(
    model: EarlyExitModel, codec: Codec[object], data: LabelledRows, job: TrainJob, options: FitOptions
) -> tuple[dict[int, Tensor], ValueArray]:
    """Trains a model; returns the exits' features, none if the backbone was trained too, and the targets."""
    targets = data.targets(model.task, codec) if data.are_labelled else None
    if targets is not None:
        model.task.check_coverage(targets)
    encoded = data.encode(codec)
    check_encoded(job, model, encoded)
    if isinstance(options, JointOptions):
        assert targets is not None, "joint training needs labels"
        train_jointly(model, encoded, targets, options)
        return {}, targets
    in_dtype = model
    if job.dtype != "float32":
        if model.backbone.float32_only:
            raise ModelFolderError(f"{model.info.name}: {model.info.family} models run in float32, not {job.dtype}")
        in_dtype = deepcopy(model).to(getattr(torch, job.dtype))
    features = exit_features(in_dtype, encoded, progress=options.progress)
    if targets is None:
        targets = outputs_of_features(model, features)[model.num_blocks - 1].argmax(1).numpy()
    train_ramps(model, encoded, targets, options, features=features)
    return features, targets


def check_encoded(job: NewModelJob, model: EarlyExitModel, encoded: Sequence[Encoded]) -> None:
    """Raises InputError for rows that do not fit the network's inputs, such as those of another model's tokenizer."""
    try:
        check_fit(model.takes(0), encoded)
    except InputError as error:
        hint = f"; --tokenizer {job.tokenizer} is another model's" if job.tokenizer is not None else ""
        raise InputError(f"{job.source}: {error}{hint}") from error


def _train_on_tokens(
    model: EarlyExitModel, codec: Codec[object], data: LabelledRows, job: TrainJob, options: FitOptions
) -> None:
    """Trains a decoder's ramps on texts, or on the decoder's own answers to them."""
    task = model.task
    assert isinstance(codec, PromptCodec)
    assert isinstance(task, TokenTask)
    model.requires_grad_(False)
    texts = prompts_of(codec, data, task, chat=job.chat)
    prompt_lengths = [1] * len(texts)
    if job.answers is not None:
        generation = GenerationOptions(max_tokens=job.answers, ends=frozenset(task.ends))
        answers = generate(model, texts, generation, options.progress)
        texts, prompt_lengths = [tuple(each.tokens) for each in answers], [len(each.prompt) for each in answers]
    train_token_ramps(model, texts, prompt_lengths, options)


def warnings_on(
    outputs: Mapping[int, Tensor],
    task: Task,
    truth_N: ValueArray,
    model: Mapping[str, Any],
    block_costs: Sequence[float] | None = None,
) -> list[str]:
    """Returns reasons against serving a trained model, with advice, from its outputs (N, C) by block.

    The work that exits save is estimated with thresholds that fit these rows.
    """
    if not outputs or not len(truth_N):
        return []
    if any(bool(each.isnan().any()) for each in outputs.values()):
        return ["the model's outputs are NaN, because training diverged: train again with a lower --learning-rate"]
    records = join_records([(range(len(truth_N)), outputs)], choose_score(task, None), task, truth_N)
    likely = likely_thresholds(records, CalibrateJob().budget, block_costs)
    saved = None if likely is None else 1 - work_share(likely.tested.survival, block_costs)
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


def _build_model(job: TrainJob, data: LabelledRows, progress: Progress) -> tuple[EarlyExitModel, FitOptions]:
    """Returns the model before training, with new weights drawn by the seed, and the options of training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        early = task_for(job, data, ()) if job.task in BY_DATA and data.are_labelled else None  # before any network
        refuse_adapter(Path(job.backbone))
        pretrained, family = load_pretrained(job.backbone, pairs=PAIR in data.columns)
        backbone, ramps = pretrained.backbone, ramp_options(job)
        if job.task == TOKEN:
            task, ramps, codec = _parts_of_decoder(job, pretrained, ramps)
            options = training_options(job, TOKEN_OPTIONS, progress=progress)
            facts: dict[str, Any] = {"answers": job.answers, "chat": job.chat, "ignored": [*pretrained.ignored]}
        else:
            if data.are_labelled:
                task = early or task_for(job, data, backbone.inputs)
            elif not job.joint and pretrained.head and pretrained.label_names:
                task = LabelTask(pretrained.label_names)  # ramps imitate the checkpoint's own classifier
            else:
                raise DataError(f"{job.source}: rows without labels; only ramps of a trained classifier need none")
            options = training_options(job, _default_options(job, task, pretrained), progress=progress)
            of_checkpoint = pretrained.codec if job.codec is None else None
            codec = of_checkpoint or codec_for(job, backbone.inputs, data, longest=backbone.max_length)
            facts = {"joint": job.joint, "imitate": job.imitate or not job.joint, "dtype": job.dtype}
        facts |= {name: getattr(options, name) for name in ("epochs", "batch", "learning_rate")}
        facts = provenance(backbone=job.backbone, data=job.source, rows=len(data), **facts, seed=job.seed)
        model = add_ramps(
            pretrained, name=job.name, family=family, codec=codec, task=task, ramps=ramps, provenance=facts
        )
    if job.head_style is not None and "head" in model.info.provenance:
        raise InputError(f"--head-style {job.head_style}: {job.backbone} has a head for these labels; leave it out")
    return model, options


def _parts_of_decoder(job: TrainJob, given: Pretrained, ramps: RampOptions) -> tuple[Task, RampOptions, NamedSpec]:
    """Returns the task, the ramps and the codec of a decoder; raises ModelFolderError or InputError if it has none."""
    backbone = given.backbone
    if not isinstance(backbone, DecoderBackbone):
        raise ModelFolderError(f"{job.backbone} is not a decoder: --task token is for models that generate")
    if isinstance(backbone, Seq2SeqBackbone) and job.answers is None:
        raise InputError("the ramps of an encoder-decoder train on its own answers: set their length with --answers")
    style = "adapted" if ramps.style == RampOptions().style else ramps.style
    if style not in DECODER_STYLES:
        raise InputError(f"--ramp-style {style}: the ramps of a decoder must be {' or '.join(DECODER_STYLES)}")
    ramps = replace(ramps, style=style, pooling="last", at=ramps.at or default_ramps(backbone.num_blocks))
    task = TokenTask(backbone.config.vocab_size, end_ids(job.backbone), given.start)
    return task, ramps, {"name": PromptCodec.name, "max_length": job.max_length or backbone.max_length}


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


def _default_options(job: TrainJob, task: Task, pretrained: Pretrained) -> FitOptions:
    """Returns the default options for this kind of training."""
    if not job.joint:
        return FitOptions()
    if task.large:
        return JOINT_MAPS
    if takes_images(pretrained.backbone.inputs):
        return JOINT_IMAGES if pretrained.head is None else JOINT_FINE
    return JOINT_OPTIONS


def training_options(job: NewModelJob, default: FitOptions, **overrides: Any) -> FitOptions:
    """Returns `default` with the options of the same name that the job sets, and with `overrides`."""
    of_job = {each.name: getattr(job, each.name, None) for each in fields(default)}
    return replace(default, **{name: value for name, value in of_job.items() if value is not None} | overrides)


def ramp_options(job: NewModelJob) -> RampOptions:
    """Returns the options of the ramps; raises InputError for a decoder's ramps of another network."""
    if job.ramp_style in DECODER_STYLES and getattr(job, "task", None) != TOKEN:
        raise InputError(f"--ramp-style {job.ramp_style} is for decoders, whose ramps share the model's head")
    head_style = getattr(job, "head_style", None)
    return RampOptions(style=job.ramp_style, head_style=head_style, pooling=job.pooling, at=job.ramps)


def run(job: TrainOptions) -> None:
    """Trains a model, and prints the result."""
    rows = job.read(job.data, label_column=None if job.task == TOKEN else job.label_column)
    held = None
    if job.hold_out is not None:
        if rows.part_names:
            raise InputError("--hold-out is not for images with joints or maps: choose the rows with --part")
        rows, held = rows.divide(job.hold_out, job.seed)
        if not len(held):
            raise InputError(f"--hold-out {job.hold_out:g} keeps none of the {len(rows)} rows: choose a larger share")
    elif old := sorted(job.out.glob(f"{HELD_OUT}.*")):
        warn(f"{old[0]} was held out of an earlier training; calibrate with rows that this one does not use")
    with progress_bars() as progress:
        model = train(job, rows, job.out, held_out=held, progress=progress, on_warning=warn)
    if held is not None:
        path = max(job.out.glob(f"{HELD_OUT}.*"), key=lambda path: path.stat().st_mtime_ns)
        print(f"{len(held)} of {len(rows) + len(held)} rows held out: {path}")
    labels = f" {model.task.num_outputs} labels," if model.task.name == "label" else ""
    print(f"{len(rows)} rows,{labels} ramps after blocks {list(model.ramp_indices)}: {job.out}")
    if model.task.name != "token":
        print(f"head of the full model: {describe_head(model)}")


def unlabelled(rows: LabelledRows) -> LabelledRows:
    """Returns the rows without their labels."""
    return rows.with_labels("" for _ in rows.labels)


DATATYPES = {"float": "FP32", "int32": "INT32", "uint8": "UINT8"}
"""Datatypes of the v2 protocol by those of a network's inputs."""
HEATMAP_SHARE, TOLERANCE_SHARE = 4, 10
"""The image's side divided by the side of a heatmap, and by the tolerance of a joint's position."""
IGNORED = ("unlabelled", "unlabeled", "void", "ignored")
"""Names of classes, in lower case, that losses and figures ignore."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")
"""A word within a joint's name."""
TOKEN_TYPES = ("token_types", "token_type_ids")
"""Names of the input that distinguishes the two texts of a pair."""


def codec_for(job: NewModelJob, inputs: Boundary, data: LabelledRows, *, longest: int) -> NamedSpec:
    """Returns the codec of a network with these inputs, of at most `longest` tokens.

    Raises InputError for an invalid `--codec`, and for a network for texts without a tokenizer or with inputs that are
    not derived from texts. Raises ModelFolderError if the user's codec cannot be created.
    """
    if job.codec is not None:
        options = {} if job.max_length is None else {"max_length": job.max_length}
        others = f"{', '.join(name for name in CODECS if name != CHAIN)} follow from the data"
        return make_codec({**_own(job.codec, "codec", others), **options}).spec()
    names = data.kind
    if names in ((TEXT,), (TEXT, PAIR)):
        if job.tokenizer is None and (is_own(job.backbone) or Path(job.backbone).suffix == ".onnx"):
            raise InputError(f"{job.backbone} has no tokenizer: choose one with --tokenizer, such as minilm")
        besides = [each.name for each in inputs[1:]]
        if unknown := [name for name in besides if name not in TOKEN_TYPES]:
            raise InputError(
                f"{job.backbone} takes {unknown[0]!r} besides {inputs[0].name!r}, which is not derived from texts; "
                "masks must be named attention_mask, positions position_ids, and token types token_type_ids"
            )
        spec = {"name": names[-1], "max_length": job.max_length or longest}
        return spec if names[-1] == TEXT else spec | {"token_types": bool(besides)}
    if names == (IMAGE,):
        image = inputs[0]
        if image.dtype != "uint8" or len(image.shape) != 3 or image.shape[-1] != 3:
            raise InputError(
                f"{job.backbone} takes {image.name!r}, {image.dtype} of shape {list(image.shape)}; images need uint8 "
                "of shape (height, width, 3), or your own codec (--codec module:function)"
            )
        height, width, _ = image.shape
        return {"name": "image", "height": height, "width": width}
    columns = [{"name": each.name, "datatype": DATATYPES[each.dtype], "shape": list(each.shape)} for each in inputs]
    return {"name": "tensor", "columns": columns}


def load_codec(spec: NamedSpec, job: NewModelJob, folder: Path) -> Codec[object]:
    """Returns the codec, after copying its tokenizer into the model folder.

    Raises InputError for a tokenizer that it does not use, and for a maximum length of images.
    """
    if job.max_length is not None and spec["name"] == IMAGE:
        raise InputError(f"--max-length {job.max_length}: images have no length in tokens")
    if make_codec(spec).reads_tokenizer:
        copy_tokenizer(job.tokenizer or job.backbone, folder)
    elif job.tokenizer is not None:
        raise InputError(f"--tokenizer {job.tokenizer}: the codec {spec['name']} uses no tokenizer")
    return find_codec(spec, folder)


TASKS = (LabelTask.name, RegressionTask.name, PoseTask.name, SegmentationTask.name)
"""Tasks that are made from the data."""
BY_DATA = (LabelTask.name, RegressionTask.name)
"""Those that do not depend on the network's inputs."""


def task_for(job: TrainJob, data: LabelledRows, inputs: Boundary) -> Task:
    """Returns the task of a model with these inputs.

    Raises DataError for labels that do not fit the task, and InputError for an unknown task, inputs that do not fit it,
    or joints that cannot be mirrored although images are.
    """
    if job.task in TASKS:
        task = _task_of_data(job.task, data, inputs, job.source)
    else:
        task = find_task(_own(job.task, "task", f"{', '.join(TASKS)} are allowed as well"))
    mirrors = job.augmentation is not None and job.augmentation.mirror
    if mirrors and isinstance(task, PoseTask) and len(task.joint_names) > 1 and not task.mirror_pairs:
        raise InputError(
            f"--augment mirrors images, but no joints are named as left and right of a pair: "
            f"{', '.join(task.joint_names)}; rename them, or leave --augment out"
        )
    return task


def _task_of_data(name: str, data: LabelledRows, inputs: Boundary, source: str) -> Task:
    """Returns one of `TASKS`.

    For a regression, an error is completely wrong if it equals the range of the labels. Heatmaps of poses have a
    quarter of the image's side (Xiao et al. 2018), and joints a tolerance of a tenth.
    """
    names = data.part_names
    if name == LabelTask.name:
        if names:
            raise DataError(f"{source}: rows have joints or class maps, which need --task pose or segmentation")
        if len(data.label_names) < 2:
            raise DataError(f"{source}: only one class, {data.labels[0]!r}; a classifier needs at least two")
        return LabelTask(data.label_names)
    if name == RegressionTask.name:
        numbers = RegressionTask(scale=1.0).targets(data.labels)
        scale = float(numbers.max()) - float(numbers.min())
        if not scale:
            raise DataError(f"{source}: every label is {data.labels[0]}; different numbers are needed")
        return find_task({"name": name, "scale": scale, "offset": float(numbers.mean())})
    if not takes_images(inputs):
        raise InputError(f"--task {name} is for images; the network takes {inputs[0].name!r}")
    height, width, _ = inputs[0].shape
    if name == SegmentationTask.name:
        if not names or data.sides is not None:
            raise DataError(f"{source}: segmentation needs class maps and a table of classes (--classes)")
        ignored = [each for each in names if each.lower() in IGNORED]
        return SegmentationTask(names, height=height, width=width, ignored=ignored)
    if data.sides is None:
        raise DataError(f"{source}: poses need a table of joints (--joints)")
    if height != width:
        raise DataError(f"poses need square images; the network takes {width} x {height}")
    pairs, heatmap_side, tolerance = _mirror_pairs(names), -(-height // HEATMAP_SHARE), height / TOLERANCE_SHARE
    return PoseTask(names, image_side=height, heatmap_side=heatmap_side, tolerance=tolerance, mirror_pairs=pairs)


def _mirror_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of joints whose names, perhaps in camel case, differ only by left and right, or l and r."""
    words_of = {name: tuple(word.lower() for word in WORD.findall(name)) for name in names}
    by_words = {words: name for name, words in words_of.items()}
    rights = (
        by_words.get(tuple("r" if word == "l" else re.sub("^left|left$", "right", word) for word in words_of[name]))
        for name in names
    )
    left_of = {right: left for left, right in zip(names, rights, strict=True) if right not in (None, left)}
    return [(left, right) for right, left in left_of.items() if right is not None]


def _own(name: str, option: str, others: str) -> NamedSpec:
    if not is_own(name):
        raise InputError(f"--{option} {name!r}: it must be your own module:function; {others}")
    return {"name": name}


def chain_models(folders: Sequence[Path], out: Path, *, name: str | None = None) -> ModelCard:
    """Writes a chain of these models, the smallest first, into `out`, and replaces a chain that is there.

    The chain refers to the models' folders by relative paths, and copies nothing. Raises InputError or ModelFolderError
    for models that cannot be chained, are not calibrated, or lack a file of their codec.

    `name`: the model name in URLs; None: the last model's name.
    """
    members = [ModelFolder(folder=folder, card=read_card(folder)) for folder in folders]
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise InputError(f"{out} is one of the chain's models: a chain needs its own folder")
    if (out / CARD_FILE).is_file() and read_card(out).family != CHAIN:
        raise InputError(f"{out} contains a single model: a chain needs its own folder")
    card = chain_card(name or members[-1].card.name, out, members, provenance=provenance())
    for member in members:
        find_codec(member.card.codec, member.folder)
        read_calibration(member.folder)
    with replacing_model(out) as made:
        (made / CARD_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return card


def run_chain(job: ChainJob) -> None:
    """Writes the chain, and prints its networks."""
    card = chain_models(job.models, job.out, name=job.name)
    chain = card.chain
    bounds = list(zip(chain.names, chain.starts, chain.bounds, strict=True))
    lines = [
        f"{name}: blocks {first} to {end - 1}, "
        + ("the reference" if end == chain.bounds[-1] else f"its end is ramp {end - 1}")
        for name, first, end in bounds
    ]
    networks = [{"name": name, "first": first, "end": end} for name, first, end in bounds]
    document = {"name": card.name, "networks": networks, "ramps": list(card.ramps)}
    next_step = f"chain: {job.out}; next: {calibrate_command(job.out)}"
    print_result(document, lines=[*lines, next_step], as_json=job.as_json)
