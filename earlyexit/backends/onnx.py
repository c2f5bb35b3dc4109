"""Runs segments with ONNX Runtime instead of torch.

The model is exported once to an ONNX file, which is kept in a folder. Its graph returns the tensors after every block
and the outputs of every exit, so that each segment is a part of the graph. It takes packed tensors and the index
tensors of their layout. Only attention uses rows.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.engine.queue import Attention
from earlyexit.errors import GraphError, PlanError
from earlyexit.families.base import weight_bytes
from earlyexit.network.boundary import Segment
from earlyexit.network.model import EarlyExitModel, SegmentRunner, arbitrary_tensors
from earlyexit.network.piece import Layout, Piece, Tensors, wait_for

Key = TypeVar("Key", bound=Hashable)

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""The name of ONNX Runtime's option for the folder with a graph's weights."""

CUDA = "CUDAExecutionProvider"
FATAL = 4
"""ONNX Runtime's log level for fatal errors only."""
UNKNOWN = (
    re.compile(r"(?P<name>[\w.]+:\w+)\(-?\d+\) is not a registered function/op"),
    re.compile(r"No Op registered for (?P<name>\w+) "),
    re.compile(r"Could not find an implementation for (?P<name>\w+)\("),
    re.compile(r"No opset import for domain '(?P<name>[\w.]+)'"),
)
"""Messages of ONNX Runtime about unknown operators."""


class Sessions(Generic[Key]):
    """A cache of sessions, which are opened when they are first prepared or got.

    Every session holds weights. So preparing a new set of sessions closes all others, except the previous set, whose
    plan may still be in force, and the `spare` most recently used ones.
    """

    def __init__(self, open_one: Callable[[Key], Any], *, spare: int = 0) -> None:
        self._open_one = open_one
        self._spare = spare
        self._sessions: dict[Key, Any] = {}
        """Ordered by last use."""
        self._lock = Lock()
        """Guards `_sessions`: one thread runs sessions while another prepares some."""
        self._prepared: frozenset[Key] = frozenset()

    def find(self, key: Key) -> Any | None:
        """Returns the session of a key; None if it is not open."""
        with self._lock:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._sessions[key] = session
        return session

    def get(self, key: Key) -> Any:
        """Returns the session of a key, and opens it if necessary."""
        session = self.find(key)
        if session is None:
            session = self._open_one(key)
            with self._lock:
                self._sessions[key] = session
        return session

    def prepare(self, keys: Collection[Key]) -> None:
        """Opens sessions. Others may be used at the same time."""
        for key in keys:
            self.get(key)
        wanted = frozenset(keys)
        if wanted != self._prepared:
            kept = wanted | self._prepared
            with self._lock:
                others = [key for key in self._sessions if key not in kept]
                for key in others[: max(0, len(others) - self._spare)]:
                    del self._sessions[key]
            self._prepared = wanted


def load_runtime(device_type: str = "cpu", *, needs: Sequence[str] = ("onnx", "onnxruntime")) -> Any:
    """Returns the module `onnxruntime`. `device_type`: the type of a torch device.

    Raises PlanError if a package of `needs` is missing, or if the installed one does not support the device.
    """
    if any(find_spec(name) is None for name in needs):
        raise PlanError("ONNX Runtime is missing; run in Offramp's clone: pip install '.[onnx]', or '.[gpu]' for a GPU")
    runtime = import_module("onnxruntime")
    available = runtime.get_available_providers()
    if device_type == "cuda" and CUDA not in available:
        advice = "run: pip uninstall onnxruntime, then pip install '.[gpu]'"
        raise PlanError(f"this ONNX Runtime has no {CUDA}; it has {', '.join(available)}; {advice}")
    return runtime


def open_session(model: Any, weights: Path, *, device_type: str = "cpu") -> Any:
    """Opens a session of a ModelProto, whose weights are in the folder `weights`. It uses as many threads as torch.

    On a CPU, errors are raised but not logged. Raises PlanError if the device cannot be used, and GraphError for a
    graph that ONNX Runtime cannot run.
    """
    runtime = load_runtime(device_type)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    if device_type == "cpu":
        options.log_severity_level = FATAL
    options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
    provider = CUDA if device_type == "cuda" else "CPUExecutionProvider"
    refusals = runtime.capi.onnxruntime_pybind11_state
    try:
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=[provider])
    except (refusals.Fail, refusals.InvalidGraph, refusals.NotImplemented, refusals.InvalidArgument) as error:
        raise GraphError(f"the graph in {weights}: {describe_error(error)}") from error
    # If the libraries of a provider do not load, ONNX Runtime falls back to the CPU, with a line on stderr.
    if provider not in session.get_providers():
        raise PlanError(f"ONNX Runtime could not start {provider}; its own log line says why")
    return session


def describe_error(error: Exception) -> str:
    """Returns an error of ONNX Runtime in one line. For unknown operators, it names them."""
    unknown = sorted({match["name"] for pattern in UNKNOWN for match in pattern.finditer(str(error))})
    if unknown:
        return f"ONNX Runtime has no operator {', '.join(unknown)}"
    return f"ONNX Runtime refuses it: {one_line(error)}"


def one_line(error: Exception) -> str:
    """Returns an error's message as one line."""
    return " ".join(str(error).split())


NUMPY_OF = {getattr(torch, name): np.dtype(name) for name in ("float32", "int32", "int64", "uint8", "bool")}
"""ONNX Runtime's form of the dtypes of a graph's inputs and outputs."""


class OnnxSegments(SegmentRunner):
    """Runs segments with ONNX Runtime in float32, for a model in inference mode whose weights are final.

    Each open segment holds a copy of its weights, beside the model's own. On a GPU, tensors stay there.
    """

    def __init__(self, model: EarlyExitModel, folder: Path) -> None:
        """`folder`: the folder `onnx` in it keeps exports. Others may share it, and it may be deleted at any time.

        Raises PlanError if ONNX Runtime is missing or does not support the model's device, for models that are not
        float32, that keep memory of sequences, or whose attention is `apart`.
        """
        if model.backbone.kept_bytes:
            raise PlanError(f"{model.info.name} keeps keys and values, which ONNX Runtime does not do here")
        if model.dtype != torch.float32:
            raise PlanError(f"ONNX Runtime runs float32 models here, not {str(model.dtype).removeprefix('torch.')}")
        load_runtime(model.device.type, needs=("onnx", "onnxscript", "onnxruntime"))
        self._model = model
        self._cache = folder / "onnx"
        if model.attention == "apart":
            raise PlanError(
                "ONNX Runtime runs one graph for any number of inputs, which cannot attend one after the other "
                "(attention: apart): choose slotted or padded, or torch"
            )
        # A graph computes attention over rows, and slots need no more rows than padded inputs.
        self._attention: Attention = "slotted" if model.attention == "auto" else model.attention
        self.sessions: Sessions[Segment] = Sessions(self._open)

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        before, found = names_before(self._model, segment.first), self.sessions.find(segment)
        if found is None or len(piece.tensors) > len(before):  # graphs do not compute `importance`
            return self._model.run(segment, piece)
        session, names = found
        values = dict(zip(before, piece.tensors, strict=True))
        layout = piece.layout(self._attention)
        feeds = {name: values[name] if name in values else getattr(layout, name) for name in names}
        if self._model.device.type == "cuda":
            results = self.room_for(segment, len(piece), int(piece.lengths_B.sum()))
            run_in_place(session, feeds, results)
            tensors = tuple(results.values())
        else:
            arrays = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
            tensors = tuple(map(torch.from_numpy, arrays))
        return (tensors[:-1], tensors[-1]) if self._model.has_exit(segment) else (tensors, None)

    def prepare(self, segments: Collection[Segment]) -> None:
        """Opens a session for each segment, while others may run. The first call exports the model, for seconds."""
        if segments and not self.file.is_file():
            self._cache.mkdir(parents=True, exist_ok=True)
            with (self._cache / "lock").open("w") as file:
                # One process exports at a time, because replicas that start together need the same file.
                fcntl.flock(file, fcntl.LOCK_EX)
                if not self.file.is_file():
                    export_elsewhere(self._model, self.file)
        self.sessions.prepare(segments)

    @cached_property
    def file(self) -> Path:
        """The path of the model's export. Its name changes whenever its content would."""
        return self._cache / f"{self._model.info.name}-{_fingerprint(self._model)[:16]}.onnx"

    @cached_property
    def _graph(self) -> Any:
        """The model's export as an `onnx.utils.Extractor`, without the weights."""
        import onnx

        return onnx.utils.Extractor(onnx.load(self.file, load_external_data=False))

    def room_for(self, segment: Segment, num_inputs: int, num_tokens: int) -> dict[str, Tensor]:
        """Returns empty tensors for the outputs of a segment's graph, by name and in the graph's order."""
        model, shapes = self._model, list[tuple[tuple[int, ...], torch.dtype]]()
        for spec in model.takes(segment.end):
            dtype = model.dtype if spec.dtype == "float" else getattr(torch, spec.dtype)
            shapes.append(((num_tokens if spec.per_token else num_inputs, *spec.shape), dtype))
        if model.has_exit(segment):
            shapes.append(((num_inputs, *model.task.output_shape), model.dtype))
        rooms = (torch.empty(shape, dtype=dtype, device=model.device) for shape, dtype in shapes)
        return dict(zip(self._names_after(segment), rooms, strict=True))

    def _names_after(self, segment: Segment) -> list[str]:
        names = names_before(self._model, segment.end)
        return [*names, exit_name(segment.end)] if self._model.has_exit(segment) else names

    def _open(self, segment: Segment) -> tuple[Any, list[str]]:
        """Returns the session of a segment, and the names of its inputs."""
        given = [*names_before(self._model, segment.first), *index_tensors(self._model)]
        part = part_of(self._graph, given, self._names_after(segment))
        session = open_session(part, self._cache, device_type=self._model.device.type)
        return session, [each.name for each in part.graph.input]


def part_of(graph: Any, given: Sequence[str], wanted: Sequence[str]) -> Any:
    """Returns the ModelProto of a part of an `onnx.utils.Extractor`'s graph. Of `given`, it takes what it needs."""
    from onnx.helper import make_node

    # Operators read the original of a tensor that passes unchanged through blocks, because the exporter optimizes.
    originals = {node.output[0]: node.input[0] for node in graph.graph.node if node.op_type == "Identity"}
    passed: dict[str, str] = {}
    for name in (name for name in given if name in originals):
        original = name
        while original in originals:
            original = originals[original]
        if original not in given:
            passed[original] = name
    part = graph.extract_model([*given, *passed], wanted)
    nodes = [make_node("Identity", [name], [original]) for original, name in passed.items()] + list(part.graph.node)
    read = {name for node in nodes for name in node.input}
    inputs = [each for each in part.graph.input if each.name in read and each.name not in passed]
    for field, values in (("node", nodes), ("input", inputs)):
        part.graph.ClearField(field)
        getattr(part.graph, field).extend(values)
    return part


def run_in_place(session: Any, feeds: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> None:
    """Runs a session that reads `feeds` and writes to `results` without copies, so that data on a GPU stays there.

    On a CPU this is slower than passing arrays (0.2 ms per call of a graph with seven inputs).
    """
    binding = session.io_binding()
    inputs = {name: tensor.contiguous() for name, tensor in feeds.items()}
    for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, results)):
        for name, tensor in tensors.items():
            device = tensor.device.type, tensor.device.index or 0
            bind(name, *device, NUMPY_OF[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    wait_for(next(iter(results.values())).device)  # ONNX Runtime uses a stream of its own
    session.run_with_iobinding(binding)


def _fingerprint(model: EarlyExitModel) -> str:
    """Returns the SHA-256 of all data that determine an export."""
    info = model.info
    styles = info.ramp_style, info.pooling, info.head_style, info.head_pooling
    heads = *styles, model.ramp_indices, *model.task.output_shape
    versions = EXPORT_VERSION, OPSET, torch.__version__, *map(metadata.version, ("onnx", "onnxscript"))
    facts = versions, info.family, heads, model.backbone.to_config()
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for part in weight_bytes(model):
        digest.update(part)
    return digest.hexdigest()


# Part of the name of every file. Increase it if `_ModelGraph` or the export changes, so that old files are not used.
EXPORT_VERSION = 9
# The first opset with Gelu as one node. From opset 23 on, attention is one node too, but ONNX Runtime 1.31 does not
# accept a mask that is the same for all queries.
OPSET = 20


def export(model: EarlyExitModel, path: Path) -> None:
    """Exports a model to a file. The exporter changes shared state, so no other thread may run torch meanwhile."""
    # The exporter would treat sizes of 0 and 1 as constants.
    lengths = [1, 1] if model.max_length == 1 else [4, 3, 1]
    layout = Layout(np.array(lengths, dtype=np.int32), model.device, "slotted")
    values = arbitrary_tensors(model, 0, layout.lengths_B, np.random.default_rng(0))
    tensors = {name: getattr(layout, name) for name in index_tensors(model)}
    inputs, outputs = names_before(model, 0), list[str]()
    for block in range(model.num_blocks):
        outputs += names_before(model, block + 1)
        outputs += [exit_name(block + 1)] if _has_head(model, block) else []
    with torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(
            _ModelGraph(model).eval(),
            # The graph reads sizes of its first inputs that have them. So parts of it do not need the model's inputs.
            kwargs={"tensors": tensors, "values": values},
            dynamo=True,
            opset_version=OPSET,
            input_names=[*tensors, *inputs],
            output_names=outputs,
            dynamic_shapes={
                "tensors": {name: _free_sizes(model, name) for name in tensors},
                "values": tuple(_free_sizes(model, name) for name in inputs),
            },
            verbose=False,
        )
    assert program is not None
    # Files are replaced as a whole, because another process may export the same model.
    path.parent.mkdir(parents=True, exist_ok=True)
    # Weights are beside the graph, so that ONNX Runtime maps them and processes share their memory.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        program.save(Path(folder) / path.name, external_data=True)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the graph last, so that its weights exist
            os.replace(file, path.parent / file.name)


def export_elsewhere(model: EarlyExitModel, path: Path) -> None:
    """Exports a model in a separate process, while threads of this one run it. Raises PlanError if it fails.

    The exporter changes state that all threads share (the model's weights, torch's modes, warnings), and holds the GIL
    for seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.pt"
        torch.save((model, path), job)
        done = subprocess.run(
            [sys.executable, "-m", "earlyexit.backends.onnx", str(job)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        *_, reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PlanError(f"the model could not be exported for ONNX Runtime: {reason}")


class _GraphLayout(Layout):
    """A layout whose tensors are inputs of the graph. It is never uniform.

    Attention is `slotted`. With one input per slot this is the padded form, so that one graph serves both. Without a
    mask of tokens, each row is an input.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Replaces Layout's cached properties.
        vars(self).update(tensors, uniform=False, scheme="slotted", _shares_rows=True)
        self.num_inputs, self.longest = tensors["mask_BT" if "mask_BT" in tensors else "lengths_B1"].shape
        self.exit_reads_tokens = False
        """Whether the tensor that the next exit reads has a row per token, rather than one per input."""

    def _masked(self, seen: Tensor, bias_HTT: Tensor | None) -> Tensor:
        # Floats, because every block would convert a bool mask again.
        return torch.where(seen, 0.0 if bias_HTT is None else bias_HTT, -torch.inf)

    def per_input(self, values: Tensor) -> bool:
        return not self.exit_reads_tokens


class _ModelGraph(nn.Module):
    """The exported module: it returns the tensors after every block, each followed by the outputs of a ramp or head."""

    def __init__(self, model: EarlyExitModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tensors: dict[str, Tensor], values: Tensors) -> Tensors:
        layout = _GraphLayout(tensors)
        outputs: list[Tensor] = []
        for block in range(self.model.num_blocks):
            after = self.model.run_blocks(block, block + 1, values, layout)
            values = tuple(each.clone() for each in after)  # a tensor that a block does not change needs another name
            outputs += values
            if _has_head(self.model, block):
                layout.exit_reads_tokens = self.model.takes(block + 1)[0].per_token
                outputs.append(self.model.exit_outputs(block, values, layout))
        return tuple(outputs)


def _has_head(model: EarlyExitModel, block: int) -> bool:
    return block in model.ramp_indices or block == model.num_blocks - 1


def index_tensors(model: EarlyExitModel) -> tuple[str, ...]:
    """Returns the names of the tensors of a `Layout` that the model's graph takes beside the values."""
    if model.max_length == 1:
        return ("lengths_B1",)  # for the number of inputs
    return "mask_BT", "place_N", "owner_RT", "row_place_N", "position_N", "first_token_B", "last_token_B", "lengths_B1"


def names_before(model: EarlyExitModel, block: int) -> list[str]:
    """Returns the names of the tensors before a block in the model's graph; for the number of blocks, those at its end.

    Tensors of different blocks may have the same name in the model.
    """
    names = [each.name for each in model.takes(block)]
    return names if block == 0 else [f"{name}@{block}" for name in names]


def exit_name(end: int) -> str:
    """Returns the name in the model's graph of the outputs of the exit before block `end`."""
    return f"outputs@{end}"


LENGTH, COUNT = torch.export.Dim("T"), torch.export.Dim("B")


def _free_sizes(model: EarlyExitModel, name: str) -> dict[int, Any]:
    """Returns the axes of an input whose size is dynamic. Inputs without tokens have one size, that of the batch."""
    if model.max_length == 1:
        return {0: COUNT}
    free: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    return free | {1: LENGTH} if name in ("mask_BT", "owner_RT") else free  # slots are as long as padded inputs


if __name__ == "__main__":
    gc.disable()  # nearly all objects of an export live until its end
    export(*torch.load(sys.argv[1], map_location="cpu", weights_only=False))
