"""Segments of a model that are captured for the shapes that its batches have."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from threading import Lock

import torch
from torch import Tensor

from earlyexit.captured.recorder import Recorder
from earlyexit.captured.shapes import Shape, shape_of, shapes_within
from earlyexit.captured.static import Buffers, StaticSegment
from earlyexit.model import EarlyExitModel
from earlyexit.piece import Piece, Tensors
from earlyexit.split import Budget, Segment

logger = logging.getLogger(__name__)

Place = tuple[Segment, Shape]
NEWLINE = "\n"


class CapturedSegments:
    """`PreparedSegments` of a model whose weights stay where they are, one recording for each segment and shape.

    On a GPU a transformer block of a small batch takes less time than the host needs to launch it; a CUDA graph is
    launched as one, but has the shapes, and the addresses, that it was captured with. So a piece is copied to where the
    smallest shape that holds it reads, and what is computed on the rows it leaves free is never looked at. What has no
    shape, the model runs: larger pieces, those with more tensors than cross (attention is to be measured), mixed
    lengths that are to attend otherwise than padded, and whatever could not be captured.
    """

    def __init__(self, model: EarlyExitModel, recorder: Recorder) -> None:
        self._model = model
        self._recorder = recorder
        self._mixes = model.attention in ("auto", "padded")
        self._captured: dict[Place, StaticSegment] = {}
        self._prepared: frozenset[Place] = frozenset()
        self._running = Lock()
        """Two batches may run at once, on one stream: one at a time fills tensors, replays, and takes the results."""

    @property
    def captured(self) -> Collection[Place]:
        """What is recorded now."""
        return self._captured.keys()

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        captured = self._captured.get((segment, shape_of(piece.lengths_B, self._model.max_length)))
        if captured is None or not captured.takes(piece):
            return self._model.run(segment, piece)
        with self._running:
            return captured.run(piece)

    def is_ready(self, segment: Segment) -> bool:
        return True  # for the model runs what is not captured

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        """Record what batches within these budgets need, the largest first: the others fit into the memory it left.

        Others may run meanwhile. What is neither wanted now nor by the last call is given up.
        """
        wanted = frozenset(
            (segment, shape)
            for segment, budget in segments.items()
            for shape in shapes_within(budget, self._model.max_length)
            if self._mixes or not shape.mixed
        )
        if wanted == self._prepared:
            return
        kept = wanted | self._prepared
        here = {place: captured for place, captured in self._captured.items() if place in kept}
        # Nothing of it runs before all is there: recording writes to tensors that all of it shares.
        self._captured = here | self._record(wanted - here.keys())
        self._prepared = wanted

    def _record(self, places: Collection[Place]) -> dict[Place, StaticSegment]:
        recorded: dict[Place, StaticSegment] = {}
        refused: list[str] = []  # not the errors, which hold the tensors of what failed
        hopeless: set[Segment] = set()
        buffers = Buffers(self._model.device)  # new ones: the others' may be in use
        for segment, shape in sorted(places, key=lambda place: place[1], reverse=True):
            if segment in hopeless:
                continue
            try:
                recorded[segment, shape] = StaticSegment(self._model, segment, shape, buffers).record(self._recorder)
            except RuntimeError as error:
                reason = error.__context__ or error  # the end of a capture that broke off raises too
                refused.append(f"{type(reason).__name__}: {str(reason).partition(NEWLINE)[0]}")
                if not isinstance(reason, torch.OutOfMemoryError):  # a smaller shape would be refused for it too
                    hopeless.add(segment)
        if refused:
            missing = len(places) - len(recorded)
            logger.warning("%d of %d shapes are not captured, torch runs them: %s", missing, len(places), refused[0])
        return recorded
