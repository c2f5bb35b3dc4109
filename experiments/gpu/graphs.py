"""Segments replayed as CUDA graphs: one launch for a whole segment, instead of some fifteen per block.

On a GPU a transformer block of a small batch takes less time than the host needs to launch it. A CUDA graph is captured
once and launched as one; but it has the shapes, and the addresses, that it was captured with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from earlyexit.boundary import Boundary
from earlyexit.errors import PlanError
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.network import arbitrary_tensors
from earlyexit.piece import Piece, Tensors
from earlyexit.split import Segment
from earlyexit.wire import Lengths

WARM_UPS = 3
"""Runs before a capture, as PyTorch's notes on CUDA graphs ask for: libraries choose their kernels in the first."""
EVERY_SIZE_TO = 8
STEP = 4
"""Beyond the sizes that are all captured, every fourth: at most three inputs of padding to twelve or more."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """What a graph takes: inputs, all of one length in tokens."""

    num_inputs: int
    length: int

    def __post_init__(self) -> None:
        if self.num_inputs < 1 or self.length < 1:
            raise PlanError(f"a graph takes at least one input of one token, not {self.num_inputs} of {self.length}")


def shapes_up_to(batch: int, length: int) -> tuple[Shape, ...]:
    """Shapes that pad little, from one input to a full batch: what shrinks below its batch finds one too."""
    sizes = {*range(1, min(batch, EVERY_SIZE_TO) + 1), *range(EVERY_SIZE_TO, batch, STEP), batch}
    return tuple(Shape(num_inputs=size, length=length) for size in sorted(sizes) if size <= batch)


class CapturedSegment(Protocol):
    """A segment that is ready to run on one shape."""

    def run(self, values: Tensors) -> tuple[Tensors, Tensor | None]:
        """As `SegmentRunner.run`, of as many inputs as the shape has, or fewer; what it gives is the caller's."""
        ...


Capture = Callable[[Segment, Shape], CapturedSegment]


class GraphSegments:
    """`PreparedSegments` that are kept per segment and shape, for a model whose weights stay where they are.

    A piece of equal lengths is run by the smallest captured shape that holds it; what is computed on the rows that it
    leaves free is never looked at. Pieces of unequal lengths, and larger ones, are run by torch.
    """

    def __init__(self, model: EarlyExitModel, shapes: Collection[Shape], capture: Capture | None = None) -> None:
        """`capture` makes what runs a segment on a shape; None for CUDA graphs."""
        self._model = model
        self._capture = CudaCapture(model) if capture is None else capture
        self._shapes = tuple(sorted(shapes, reverse=True))
        self._sizes: defaultdict[int, list[int]] = defaultdict(list)
        for shape in reversed(self._shapes):
            self._sizes[shape.length].append(shape.num_inputs)
        self._captured: dict[Segment, dict[Shape, CapturedSegment]] = {}
        self._prepared: frozenset[Segment] = frozenset()

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        shape = self.shape_of(piece.lengths_B)
        captured = self._captured.get(segment)
        if shape is None or captured is None:
            return self._model.run(segment, piece)
        return captured[shape].run(piece.tensors)

    def shape_of(self, lengths_B: Lengths) -> Shape | None:
        """The smallest shape that holds inputs of these lengths; None where torch must run them."""
        length = int(lengths_B[0])
        sizes = self._sizes.get(length, [])
        at = bisect_left(sizes, len(lengths_B))
        if at == len(sizes) or (lengths_B != length).any():
            return None
        return Shape(num_inputs=sizes[at], length=length)

    def is_ready(self, segment: Segment) -> bool:
        return segment in self._captured

    def prepare(self, segments: Collection[Segment]) -> None:
        """Capture every shape of each, the largest first: the smaller ones then fit into the memory it left.

        Others may run meanwhile. Graphs of segments that are neither here nor among the last ones prepared are given
        up.
        """
        for segment in segments:
            if segment not in self._captured:
                self._captured[segment] = {shape: self._capture(segment, shape) for shape in self._shapes}
        wanted = frozenset(segments)
        if wanted != self._prepared:
            kept = wanted | self._prepared
            self._captured = {segment: captured for segment, captured in self._captured.items() if segment in kept}
            self._prepared = wanted


class CudaCapture:
    """Captures segments as CUDA graphs.

    The graphs share one pool of memory: each may overwrite what another computed on the way, never another's result.
    So they must be replayed one after the other, on one stream, as a device does. Captures and replays are both in
    inference mode: the random generator's tensors, which each touches, belong to the mode of the first capture.
    """

    def __init__(self, model: EarlyExitModel) -> None:
        self._model = model
        self._pool: _Pool | None = None
        self._inputs: dict[tuple[Boundary, Shape], StaticInputs] = {}

    @torch.inference_mode()
    def __call__(self, segment: Segment, shape: Shape) -> StaticSegment:
        with torch.cuda.device(self._model.device):
            if self._pool is None:
                self._pool = _open_pool()
            inputs = self._inputs_of(segment, shape)
            _warm_up(lambda: self._model.compute(segment, inputs.tensors, inputs.layout), self._pool.stream)
            graph = torch.cuda.CUDAGraph()
            with self._pool.capture(graph):
                hidden, outputs_BC = self._model.compute(segment, inputs.tensors, inputs.layout)
        return StaticSegment(graph.replay, shape, inputs, hidden, outputs_BC)

    def _inputs_of(self, segment: Segment, shape: Shape) -> StaticInputs:
        """One for all segments that take the same tensors: each is filled before its replay, and read in it."""
        key = (self._model.boundary(segment.first - 1), shape)
        if key not in self._inputs:
            self._inputs[key] = static_inputs(self._model, segment, shape)
        return self._inputs[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """Memory that graphs share, and the stream they are captured on: to share, it must be one."""

    handle: Any
    stream: torch.cuda.Stream
    first: torch.cuda.CUDAGraph
    """Of no use by itself: a pool whose last graph is gone cannot be captured into again."""

    def capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        # Only what this thread does is captured, and only it must keep to what can be: others may be serving.
        return torch.cuda.graph(graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local")


def _open_pool() -> _Pool:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch ships no type for it
    pool = _Pool(handle=torch.cuda.graph_pool_handle(), stream=stream, first=torch.cuda.CUDAGraph())
    with pool.capture(pool.first):
        torch.zeros(1, device="cuda")
    return pool


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInputs:
    """What a graph reads, at the same addresses for ever."""

    tensors: Tensors
    """Overwritten before every replay."""
    layout: Layout
    """Its index tensors are all on the device: a capture cannot fetch them."""


def static_inputs(model: EarlyExitModel, segment: Segment, shape: Shape) -> StaticInputs:
    """Values of a segment's shape."""
    lengths_B: Lengths = np.full(shape.num_inputs, shape.length, dtype=np.int32)
    layout = Layout(lengths_B, model.device)
    for _ in (layout.first_token_B, layout.position_N, layout.lengths_B1):
        pass  # each is made when it is first asked for
    values = arbitrary_tensors(model, segment.first, lengths_B, np.random.default_rng(0))
    return StaticInputs(tensors=values, layout=layout)


class StaticSegment:
    """A segment whose `replay` reads and writes the same tensors every time."""

    def __init__(
        self,
        replay: Callable[[], object],
        shape: Shape,
        inputs: StaticInputs,
        hidden: Tensors,
        outputs_BC: Tensor | None,
    ) -> None:
        self._replay = replay
        self._shape = shape
        self._inputs = inputs  # whole: the layout is never asked again, but its tensors are read
        self._hidden = hidden
        self._outputs_BC = outputs_BC

    @torch.inference_mode()
    def run(self, values: Tensors) -> tuple[Tensors, Tensor | None]:
        for held, given in zip(self._inputs.tensors, values, strict=True):
            held[: len(given)].copy_(given)
        self._replay()
        share = len(values[0]) / len(self._inputs.tensors[0])
        # Copies, for the next replay writes to the same addresses while survivors may wait for long.
        hidden = tuple(each[: round(len(each) * share)].clone() for each in self._hidden)
        if self._outputs_BC is None:
            return hidden, None
        return hidden, self._outputs_BC[: round(self._shape.num_inputs * share)].clone()


def _warm_up(run: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Run on the stream that captures, so that its libraries' workspaces exist."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    stream.synchronize()
