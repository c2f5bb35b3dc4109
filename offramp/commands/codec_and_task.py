"""Chooses the codec and the task of a new model: those of the options, or those that fit its network and data."""

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
from offramp.commands.jobs import NewModelJob, TrainJob

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
        return make_codec({**_own(job.codec, "codec", [name for name in CODECS if name != CHAIN]), **options}).spec()
    names = data.kind
    if names in ((TEXT,), (TEXT, PAIR)):
        if job.tokenizer is None and (is_own(job.backbone) or Path(job.backbone).suffix == ".onnx"):
            raise InputError(f"{job.backbone} has no tokenizer: choose one with --tokenizer, such as minilm")
        spec = {"name": names[-1], "max_length": job.max_length or longest}
        types = _has_token_types(inputs, job.backbone)
        return spec if names[-1] == TEXT else spec | {"token_types": types}
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
    """Returns the codec, after copying its tokenizer into the model folder; raises InputError if it uses none."""
    if make_codec(spec).reads_tokenizer:
        copy_tokenizer(job.tokenizer or job.backbone, folder)
    elif job.tokenizer is not None:
        raise InputError(f"--tokenizer {job.tokenizer}: the codec {spec['name']} uses no tokenizer")
    return find_codec(spec, folder)


def task_for(job: TrainJob, data: LabelledRows, inputs: Boundary) -> Task:
    """Returns the task of a model with these inputs.

    Raises DataError for labels that do not fit the task, and InputError for an unknown task, inputs that do not fit it,
    or joints that cannot be mirrored although images are.
    """
    if job.task in TASK_MAKERS:
        task = TASK_MAKERS[job.task](data, inputs, job.source or "the data")
    else:
        task = find_task(_own(job.task, "task", TASK_MAKERS))
    mirrors = job.augmentation is not None and job.augmentation.mirror
    if mirrors and isinstance(task, PoseTask) and len(task.joint_names) > 1 and not task.mirror_pairs:
        raise InputError(
            f"--augment mirrors images, but no joints are named as left and right of a pair: "
            f"{', '.join(task.joint_names)}; rename them, or leave --augment out"
        )
    return task


def _label(data: LabelledRows, _: Boundary, source: str) -> LabelTask:
    if data.part_names:
        raise DataError(f"{source}: rows have joints or class maps, which need --task pose or segmentation")
    if len(data.label_names) < 2:
        raise DataError(f"{source}: only one class, {data.labels[0]!r}; a classifier needs at least two")
    return LabelTask(data.label_names)


def _pose(data: LabelledRows, inputs: Boundary, source: str) -> PoseTask:
    """Returns the task with heatmaps of a quarter of the image's side (Xiao et al. 2018) and a tolerance of a tenth."""
    height, width = _image_sides(inputs, PoseTask.name)
    if data.sides is None:
        raise DataError(f"{source}: poses need a table of joints (--joints)")
    if height != width:
        raise DataError(f"poses need square images; the network takes {width} x {height}")
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
        raise DataError(f"{source}: segmentation needs class maps and a table of classes (--classes)")
    ignored = [name for name in data.part_names if name.lower() in IGNORED]
    return SegmentationTask(data.part_names, height=height, width=width, ignored=ignored)


def _image_sides(inputs: Boundary, task: str) -> tuple[int, int]:
    if not takes_images(inputs):
        raise InputError(f"--task {task} is for images; the network takes {inputs[0].name!r}")
    height, width, _ = inputs[0].shape
    return height, width


def _mirror_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of joints whose names differ only by left and right, or l and r."""
    by_words = {_words(name): name for name in names}
    rights = (
        by_words.get(tuple("r" if word == "l" else re.sub("^left|left$", "right", word) for word in _words(name)))
        for name in names
    )
    left_of = {right: left for left, right in zip(names, rights, strict=True) if right not in (None, left)}
    return [(left, right) for right, left in left_of.items() if right is not None]


def _words(name: str) -> tuple[str, ...]:
    """Returns the words of a name in lower case; names may be in camel case."""
    return tuple(word.lower() for word in WORD.findall(name))


def _regression(data: LabelledRows, _: Boundary, source: str) -> RegressionTask:
    """Returns the task with the range of the labels as the scale: an error of this size is completely wrong."""
    numbers = RegressionTask(scale=1.0).targets(data.labels)
    scale = float(numbers.max() - numbers.min())
    if not scale:
        raise DataError(f"{source}: every label is {data.labels[0]}; different numbers are needed")
    return RegressionTask(scale=scale, offset=float(numbers.mean()))


TASK_MAKERS: Mapping[str, Callable[[LabelledRows, Boundary, str], Task]] = {
    LabelTask.name: _label,
    RegressionTask.name: _regression,
    PoseTask.name: _pose,
    SegmentationTask.name: _segmentation,
}
"""Functions that make a task from the data, the network's inputs and the name of the data, by the task's name."""
BY_DATA = (LabelTask.name, RegressionTask.name)
"""Tasks that depend only on the data, not on the network's inputs."""


def _has_token_types(inputs: Boundary, backbone: str) -> bool:
    """Returns whether a network for texts takes token types besides tokens; raises InputError for other inputs."""
    others = [each.name for each in inputs[1:]]
    unknown = [name for name in others if name not in TOKEN_TYPES]
    if unknown:
        raise InputError(
            f"{backbone} takes {unknown[0]!r} besides {inputs[0].name!r}, which is not derived from texts; masks must "
            "be named attention_mask, positions position_ids, and token types token_type_ids"
        )
    return bool(others)


def _own(name: str, option: str, known: Iterable[str]) -> NamedSpec:
    if not is_own(name):
        raise InputError(
            f"--{option} {name!r}: it must be your own module:function; {', '.join(known)} follow from the data"
        )
    return {"name": name}
