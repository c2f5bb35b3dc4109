"""The seam to the device: work on tensors that stay where they are, recorded once and done again at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

WARM_UPS = 3
"""Runs before a capture, as PyTorch's notes on CUDA graphs ask for: libraries choose their kernels in the first."""

Work = Callable[[], None]


class Recorder(Protocol):
    """Of one device, whose work is done in the order in which it is told."""

    def record(self, work: Work) -> Work:
        """What does `work` again, on the same tensors; raises RuntimeError where it cannot be recorded.

        By then `work` has been done. Other threads may use the device meanwhile.
        """
        ...


class EagerRecorder:
    """Does the work itself every time: what a GPU is told by one launch, without a GPU."""

    def record(self, work: Work) -> Work:
        work()
        return work


class CudaRecorder:
    """CUDA graphs, which share one pool of memory.

    What a graph computes on the way may lie where another's did: so they are replayed one after the other, on one
    stream, and their results are in tensors that were there before. Work is recorded in inference mode and replayed in
    it: the random generator's tensors, which each touches, belong to the mode of the first capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None
        self._first: Any = None
        """Of no use by itself: a pool whose last graph is gone cannot be captured into again."""

    def record(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            if self._first is None:
                self._open()
            self._warm_up(work)
            graph = torch.cuda.CUDAGraph()
            with self._capturing(graph):
                work()
        return graph.replay

    def _open(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch ships no type for it
        self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            torch.zeros(1, device=self._device)
        self._first = graph

    def _warm_up(self, work: Work) -> None:
        """On the stream that captures, so that its libraries' workspaces exist."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._stream.synchronize()

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # Not `torch.cuda.graph`, which waits for the device and empties the allocators' caches before every capture,
        # while others serve. Only what this thread does is captured, and only it must keep to what can be.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()


@cache
def recorder_of(device: torch.device) -> Recorder:
    """One per device: all that is captured there shares its pool."""
    return CudaRecorder(device) if device.type == "cuda" else EagerRecorder()
