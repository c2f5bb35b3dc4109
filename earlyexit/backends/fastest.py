"""The backend `auto`: torch or ONNX Runtime, whichever computes the first prepared segments faster on this machine.

On processors, ONNX Runtime is chosen unless torch is much faster: one replica can then run two batches at once, because
ONNX Runtime does not hold the GIL. That needs less memory than two replicas, and fewer inputs are late.

The faster backend depends on the processor, the number of threads and the model's sizes, so it must be measured. The
measure is the processor time of all threads, which other work on the machine disturbs less than wall-clock time.
Threads that finish early spin while they wait for more work. Therefore a measurement includes a short pause after each
run, and the median of many runs is taken rather than the minimum.
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

from earlyexit.backends.onnx import OnnxSegments
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Budget, Segment
from earlyexit.network.layers import torch_segments
from earlyexit.network.model import EarlyExitModel, SegmentRunner, arbitrary_tensors
from earlyexit.network.piece import Piece, Tensors, wait_for

logger = logging.getLogger(__name__)

TYPICAL_TOKENS = 16
"""The length of the inputs in a measurement."""
ROUNDS = 8
"""In each round both backends run every segment at each batch size. The first round is a warm-up."""
PART = 4
"""Each segment is measured with a full batch and with 1 / `PART` of it, because at half load few batches are full."""
AFTER_S = 0.003
"""The pause after a run, in seconds. The threads of the run stop spinning within it."""
MUCH_FASTER = 0.8
"""On processors, torch is chosen below this share of ONNX Runtime's time."""
Open = Callable[[EarlyExitModel, Path], SegmentRunner]


class FastestSegments(SegmentRunner):
    """Runs segments with torch or ONNX Runtime. The choice is made once, when the first segments are prepared."""

    def __init__(
        self,
        model: EarlyExitModel,
        folder: Path,
        *,
        by_torch: Open = torch_segments,
        by_onnx: Open = OnnxSegments,
        took_s: Callable[[Callable[[], object]], float] | None = None,
    ) -> None:
        """`took_s`: calls a function and returns its seconds; None: `_measure_s`."""
        self._model = model
        self._open_torch, self._open_onnx = by_torch, by_onnx
        self._folder = folder
        self._took_s = took_s or self._measure_s
        self._chosen: SegmentRunner | None = None
        self.backend: str | None = None
        """The name of the faster backend; None before the choice."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, torch.Tensor | None]:
        return (self._chosen or self._model).run(segment, piece)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        if self._chosen is None and segments:
            self._chosen = self._choose(segments)
        elif self._chosen is not None:
            self._chosen.prepare(segments)

    def _choose(self, segments: Mapping[Segment, Budget]) -> SegmentRunner:
        # Torch replaces modules of its model, but an export needs the original ones. So ONNX Runtime is opened first,
        # and torch is measured on a copy.
        try:
            onnx = self._open_onnx(self._model, self._folder)
            onnx.prepare(segments)
        except PlanError as error:  # not installed, not float32, or attention `apart`
            logger.info("torch computes %s: %s", self._model.info.name, error)
            return self._use_torch()
        measured_torch = self._open_torch(deepcopy(self._model), self._folder)
        torch_s, onnx_s = self._seconds_per_input([measured_torch, onnx], segments)
        share = MUCH_FASTER if self._model.device.type == "cpu" else 1.0
        self.backend = "torch" if torch_s < share * onnx_s else "onnx"
        args = self.backend, self._model.info.name, torch_s * 1e3, onnx_s * 1e3
        logger.info("%s computes %s: an input takes torch %.3g ms of processor time, ONNX Runtime %.3g ms", *args)
        return onnx if self.backend == "onnx" else self._use_torch()

    def _use_torch(self) -> SegmentRunner:
        self.backend = "torch"
        return self._open_torch(self._model, self._folder)

    @torch.inference_mode()
    def _seconds_per_input(self, runners: Sequence[SegmentRunner], segments: Mapping[Segment, Budget]) -> list[float]:
        """Returns each runner's seconds per input through all segments, as the mean of a full and a partial batch."""
        length, pieces = min(TYPICAL_TOKENS, self._model.max_length), list[tuple[Segment, Piece]]()
        for segment, budget in segments.items():
            full = budget.inputs if budget.tokens is None else max(1, min(budget.inputs, budget.tokens // length))
            for size in (full, max(1, full // PART)):
                lengths_B = np.full(size, length, dtype=np.int32)
                piece = Piece(
                    sample_ids=tuple(map(str, range(size))),
                    next_block=segment.first,
                    lengths_B=lengths_B,
                    tensors=arbitrary_tensors(self._model, segment.first, lengths_B, np.random.default_rng(0)),
                    state_BS=torch.empty(size, 0, device=self._model.device),
                )
                pieces.append((segment, piece))
        seconds = np.empty((len(runners), len(pieces), ROUNDS))
        for round_index in range(ROUNDS):
            for k, (segment, piece) in enumerate(pieces):
                for r, runner in enumerate(runners):
                    seconds[r, k, round_index] = self._took_s(partial(runner.run, segment, piece)) / len(piece)
        return [float(each) for each in np.median(seconds[:, :, 1:], axis=2).sum(axis=1) / 2]

    def _measure_s(self, run: Callable[[], object]) -> float:
        """Returns the processor time of a run and of the pause after it; on a GPU, the run's wall-clock time."""
        on_cpu = self._model.device.type == "cpu"
        now_s = time.process_time if on_cpu else time.perf_counter
        wait_for(self._model.device)
        start_s = now_s()
        run()
        wait_for(self._model.device)
        time.sleep(AFTER_S if on_cpu else 0)
        return now_s() - start_s
