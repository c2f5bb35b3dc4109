"""Segments of an ONNX graph where it is served: its own sessions, and its ramps by torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from earlyexit.families.onnx_graph.backbone import OnnxBackbone
from earlyexit.model import EarlyExitModel
from earlyexit.piece import Piece, Tensors
from earlyexit.reordered import reorder_linears
from earlyexit.split import Segment


class GraphSegments:
    """`PreparedSegments` of a model whose backbone is a graph."""

    def __init__(self, model: EarlyExitModel, backbone: OnnxBackbone) -> None:
        self._model = model
        self._backbone = backbone

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        return self._model.run(segment, piece)

    def is_ready(self, segment: Segment) -> bool:
        return self._backbone.is_ready(segment.first, segment.end, self._model.device.type)

    def prepare(self, segments: Collection[Segment]) -> None:
        self._backbone.prepare({(each.first, each.end) for each in segments}, self._model.device.type)


def graph_segments(model: EarlyExitModel, _: Path, num_threads: int) -> GraphSegments:
    """On the model's own device; the ramps' linear layers are reordered, as on any CPU."""
    backbone = model.backbone
    assert isinstance(backbone, OnnxBackbone)
    backbone.num_threads = num_threads
    reorder_linears(model)
    return GraphSegments(model, backbone)
