"""Segments by the backend that is faster on this machine; both are tried once, on the first segments prepared.

The faster backend depends on the processor, its number of threads and the model's sizes, so it must be measured. The
measure is processor time of all threads, which other work on the machine disturbs less than wall-clock time. Threads
that finish early spin for the next work and use a processor meanwhile. So a run counts with the time spent until
shortly after it, and the median of many runs counts, rather than the fastest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import torch

from earlyexit.backends.onnx import onnx_segments
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Budget, Segment
from earlyexit.network.layers import torch_segments
from earlyexit.network.model import EarlyExitModel, SegmentRunner, arbitrary_tensors
from earlyexit.network.piece import Piece, Tensors, wait_for

logger = logging.getLogger(__name__)

TYPICAL_TOKENS = 16
"""Of an input of a trial."""
ROUNDS = 8
"""In each round both run every segment at each size, in turns. The first round is cold; the others' median counts."""
PART = 4
"""A trial also runs this part of a full batch: few batches are full at half load."""
AFTER_S = 0.003
"""Pause after a run, in which spinning threads spend the rest of what the run costs."""
Open = Callable[[EarlyExitModel, Path, int], SegmentRunner]


class FastestSegments(SegmentRunner):
    """Segments by torch or by ONNX Runtime, decided once, when the first segments are prepared.

    Until then no segment is ready.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        folder: Path,
        num_threads: int,
        *,
        by_torch: Open = torch_segments,
        by_onnx: Open = onnx_segments,
        took_s: Callable[[Callable[[], object]], float] | None = None,
    ) -> None:
        """`took_s`: runs something and returns its seconds; None: see `_machine_s`."""
        self._model = model
        self._open_torch, self._open_onnx = by_torch, by_onnx
        self._where = folder, num_threads
        self._took_s = took_s or self._machine_s
        self._chosen: SegmentRunner | None = None
        self.backend: str | None = None
        """The faster backend; None before the decision."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, torch.Tensor | None]:
        return (self._chosen or self._model).run(segment, piece)

    def is_ready(self, segment: Segment) -> bool:
        return self._chosen is not None and self._chosen.is_ready(segment)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        if self._chosen is None and segments:
            self._chosen = self._decide(segments)
        elif self._chosen is not None:
            self._chosen.prepare(segments)

    def _decide(self, segments: Mapping[Segment, Budget]) -> SegmentRunner:
        # ONNX Runtime first, and torch on a copy: exports are of the modules as they are loaded, and torch puts others
        # in their places.
        try:
            onnx = self._open_onnx(self._model, *self._where)
            onnx.prepare(segments)
        except PlanError as error:  # not installed, not float32, attends apart
            logger.info("torch computes %s: %s", self._model.info.name, error)
            return self._by_torch()
        torch_s, onnx_s = self._seconds([self._open_torch(deepcopy(self._model), *self._where), onnx], segments)
        self.backend = "onnx" if onnx_s < torch_s else "torch"
        told = self.backend, self._model.info.name, torch_s * 1e3, onnx_s * 1e3
        logger.info("%s computes %s: an input takes torch %.3g ms of processor time, ONNX Runtime %.3g ms", *told)
        return onnx if self.backend == "onnx" else self._by_torch()

    def _by_torch(self) -> SegmentRunner:
        self.backend = "torch"
        return self._open_torch(self._model, *self._where)

    @torch.inference_mode()
    def _seconds(self, runners: Sequence[SegmentRunner], segments: Mapping[Segment, Budget]) -> list[float]:
        """By runner, of an input through all of the segments, on average of two sizes: a full batch, and a part."""
        length, pieces = min(TYPICAL_TOKENS, self._model.max_length), list[tuple[Segment, Piece]]()
        for segment, budget in segments.items():
            full = budget.inputs if budget.tokens is None else max(1, min(budget.inputs, budget.tokens // length))
            for number in (full, max(1, full // PART)):
                lengths_B = np.full(number, length, dtype=np.int32)
                piece = Piece(
                    sample_ids=tuple(map(str, range(number))),
                    next_block=segment.first,
                    lengths_B=lengths_B,
                    tensors=arbitrary_tensors(self._model, segment.first, lengths_B, np.random.default_rng(0)),
                    state_BS=torch.empty(number, 0, device=self._model.device),
                )
                pieces.append((segment, piece))
        seconds = np.empty((len(runners), len(pieces), ROUNDS))
        for round_index in range(ROUNDS):
            for k, (segment, piece) in enumerate(pieces):
                for r, runner in enumerate(runners):
                    seconds[r, k, round_index] = self._took_s(partial(runner.run, segment, piece)) / len(piece)
        return [float(each) for each in np.median(seconds[:, :, 1:], axis=2).sum(axis=1) / 2]

    def _machine_s(self, run: Callable[[], object]) -> float:
        """Returns processor time until shortly after a run; on a GPU the seconds until it is done."""
        on_cpu = self._model.device.type == "cpu"
        now_s = time.process_time if on_cpu else time.perf_counter
        wait_for(self._model.device)
        began_s = now_s()
        run()
        wait_for(self._model.device)
        time.sleep(AFTER_S if on_cpu else 0)
        return now_s() - began_s
