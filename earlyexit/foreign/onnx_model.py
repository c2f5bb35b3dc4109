"""An ONNX file as a foreign model. Only its `inputs`, and cutting the model in `onnx_cut`, need torch."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from earlyexit.data.rows import IMAGE, PAIR, TEXT
from earlyexit.errors import GraphError, InputError, first_line
from earlyexit.foreign.dataflow import REPEATS, Site, layout_role, with_shares
from earlyexit.foreign.model import ForeignModel
from earlyexit.foreign.onnx_file import (
    OPEN_SIZE,
    arbitrary_inputs,
    check_operators,
    dataflow_of,
    dtype_of_input,
    load_structure,
    returning,
    sizes_of_input,
    table_rows,
    weights_beside,
)
from earlyexit.network.boundary import Boundary, TensorSpec

if TYPE_CHECKING:
    from earlyexit.foreign.onnx_backbone import GraphInput

logger = logging.getLogger(__name__)

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
    examples: Mapping[str, Any]
    """Arbitrary inputs by name."""

    @property
    def inputs(self) -> Boundary:
        infos = [each for each in self.proto.graph.input if each.name in self.flow.inputs]
        if self.options.columns == (IMAGE,):
            return (self._image(infos[0]),)
        if TEXT in self.options.columns:
            ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True)
            has_types = any(layout_role(each.name) == "zeros" for each in infos)
            return (ids, *[replace(ids, name="token_types")] * (PAIR in self.options.columns and has_types))
        return tuple(declared_input(self.proto.graph, each).spec() for each in infos)

    def timed(self, sites: Sequence[Site], *, repeats: int = REPEATS) -> tuple[Site, ...]:
        """Raises GraphError if the model cannot be run.

        Operators are fused as in serving, but not across sites, because a cut would prevent that. To this end, the
        tensors of all sites are outputs of the timed graph.
        """
        import onnx
        import onnxruntime

        if missing := [path for path in self.beside if not path.is_file()]:
            raise GraphError(f"{self.path}: its weights are missing: {missing[0]}")
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        with tempfile.TemporaryDirectory() as folder:
            options.profile_file_prefix = f"{folder}/profile"
            options.optimized_model_filepath = f"{folder}/fused.onnx"
            tensors = [*self.flow.outputs, *(name for site in sites for name in site.tensors)]
            try:
                session = self._session(tensors, options)
                for _ in range(repeats):
                    session.run(None, self.examples)
            except Exception as error:  # the errors of ONNX Runtime have no common base class
                shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in self.examples.items())
                reason = first_line(error)
                raise GraphError(f"ONNX Runtime cannot run {self.path} on inputs of {shapes}: {reason}") from error
            seconds = _shortest(Path(session.end_profiling()))
            fused = onnx.load(options.optimized_model_filepath, load_external_data=False)
        return with_shares(sites, dataflow_of(fused.graph), self.flow.outputs, seconds)

    def measured(self) -> OnnxModel:
        """Returns the model with the shapes of its tensors, or only of its inputs if it cannot be run."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        tensors = self.flow.tensors or self.flow.outputs
        values: dict[str, Any] = dict(self.examples)
        try:
            results = self._session(tensors, options).run(None, self.examples)
            values |= {name: each for name, each in zip(tensors, results, strict=True) if hasattr(each, "nbytes")}
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            logger.warning("some shapes of the graph %s are unknown: %s", self.path, first_line(error))
        return replace(self, flow=self.flow.measured(values))

    def _session(self, tensors: Iterable[str], options: Any) -> Any:
        """Opens a session with one thread that returns these tensors."""
        import onnxruntime

        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # hides errors, which are reported by the caller
        options.add_session_config_entry(FOLDER_OF_WEIGHTS, str(self.path.resolve().parent))
        model = returning(self.proto, [name for name in tensors if name not in self.examples])
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def _image(self, info: Any) -> TensorSpec:
        """Returns the codec's tensor for an image input of the graph, which has the channels first or last."""
        sizes = sizes_of_input(info)
        sides = [size for size in sizes[1:] if size != CHANNELS]
        height, width = self.options.image_size or (sides if len(sides) == 2 else (None, None))
        in_colour = len(sizes) == 4 and not {CHANNELS, None}.isdisjoint((sizes[1], sizes[3]))
        if not height or not width or not in_colour:
            advice = "set --image-size HEIGHTxWIDTH" if in_colour else "give arrays of this shape (.npz)"
            raise InputError(f"{self.name} takes {info.name!r} as {list(sizes)}: no RGB images of known size; {advice}")
        return TensorSpec(name="image", shape=(height, width, CHANNELS), dtype="uint8")


def read_onnx(path: Path, *, open_size: int = OPEN_SIZE, arrays: bool = False) -> OnnxModel:
    """Reads a model. `open_size`: the assumed size of its open axes. `arrays`: see `Dataflow`.

    Raises GraphError for other files, for weights outside the model's folder, and for If, Loop and Scan.
    """
    proto = load_structure(path)
    beside = weights_beside(proto, path)
    if proto.functions:
        import onnx.inliner

        proto = onnx.inliner.inline_local_functions(proto)
    check_operators(proto.graph, path)
    flow = replace(dataflow_of(proto.graph), arrays=arrays)
    examples = arbitrary_inputs([each for each in proto.graph.input if each.name in flow.inputs], open_size)
    return OnnxModel(name=str(path), path=path, proto=proto, flow=flow, beside=beside, examples=examples).measured()


def declared_input(graph: Any, info: Any) -> GraphInput:
    """Returns an input without tokens, as the graph declares it. Raises InputError for a scalar or an open size."""
    from earlyexit.foreign.onnx_backbone import GraphInput

    sizes = sizes_of_input(info)
    shape = tuple(size for size in sizes[1:] if size is not None)
    if len(shape) != len(sizes) - 1:
        raise InputError(f"{info.name!r} is {list(sizes)}; arrays need an axis of inputs, and fixed sizes after it")
    dtype = dtype_of_input(info)
    below = table_rows(graph, info.name) if dtype in ("int64", "int32") else None
    return GraphInput(name=info.name, shape=shape, dtype=dtype, below=below)


def _shortest(profile: Path) -> Mapping[str, float]:
    """Returns the seconds of each operator's shortest run."""
    seconds: defaultdict[str, float] = defaultdict(lambda: math.inf)
    for event in json.loads(profile.read_text(encoding="utf-8")):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            name = name.removesuffix("_kernel_time")
            seconds[name] = min(seconds[name], event["dur"] / 1e6)
    return seconds
