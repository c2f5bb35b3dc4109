"""An ONNX file as a foreign model, without torch: only cutting it, in `onnx_cut`, needs that."""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from earlyexit.data.rows import IMAGE, PAIR, TEXT
from earlyexit.errors import GraphError, InputError
from earlyexit.foreign.dataflow import REPEATS, Site, layout_role, with_shares
from earlyexit.foreign.model import TEXT_LENGTH, ForeignModel, given_head
from earlyexit.foreign.onnx_file import (
    OPEN_SIZE,
    check_operators,
    dataflow_of,
    load_structure,
    sizes_of_input,
    weights_beside,
    with_shapes,
)
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, DType, Encoded, TensorSpec

if TYPE_CHECKING:
    from earlyexit.families.base import Pretrained

CHANNELS = 3
FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's option for the folder with the weights of a model that is given as bytes."""


@dataclass(frozen=True, kw_only=True)
class OnnxModel(ForeignModel):
    """An ONNX file that was read and checked. Tensors and operators of `flow` are named as in `proto`."""

    family: ClassVar[str] = "onnx"
    path: Path
    proto: Any
    """onnx.ModelProto, without functions of its own, each node with its own name; without the weights beside it."""
    beside: tuple[Path, ...]
    """Files with weights, in the folder of the model or below it."""

    @property
    def inputs(self) -> Boundary:
        infos = [each for each in self.proto.graph.input if each.name in self.flow.inputs]
        if self.asked.columns == (IMAGE,):
            return (self._image(infos[0]),)
        if TEXT in self.asked.columns:
            ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True)
            has_types = any(layout_role(each.name) == "zeros" for each in infos)
            return (ids, *[replace(ids, name="token_types")] * (PAIR in self.asked.columns and has_types))
        return tuple(map(_column, infos))

    @property
    def longest(self) -> int:
        return TEXT_LENGTH

    def with_answer(self, codec: NamedSpec) -> Self:
        if len(self.flow.outputs) == 1 and self.asked.output is None:
            return self
        answer = self._opened(codec, lambda graph: graph.output)
        return replace(self, flow=replace(self.flow, outputs=(answer,)))

    def specs(self, cuts: Sequence[Sequence[str]], codec: NamedSpec) -> list[list[TensorSpec] | str]:
        found: list[list[TensorSpec] | str] = self._opened(codec, lambda graph: graph.specs(cuts))
        return found

    def take(
        self, cuts: Sequence[Sequence[str]], codec: NamedSpec, folder: Path, rows: Sequence[Encoded] = ()
    ) -> Pretrained:
        """Also puts the graph into the folder; a number of inputs that it was made for is taken out of it."""
        from earlyexit.families.base import Pretrained
        from earlyexit.foreign.onnx_backbone import FILES, OnnxBackbone

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as trial:  # what is refused leaves a folder as it was
            config = self._opened(codec, lambda graph: graph.taken(cuts, rows), Path(trial))
            for name in FILES:
                (Path(trial) / name).replace(folder / name)
        backbone = OnnxBackbone(config, folder)
        return Pretrained(backbone=backbone, head=given_head(backbone), label_names=None, codec=codec)

    def _opened(self, codec: NamedSpec, look: Callable[[Any], Any], folder: Path | None = None) -> Any:
        """Returns what is seen in the graph, an `onnx_cut.Opened`."""
        from earlyexit.foreign.onnx_cut import opened

        return opened(self.proto, self.path, self.asked, codec, look, folder)

    def timed(self, sites: Sequence[Site], *, repeats: int = REPEATS) -> tuple[Site, ...]:
        """Returns sites with shares of seconds, and with bytes where the file does not tell them.

        Operators are fused as they are where the model is served. The sites' tensors are outputs of the graph that is
        timed, so that nothing is fused across them: no cut could either. Raises GraphError for what cannot be run.
        """
        if find_spec("onnxruntime") is None:
            raise GraphError("sites are timed with ONNX Runtime: install offramp[onnx] or offramp[gpu]")
        import onnx

        missing = [path for path in self.beside if not path.is_file()]
        if missing:
            raise GraphError(f"{self.path}: its weights are not there: {missing[0]}")
        with tempfile.TemporaryDirectory() as folder:
            seconds, given = self._profiled(sites, repeats, Path(folder))
            fused = onnx.load(Path(folder) / "fused.onnx", load_external_data=False)
        flow = dataflow_of(fused.graph, fused.graph)
        return tuple(
            site
            if site.bytes_per_input is not None
            else replace(site, bytes_per_input=_bytes(site, given, self.flow.batch))
            for site in with_shares(sites, flow, self.flow.outputs, seconds)
        )

    def _profiled(
        self, sites: Sequence[Site], repeats: int, folder: Path
    ) -> tuple[Mapping[str, float], Mapping[str, Any]]:
        """Returns seconds of every fused operator by its name, and the values of the sites' tensors."""
        import onnx
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what fails is told below, and that the fused graph suits this machine is known
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        options.optimized_model_filepath = str(folder / "fused.onnx")
        options.add_session_config_entry(FOLDER_OF_WEIGHTS, str(self.path.resolve().parent))
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        there = {each.name for each in model.graph.output} | {*self.flow.inputs}
        tensors = dict.fromkeys([*self.flow.outputs, *(name for site in sites for name in site.tensors)])
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in there)
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            for _ in range(repeats):
                values = session.run(None, self._drawn_inputs())
        except Exception as error:  # ONNX Runtime has no class of its own that all of its errors are of
            shapes = ", ".join(f"{name} {list(self.flow.shapes[name])}" for name in self.flow.inputs)
            reason = str(error).strip().splitlines()[0]
            raise GraphError(f"ONNX Runtime cannot run {self.path} on inputs of {shapes}: {reason}") from error
        names = [each.name for each in session.get_outputs()]
        return _least(Path(session.end_profiling())), dict(zip(names, values, strict=True))

    def _drawn_inputs(self) -> dict[str, Any]:
        """Returns inputs of the shapes that were read: normal numbers, or ones where whole numbers are taken."""
        import onnx

        generator, drawn = np.random.default_rng(0), {}
        types = {each.name: each.type.tensor_type.elem_type for each in self.proto.graph.input}
        for name in self.flow.inputs:
            if name not in self.flow.shapes:
                raise GraphError(f"{self.path}: its input {name!r} has no shape")
            dtype = onnx.helper.tensor_dtype_to_np_dtype(types[name])
            shape = self.flow.shapes[name]
            floats = np.issubdtype(dtype, np.floating)
            drawn[name] = (generator.standard_normal(shape) if floats else np.ones(shape)).astype(dtype)
        return drawn

    def _image(self, info: Any) -> TensorSpec:
        """Returns an image as its codec gives it; graphs take (B, 3, height, width), or the channels last."""
        sides = [size for size in sizes_of_input(info)[1:] if size != CHANNELS]
        height, width = self.asked.image_size or (sides if len(sides) == 2 else (None, None))
        if not height or not width:
            raise InputError(
                f"{self.name} leaves the size of {info.name!r} open, or takes no images: it is {_described(info)}; "
                "--image-size HEIGHTxWIDTH says it"
            )
        return TensorSpec(name="image", shape=(height, width, CHANNELS), dtype="uint8")


def read_onnx(path: Path, *, open_size: int = OPEN_SIZE) -> OnnxModel:
    """Read a model; axes that it leaves open are `open_size` long where bytes are counted.

    Raises GraphError for what is no ONNX model, for weights outside its folder, and for If, Loop and Scan.
    """
    proto = load_structure(path)
    beside = weights_beside(proto, path)
    if proto.functions:
        import onnx.inliner

        proto = onnx.inliner.inline_local_functions(proto)
    check_operators(proto.graph, path)
    flow = dataflow_of(proto.graph, with_shapes(proto, open_size))
    return OnnxModel(name=str(path), path=path, proto=proto, flow=flow, beside=beside)


def _column(info: Any) -> TensorSpec:
    """Returns the array of the data that a graph's input takes."""
    from onnx import helper

    dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
    row = tuple(size or 0 for size in sizes_of_input(info)[1:])
    if not all(row):
        raise InputError(f"the size of {info.name!r} is open: it is {_described(info)}; arrays have one size")
    kinds: dict[str, DType] = {"f": "float", "i": "int32", "u": "int32"}
    if dtype.kind not in kinds:
        raise InputError(f"{info.name!r} is {dtype}; a model takes floating point or whole numbers")
    return TensorSpec(name=info.name, shape=row, dtype="uint8" if dtype == np.uint8 else kinds[dtype.kind])


def _described(info: Any) -> list[int]:
    return [size or 0 for size in sizes_of_input(info)]


def _least(profile: Path) -> Mapping[str, float]:
    """Returns seconds by operator, the shortest of all runs."""
    runs: defaultdict[str, float] = defaultdict(lambda: math.inf)
    for event in json.loads(profile.read_text(encoding="utf-8")):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            name = name.removesuffix("_kernel_time")
            runs[name] = min(runs[name], event["dur"] / 1e6)
    return runs


def _bytes(site: Site, given: Mapping[str, Any], batch: int) -> int | None:
    """Returns the bytes of one input; those that were read where a tensor is an input of the model."""
    values = [given[name] for name in site.tensors if name in given]
    if len(values) < len(site.tensors):
        return site.bytes_per_input
    return sum(int(each.nbytes) for each in values) // batch
