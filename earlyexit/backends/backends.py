"""Backends: what computes a model's segments where it is served. Without torch, until one is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from earlyexit.named import imported

if TYPE_CHECKING:
    from earlyexit.network.model import EarlyExitModel
    from earlyexit.network.network import SegmentRunner

# Name -> what opens it, with the arguments of `open_segments`.
BACKENDS = {
    "torch": "earlyexit.network.layers:torch_segments",
    "onnx": "earlyexit.backends.onnx:onnx_segments",
    "auto": "earlyexit.backends.fastest:FastestSegments",
}
if TYPE_CHECKING:
    BackendName = str
else:  # what reads files refuses other names, and lists these
    BackendName = Literal[tuple(BACKENDS)]


def open_segments(backend: BackendName, model: EarlyExitModel, folder: Path, num_threads: int) -> SegmentRunner:
    """How a model that no longer changes is computed; its own modules may be replaced by equal ones.

    What takes long to make is kept in `folder`. A backbone that has a runtime of its own is computed by that one,
    whatever the backend. Raises PlanError for a model that the backend cannot run.
    """
    place = model.backbone.own_segments or BACKENDS[backend]
    segments: SegmentRunner = imported(place)(model, folder, num_threads)
    return segments


def computed_by(segments: SegmentRunner | None) -> str | None:
    """Which backends were found to be faster, where that was asked and is decided: of a chain its networks'."""
    found = {getattr(each, "backend", None) for each in getattr(segments, "runners", (segments,))}
    return " and ".join(sorted(name for name in found if name is not None)) or None
