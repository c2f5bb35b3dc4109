"""ONNX files and torch modules, read and cut into the blocks of a backbone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from earlyexit.data.rows import IMAGE, PAIR, TEXT, LabelledRows
from earlyexit.errors import DataError, InputError, ModelFolderError
from earlyexit.named import NamedSpec, is_own
from earlyexit.network.boundary import Boundary, DType, TensorSpec, why_no_exit

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.data.rows import LabelledRows
    from earlyexit.families.base import Pretrained
    from earlyexit.foreign.dataflow import Dataflow, Site
    from earlyexit.foreign.onnx_file import OnnxFile
    from earlyexit.foreign.onnx_source import GraphOptions
    from earlyexit.foreign.torch_module import TorchGraph
    from earlyexit.foreign.torch_pieces import Traced
    from earlyexit.network.wire import Encoded
    from earlyexit.tasks.base import ValueArray
    from offramp.commands.jobs import InjectJob


def check_names(job: InjectJob, data: LabelledRows, num_outputs: int) -> None:
    """Raise DataError where labels do not fit a model of so many answers, and ramps are to learn from them."""
    where = job.source or "the data"
    if job.names is not None:
        _check_named(job, job.names, data, num_outputs)
    elif not (job.from_answers or _are_numbers(data, num_outputs)) and len(data.label_names) != num_outputs:
        raise DataError(
            f"{where}: {len(data.label_names)} different labels, and the model has {num_outputs} answers; --labels "
            "FILE names all of them in the model's order, a line each"
        )


def answer_names(job: InjectJob, data: LabelledRows, answers: Tensor, num_outputs: int) -> tuple[str, ...]:
    """As asked for; else the data's labels, in the order in which the model answers most rows as they are labelled.

    The numbers 0 to C - 1 where rows have no labels, or none but these; and where `check_names` lets other labels pass.
    """
    if job.names is not None:
        return job.names
    labels = data.label_names
    if _are_numbers(data, num_outputs) or len(labels) != num_outputs:
        return tuple(map(str, range(num_outputs)))
    return _in_the_models_order(labels, np.array([labels.index(label) for label in data.labels]), answers.numpy())


def _are_numbers(data: LabelledRows, num_outputs: int) -> bool:
    return set(data.label_names) <= {*map(str, range(num_outputs)), ""}


def _check_named(job: InjectJob, names: tuple[str, ...], data: LabelledRows, num_outputs: int) -> None:
    if len(names) != num_outputs or len(set(names)) < num_outputs:
        raise DataError(f"--labels: {len(set(names))} different names; the model has {num_outputs} answers")
    unknown = sorted(set(data.label_names) - {*names, ""})
    if unknown and not job.from_answers:
        raise DataError(f"{job.source or 'the data'}: {unknown[0]!r} is none of the names in --labels")


def _in_the_models_order(labels: tuple[str, ...], label_N: ValueArray, answer_N: ValueArray) -> tuple[str, ...]:
    """The assignment of labels to outputs under which most rows are answered right; among equals the alphabet's."""
    from scipy.optimize import linear_sum_assignment

    counts_CC = np.eye(len(labels)) / 2
    np.add.at(counts_CC, (answer_N, label_N), 1)
    _, label_of_C = linear_sum_assignment(counts_CC, maximize=True)
    return tuple(labels[k] for k in label_of_C)


TEXT_LENGTH = 512
"""Tokens, where a graph does not say how long its inputs may be."""
CHANNELS = 3


class Foreign(Protocol):
    """A model that was read, for data of one kind."""

    @property
    def family(self) -> str: ...
    @property
    def num_operators(self) -> int: ...
    @property
    def inputs(self) -> Boundary:
        """What a codec is to give."""
        ...

    @property
    def longest(self) -> int:
        """In tokens; 1 where inputs have none."""
        ...

    def sites(self, codec: NamedSpec) -> tuple[Site, ...]:
        """Where it can be cut on the way to its answer, with their shares of its time."""
        ...

    def refused(self, sites: Sequence[Site], codec: NamedSpec) -> Mapping[tuple[str, ...], str]:
        """Of those whose tensors have no row per input, or per token, of a type that crosses: the tensors, and why."""
        ...

    def take(
        self, cuts: Sequence[Sequence[str]], codec: NamedSpec, folder: Path, rows: Sequence[Encoded] = ()
    ) -> Pretrained:
        """Its backbone in blocks, tried with rows of the data; raises ModelFolderError for what cannot cross."""
        ...


def read_foreign(job: InjectJob, data: LabelledRows) -> Foreign:
    """Raises InputError for what is no model, and what reading one raises."""
    if is_own(job.backbone):
        from earlyexit.foreign.torch_module import read_torch

        return TorchForeign(graph=read_torch(job.backbone), job=job, pairs=PAIR in data.columns)
    from earlyexit.foreign.onnx_file import OPEN_SIZE, read_onnx

    timed = min(OPEN_SIZE, job.max_length or OPEN_SIZE)  # longer texts than it takes could not be timed
    return OnnxForeign(file=read_onnx(Path(job.backbone), open_size=timed), job=job, kind=data.kind)


@dataclass(frozen=True, kw_only=True)
class TorchForeign:
    """A torch module, by torch.export."""

    graph: TorchGraph
    job: InjectJob
    pairs: bool
    family: str = "exported"

    @property
    def num_operators(self) -> int:
        return len(self.graph.flow.operators)

    @property
    def inputs(self) -> Boundary:
        return tuple(map(self._traced.input_spec, self._traced.carried))

    @property
    def longest(self) -> int:
        return (self._traced.most_tokens or TEXT_LENGTH) if self.inputs[0].per_token else 1

    def sites(self, codec: NamedSpec) -> tuple[Site, ...]:
        from earlyexit.foreign.torch_backbone import output_of
        from earlyexit.foreign.torch_module import time_torch

        flow = replace(self.graph.flow, outputs=(output_of(self.graph, self.job.output),))
        graph = replace(self.graph, flow=flow)
        return _timed_sites(flow, lambda sites: time_torch(graph, sites), sets=self.job.sets)

    def refused(self, sites: Sequence[Site], codec: NamedSpec) -> Mapping[tuple[str, ...], str]:
        found: dict[tuple[str, ...], str] = {}
        for site in sites:
            try:
                if why := why_no_exit([self._traced.spec(tensor) for tensor in site.tensors]):
                    found[site.tensors] = why
            except ModelFolderError as error:
                found[site.tensors] = str(error)
        return found

    def take(
        self, cuts: Sequence[Sequence[str]], codec: NamedSpec, folder: Path, rows: Sequence[Encoded] = ()
    ) -> Pretrained:
        from earlyexit.foreign.torch_backbone import take_module

        longest = codec.get("max_length")
        return take_module(self.graph, self._traced, cuts, self._answer, max_length=longest, rows=rows)

    @cached_property
    def _answer(self) -> str:
        from earlyexit.foreign.torch_backbone import answer_of

        return answer_of(self.graph, self.job.output)

    @cached_property
    def _traced(self) -> Traced:
        from earlyexit.foreign.torch_backbone import traced_inputs

        assert self._answer  # may add to the graph, which is then looked at
        return traced_inputs(self.graph, token_types=self.pairs)


@dataclass(frozen=True, kw_only=True)
class OnnxForeign:
    """An ONNX file."""

    file: OnnxFile
    job: InjectJob
    kind: tuple[str, ...]
    """The data's kind, as `LabelledRows.kind` has it."""
    family: str = "onnx"

    @property
    def num_operators(self) -> int:
        return len(self.file.flow.operators)

    @property
    def inputs(self) -> Boundary:
        infos = [each for each in self.file.proto.graph.input if each.name in self.file.flow.inputs]
        if self.kind == (IMAGE,):
            return (self._pixels(infos[0]),)
        if TEXT in self.kind:
            types = [each for each in infos if _is_of(each, "type", "segment")]
            ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True)
            return (ids, *[replace(ids, name="token_types")] * (PAIR in self.kind and bool(types)))
        return tuple(map(_column, infos))

    def _pixels(self, info: Any) -> TensorSpec:
        """Of an image as its codec gives it; graphs take (B, 3, height, width), or the channels last."""
        sides = [size for size in _sizes(info)[1:] if size != CHANNELS]
        height, width = self.job.image_size or (tuple(sides) if len(sides) == 2 else (0, 0))
        if not height or not width:
            raise InputError(
                f"{self.file.path} leaves the size of {info.name!r} open, or takes no images: it is {_sizes(info)}; "
                "--image-size HEIGHTxWIDTH says it"
            )
        return TensorSpec(name="image", shape=(height, width, CHANNELS), dtype="uint8")

    @property
    def longest(self) -> int:
        return TEXT_LENGTH

    def sites(self, codec: NamedSpec) -> tuple[Site, ...]:
        from earlyexit.foreign.onnx_file import time_onnx
        from earlyexit.foreign.onnx_source import answer_of_graph

        outputs = self.file.flow.outputs
        if len(outputs) > 1 or self.job.output is not None:
            outputs = (answer_of_graph(self.file.path, self._options([], codec)),)
        flow = replace(self.file.flow, outputs=outputs)
        file = replace(self.file, flow=flow)
        return _timed_sites(flow, lambda sites: time_onnx(file, sites), sets=self.job.sets)

    def refused(self, sites: Sequence[Site], codec: NamedSpec) -> Mapping[tuple[str, ...], str]:
        from earlyexit.foreign.onnx_source import why_not_at

        return why_not_at(self.file.path, self._options([site.tensors for site in sites], codec))

    def take(
        self, cuts: Sequence[Sequence[str]], codec: NamedSpec, folder: Path, rows: Sequence[Encoded] = ()
    ) -> Pretrained:
        from earlyexit.foreign.onnx_source import take_graph

        return take_graph(self.file.path, folder, self._options(cuts, codec), rows)

    def _options(self, cuts: Sequence[Sequence[str]], codec: NamedSpec) -> GraphOptions:
        from earlyexit.foreign.onnx_source import GraphOptions

        return GraphOptions(cuts=cuts, codec=codec, pixels=self.job.pixels, output=self.job.output)


def _timed_sites(
    flow: Dataflow, timed: Callable[[Sequence[Site]], tuple[Site, ...]], *, sets: bool
) -> tuple[Site, ...]:
    from earlyexit.foreign.cut_sets import with_sets
    from earlyexit.foreign.dataflow import find_sites

    sites = find_sites(flow)
    sites = timed(sites) if sites else sites
    found = with_sets(flow, sites) if sets else sites
    return timed(found) if len(found) > len(sites) else found


def _sizes(info: Any) -> list[int]:
    """Of an input's axes; 0 where one is open."""
    return [axis.dim_value for axis in info.type.tensor_type.shape.dim]


def _is_of(info: Any, *parts: str) -> bool:
    return any(part in info.name.lower() for part in parts)


def _column(info: Any) -> TensorSpec:
    """Of arrays, as they are in the data."""
    import onnx

    dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
    row = _sizes(info)[1:]
    if not all(row):
        raise InputError(f"the size of {info.name!r} is open: it is {_sizes(info)}; arrays have one size")
    kinds: dict[str, DType] = {"f": "float", "i": "int32", "u": "int32"}
    if dtype.kind not in kinds:
        raise InputError(f"{info.name!r} is {dtype}; a model takes floating point or whole numbers")
    return TensorSpec(name=info.name, shape=tuple(row), dtype="uint8" if dtype == np.uint8 else kinds[dtype.kind])
