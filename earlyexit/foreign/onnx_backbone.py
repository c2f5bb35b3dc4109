"""The backbone of a foreign ONNX graph. Its blocks are subgraphs, which ONNX Runtime runs.

The files of the graph and its weights never change. The graph takes padded texts; between blocks, texts are packed as
in any model. Each block computes constants, and whatever follows from the layout (masks, positions, sizes), by itself.
All other tensors must cross. `onnx.utils.Extractor` would silently include earlier blocks for a missing tensor.

Tensor legend: B inputs, T tokens of the longest, N tokens of all, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from earlyexit.backends.onnx import Sessions, load_runtime, one_line, open_session
from earlyexit.errors import ModelFolderError, first_mistake
from earlyexit.families.base import Backbone, Family, JsonDict
from earlyexit.foreign.dataflow import Dataflow, Part
from earlyexit.foreign.onnx_file import DTYPES, GraphDType, dataflow_of, locations
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.piece import Layout, Tensors

Axes = Literal["B", "B*n", "BT", "TB", "B*T"]
"""The first axes of a graph's tensor: inputs; n rows per input in one axis; inputs and tokens, in either order; the
padded tokens of all inputs in one axis."""
Source = Literal["codec", "mask", "zeros", "positions"]
"""The source of a graph's input. All but `codec` follow from the layout: the mask of tokens, token types (zeros), and
the positions of tokens."""
Outputs = Literal["logits", "probabilities"]
"""The kind of outputs of the graph's classifier."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Crossing(_Config):
    """A tensor of the graph that passes from one block to the next."""

    name: str
    axes: Axes = "B"
    shape: tuple[int, ...] = ()
    """The shape of the row of an input or token. For `B*n` it begins with n."""
    dtype: GraphDType = "float32"
    """The numpy name of its type in the graph."""

    @property
    def per_token(self) -> bool:
        """Whether it has one row per token, rather than one per input."""
        return self.axes not in ("B", "B*n")

    def spec(self, below: int | None = None) -> TensorSpec:
        """Returns its description for a boundary."""
        return TensorSpec(
            name=self.name, shape=self.shape, dtype=DTYPES[self.dtype], per_token=self.per_token, below=below
        )


class GraphInput(Crossing):
    """An input of the graph."""

    source: Source = "codec"
    below: int | None = None
    """For integers: all values must be below this bound."""


class Pixels(_Config):
    """How RGB images (height, width, 3) with values from 0 to 255 are converted for the graph."""

    height: int = Field(gt=0)
    width: int = Field(gt=0)
    scale: float = 1 / 255
    """The factor that is applied before `mean` and `std`."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """The order of `mean` and `std` is `order`."""
    order: Literal["RGB", "BGR"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"


class Size(_Config):
    """A size in the graph that depends on the numbers of inputs and tokens: factor * B^inputs * T^tokens."""

    factor: int
    inputs: int = 0
    tokens: int = 0

    def of(self, num_inputs: int, longest: int) -> int:
        """Returns the size for `num_inputs` inputs that are padded to `longest` tokens."""
        return self.factor * int(num_inputs**self.inputs * longest**self.tokens)


class Entry(_Config):
    """How inputs are converted for a graph."""

    inputs: tuple[GraphInput, ...]
    max_length: int = Field(default=1, gt=0)
    """The longest input in tokens; 1 if inputs have no tokens."""
    pixels: Pixels | None = None
    """How images are converted. None: the graph takes the codec's tensors as they are."""

    @property
    def codec_inputs(self) -> tuple[GraphInput, ...]:
        """The inputs from the codec, in the order of its tensors."""
        return tuple(each for each in self.inputs if each.source == "codec")

    @property
    def layout_inputs(self) -> dict[str, GraphInput]:
        """The inputs that follow from the layout, by name."""
        return {each.name: each for each in self.inputs if each.source != "codec"}

    @property
    def entry(self) -> Boundary:
        """The tensors of the codec."""
        if self.pixels is not None:
            return (TensorSpec(name="image", shape=(self.pixels.height, self.pixels.width, 3), dtype="uint8"),)
        return tuple(each.spec(below=each.below) for each in self.codec_inputs)

    def enter(self, inputs: Tensors) -> Tensors:
        """Returns the tensors of the codec in the graph's form: pixels are normalized, other tensors are unchanged."""
        if self.pixels is None:
            return inputs
        pixels, channels_first = self.pixels, self.pixels.layout == "NCHW"
        planes = inputs[0].flip(3) if pixels.order == "BGR" else inputs[0]
        planes = planes.permute(0, 3, 1, 2) if channels_first else planes
        values = planes.to(torch.float32, memory_format=torch.contiguous_format)  # a single copy, in the graph's order
        mean, std = (values.new_tensor(each) for each in (pixels.mean, pixels.std))
        if channels_first:
            mean, std = mean[:, None, None], std[:, None, None]
        return (values.mul_(pixels.scale / std).sub_(mean / std),)


class GraphConfig(Entry):
    """The configuration with which a graph's file is run in blocks."""

    file: str = "graph.onnx"
    sha256: str
    """The digest of the file and of its weights."""
    cuts: tuple[tuple[Crossing, ...], ...]
    """The tensors that cross after every block; after the last block, the graph's answer alone."""
    outputs: Outputs
    sizes: dict[str, tuple[Size, ...]] = {}
    """The shapes that are fed to blocks which lack the tensors themselves."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> GraphConfig:
        if not self.codec_inputs:
            raise ValueError("an input from the codec is needed")
        if not self.cuts or not all(self.cuts):
            raise ValueError("every block needs a tensor that crosses after it")
        if self.pixels is not None and len(self.codec_inputs) > 1:
            raise ValueError("pixels must be the only input from the codec")
        return self

    def before(self, block: int) -> tuple[Crossing, ...]:
        """Returns the tensors that cross before a block; before the first block, the codec's tensors."""
        return self.codec_inputs if block == 0 else self.cuts[block - 1]


FILE, WEIGHTS_SUFFIX = "graph.onnx", ".data"
"""The file of the graph, and the ending of the file of its weights."""
INLINE_BYTES = 1024
"""Smaller tensors stay in the graph's file, because ONNX Runtime reads shapes while it opens a session."""


def read_graph(folder: Path, file: str) -> Any:
    """Returns the ModelProto in a model's folder, without its weights. Raises ModelFolderError if it is not usable."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(folder / file, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelFolderError(f"{folder / file} is no ONNX file: {one_line(error)}") from error
    if others := {location for _, location in locations(model)} - {file + WEIGHTS_SUFFIX}:
        raise ModelFolderError(f"{folder / file} has weights in {sorted(others)[0]!r}, which is not its own file")
    return model


def fingerprint(folder: Path, file: str) -> str:
    """Returns the SHA-256 of a graph's file and of its weights. Raises ModelFolderError if one is missing."""
    digest = hashlib.sha256()
    for name in (file, file + WEIGHTS_SUFFIX):
        try:
            with (folder / name).open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as error:
            raise ModelFolderError(f"{folder} has no {name}, which its network needs") from error
    return digest.hexdigest()


def part_model(model: Any, part: Part, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Returns the ModelProto of a part of a graph. `inputs` and `outputs` are ValueInfoProtos."""
    from onnx import helper

    nodes, read = [model.graph.node[k] for k in part.operators], set(part.inputs)
    weights = [each for each in model.graph.initializer if each.name in read]
    sparse = [each for each in model.graph.sparse_initializer if each.values.name in read]
    graph = helper.make_graph(nodes, "piece", inputs, outputs, weights, sparse_initializer=sparse)
    return helper.make_model(graph, ir_version=model.ir_version, opset_imports=model.opset_import)


Array = npt.NDArray[Any]


class OnnxBackbone(Backbone):
    """The blocks of a graph. Consecutive blocks without an exit between them run as one session.

    A session is opened when it is first prepared or run. Beside the sessions of the current and the previous plan, one
    session per block is kept for probes and training.
    """

    config: GraphConfig
    reorders_linears: ClassVar[bool] = False
    float32_only: ClassVar[bool] = True
    own_runtime: ClassVar[bool] = True

    def __init__(self, config: GraphConfig, folder: Path) -> None:
        super().__init__()
        self.config = config
        self.num_blocks = len(config.cuts)
        self.inputs = config.entry
        self.max_length = config.max_length
        self._folder = folder
        self.sessions: Sessions[tuple[int, int, str]] = Sessions(self._open, spare=self.num_blocks)

    def boundary(self, block: int) -> Boundary:
        return tuple(each.spec() for each in self.config.cuts[block])

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return self.config.enter(inputs)

    def run_blocks(self, first: int, end: int, hidden: Tensors, layout: Layout) -> Tensors:
        if first == end:
            return hidden
        part, session = self.sessions.get((first, end, layout.device.type))
        before = {each.name: (each, values) for each, values in zip(self.config.before(first), hidden, strict=True)}
        feeds = {name: to_graph_array(*before[name], layout) for name in part.inputs if name in before}
        layout_inputs = self.config.layout_inputs
        feeds |= {name: layout_array(layout_inputs[name], layout) for name in part.inputs if name in layout_inputs}
        for name in part.sizes:
            shape = [size.of(layout.num_inputs, layout.longest) for size in self.config.sizes[name]]
            feeds[name] = np.array(shape, dtype=np.int64)
        names = [each.name for each in self.config.cuts[end - 1] if each.name not in before]
        results = dict(zip(names, session.run(names, feeds), strict=True))
        after = [
            before[each.name][1] if each.name in before else _from_graph_array(each, results[each.name], layout)
            for each in self.config.cuts[end - 1]
        ]
        return tuple(map(self._logits, after)) if end == self.num_blocks else tuple(after)

    def prepare(self, spans: Collection[tuple[int, int]], device: torch.device) -> None:
        self.sessions.prepare({(*span, device.type) for span in spans})

    def answer_of(self, result: Array, layout: Layout) -> Tensor:
        """Returns the logits for the answer of the uncut graph."""
        [last] = self.config.cuts[-1]
        return self._logits(_from_graph_array(last, result, layout))

    def to_config(self) -> JsonDict:
        return self.config.model_dump(mode="json")

    def sha256(self) -> str:
        """Returns the digest of the graph and its weights."""
        return self.config.sha256

    def write_files(self, folder: Path) -> None:
        for name in (self.config.file, self.config.file + WEIGHTS_SUFFIX):
            source, target = self._folder / name, folder / name
            if not (target.exists() and target.samefile(source)):
                shutil.copyfile(source, target)

    def _logits(self, rows: Tensor) -> Tensor:
        """Returns the logits of the graph's outputs. The logarithms of tiny probabilities are finite, and not noise."""
        if self.config.outputs != "probabilities":
            return rows
        return rows.clamp_min(torch.finfo(getattr(torch, self.config.cuts[-1][0].dtype)).tiny).log()

    @cached_property
    def _graph(self) -> tuple[Any, Dataflow]:
        graph = read_graph(self._folder, self.config.file)
        return graph, dataflow_of(graph.graph)

    def _open(self, span: tuple[int, int, str]) -> tuple[Part, Any]:
        """Returns the part of the graph with these blocks, and its session."""
        from onnx.helper import TensorProto, make_tensor_value_info

        first, end, device_type = span
        before = {each.name: each for each in self.config.before(first)}
        after = [each for each in self.config.cuts[end - 1] if each.name not in before]
        layout_inputs = self.config.layout_inputs
        graph, flow = self._graph
        part = flow.part(before, layout_inputs, [each.name for each in after])
        given = before | layout_inputs
        inputs = [_value_info(given[name]) for name in part.inputs if name in given]
        ranks = {name: len(self.config.sizes[name]) for name in part.sizes}
        inputs += [make_tensor_value_info(name, TensorProto.INT64, [rank]) for name, rank in ranks.items()]
        model = part_model(graph, part, inputs, [*map(_value_info, after)])
        return part, open_session(model, self._folder, device_type=device_type)


class OnnxGraph(Family):
    """The family of ONNX graphs from files."""

    name = "onnx"
    lazy_weights = False

    def build(self, config: JsonDict, folder: Path | None = None) -> OnnxBackbone:
        """Raises ModelFolderError unless the folder has the graph for which the configuration was made."""
        try:
            graph = GraphConfig.model_validate(config)
        except ValidationError as error:
            raise ModelFolderError(f"no onnx backbone can be built: {first_mistake(error, 'the graph')}") from error
        if folder is None:
            raise ModelFolderError("an onnx model needs the file in its model folder; it cannot be made of sizes alone")
        if Path(graph.file).name != graph.file:
            raise ModelFolderError(f"{graph.file!r} is outside the model's folder {folder}")
        if fingerprint(folder, graph.file) != graph.sha256:
            raise ModelFolderError(
                f"{folder / graph.file} or its weights are not those of which the model was made: their SHA-256 is not "
                f"{graph.sha256[:12]}..."
            )
        load_runtime()
        return OnnxBackbone(graph, folder)


def to_graph_array(crossing: Crossing, values: Tensor, layout: Layout) -> Array:
    """Returns packed values as an array for the graph."""
    rows = layout.pad(values) if crossing.per_token else values
    if crossing.axes == "TB":
        rows = rows.transpose(0, 1)
    elif "*" in crossing.axes:
        rows = rows.flatten(0, 1)
    array: Array = rows.to(getattr(torch, crossing.dtype)).cpu().contiguous().numpy()
    return array


def _from_graph_array(crossing: Crossing, result: Array, layout: Layout) -> Tensor:
    rows = torch.from_numpy(result).to(layout.device, getattr(torch, DTYPES[crossing.dtype]))
    if crossing.axes == "TB":
        rows = rows.transpose(0, 1)
    elif "*" in crossing.axes:
        rows = rows.reshape(layout.num_inputs, -1, *rows.shape[1:])
    return layout.unpad(rows) if crossing.per_token else rows


def layout_array(graph_input: GraphInput, layout: Layout) -> Array:
    """Returns the array (B, T) or (T, B) for an input that follows from the layout."""
    rows_BT: Array = np.broadcast_to(np.arange(layout.longest), (layout.num_inputs, layout.longest))
    if graph_input.source == "mask":
        rows_BT = rows_BT < layout.lengths_B[:, None]
    elif graph_input.source == "zeros":
        rows_BT = np.zeros_like(rows_BT)
    return np.ascontiguousarray(rows_BT.T if graph_input.axes == "TB" else rows_BT, dtype=graph_input.dtype)


def _value_info(crossing: Crossing) -> Any:
    from onnx import helper

    first = ["rows"] if "*" in crossing.axes else list(crossing.axes)
    inside = crossing.shape[1:] if crossing.axes == "B*n" else crossing.shape
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(crossing.dtype))
    return helper.make_tensor_value_info(crossing.name, dtype, [*first, *inside])
