"""Backends: the runtimes that compute a model's segments. Torch is imported when one is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from earlyexit.named import import_attribute

if TYPE_CHECKING:
    from earlyexit.network.model import EarlyExitModel, SegmentRunner

# The classes and functions that open a backend, by its name. They take the last two arguments of `open_segments`.
BACKENDS = {
    "torch": "earlyexit.network.layers:torch_segments",
    "onnx": "earlyexit.backends.onnx:OnnxSegments",
    "auto": "earlyexit.backends.fastest:FastestSegments",
}
if TYPE_CHECKING:
    BackendName = str
else:  # pydantic refuses other names, and lists these
    BackendName = Literal[tuple(BACKENDS)]


def open_segments(backend: BackendName, model: EarlyExitModel, folder: Path) -> SegmentRunner:
    """Opens a backend for a model whose weights are final. Modules of the model may be replaced by equivalent ones.

    `folder` keeps exports, which take long. A backbone that has its own runtime ignores `backend`. On a CPU, all
    backends use as many threads as torch does. Raises PlanError for a model that the backend cannot run.
    """
    opener = BACKENDS["torch" if model.backbone.own_runtime else backend]
    segments: SegmentRunner = import_attribute(opener)(model, folder)
    return segments


def computed_by(segments: SegmentRunner | None) -> str | None:
    """Returns the backend that `auto` chose, or None before the choice; for a chain, the backends of all networks."""
    names = {getattr(each, "backend", None) for each in getattr(segments, "runners", (segments,))}
    return " and ".join(sorted(name for name in names if name is not None)) or None
