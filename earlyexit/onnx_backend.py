"""Segments computed by ONNX Runtime instead of torch.

A segment becomes one ONNX file, exported when it is first prepared or run, and kept in a folder. It is packed like a
piece: the graph takes the layout's index tensors as inputs beside the values, and only attention sees rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.boundary import DType
from earlyexit.errors import PlanError
from earlyexit.fingerprint import weight_bytes
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.onnx_export import (
    EXIT_NAME,
    EXPORT_VERSION,
    OPSET,
    after_name,
    export,
    export_elsewhere,
    index_tensors,
    value_names,
)
from earlyexit.onnx_sessions import Sessions, load_runtime, open_session, provider_of
from earlyexit.piece import Piece, Tensors
from earlyexit.slots import Attention
from earlyexit.split import Segment
from earlyexit.transfer import wait_for

NUMPY_OF = {getattr(torch, name): np.dtype(name) for name in ("float32", "int32", "int64", "uint8", "bool")}
"""Of what crosses, and of index tensors: how ONNX Runtime is told a tensor's type."""


class OnnxSegments:
    """`PreparedSegments` on ONNX Runtime, in float32, for a model in inference mode whose weights no longer change.

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
        if model.kept_bytes:
            raise PlanError(f"{model.info.name} keeps keys and values, which ONNX Runtime does not do here")
        if model.dtype != torch.float32:
            raise PlanError(f"ONNX Runtime runs float32 models here, not {str(model.dtype).removeprefix('torch.')}")
        self._runtime = load_runtime(providers, needs=("onnx", "onnxscript", "onnxruntime"))
        self._model = model
        self._cache = cache
        self._providers = tuple(providers)
        self._num_threads = num_threads
        self._attention = _in_rows(model.attention)
        self._sessions: Sessions[Segment] = Sessions(self._open)
        self._fingerprint: str | None = None

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        names = value_names(self._model, segment.first)
        if len(piece.tensors) > len(names):  # attention is to be measured, for which there are no graphs
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
        missing = {segment: path for segment in segments if not (path := self.file(segment)).is_file()}
        if missing:
            export_elsewhere(self._model, missing)
        self._sessions.prepare(segments)

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
    """Run a session on tensors where they are, into others there: what is on a GPU never sees the host.

    On a CPU that is slower than passing arrays (0.2 ms per call of a graph with seven inputs).
    """
    binding = session.io_binding()
    given = {name: tensor.contiguous() for name, tensor in feeds.items()}
    for bind, tensors in ((binding.bind_input, given), (binding.bind_output, results)):
        for name, tensor in tensors.items():
            place = tensor.device.type, tensor.device.index or 0
            bind(name, *place, NUMPY_OF[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    wait_for(next(iter(results.values())).device)  # ONNX Runtime has a stream of its own, and waits for that itself
    session.run_with_iobinding(binding)


def onnx_segments(model: EarlyExitModel, folder: Path, num_threads: int) -> OnnxSegments:
    """On the model's own device; exports are kept beside the model."""
    provider = provider_of(model.device.type)
    return OnnxSegments(model, cache=folder / "onnx", providers=(provider,), num_threads=num_threads)


def _in_rows(attention: Attention) -> Attention:
    """What a graph takes, whose attention is over rows: `auto` is slots, which are never more rows than padded ones."""
    if attention == "apart":
        raise PlanError(
            "ONNX Runtime runs one graph for any number of inputs, which cannot attend one after the other (attention: "
            "apart): choose slotted or padded, or torch"
        )
    return "slotted" if attention == "auto" else attention


def _fingerprint(model: EarlyExitModel) -> str:
    """SHA-256 of everything that an export depends on."""
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
