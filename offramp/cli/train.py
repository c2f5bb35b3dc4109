"""`offramp train`: a model with ramps, from a checkpoint and labelled rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError
from offramp.cli.options import (
    DTYPES,
    HEAD_STYLES,
    POOLINGS,
    RAMP_STYLES,
    AsJson,
    Classes,
    DataFile,
    Dtype,
    Joints,
    LabelColumn,
    PairColumn,
    Part,
    Seed,
    TextColumn,
    above_zero,
    choice,
    completes,
    integers,
)

if TYPE_CHECKING:
    from earlyexit.data.rows import LabelledRows
    from earlyexit.network.checkpoint import RampOptions
    from earlyexit.network.model import EarlyExitModel
    from earlyexit.training.augmentation import Augmentation
    from offramp.commands.train_job import TrainJob


def chain(
    models: Annotated[
        list[Path], typer.Argument(help="Folders of calibrated models, the smallest first; the last is the reference.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the chain to; it names the models' folders.")],
    name: Annotated[str | None, typer.Option(help="Model name in URLs; default: the last model's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put small models before a large one: inputs that a model is not sure of go on to the next."""
    from offramp.commands.chain import chain_models

    card = chain_models(models, out, name=name)
    found = card.chain
    if as_json:
        networks = [
            {"name": each, "first": first, "end": end}
            for each, first, end in zip(found.names, found.starts, found.bounds, strict=True)
        ]
        print(json.dumps({"name": card.name, "networks": networks, "ramps": list(card.ramps)}))
        return
    for place, each in enumerate(found.names):
        role = "the reference" if place == len(found.names) - 1 else f"its end is ramp {found.ends[place]}"
        print(f"{each}: blocks {found.starts[place]} to {found.ends[place]}, {role}")
    print(f"chain: {out}; next: offramp calibrate {out} --data VALIDATION_FILE")


Backbone = Annotated[
    str,
    typer.Option(
        help="Checkpoint folder or hub name, 'minilm' or 'mpnet' (packaged), state dict (.th, .pt, .pth), "
        "configuration of an untrained network (.json), or your own module:function."
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Checkpoint folder, hub name, minilm, mpnet or tokenizer.json; default: the backbone's."),
]
Codec = Annotated[str | None, typer.Option(help="Your own, module:function; default: as the network and the data say.")]
TaskName = Annotated[
    str | None,
    typer.Option(
        help="label (the default), regression, pose (--joints), segmentation (--classes), token (the default of "
        "decoders' and encoder-decoders' files and folders), or your own module:function."
    ),
]
Answers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Of decoders: ramps learn from so many tokens of the model's own answers to the rows; default: the rows.",
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Of decoders: rows are what a user says, by the chat template.")]
RampStyle = Annotated[
    str,
    typer.Option(
        help="light (pooling and linear), mlp (one hidden layer of 64), pooler (DeeBERT's), reduced (two layers), "
        "conv (over maps), bridge (later regions' first blocks, before a head like the full model's), or of decoders, "
        "whose head ramps share: normed, or adapted (two thin layers before it, the default).",
        **completes(RAMP_STYLES),
    ),
]
HeadStyle = Annotated[
    str | None,
    typer.Option(
        help="Of a full model's head that no checkpoint brought: light, mlp, or for maps maps or deconv; default: the "
        "ramps', after bridges light or maps.",
        **completes(HEAD_STYLES),
    ),
]
PoolingOption = Annotated[
    str, typer.Option(help="mean (of tokens, or a map), first (token) or grid (of a map).", **completes(POOLINGS))
]
Ramps = Annotated[str | None, typer.Option(help="Blocks that get a ramp, like 0,2,4; default: all but the last.")]
Joint = Annotated[
    bool,
    typer.Option(
        "--joint",
        help="Train the whole model, not only its ramps: minutes in place of seconds, worth it where no checkpoint was "
        "trained for your labels (on TREC's questions 94.8 % right, not 89.0, after 3.3 blocks not 4.6).",
    ),
]
Imitate = Annotated[
    bool,
    typer.Option(
        "--imitate",
        help="Have ramps learn of the full model's outputs, not of the labels; with --joint all exits, of the network "
        "as it came.",
    ),
]
Augment = Annotated[
    bool, typer.Option("--augment", help="With --joint: shift and mirror images anew each time they are seen.")
]
Patience = Annotated[
    int | None,
    typer.Option(
        min=1, help="With --joint: stop after so many epochs without progress, told by a tenth of the rows kept apart."
    ),
]
HoldOut = Annotated[
    float | None, typer.Option(help="Share of each label's rows to keep from training: held_out in --out.")
]


def train(
    data: DataFile,
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    backbone: Backbone = "minilm",
    tokenizer: Tokenizer = None,
    name: Annotated[str | None, typer.Option(help="Model name in URLs; default: the folder's.")] = None,
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    part: Part = None,
    joints: Joints = None,
    classes: Classes = None,
    task: TaskName = None,
    answers: Answers = None,
    chat: Chat = False,
    codec: Codec = None,
    ramp_style: RampStyle = "light",
    head_style: HeadStyle = None,
    pooling: PoolingOption = "mean",
    ramps: Ramps = None,
    joint: Joint = False,
    imitate: Imitate = False,
    augment: Augment = False,
    patience: Patience = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest input in tokens.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the rows.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Inputs of one step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(callback=above_zero)] = None,
    dtype: Dtype = "float32",
    hold_out: HoldOut = None,
    seed: Seed = 0,
) -> None:
    """Train a model's ramps (on a frozen backbone, or --joint with it)."""
    from offramp.commands.train_job import TOKEN, TrainJob, default_task

    task = task or default_task(backbone)
    texts = text_column, pair_column, None if task == TOKEN else label_column
    job = TrainJob(
        backbone=_place(backbone),
        tokenizer=tokenizer and _place(tokenizer),
        name=name or out.resolve().name,
        codec=codec,
        task=task,
        answers=answers,
        chat=chat,
        ramps=_ramp_options(ramp_style, head_style, pooling, ramps),
        joint=joint,
        imitate=imitate,
        augmentation=_augmentation(augment),
        patience=patience,
        max_length=max_length,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        dtype=choice("dtype", dtype, DTYPES),
        seed=seed,
        source=str(data),
    )
    rows = _rows(data, texts, part=part, joints=joints, classes=classes)
    _train(job, rows if hold_out is None else _hold_out(rows, hold_out, seed, out), out)


def _rows(path: Path, texts: tuple[str, str | None, str | None], **options: Any) -> LabelledRows:
    from earlyexit.data.rows import read_labelled

    text, pair, label = texts
    return read_labelled(path, text_column=text, pair_column=pair, label_column=label, **options)


def _train(job: TrainJob, rows: LabelledRows, out: Path) -> None:
    from offramp.commands import train as training
    from offramp.commands.progress import progress_bars

    with progress_bars() as progress:
        _print_trained(training.train(job, rows, out, progress=progress), len(rows), out)


def _place(name: str) -> str:
    from offramp.commands.train import resolve_backbone

    return resolve_backbone(name)


def _augmentation(asked: bool) -> Augmentation | None:
    from earlyexit.training.augmentation import Augmentation

    return Augmentation() if asked else None


def _ramp_options(style: str, head: str | None, pooling: str, blocks: str | None) -> RampOptions:
    from earlyexit.network.checkpoint import RampOptions

    return RampOptions(
        style=choice("ramp-style", style, RAMP_STYLES),
        head_style=choice("head-style", head, HEAD_STYLES),
        pooling=choice("pooling", pooling, POOLINGS),
        at=None if blocks is None else integers("ramps", blocks),
    )


def _print_trained(model: EarlyExitModel, num_rows: int, out: Path) -> None:
    from offramp.commands.train import head_in_words

    labels = f" {model.task.num_outputs} labels," if model.task.name == "label" else ""
    print(f"{num_rows} rows,{labels} ramps after blocks {list(model.ramp_indices)}: {out}")
    if model.task.name != "token":
        print(f"head of the full model: {head_in_words(model)}")


def _hold_out(rows: LabelledRows, share: float, seed: int, out: Path) -> LabelledRows:
    """The rows to train on; the others are written where calibration and tests find them."""
    from earlyexit.data.rows import write_labelled
    from offramp.commands.train import HELD_OUT, make_folder

    if not 0 < share < 1:
        raise InputError(f"--hold-out {share:g}; a share between 0 and 1 is needed")
    if rows.part_names:
        raise InputError("--hold-out writes rows and their labels; of images with joints or maps --part names a part")
    learned, held = rows.divide(share, seed)
    make_folder(out)
    written = write_labelled(held, out, HELD_OUT)
    print(f"{len(held)} of {len(rows)} rows held out: {written}")
    return learned
