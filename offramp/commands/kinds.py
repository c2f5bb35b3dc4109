"""Chooses codec and task of a new model: as asked for, else by its network and its data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from earlyexit.codecs import CODECS, find_codec, make_codec
from earlyexit.codecs.base import Codec
from earlyexit.data.rows import IMAGE, PAIR, TEXT, LabelledRows
from earlyexit.errors import DataError, InputError
from earlyexit.named import NamedSpec, is_own
from earlyexit.network.boundary import Boundary, takes_images
from earlyexit.network.checkpoint import copy_tokenizer
from earlyexit.network.store import CHAIN
from earlyexit.tasks import find_task
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.segmentation import SegmentationTask
from offramp.commands.jobs import NewModel, TrainJob

DATATYPES = {"float": "FP32", "int32": "INT32", "uint8": "UINT8"}
"""Datatypes of a network's inputs, by the names of the v2 protocol."""
HEATMAP_SHARE, TOLERANCE_SHARE = 4, 10
"""Divisors of an image's side: for the side of a heatmap, and for the tolerance of a joint's place."""
IGNORED = ("unlabelled", "unlabeled", "void", "ignored")
"""Names of classes, in lower case, that are ignored in losses and figures."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")
"""A word of a joint's name."""
TOKEN_TYPES = ("token_types", "token_type_ids")
"""Names of the input that distinguishes the texts of a pair."""


def codec_for(job: NewModel, inputs: Boundary, data: LabelledRows, *, longest: int) -> NamedSpec:
    """Returns the codec of a network that takes these inputs, of at most `longest` tokens.

    Raises InputError for what `--codec` cannot be, and where a network for texts brings no tokenizer, or takes what
    texts do not give; ModelFolderError for a codec of one's own that cannot be made, or that takes no `max_length`
    where one is given.
    """
    if job.codec is not None:
        asked = {} if job.max_length is None else {"max_length": job.max_length}
        return make_codec({**_own(job.codec, "codec", [name for name in CODECS if name != CHAIN]), **asked}).spec()
    names = data.kind
    if names in ((TEXT,), (TEXT, PAIR)):
        if job.tokenizer is None and (is_own(job.backbone) or Path(job.backbone).suffix == ".onnx"):
            raise InputError(f"{job.backbone} brings no tokenizer: --tokenizer names one, minilm for instance")
        spec = {"name": names[-1], "max_length": job.max_length or longest}
        types = _has_token_types(inputs, job.backbone)
        return spec if names[-1] == TEXT else spec | {"token_types": types}
    if names == (IMAGE,):
        image = inputs[0]
        if image.dtype != "uint8" or len(image.shape) != 3 or image.shape[-1] != 3:
            raise InputError(
                f"{job.backbone} takes {image.name!r}, {image.dtype} of the shape {list(image.shape)}, and the data "
                "holds images: (height, width, 3) of uint8 is needed, or a codec of your own (--codec module:function)"
            )
        height, width, _ = image.shape
        return {"name": "image", "height": height, "width": width}
    columns = [{"name": each.name, "datatype": DATATYPES[each.dtype], "shape": list(each.shape)} for each in inputs]
    return {"name": "tensor", "columns": columns}


def load_codec(spec: NamedSpec, job: NewModel, folder: Path) -> Codec[object]:
    """Returns the codec, after copying the tokenizer that it may need into the model's folder.

    Raises InputError for `--tokenizer` where it reads none.
    """
    if make_codec(spec).reads_tokenizer:
        copy_tokenizer(job.tokenizer or job.backbone, folder)
    elif job.tokenizer is not None:
        raise InputError(f"--tokenizer {job.tokenizer}: the codec {spec['name']} reads none")
    return find_codec(spec, folder)


def task_for(job: TrainJob, data: LabelledRows, inputs: Boundary) -> Task:
    """Returns the task of a model that takes these inputs.

    Raises DataError for labels that it cannot be trained on, InputError for others, and for joints that cannot be
    mirrored where images are.
    """
    if job.task in TASK_MAKERS:
        task = TASK_MAKERS[job.task](data, inputs, job.source or "the data")
    else:
        task = find_task(_own(job.task, "task", TASK_MAKERS))
    mirrors = job.augmentation is not None and job.augmentation.mirror
    if mirrors and isinstance(task, PoseTask) and len(task.joint_names) > 1 and not task.mirror_pairs:
        raise InputError(
            f"--augment mirrors images, and no two joints are called left and right of the same: "
            f"{', '.join(task.joint_names)}; call them so, or leave it out"
        )
    return task


def _label(data: LabelledRows, _: Boundary, source: str) -> LabelTask:
    if data.part_names:
        raise DataError(f"{source}: rows have joints, or maps of classes: --task pose or segmentation answers so")
    if len(data.label_names) < 2:
        raise DataError(f"{source}: only one class, {data.labels[0]!r}; a classifier needs at least two")
    return LabelTask(data.label_names)


def _pose(data: LabelledRows, inputs: Boundary, source: str) -> PoseTask:
    """Heatmaps have a quarter of the image's side (Xiao et al. 2018); the tolerance is a tenth of it."""
    height, width = _image_sides(inputs, PoseTask.name)
    if data.sides is None:
        raise DataError(f"{source}: a pose is of joints; --joints names their table")
    if height != width:
        raise DataError(f"poses are in square images; the network takes {width} x {height}")
    return PoseTask(
        data.part_names,
        image_side=height,
        heatmap_side=-(-height // HEATMAP_SHARE),
        tolerance=height / TOLERANCE_SHARE,
        mirror_pairs=_mirror_pairs(data.part_names),
    )


def _segmentation(data: LabelledRows, inputs: Boundary, source: str) -> SegmentationTask:
    height, width = _image_sides(inputs, SegmentationTask.name)
    if not data.part_names or data.sides is not None:
        raise DataError(f"{source}: segmentation is by maps of classes; --classes names their table")
    ignored = [name for name in data.part_names if name.lower() in IGNORED]
    return SegmentationTask(data.part_names, height=height, width=width, ignored=ignored)


def _image_sides(inputs: Boundary, task: str) -> tuple[int, int]:
    if not takes_images(inputs):
        raise InputError(f"--task {task} is of images; the network takes {inputs[0].name!r}")
    height, width, _ = inputs[0].shape
    return height, width


def _mirror_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns pairs of joints whose names differ only by left and right, or l and r."""
    by_words = {_words(name): name for name in names}
    rights = (
        by_words.get(tuple("r" if word == "l" else re.sub("^left|left$", "right", word) for word in _words(name)))
        for name in names
    )
    left_of = {right: left for left, right in zip(names, rights, strict=True) if right not in (None, left)}
    return [(left, right) for right, left in left_of.items() if right is not None]


def _words(name: str) -> tuple[str, ...]:
    """Returns the words of a name in lower case; a capital after a small letter starts a word, too."""
    return tuple(word.lower() for word in WORD.findall(name))


def _regression(data: LabelledRows, _: Boundary, source: str) -> RegressionTask:
    """The scale is the range of the labels: an error of that size counts as wholly wrong."""
    numbers = RegressionTask(scale=1.0).targets(data.labels)
    reach = float(numbers.max() - numbers.min())
    if not reach:
        raise DataError(f"{source}: every label is {data.labels[0]}; numbers that differ are needed")
    return RegressionTask(scale=reach, offset=float(numbers.mean()))


# Task -> what makes one of data, of what a network takes, and of the data's name.
TASK_MAKERS: Mapping[str, Callable[[LabelledRows, Boundary, str], Task]] = {
    LabelTask.name: _label,
    RegressionTask.name: _regression,
    PoseTask.name: _pose,
    SegmentationTask.name: _segmentation,
}
BY_DATA = (LabelTask.name, RegressionTask.name)
"""Tasks that depend on the data only, not on the network's inputs."""


def _has_token_types(inputs: Boundary, backbone: str) -> bool:
    """Returns whether a network for texts takes token types beside its tokens; raises InputError for other inputs."""
    others = [each.name for each in inputs[1:]]
    strange = [name for name in others if name not in TOKEN_TYPES]
    if strange:
        raise InputError(
            f"{backbone} takes {strange[0]!r} beside {inputs[0].name!r}, which texts do not give; masks are called "
            "attention_mask, positions position_ids, types of tokens token_type_ids"
        )
    return bool(others)


def _own(name: str, option: str, known: Iterable[str]) -> NamedSpec:
    if not is_own(name):
        raise InputError(f"--{option} {name!r}; {', '.join(known)} follow from the data, your own is module:function")
    return {"name": name}
