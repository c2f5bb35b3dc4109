"""An ONNX file as a foreign model. This module needs no torch; only cutting the model, in `onnx_cut`, does."""

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
"""The name of ONNX Runtime's option for the weights' folder of a model that is passed as bytes."""


@dataclass(frozen=True, kw_only=True)
class OnnxModel(ForeignModel):
    """An ONNX file that was read and checked. Tensors and operators of `flow` have their names in `proto`."""

    family: ClassVar[str] = "onnx"
    path: Path
    proto: Any
    """The onnx.ModelProto, with inlined functions and unique names of nodes, without the weights beside the file."""
    beside: tuple[Path, ...]
    """The files with weights. They are in the model's folder or below it."""

    @property
    def inputs(self) -> Boundary:
        infos = [each for each in self.proto.graph.input if each.name in self.flow.inputs]
        if self.options.columns == (IMAGE,):
            return (self._image(infos[0]),)
        if TEXT in self.options.columns:
            ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True)
            has_types = any(layout_role(each.name) == "zeros" for each in infos)
            return (ids, *[replace(ids, name="token_types")] * (PAIR in self.options.columns and has_types))
        return tuple(map(_column, infos))

    @property
    def longest(self) -> int:
        return TEXT_LENGTH

    def with_answer(self, codec: NamedSpec) -> Self:
        if len(self.flow.outputs) == 1 and self.options.output is None:
            return self
        answer = self._try_graph(codec, lambda graph: graph.output)
        return replace(self, flow=replace(self.flow, outputs=(answer,)))

    def specs(self, cuts: Sequence[Sequence[str]], codec: NamedSpec) -> list[list[TensorSpec] | str]:
        specs: list[list[TensorSpec] | str] = self._try_graph(codec, lambda graph: graph.specs(cuts))
        return specs

    def build(
        self, cuts: Sequence[Sequence[str]], codec: NamedSpec, folder: Path, rows: Sequence[Encoded] = ()
    ) -> Pretrained:
        """Also writes the graph to the folder. If the graph has a fixed batch size, it is changed to any size."""
        from earlyexit.families.base import Pretrained
        from earlyexit.foreign.onnx_backbone import FILES, OnnxBackbone

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as trial:  # an error leaves the folder unchanged
            config = self._try_graph(codec, lambda graph: graph.to_config(cuts, rows), Path(trial))
            for name in FILES:
                (Path(trial) / name).replace(folder / name)
        backbone = OnnxBackbone(config, folder)
        return Pretrained(backbone=backbone, head=given_head(backbone), label_names=None, codec=codec)

    def _try_graph(self, codec: NamedSpec, use: Callable[[Any], Any], folder: Path | None = None) -> Any:
        """Returns the result of a function of the model's `onnx_cut.TrialGraph`."""
        from earlyexit.foreign.onnx_cut import try_graph

        return try_graph(self.proto, self.path, self.options, codec, use, folder)

    def timed(self, sites: Sequence[Site], *, repeats: int = REPEATS) -> tuple[Site, ...]:
        """Also sets `bytes_per_input` if it is unknown. Raises GraphError if the model cannot be run.

        Operators are fused as in serving, but not across sites, because a cut would prevent that. To this end, the
        tensors of all sites are outputs of the timed graph.
        """
        if find_spec("onnxruntime") is None:
            raise GraphError("sites are timed with ONNX Runtime: install offramp[onnx] or offramp[gpu]")
        import onnx

        missing = [path for path in self.beside if not path.is_file()]
        if missing:
            raise GraphError(f"{self.path}: its weights are missing: {missing[0]}")
        with tempfile.TemporaryDirectory() as folder:
            seconds, values = self._profile(sites, repeats, Path(folder))
            fused = onnx.load(Path(folder) / "fused.onnx", load_external_data=False)
        flow = dataflow_of(fused.graph, fused.graph)
        return tuple(
            site
            if site.bytes_per_input is not None
            else replace(site, bytes_per_input=_bytes(site, values, self.flow.batch))
            for site in with_shares(sites, flow, self.flow.outputs, seconds)
        )

    def _profile(
        self, sites: Sequence[Site], repeats: int, folder: Path
    ) -> tuple[Mapping[str, float], Mapping[str, Any]]:
        """Returns the seconds of every fused operator by its name, and the values of the sites' tensors."""
        import onnx
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # hides errors, which are reported below, and a warning about the saved graph
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        options.optimized_model_filepath = str(folder / "fused.onnx")
        options.add_session_config_entry(FOLDER_OF_WEIGHTS, str(self.path.resolve().parent))
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        existing = {each.name for each in model.graph.output} | {*self.flow.inputs}
        tensors = dict.fromkeys([*self.flow.outputs, *(name for site in sites for name in site.tensors)])
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in existing)
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            for _ in range(repeats):
                values = session.run(None, self._random_inputs())
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            shapes = ", ".join(f"{name} {list(self.flow.shapes[name])}" for name in self.flow.inputs)
            reason = str(error).strip().splitlines()[0]
            raise GraphError(f"ONNX Runtime cannot run {self.path} on inputs of {shapes}: {reason}") from error
        names = [each.name for each in session.get_outputs()]
        return _shortest(Path(session.end_profiling())), dict(zip(names, values, strict=True))

    def _random_inputs(self) -> dict[str, Any]:
        """Returns inputs of the known shapes: normally distributed numbers, or ones for integers."""
        import onnx

        generator, inputs = np.random.default_rng(0), {}
        types = {each.name: each.type.tensor_type.elem_type for each in self.proto.graph.input}
        for name in self.flow.inputs:
            if name not in self.flow.shapes:
                raise GraphError(f"{self.path}: its input {name!r} has no shape")
            dtype = onnx.helper.tensor_dtype_to_np_dtype(types[name])
            shape = self.flow.shapes[name]
            is_float = np.issubdtype(dtype, np.floating)
            inputs[name] = (generator.standard_normal(shape) if is_float else np.ones(shape)).astype(dtype)
        return inputs

    def _image(self, info: Any) -> TensorSpec:
        """Returns the codec's tensor for an image input of the graph, which has the channels first or last."""
        sides = [size for size in sizes_of_input(info)[1:] if size != CHANNELS]
        height, width = self.options.image_size or (sides if len(sides) == 2 else (None, None))
        if not height or not width:
            raise InputError(
                f"{self.name} leaves the size of {info.name!r} open, or takes no images: it is {_described(info)}; "
                "set the size with --image-size HEIGHTxWIDTH"
            )
        return TensorSpec(name="image", shape=(height, width, CHANNELS), dtype="uint8")


def read_onnx(path: Path, *, open_size: int = OPEN_SIZE) -> OnnxModel:
    """Reads a model. `open_size`: the assumed size of its open axes.

    Raises GraphError for other files, for weights outside the model's folder, and for If, Loop and Scan.
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
    """Returns the codec's tensor for an input of the graph."""
    from onnx import helper

    dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
    row = tuple(size or 0 for size in sizes_of_input(info)[1:])
    if not all(row):
        raise InputError(f"the size of {info.name!r} is open: it is {_described(info)}; all arrays must have one size")
    kinds: dict[str, DType] = {"f": "float", "i": "int32", "u": "int32"}
    if dtype.kind not in kinds:
        raise InputError(f"{info.name!r} is {dtype}; inputs must be floating point numbers or integers")
    return TensorSpec(name=info.name, shape=row, dtype="uint8" if dtype == np.uint8 else kinds[dtype.kind])


def _described(info: Any) -> list[int]:
    return [size or 0 for size in sizes_of_input(info)]


def _shortest(profile: Path) -> Mapping[str, float]:
    """Returns the seconds of each operator's shortest run."""
    seconds: defaultdict[str, float] = defaultdict(lambda: math.inf)
    for event in json.loads(profile.read_text(encoding="utf-8")):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            name = name.removesuffix("_kernel_time")
            seconds[name] = min(seconds[name], event["dur"] / 1e6)
    return seconds


def _bytes(site: Site, values: Mapping[str, Any], batch: int) -> int | None:
    """Returns the bytes of one input at a site, or `site.bytes_per_input` if the value of a tensor is unknown."""
    arrays = [values[name] for name in site.tensors if name in values]
    if len(arrays) < len(site.tensors):
        return site.bytes_per_input
    return sum(int(each.nbytes) for each in arrays) // batch
