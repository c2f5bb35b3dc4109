"""Backends: the runtimes of a served model's segments. Torch is imported when one is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from earlyexit.named import import_attribute

if TYPE_CHECKING:
    from earlyexit.network.model import EarlyExitModel, SegmentRunner

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
    """Returns the runner of a model that no longer changes; the model's modules may be replaced by equal ones.

    Exports, which take long to make, are kept in `folder`. A backbone with a runtime of its own uses that, whatever the
    backend. Raises PlanError for a model that the backend cannot run.
    """
    place = model.backbone.own_segments or BACKENDS[backend]
    segments: SegmentRunner = import_attribute(place)(model, folder, num_threads)
    return segments


def computed_by(segments: SegmentRunner | None) -> str | None:
    """Returns the backends that `auto` chose, of a chain for all its networks; None before a choice."""
    found = {getattr(each, "backend", None) for each in getattr(segments, "runners", (segments,))}
    return " and ".join(sorted(name for name in found if name is not None)) or None
