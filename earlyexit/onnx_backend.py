"""Segments computed by ONNX Runtime instead of torch.

A segment becomes one ONNX file, exported when it is first prepared or run, and kept in a folder. It is packed like a
piece: the graph takes the layout's index tensors as inputs beside the values, and only attention sees rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.fingerprint import weight_bytes
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.onnx_export import EXPORT_VERSION, OPSET, export, export_elsewhere, index_tensors, value_names
from earlyexit.onnx_sessions import Sessions, load_runtime, open_session, provider_of
from earlyexit.piece import Piece, Tensors
from earlyexit.slots import Attention
from earlyexit.split import Segment


class OnnxSegments:
    """`PreparedSegments` on ONNX Runtime, in float32, for a model in inference mode whose weights no longer change.

    Every segment that ran holds its own copy of its weights, beside the model's. `cache` may be shared by models and
    processes and deleted at any time. With the provider `CUDAExecutionProvider` the blocks run on the GPU, but pieces
    cross over host memory before and after every segment.
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
            self._model, Layout(piece.lengths_B, attention=self._attention)
        )
        results = self._sessions.get(segment).run(None, {name: tensor.cpu().numpy() for name, tensor in feeds.items()})
        tensors = tuple(torch.from_numpy(result).to(self._model.device) for result in results)
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

    def _open(self, segment: Segment) -> Any:
        path = self.file(segment)
        if not path.is_file():
            export(self._model, segment, path)
        return open_session(self._runtime, path, providers=self._providers, num_threads=self._num_threads)


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
