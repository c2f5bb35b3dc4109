"""The backbone of an ONNX graph from elsewhere: its blocks are sub-graphs, run by ONNX Runtime.

The graph's file lies in the model's folder, its weights beside it, and neither ever changes. Texts enter it padded, as
such graphs take them; between blocks they are packed, as any model's are. A block computes anew what follows from the
layout alone (masks, positions, sizes), and constants. Everything else that it needs must cross: `onnx.utils.Extractor`
would walk on to the graph's inputs for a forgotten tensor, and compute earlier blocks again without a word.

Tensor legend: B inputs, T tokens of the longest, N tokens of all, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from earlyexit.backends.onnx import Sessions, load_runtime, open_session, provider_of
from earlyexit.errors import GraphError, ModelFolderError, first_mistake
from earlyexit.families.base import Backbone, Family, JsonDict
from earlyexit.foreign.dataflow import Dataflow, Part
from earlyexit.foreign.onnx_file import dataflow_of, locations
from earlyexit.network.boundary import Boundary, DType, TensorSpec
from earlyexit.network.layers import reorder_linears
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Layout, Tensors

Axes = Literal["B", "B*n", "BT", "TB", "B*T"]
"""The first axes of a graph's tensor: inputs; n rows of every input in one axis; inputs and tokens, in either order;
the tokens of all inputs in one axis."""
Source = Literal["codec", "mask", "zeros", "positions"]
"""What a graph's input is fed with. All but the codec's follow from the layout: where tokens are, 0 for each token (its
type, where all are of a first text), and each token's position."""
Outputs = Literal["logits", "probabilities"]
"""What the graph's classifier gives."""

DTYPES: Mapping[str, DType] = {
    "float32": "float",
    "float16": "float",
    "int64": "int32",
    "int32": "int32",
    "uint8": "uint8",
    "bool": "uint8",
}
"""What crosses, by the graph's own type of number."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Crossing(_Config):
    """One tensor of the graph that crosses between blocks."""

    name: str
    axes: Axes = "B"
    shape: tuple[int, ...] = ()
    """The shape of a row of an input, or of a token; it begins with n where inputs have n rows."""
    dtype: str = "float32"
    """The graph's type, by numpy's name."""

    @field_validator("dtype")
    @classmethod
    def _crosses(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"numbers that cross are {', '.join(DTYPES)}, not {dtype}")
        return dtype

    @property
    def per_token(self) -> bool:
        """Whether it has a row for every token."""
        return self.axes not in ("B", "B*n")

    def spec(self, below: int | None = None) -> TensorSpec:
        """Returns its entry in a boundary."""
        return TensorSpec(
            name=self.name, shape=self.shape, dtype=DTYPES[self.dtype], per_token=self.per_token, below=below
        )


class GraphInput(Crossing):
    """One of the graph's inputs."""

    source: Source = "codec"
    below: int | None = None
    """For whole numbers: the first that the graph does not take."""


class Pixels(_Config):
    """How pixels from 0 to 255, (height, width, 3), red first, become what the graph takes."""

    height: int = Field(gt=0)
    width: int = Field(gt=0)
    scale: float = 1 / 255
    """Multiplies the pixels, before `mean` is subtracted and `std` divides."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """`mean` and `std` list the channels in the order that `order` names."""
    order: Literal["RGB", "BGR"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"


class Size(_Config):
    """A number in the graph that follows from the numbers of inputs and tokens: factor * B^inputs * T^tokens."""

    factor: int
    inputs: int = 0
    tokens: int = 0

    def of(self, num_inputs: int, longest: int) -> int:
        """Returns the number for so many inputs of so many tokens."""
        return self.factor * int(num_inputs**self.inputs * longest**self.tokens)


class Entry(_Config):
    """How inputs enter a graph."""

    inputs: tuple[GraphInput, ...]
    max_length: int = Field(default=1, gt=0)
    """The longest input in tokens; 1 where inputs have none."""
    pixels: Pixels | None = None
    """None where the codec gives what the graph takes."""

    @property
    def codec_inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that the codec gives, in its order."""
        return tuple(each for each in self.inputs if each.source == "codec")

    @property
    def layout_inputs(self) -> dict[str, GraphInput]:
        """The inputs that follow from the layout, by name."""
        return {each.name: each for each in self.inputs if each.source != "codec"}

    @property
    def entry(self) -> Boundary:
        """The boundary of what the codec gives."""
        if self.pixels is not None:
            return (TensorSpec(name="image", shape=(self.pixels.height, self.pixels.width, 3), dtype="uint8"),)
        return tuple(each.spec(below=each.below) for each in self.codec_inputs)

    def enter(self, inputs: Tensors) -> Tensors:
        """Returns what the graph takes: pixels as it was trained on them, anything else as the codec gives it."""
        if self.pixels is None:
            return inputs
        how, channels_first = self.pixels, self.pixels.layout == "NCHW"
        planes = inputs[0].flip(3) if how.order == "BGR" else inputs[0]
        planes = planes.permute(0, 3, 1, 2) if channels_first else planes
        values = planes.to(torch.float32, memory_format=torch.contiguous_format)  # one copy, in the order of the graph
        mean, std = (values.new_tensor(each) for each in (how.mean, how.std))
        if channels_first:
            mean, std = mean[:, None, None], std[:, None, None]
        return (values.mul_(how.scale / std).sub_(mean / std),)


class GraphConfig(Entry):
    """Everything that is needed to run a graph in blocks, beside its file."""

    file: str = "graph.onnx"
    sha256: str
    """The digest of the file and of the weights beside it."""
    cuts: tuple[tuple[Crossing, ...], ...]
    """What crosses after every block; after the last, the graph's answer alone."""
    outputs: Outputs
    sizes: dict[str, tuple[Size, ...] | Size] = {}
    """Shapes that blocks read from tensors which they do not have; one number for the graph's `Size`."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> GraphConfig:
        if not self.codec_inputs:
            raise ValueError("an input from the codec is needed")
        if not self.cuts or not all(self.cuts):
            raise ValueError("every block needs a tensor that crosses after it")
        if self.pixels is not None and len(self.codec_inputs) > 1:
            raise ValueError("pixels are the only input from the codec")
        return self

    def before(self, block: int) -> tuple[Crossing, ...]:
        """Returns what crosses before a block; before the first, what the codec gives."""
        return self.codec_inputs if block == 0 else self.cuts[block - 1]


FILE, WEIGHTS_SUFFIX = "graph.onnx", ".data"
FILES = (FILE, FILE + WEIGHTS_SUFFIX)
"""The files of a graph and of its weights."""
INLINE_BYTES = 1024
"""Smaller tensors stay in the graph: ONNX Runtime reads shapes and the like while it opens a session."""
UNKNOWN = (
    re.compile(r"(?P<name>[\w.]+:\w+)\(-?\d+\) is not a registered function/op"),
    re.compile(r"No Op registered for (?P<name>\w+) "),
    re.compile(r"Could not find an implementation for (?P<name>\w+)\("),
    re.compile(r"No opset import for domain '(?P<name>[\w.]+)'"),
)
"""Messages of ONNX Runtime about operators that it does not have."""

FileState = tuple[tuple[int, int, int], ...]
"""Identity, size and time of files; while these are the same, so is the content."""


def read_graph(folder: Path, file: str) -> Any:
    """Returns the ModelProto in a model's folder, without its weights; raises ModelFolderError."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(folder / file, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelFolderError(f"{folder / file} is no ONNX file: {one_line(error)}") from error
    strange = {location for _, location in locations(model)} - {file + WEIGHTS_SUFFIX}
    if strange:
        raise ModelFolderError(f"{folder / file} has weights in {sorted(strange)[0]!r}, which is not its own file")
    return model


def fingerprint(folder: Path, file: str) -> str:
    """Returns the SHA-256 of a graph's file and of its weights."""
    digest = hashlib.sha256()
    for name in (file, file + WEIGHTS_SUFFIX):
        with (folder / name).open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def state_of(folder: Path, file: str) -> FileState:
    """Returns the state of a graph's file and of its weights; raises ModelFolderError where one is missing."""
    try:
        found = [(folder / name).stat() for name in (file, file + WEIGHTS_SUFFIX)]
    except OSError as error:
        lost = Path(error.filename).name
        raise ModelFolderError(f"{folder} has no {lost}, which its network consists of") from error
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def in_plain_words(error: Exception) -> str:
    """Returns an error of ONNX Runtime in one line, which names operators that it does not have."""
    said = str(error)
    unknown = sorted({found["name"] for pattern in UNKNOWN for found in pattern.finditer(said)})
    if unknown:
        return f"ONNX Runtime has no operator {', '.join(unknown)}"
    return f"ONNX Runtime refuses it: {one_line(error)}"


def one_line(error: Exception) -> str:
    """Returns an error's message without its line breaks."""
    return " ".join(str(error).split())


def weights_of(graph: Any) -> dict[str, Any]:
    """Returns the stored tensors of a GraphProto by name."""
    return {each.name: each for each in graph.initializer} | {
        each.values.name: each for each in graph.sparse_initializer
    }


def piece_model(model: Any, part: Part, inputs: Iterable[Any], outputs: Iterable[Any]) -> Any:
    """Returns a ModelProto of a part with the graph's weights; `inputs` and `outputs` are ValueInfoProtos."""
    from onnx import ModelProto

    piece = ModelProto(ir_version=model.ir_version)
    piece.opset_import.extend(model.opset_import)
    piece.graph.name = "piece"
    piece.graph.node.extend(model.graph.node[k] for k in part.operators)
    weights = weights_of(model.graph)
    for weight in (weights[name] for name in part.inputs if name in weights):
        target = piece.graph.sparse_initializer if hasattr(weight, "values") else piece.graph.initializer
        target.append(weight)
    piece.graph.input.extend(inputs)
    piece.graph.output.extend(outputs)
    return piece


Array = npt.NDArray[Any]
TORCH_DTYPES = {"float": torch.float32, "int32": torch.int32, "uint8": torch.uint8}
"""Types of what crosses."""


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
        self.inputs = config.entry
        self.max_length = config.max_length
        self.num_threads = torch.get_num_threads()
        """The threads of sessions that are opened from now on."""
        self._folder = folder
        self._state = state or state_of(folder, config.file)
        self._sessions: Sessions[tuple[int, int, str]] = Sessions(self._open, spare=self.num_blocks)

    def boundary(self, block: int) -> Boundary:
        return tuple(each.spec() for each in self.config.cuts[block])

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return self.config.enter(inputs)

    def run_blocks(self, first: int, end: int, hidden: Tensors, layout: Layout) -> Tensors:
        if first == end:
            return hidden
        part, session = self._sessions.get((first, end, layout.device.type))
        crossing = {each.name: (each, values) for each, values in zip(self.config.before(first), hidden, strict=True)}
        feeds = {name: fed(*crossing[name], layout) for name in part.inputs if name in crossing}
        made = self.config.layout_inputs
        feeds |= {name: of_layout(made[name], layout) for name in part.inputs if name in made}
        feeds |= {name: _sizes(self.config.sizes[name], layout) for name in part.sizes}
        names = [each.name for each in self.config.cuts[end - 1] if each.name not in crossing]
        results = dict(zip(names, session.run(names, feeds), strict=True))
        after = [
            crossing[each.name][1] if each.name in crossing else _taken(each, results[each.name], layout)
            for each in self.config.cuts[end - 1]
        ]
        return tuple(map(self._answer, after)) if end == self.num_blocks else tuple(after)

    def answer_of(self, result: Array, layout: Layout) -> Tensor:
        """Returns what crosses after the last block, by the graph's own answer."""
        [last] = self.config.cuts[-1]
        return self._answer(_taken(last, result, layout))

    def is_ready(self, first: int, end: int, device_type: str) -> bool:
        return self._sessions.is_ready((first, end, device_type))

    def prepare(self, spans: Collection[tuple[int, int]], device_type: str) -> None:
        self._sessions.prepare([(first, end, device_type) for first, end in spans])

    def to_config(self) -> JsonDict:
        return self.config.model_dump(mode="json")

    def sha256(self) -> str:
        """Returns the digest of the graph and its weights; sessions are opened only from files that have it."""
        return self.config.sha256

    def write_files(self, folder: Path) -> None:
        for name in (self.config.file, self.config.file + WEIGHTS_SUFFIX):
            source, target = self._folder / name, folder / name
            if not (target.exists() and target.samefile(source)):
                shutil.copyfile(source, target)

    def _answer(self, rows: Tensor) -> Tensor:
        """Returns logits: of probabilities the logarithm, which is finite although some are 0."""
        if self.config.outputs != "probabilities":
            return rows
        return rows.clamp_min(torch.finfo(torch.float32).tiny).log()

    @cached_property
    def _graph(self) -> Any:
        return read_graph(self._folder, self.config.file)

    @cached_property
    def _flow(self) -> Dataflow:
        return dataflow_of(self._graph.graph, self._graph.graph)

    def _open(self, span: tuple[int, int, str]) -> tuple[Part, Any]:
        """Returns what computes consecutive blocks, and its session.

        Raises ModelFolderError where the files are no longer those that were checked.
        """
        self._check_files()
        first, end, device_type = span
        before = {each.name: each for each in self.config.before(first)}
        after = [each for each in self.config.cuts[end - 1] if each.name not in before]
        layout_inputs = self.config.layout_inputs
        part = self._flow.part(before, layout_inputs, [each.name for each in after])
        given = before | layout_inputs
        inputs = [_value_info(given[name]) for name in part.inputs if name in given]
        inputs += [_size_info(name, self.config.sizes[name]) for name in part.sizes]
        model = piece_model(self._graph, part, inputs, map(_value_info, after))
        session = open_graph(model, self._folder, device_type=device_type, num_threads=self.num_threads)
        self._check_files()
        return part, session

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
        try:
            read = GraphConfig.model_validate(config)
        except ValidationError as error:
            raise ModelFolderError(f"no onnx backbone can be built: {first_mistake(error, 'the graph')}") from error
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


@dataclass(frozen=True, slots=True)
class _Form:
    """The conversion of our rows to those of a graph's tensor, and back."""

    to_graph: Callable[[Tensor, Layout], Tensor]
    from_graph: Callable[[Tensor, Layout], Tensor]
    axes: tuple[str, ...]
    """The graph's names of these axes."""


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


def fed(crossing: Crossing, values: Tensor, layout: Layout) -> Array:
    """Returns what crosses, or enters, as the graph takes it."""
    rows = FORMS[crossing.axes].to_graph(values, layout).to(getattr(torch, crossing.dtype))
    array: Array = rows.cpu().contiguous().numpy()
    return array


def _taken(crossing: Crossing, result: Array, layout: Layout) -> Tensor:
    rows = FORMS[crossing.axes].from_graph(torch.from_numpy(result).to(layout.device), layout)
    return rows.to(TORCH_DTYPES[DTYPES[crossing.dtype]])


def of_layout(graph_input: GraphInput, layout: Layout) -> Array:
    """Returns an input that follows from the lengths alone, (B, T) or (T, B)."""
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


def _value_info(crossing: Crossing) -> Any:
    from onnx import helper

    inside = crossing.shape[1:] if crossing.axes == "B*n" else crossing.shape
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(crossing.dtype))
    return helper.make_tensor_value_info(crossing.name, dtype, [*FORMS[crossing.axes].axes, *inside])


def _size_info(name: str, sizes: Size | tuple[Size, ...]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.INT64, [] if isinstance(sizes, Size) else [len(sizes)])


def graph_segments(model: EarlyExitModel, _: Path, num_threads: int) -> EarlyExitModel:
    """Returns the model, whose backbone opens sessions; the ramps' linear layers are reordered, as on any CPU."""
    backbone = model.backbone
    assert isinstance(backbone, OnnxBackbone)
    backbone.num_threads = num_threads
    reorder_linears(model)
    return model
