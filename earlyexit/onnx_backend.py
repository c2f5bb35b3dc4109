"""Segments computed by ONNX Runtime instead of torch.

A segment becomes one ONNX file, exported when it is first run and kept in a folder. It is packed like a piece: the
graph takes the layout's index tensors as inputs beside the values, and only attention sees a padded form.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.errors import PlanError
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.piece import Piece
from earlyexit.split import Segment

# Part of every file's name: raise it when `_SegmentGraph` or the export changes, so that older files are not used.
EXPORT_VERSION = 3
# The first opset with Gelu as one node is 20. From 23 on attention is one node too, but ONNX Runtime 1.31 refuses it
# with a mask that is the same for all queries, as ours is.
OPSET = 20
# A file is one protobuf message, which cannot be longer; the graph beside the weights is far below the margin.
MAX_WEIGHT_BYTES = 2**31 - 2**24


class OnnxSegments:
    """A `SegmentRunner` on ONNX Runtime, in float32, for a model in inference mode whose weights no longer change.

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
        """Raise PlanError without ONNX Runtime or a provider, and for models that are not float32.

        `num_threads` are those of every segment's session; None leaves the choice to ONNX Runtime.
        """
        if model.dtype != torch.float32:
            raise PlanError(f"ONNX Runtime runs float32 models here, not {str(model.dtype).removeprefix('torch.')}")
        self._runtime = _load_runtime(providers)
        self._model = model
        self._cache = cache
        self._providers = tuple(providers)
        self._num_threads = num_threads
        self._sessions: dict[Segment, Any] = {}
        self._fingerprint: str | None = None

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensor, Tensor | None]:
        layout = Layout(piece.lengths_B)
        feeds = {"values": piece.values.cpu(), **_index_tensors(layout)}
        results = self._session(segment).run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
        hidden_ND, *logits_BC = (torch.from_numpy(result).to(self._model.device) for result in results)
        return hidden_ND, logits_BC[0] if logits_BC else None

    def file(self, segment: Segment) -> Path:
        """Where the segment's export is kept; the name changes with whatever changes its content."""
        self._fingerprint = self._fingerprint or _fingerprint(self._model)
        end = f"{segment.end}-exit" if _has_exit(self._model, segment) else f"{segment.end}"
        return self._cache / f"{self._model.info.name}-{segment.first}-{end}-{self._fingerprint[:16]}.onnx"

    def _session(self, segment: Segment) -> Any:
        if segment not in self._sessions:
            path = self.file(segment)
            if not path.is_file():
                _export(self._model, segment, path)
            self._sessions[segment] = self._open(path)
        return self._sessions[segment]

    def _open(self, path: Path) -> Any:
        options = self._runtime.SessionOptions()
        options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = self._num_threads or 0  # ONNX Runtime's word for its own choice
        session = self._runtime.InferenceSession(path, options, providers=list(self._providers))
        # A provider whose libraries do not load is left out with a line on stderr, and the CPU takes its place.
        missing = sorted(set(self._providers) - set(session.get_providers()))
        if missing:
            raise PlanError(f"ONNX Runtime could not start {', '.join(missing)}; its own log line says why")
        return session


class _GraphLayout(Layout):
    """A layout whose tensors are a graph's inputs, and whose sizes are theirs; never taken for uniform."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        vars(self).update(tensors)  # in the place of what Layout would compute
        self.num_inputs, self.longest = tensors["mask_BT"].shape

    @property
    def uniform(self) -> bool:
        return False


class _SegmentGraph(nn.Module):
    """What is exported: a segment, with the exit at its end if there is one."""

    def __init__(self, model: EarlyExitModel, segment: Segment) -> None:
        super().__init__()
        self.model = model
        self.segment = segment
        self.has_exit = _has_exit(model, segment)

    def forward(self, values: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        layout = _GraphLayout(tensors)
        hidden_ND = self.model.run_blocks(self.segment.first, self.segment.end, values, layout)
        if not self.has_exit:
            return (hidden_ND,)
        return hidden_ND, self.model.exit_logits(self.segment.end - 1, hidden_ND, layout)


def _index_tensors(layout: Layout) -> dict[str, Tensor]:
    names = ("mask_BT", "slot_N", "position_N", "first_token_B", "lengths_B1")
    return {name: getattr(layout, name) for name in names}


def _has_exit(model: EarlyExitModel, segment: Segment) -> bool:
    return segment.ramp is not None or segment.end == model.num_blocks


def _load_runtime(providers: Sequence[str]) -> Any:
    if any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        raise PlanError("ONNX Runtime is not installed: install offramp[onnx] or offramp[gpu]")
    runtime = import_module("onnxruntime")
    available = runtime.get_available_providers()
    unknown = [name for name in providers if name not in available]
    if unknown:
        raise PlanError(f"this ONNX Runtime has no {', '.join(unknown)}; it has {', '.join(available)}")
    return runtime


def _fingerprint(model: EarlyExitModel) -> str:
    """SHA-256 of everything that an export depends on."""
    info = replace(model.info, provenance={})
    versions = [EXPORT_VERSION, OPSET, torch.__version__, *map(metadata.version, ("onnx", "onnxscript"))]
    digest = hashlib.sha256(json.dumps([versions, str(info), model.backbone.to_config()], sort_keys=True).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def _export(model: EarlyExitModel, segment: Segment, path: Path) -> None:
    values, tensors = _example_inputs(model, segment)
    with _quiet_exporter(), torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(
            _SegmentGraph(model, segment).eval(),
            kwargs={"values": values, "tensors": tensors},
            dynamo=True,
            opset_version=OPSET,
            input_names=["values", *tensors],
            output_names=["hidden_ND", "logits_BC"] if _has_exit(model, segment) else ["hidden_ND"],
            dynamic_shapes={"values": _free_sizes("values"), "tensors": {name: _free_sizes(name) for name in tensors}},
            verbose=False,
        )
    assert program is not None
    _check_size(program.model.graph.initializers.values(), segment)
    # Another process may export the same segment: whoever is last replaces a whole file by an equal one.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        program.save(Path(folder) / path.name, external_data=False)
        os.replace(Path(folder) / path.name, path)


def _example_inputs(model: EarlyExitModel, segment: Segment) -> tuple[Tensor, dict[str, Tensor]]:
    # Any sizes but 0 and 1, which the exporter would take for constants.
    layout = Layout(np.array([3, 2], dtype=np.int32), model.device)
    if segment.first == 0:
        values = torch.zeros(layout.num_tokens, dtype=torch.int32, device=model.device)
    else:
        values = torch.zeros(layout.num_tokens, model.backbone.hidden_size, device=model.device)
    return values, _index_tensors(layout)


def _free_sizes(name: str) -> dict[int, Any]:
    return dict.fromkeys((0, 1) if name == "mask_BT" else (0,), torch.export.Dim.DYNAMIC)


def _check_size(weights: Iterable[Any], segment: Segment) -> None:
    num_bytes = sum(weight.const_value.nbytes for weight in weights)
    if num_bytes > MAX_WEIGHT_BYTES:
        raise PlanError(
            f"blocks {segment.first} to {segment.end - 1} hold {num_bytes / 1e9:.1f} GB of weights, more than one ONNX "
            "file can: split them, or run them with torch"
        )


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """No word of what the exporter itself is built on; its failures are exceptions."""
    registry = logging.getLogger("torch.onnx._internal.exporter._registration")  # speaks of torchvision's operators
    level = registry.level
    registry.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
            yield
    finally:
        registry.setLevel(level)
