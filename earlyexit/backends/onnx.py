"""Segments computed by ONNX Runtime instead of torch, and their export.

A segment becomes one ONNX file, exported when it is first prepared or run, and kept in a folder. It is packed like a
piece: the graph takes the layout's index tensors as inputs beside the values, and only attention sees rows.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.engine.queue import Attention
from earlyexit.errors import PlanError
from earlyexit.families.base import weight_bytes
from earlyexit.network.boundary import DType, Segment
from earlyexit.network.model import EarlyExitModel, SegmentRunner, arbitrary_tensors
from earlyexit.network.piece import Layout, Piece, Tensors, wait_for

Key = TypeVar("Key", bound=Hashable)

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's option for the folder with a graph's weights."""

CUDA = "CUDAExecutionProvider"
FATAL = 4
"""ONNX Runtime's log level for fatal errors only."""


class Sessions(Generic[Key]):
    """Sessions by key, each opened when it is first prepared or used.

    Every session holds weights. So preparing a new set closes all sessions except that set, the set before (of a plan
    that is still in force while the next is prepared), and the `spare` others that were used last.
    """

    def __init__(self, open_one: Callable[[Key], Any], *, spare: int = 0) -> None:
        self._open_one = open_one
        self._spare = spare
        self._sessions: dict[Key, Any] = {}
        """In the order of their last use."""
        self._lock = Lock()
        """Held while the sessions are read or changed: one thread runs sessions while another prepares some."""
        self._prepared: frozenset[Key] = frozenset()

    def get(self, key: Key) -> Any:
        """Returns the session of a key; raises what opening it raises."""
        with self._lock:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._sessions[key] = session
        if session is None:
            session = self._open_one(key)
            with self._lock:
                self._sessions[key] = session
        return session

    def is_ready(self, key: Key) -> bool:
        """Whether it is open."""
        with self._lock:
            return key in self._sessions

    def prepare(self, keys: Collection[Key]) -> None:
        """Open sessions; others may be used at the same time."""
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


def load_runtime(providers: Sequence[str], *, needs: Sequence[str] = ("onnx", "onnxruntime")) -> Any:
    """Returns ONNX Runtime's module; raises PlanError without it, a package that it needs here, or a provider."""
    if any(find_spec(name) is None for name in needs):
        raise PlanError("ONNX Runtime is not installed: install offramp[onnx] or offramp[gpu]")
    runtime = import_module("onnxruntime")
    available = runtime.get_available_providers()
    unknown = [name for name in providers if name not in available]
    if unknown:
        instead = "; install offramp[gpu] in the place of offramp[onnx]" if CUDA in unknown else ""
        raise PlanError(f"this ONNX Runtime has no {', '.join(unknown)}; it has {', '.join(available)}{instead}")
    return runtime


def provider_of(device_type: str) -> str:
    """Returns the provider for a torch device of this type."""
    return CUDA if device_type == "cuda" else "CPUExecutionProvider"


def open_session(
    runtime: Any,
    graph: Path | bytes,
    *,
    providers: Sequence[str],
    num_threads: int | None = None,
    weights: Path | None = None,
    quiet: bool = False,
) -> Any:
    """Returns a session of a file, or of a graph in memory with weights in the folder `weights`.

    `num_threads` None leaves the choice to ONNX Runtime. `quiet`: errors are raised, but not logged.
    Raises PlanError for a provider that does not start, and what ONNX Runtime raises.
    """
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = num_threads or 0  # ONNX Runtime's word for its own choice
    if quiet:
        options.log_severity_level = FATAL
    if weights is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
    session = runtime.InferenceSession(graph, options, providers=list(providers))
    # ONNX Runtime replaces a provider whose libraries do not load by the CPU, with a line on stderr.
    missing = sorted(set(providers) - set(session.get_providers()))
    if missing:
        raise PlanError(f"ONNX Runtime could not start {', '.join(missing)}; its own log line says why")
    return session


NUMPY_OF = {getattr(torch, name): np.dtype(name) for name in ("float32", "int32", "int64", "uint8", "bool")}
"""Types of tensors that cross and of index tensors, in the form for ONNX Runtime."""


class OnnxSegments(SegmentRunner):
    """Segments on ONNX Runtime, in float32, for a model in inference mode whose weights no longer change.

    Every segment that ran holds its own copy of its weights, beside the model's. `cache` may be shared by models and
    processes and deleted at any time. With the provider `CUDAExecutionProvider` blocks run on the GPU, and pieces stay
    there.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        *,
        cache: Path,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        num_threads: int | None = None,
    ) -> None:
        """Raise PlanError without ONNX Runtime or a provider, for models that are not float32 or attend apart.

        `num_threads` are those of every segment's session; None leaves the choice to ONNX Runtime.
        """
        if model.backbone.kept_bytes:
            raise PlanError(f"{model.info.name} keeps keys and values, which ONNX Runtime does not do here")
        if model.dtype != torch.float32:
            raise PlanError(f"ONNX Runtime runs float32 models here, not {str(model.dtype).removeprefix('torch.')}")
        self._runtime = load_runtime(providers, needs=("onnx", "onnxscript", "onnxruntime"))
        self._model = model
        self._cache = cache
        self._providers = tuple(providers)
        self._num_threads = num_threads
        if model.attention == "apart":
            raise PlanError(
                "ONNX Runtime runs one graph for any number of inputs, which cannot attend one after the other "
                "(attention: apart): choose slotted or padded, or torch"
            )
        # Attention of a graph is over rows; slots are never more rows than padded inputs.
        self._attention: Attention = "slotted" if model.attention == "auto" else model.attention
        self._sessions: Sessions[Segment] = Sessions(self._open)
        self._fingerprint: str | None = None

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        names = value_names(self._model, segment.first)
        if len(piece.tensors) > len(names):  # attention is measured, for which there are no graphs
            return self._model.run(segment, piece)
        feeds = dict(zip(names, piece.tensors, strict=True)) | index_tensors(
            self._model, Layout(piece.lengths_B, self._model.device, self._attention)
        )
        session = self._sessions.get(segment)
        if self._model.device.type == "cuda":
            results = self.room_for(segment, len(piece), int(piece.lengths_B.sum()))
            run_in_place(session, feeds, results)
            tensors = tuple(results.values())
        else:
            found = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
            tensors = tuple(map(torch.from_numpy, found))
        return (tensors[:-1], tensors[-1]) if self._model.has_exit(segment) else (tensors, None)

    def is_ready(self, segment: Segment) -> bool:
        return self._sessions.is_ready(segment)

    def prepare(self, segments: Collection[Segment]) -> None:
        """Open a session for each, for seconds each if it was never exported; others may run at the same time."""
        if self._missing(segments):
            self._cache.mkdir(parents=True, exist_ok=True)
            with (self._cache / "lock").open("w") as file:
                # One process at a time, until the file is closed: replicas that start together need the same files.
                fcntl.flock(file, fcntl.LOCK_EX)
                if missing := self._missing(segments):
                    export_elsewhere(self._model, missing)
        self._sessions.prepare(segments)

    def _missing(self, segments: Collection[Segment]) -> dict[Segment, Path]:
        return {segment: path for segment in segments if not (path := self.file(segment)).is_file()}

    def file(self, segment: Segment) -> Path:
        """Where the segment's export is kept; the name changes with whatever changes its content."""
        self._fingerprint = self._fingerprint or _fingerprint(self._model)
        end = f"{segment.end}-exit" if self._model.has_exit(segment) else f"{segment.end}"
        return self._cache / f"{self._model.info.name}-{segment.first}-{end}-{self._fingerprint[:16]}.onnx"

    def room_for(self, segment: Segment, num_inputs: int, num_tokens: int) -> dict[str, Tensor]:
        """Tensors for what a segment's graph gives, by its names and in its order."""
        after = self._model.boundary(segment.end - 1)
        results = {
            after_name(spec.name): self._room((num_tokens if spec.per_token else num_inputs, *spec.shape), spec.dtype)
            for spec in after
        }
        if self._model.has_exit(segment):
            results[EXIT_NAME] = self._room((num_inputs, *self._model.task.output_shape))
        return results

    def _room(self, shape: tuple[int, ...], dtype: DType = "float") -> Tensor:
        own = self._model.dtype if dtype == "float" else getattr(torch, dtype)
        return torch.empty(shape, dtype=own, device=self._model.device)

    def _open(self, segment: Segment) -> Any:
        path = self.file(segment)
        if not path.is_file():
            export(self._model, segment, path)
        return open_session(self._runtime, path, providers=self._providers, num_threads=self._num_threads)


def run_in_place(session: Any, feeds: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> None:
    """Run a session on tensors in place, into other tensors: data on a GPU stays there.

    On a CPU this is slower than passing arrays (0.2 ms per call of a graph with seven inputs).
    """
    binding = session.io_binding()
    given = {name: tensor.contiguous() for name, tensor in feeds.items()}
    for bind, tensors in ((binding.bind_input, given), (binding.bind_output, results)):
        for name, tensor in tensors.items():
            place = tensor.device.type, tensor.device.index or 0
            bind(name, *place, NUMPY_OF[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    wait_for(next(iter(results.values())).device)  # ONNX Runtime uses, and waits for, a stream of its own
    session.run_with_iobinding(binding)


def onnx_segments(model: EarlyExitModel, folder: Path, num_threads: int) -> OnnxSegments:
    """Returns segments on the model's own device; exports are kept in the model's folder."""
    provider = provider_of(model.device.type)
    return OnnxSegments(model, cache=folder / "onnx", providers=(provider,), num_threads=num_threads)


def _fingerprint(model: EarlyExitModel) -> str:
    """Returns the SHA-256 of everything that an export depends on."""
    info = model.info
    heads = [
        info.ramp_style,
        info.pooling,
        info.head_style,
        info.head_pooling,
        model.ramp_indices,
        *model.task.output_shape,
    ]
    versions = [EXPORT_VERSION, OPSET, torch.__version__, *map(metadata.version, ("onnx", "onnxscript"))]
    digest = hashlib.sha256(
        json.dumps([versions, info.family, heads, model.backbone.to_config()], sort_keys=True).encode()
    )
    for part in weight_bytes(model):
        digest.update(part)
    return digest.hexdigest()


# Part of every file's name: raise it when `_SegmentGraph` or the export changes, so that older files are not used.
EXPORT_VERSION = 6
# The first opset with Gelu as one node is 20. From 23 on attention is one node too, but ONNX Runtime 1.31 refuses it
# with a mask that is the same for all queries, as ours is.
OPSET = 20

EXIT_NAME = "outputs"


def export(model: EarlyExitModel, segment: Segment, path: Path) -> None:
    """Write a segment's file; no other thread may run torch meanwhile: the exporter changes shared state."""
    # No sizes of 0 and 1, which the exporter would take for constants.
    lengths = [1, 1] if model.max_length == 1 else [4, 3, 1]
    layout = Layout(np.array(lengths, dtype=np.int32), model.device, "slotted")
    values = arbitrary_tensors(model, segment.first, layout.lengths_B, np.random.default_rng(0))
    tensors = index_tensors(model, layout)
    inputs, outputs = value_names(model, segment.first), value_names(model, segment.end)
    longest = torch.export.Dim("T")  # a single dimension: slots are as long as the padded form
    with quiet_exporter(), torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(
            _SegmentGraph(model, segment).eval(),
            kwargs={"values": values, "tensors": tensors},
            dynamo=True,
            opset_version=OPSET,
            input_names=[*inputs, *tensors],
            output_names=[*map(after_name, outputs), *([EXIT_NAME] if model.has_exit(segment) else [])],
            dynamic_shapes={
                "values": tuple(_free_sizes(name, longest) for name in inputs),
                "tensors": {name: _free_sizes(name, longest) for name in tensors},
            },
            verbose=False,
        )
    assert program is not None
    # Another process may export the same segment: the last one replaces a whole file by an equal one.
    path.parent.mkdir(parents=True, exist_ok=True)
    # Weights lie beside the graph, so that ONNX Runtime maps them and processes share them.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        program.save(Path(folder) / path.name, external_data=True)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the graph last: what is there has its weights
            os.replace(file, path.parent / file.name)


def export_elsewhere(model: EarlyExitModel, files: Mapping[Segment, Path]) -> None:
    """Write several segments' files while other threads run the model. Raises PlanError for what cannot be exported.

    It runs in a process of its own: the exporter changes state that all threads share (the model's weights, torch's
    modes, warnings), and holds Python's lock for seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.pt"
        torch.save((model, dict(files)), job)
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
    """A layout whose tensors are a graph's inputs; it is never uniform.

    Attention is in slots, which are the padded form if each holds one input: one graph serves both.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        vars(self).update(tensors, scheme="slotted", _shares_rows=True)  # instead of what Layout would compute
        self.num_inputs, self.longest = tensors["mask_BT"].shape

    def _masked(self, seen: Tensor, bias_HTT: Tensor | None) -> Tensor:
        # Numbers, once for all blocks: each block would convert booleans to numbers otherwise.
        return torch.where(seen, 0.0 if bias_HTT is None else bias_HTT, -torch.inf)

    @property
    def uniform(self) -> bool:
        return False

    def per_input(self, values: Tensor) -> bool:
        return False


class _NoTokens(Layout):
    """The layout of inputs without tokens in a graph: rows are inputs, of any number."""

    def __init__(self) -> None:
        self.longest = 1

    def per_input(self, values: Tensor) -> bool:
        return True


class _SegmentGraph(nn.Module):
    """The exported module: a segment, with the exit at its end if there is one."""

    def __init__(self, model: EarlyExitModel, segment: Segment) -> None:
        super().__init__()
        self.model = model
        self.segment = segment

    def forward(self, values: Tensors, tensors: dict[str, Tensor]) -> Tensors:
        layout = _GraphLayout(tensors) if tensors else _NoTokens()
        hidden, outputs_BC = self.model.compute(self.segment, values, layout)
        return hidden if outputs_BC is None else (*hidden, outputs_BC)


def after_name(name: str) -> str:
    """Returns the name of an output; the input of a graph may have the same name in the boundary."""
    return f"{name}_after"


def value_names(model: EarlyExitModel, block: int) -> list[str]:
    """Returns the names of a graph's tensors that cross before `block`."""
    return [each.name for each in model.boundary(block - 1)]


def index_tensors(model: EarlyExitModel, layout: Layout) -> dict[str, Tensor]:
    """Returns the graph's inputs beside the values: none for inputs without tokens."""
    if model.max_length == 1:
        return {}
    names = ("mask_BT", "place_N", "owner_RT", "row_place_N", "position_N", "first_token_B", "lengths_B1")
    return {name: getattr(layout, name) for name in names}


def _free_sizes(name: str, longest: Any) -> dict[int, Any]:
    free: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    return free | {1: longest} if name in ("mask_BT", "owner_RT") else free


@cache
def _operators(build: Callable[..., Any], opset_version: int) -> Any:
    """The exporter's table of operators. It would build the table for every export, in a fifth of the time."""
    return build(opset_version=opset_version)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silences messages of the exporter's own parts; its failures are exceptions. Garbage is collected afterwards."""
    module = import_module("torch.onnx._internal.exporter._registration")
    log, registry, collects = logging.getLogger(module.__name__), module.ONNXRegistry, gc.isenabled()
    level, build = log.level, registry.from_torchlib
    log.setLevel(logging.ERROR)  # it speaks of torchvision's operators
    registry.from_torchlib = staticmethod(partial(_operators, build))
    gc.disable()
    try:
        with warnings.catch_warnings():
            # One name for two sizes is what is meant: they are equal.
            warnings.filterwarnings("ignore", message=r"# The axis name: \w+ will not be used", category=UserWarning)
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
            yield
    finally:
        log.setLevel(level)
        registry.from_torchlib = build
        if collects:
            gc.enable()


if __name__ == "__main__":
    job_model, job_files = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
    for job_segment, job_path in job_files.items():
        export(job_model, job_segment, job_path)
