"""An ONNX graph that nobody here wrote: its blocks are sub-graphs, run by ONNX Runtime.

The file lies in the model's folder, its weights beside it, and neither ever changes. Texts enter it padded, as such
graphs take them; between blocks they are packed, as any model's are.

Tensor legend: B inputs, T tokens of the longest, N tokens of all, H rows, W columns.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.backends.onnx import Sessions, load_runtime, open_session, provider_of
from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.foreign.onnx_config import DTYPES, Axes, Crossing, GraphConfig, GraphInput, Pixels, Size, read_config
from earlyexit.foreign.onnx_parts import (
    WEIGHTS_SUFFIX,
    FileState,
    GraphParts,
    Part,
    fingerprint,
    in_plain_words,
    piece_model,
    read_graph,
    state_of,
)
from earlyexit.network.boundary import Boundary
from earlyexit.network.layers import reorder_linears
from earlyexit.network.layout import Layout
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece, Tensors
from earlyexit.network.split import Segment

Array = npt.NDArray[Any]
TORCH_DTYPES = {"float": torch.float32, "int32": torch.int32, "uint8": torch.uint8}
"""Of what crosses."""


class OnnxBackbone(Backbone):
    """A graph in blocks; consecutive ones without an exit between them are one session.

    Sessions are opened when first prepared or run. Beside those of the plans that are or were prepared last, as many
    are kept as there are blocks: those that probes and training run.
    """

    reorders_linears: ClassVar[bool] = False
    float32_only: ClassVar[bool] = True
    own_segments: ClassVar[str | None] = "earlyexit.foreign.onnx_backbone:graph_segments"

    def __init__(self, config: GraphConfig, folder: Path, state: FileState | None = None) -> None:
        """`folder` holds the graph's file; `state`: of its files, as the configuration was made; None for as they are.

        Raises ModelFolderError where one is missing.
        """
        super().__init__()
        self.config = config
        self.num_blocks = len(config.cuts)
        self.max_length = config.max_length
        self.num_threads = torch.get_num_threads()
        """Of the sessions that are opened from now on."""
        self._folder = folder
        self._state = state or state_of(folder, config.file)
        self._sessions: Sessions[tuple[int, int, str]] = Sessions(self._open, spare=self.num_blocks)

    @property
    def inputs(self) -> Boundary:
        return self.config.boundary(-1)

    def boundary(self, block: int) -> Boundary:
        return self.config.boundary(block)

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        """What the graph takes: pixels as it was trained on them, anything else as it comes."""
        return enter(inputs, self.config.pixels)

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return self.run_blocks(index, index + 1, hidden, layout)

    def run_blocks(self, first: int, end: int, hidden: Tensors, layout: Layout) -> Tensors:
        if first == end:
            return hidden
        piece: _Piece = self._sessions.get((first, end, layout.device.type))
        crossing = {each.name: (each, values) for each, values in zip(self.config.before(first), hidden, strict=True)}
        feeds = {name: fed(*crossing[name], layout) for name in piece.part.inputs if name in crossing}
        of_layout = self.config.layout_inputs
        feeds |= layout_feeds([of_layout[name] for name in piece.part.inputs if name not in crossing], layout)
        feeds |= {name: _sizes(self.config.sizes[name], layout) for name in piece.part.sizes}
        results = dict(zip(piece.outputs, piece.session.run(piece.outputs, feeds), strict=True))
        after = [
            crossing[each.name][1] if each.name in crossing else _taken(each, results[each.name], layout)
            for each in self.config.cuts[end - 1]
        ]
        return tuple(map(self._answer, after)) if end == self.num_blocks else tuple(after)

    def answer_of(self, result: Array, layout: Layout) -> Tensor:
        """What crosses after the last block, of the graph's own answer."""
        [last] = self.config.cuts[-1]
        return self._answer(_taken(last, result, layout))

    def is_ready(self, first: int, end: int, device_type: str) -> bool:
        """Whether blocks first to end - 1 run at once."""
        return self._sessions.is_ready((first, end, device_type))

    def prepare(self, spans: Collection[tuple[int, int]], device_type: str) -> None:
        """Open the sessions of these, each `(first, end)`; others may run at the same time."""
        self._sessions.prepare([(first, end, device_type) for first, end in spans])

    def to_config(self) -> JsonDict:
        return self.config.model_dump(mode="json")

    def sha256(self) -> str:
        """Of the graph and its weights: sessions are opened of the very files that had it."""
        return self.config.sha256

    def write_files(self, folder: Path) -> None:
        for name in (self.config.file, self.config.file + WEIGHTS_SUFFIX):
            source, target = self._folder / name, folder / name
            if not (target.exists() and target.samefile(source)):
                shutil.copyfile(source, target)

    def _answer(self, rows: Tensor) -> Tensor:
        """Logits: the logarithm of probabilities, which is finite though some are 0."""
        if self.config.outputs != "probabilities":
            return rows
        return rows.clamp_min(torch.finfo(torch.float32).tiny).log()

    @cached_property
    def _graph(self) -> Any:
        return read_graph(self._folder, self.config.file)

    @cached_property
    def _parts(self) -> GraphParts:
        return GraphParts(self._graph.graph)

    def _open(self, span: tuple[int, int, str]) -> _Piece:
        """Raises ModelFolderError where the files are no longer those that were checked."""
        self._check_files()
        first, end, device_type = span
        before = {each.name: each for each in self.config.before(first)}
        after = [each for each in self.config.cuts[end - 1] if each.name not in before]
        layout_inputs = self.config.layout_inputs
        part = self._parts.part(before, layout_inputs, [each.name for each in after])
        inputs = [_value_info((before | layout_inputs)[name]) for name in part.inputs]
        inputs += [_size_info(name, self.config.sizes[name]) for name in part.sizes]
        model = piece_model(self._graph, part, self._parts, inputs, map(_value_info, after))
        session = open_graph(model, self._folder, device_type=device_type, num_threads=self.num_threads)
        self._check_files()
        return _Piece(part=part, session=session, outputs=[each.name for each in after])

    def _check_files(self) -> None:
        if state_of(self._folder, self.config.file) != self._state:
            raise ModelFolderError(
                f"{self._folder / self.config.file}, or the weights beside it, changed after the model was loaded: "
                "load it again"
            )


class OnnxGraph(Family):
    """Graphs from files, cut at tensors by their names."""

    name = "onnx"
    lazy_weights = False

    def build(self, config: JsonDict, folder: Path | None = None) -> OnnxBackbone:
        """Raise ModelFolderError where the folder does not hold the graph that the configuration was made for."""
        read = read_config(config)
        if folder is None:
            raise ModelFolderError("an onnx model is a file in a model's folder; it cannot be made of sizes")
        if Path(read.file).name != read.file:
            raise ModelFolderError(f"{read.file!r} is outside the model's folder {folder}")
        state = state_of(folder, read.file)
        if fingerprint(folder, read.file) != read.sha256:
            raise ModelFolderError(
                f"{folder / read.file}, or the weights beside it, are not those that the model was made of: their "
                f"SHA-256 is not {read.sha256[:12]}..."
            )
        load_runtime([])
        return OnnxBackbone(read, folder, state)

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        raise ModelFolderError("ONNX graphs come as files (.onnx)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Consecutive blocks, opened."""

    part: Part
    session: Any
    outputs: list[str]


@dataclass(frozen=True, slots=True)
class _Form:
    """How our rows become those of a graph's tensor, and back."""

    to_graph: Callable[[Tensor, Layout], Tensor]
    from_graph: Callable[[Tensor, Layout], Tensor]
    axes: tuple[str, ...]
    """Names of the graph's own."""


FORMS: Mapping[Axes, _Form] = {
    "B": _Form(lambda values, _: values, lambda values, _: values, ("B",)),
    "B*n": _Form(
        lambda values, _: values.flatten(0, 1),
        lambda values, layout: values.reshape(layout.num_inputs, -1, *values.shape[1:]),
        ("rows",),
    ),
    "BT": _Form(lambda values, layout: layout.pad(values), lambda values, layout: layout.unpad(values), ("B", "T")),
    "TB": _Form(
        lambda values, layout: layout.pad(values).transpose(0, 1),
        lambda values, layout: layout.unpad(values.transpose(0, 1)),
        ("T", "B"),
    ),
    "B*T": _Form(
        lambda values, layout: layout.pad(values).flatten(0, 1),
        lambda values, layout: layout.unpad(values.reshape(layout.num_inputs, layout.longest, *values.shape[1:])),
        ("rows",),
    ),
}


def open_graph(
    model: Any, folder: Path, *, device_type: str = "cpu", num_threads: int | None = None, quiet: bool = False
) -> Any:
    """A session of a ModelProto whose weights lie in a folder; raises GraphError for what cannot be run.

    `quiet`: ONNX Runtime's own words of what fails are left out.
    """
    providers = (provider_of(device_type),)
    runtime = load_runtime(providers)
    refusals = runtime.capi.onnxruntime_pybind11_state
    try:
        return open_session(
            runtime,
            model.SerializeToString(),
            providers=providers,
            num_threads=num_threads,
            weights=folder,
            quiet=quiet,
        )
    except (refusals.Fail, refusals.InvalidGraph, refusals.NotImplemented, refusals.InvalidArgument) as error:
        raise GraphError(f"the graph in {folder}: {in_plain_words(error)}") from error


def enter(inputs: Tensors, pixels: Pixels | None) -> Tensors:
    """What a graph takes of what a codec gives: pixels as it was trained on them, anything else as it comes."""
    return inputs if pixels is None else (_normalised(inputs[0], pixels),)


def fed(crossing: Crossing, values: Tensor, layout: Layout) -> Array:
    """What crosses, or enters, as the graph takes it."""
    rows = FORMS[crossing.axes].to_graph(values, layout).to(getattr(torch, crossing.dtype))
    array: Array = rows.cpu().contiguous().numpy()
    return array


def _taken(crossing: Crossing, result: Array, layout: Layout) -> Tensor:
    rows = FORMS[crossing.axes].from_graph(torch.from_numpy(result).to(layout.device), layout)
    return rows.to(TORCH_DTYPES[DTYPES[crossing.dtype]])


def layout_feeds(inputs: Iterable[GraphInput], layout: Layout) -> dict[str, Array]:
    """Inputs that follow from the layout alone."""
    return {each.name: _of_layout(each, layout) for each in inputs}


def _of_layout(graph_input: GraphInput, layout: Layout) -> Array:
    """(B, T) or (T, B): what follows from the lengths alone."""
    dtype, shape = np.dtype(graph_input.dtype), (layout.num_inputs, layout.longest)
    if graph_input.source == "mask":
        rows_BT = (np.arange(layout.longest)[None, :] < layout.lengths_B[:, None]).astype(dtype)
    elif graph_input.source == "positions":
        rows_BT = np.broadcast_to(np.arange(layout.longest, dtype=dtype), shape)
    else:
        rows_BT = np.zeros(shape, dtype)
    return np.ascontiguousarray(rows_BT.T if graph_input.axes == "TB" else rows_BT)


def _sizes(sizes: Size | tuple[Size, ...], layout: Layout) -> Array:
    def number(size: Size) -> int:
        return size.of(layout.num_inputs, layout.longest)

    return np.array(number(sizes) if isinstance(sizes, Size) else [number(each) for each in sizes], dtype=np.int64)


def _normalised(pixels_BHWC: Tensor, how: Pixels) -> Tensor:
    planes = pixels_BHWC.flip(3) if how.order == "BGR" else pixels_BHWC
    planes = planes.permute(0, 3, 1, 2) if how.layout == "NCHW" else planes
    values = planes.to(torch.float32, memory_format=torch.contiguous_format)  # one copy, in the order of the graph
    mean, std = (values.new_tensor(each) for each in (how.mean, how.std))
    if how.layout == "NCHW":
        mean, std = mean[:, None, None], std[:, None, None]
    return values.mul_(how.scale / std).sub_(mean / std)


def _value_info(crossing: Crossing) -> Any:
    from onnx import helper

    inside = crossing.shape[1:] if crossing.axes == "B*n" else crossing.shape
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(crossing.dtype))
    return helper.make_tensor_value_info(crossing.name, dtype, [*FORMS[crossing.axes].axes, *inside])


def _size_info(name: str, sizes: Size | tuple[Size, ...]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.INT64, [] if isinstance(sizes, Size) else [len(sizes)])


class GraphSegments:
    """`PreparedSegments` of a model whose backbone is a graph."""

    def __init__(self, model: EarlyExitModel, backbone: OnnxBackbone) -> None:
        self._model = model
        self._backbone = backbone

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        return self._model.run(segment, piece)

    def is_ready(self, segment: Segment) -> bool:
        return self._backbone.is_ready(segment.first, segment.end, self._model.device.type)

    def prepare(self, segments: Collection[Segment]) -> None:
        self._backbone.prepare({(each.first, each.end) for each in segments}, self._model.device.type)


def graph_segments(model: EarlyExitModel, _: Path, num_threads: int) -> GraphSegments:
    """On the model's own device; the ramps' linear layers are reordered, as on any CPU."""
    backbone = model.backbone
    assert isinstance(backbone, OnnxBackbone)
    backbone.num_threads = num_threads
    reorder_linears(model)
    return GraphSegments(model, backbone)
