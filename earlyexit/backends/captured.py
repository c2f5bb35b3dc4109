"""Segments recorded as CUDA graphs, one per segment and shape, on tensors that stay where they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.errors import first_line
from earlyexit.network.boundary import Budget, Lengths, Segment
from earlyexit.network.model import EarlyExitModel, SegmentRunner
from earlyexit.network.piece import Layout, Piece, Tensors, to_device

WARM_UPS = 3
"""Runs before a capture, as PyTorch's notes on CUDA graphs ask for: libraries choose their kernels in the first."""

Work = Callable[[], None]


Record = Callable[[Work], Work]
"""Runs the work of one device, in the order of its submission, and returns a function that runs it again on the same
tensors. Raises RuntimeError where it cannot be recorded. Other threads may use the device meanwhile."""


def run_again(work: Work) -> Work:
    """Runs the work itself every time: for dry runs of the GPU bench, without a GPU."""
    work()
    return work


class CudaRecorder:
    """CUDA graphs that share one pool of memory.

    Intermediate results of two graphs may lie at the same address. So graphs are replayed one after the other, on one
    stream, and their results are in tensors outside the pool. Work is recorded and replayed in inference mode: the
    random generator's tensors, which each graph touches, belong to the mode of the first capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None
        self._first: Any = None
        """Keeps the pool alive: a pool whose last graph is gone cannot be captured into again."""

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
        # while other threads serve. Only this thread's work is captured, and only it must be capturable.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()


@cache
def recorder_of(device: torch.device) -> Record:
    """Returns the recorder of a device; there is one per device, so that all captures share its pool."""
    return CudaRecorder(device).record if device.type == "cuda" else run_again


MOST_TOKENS = 8192
"""Larger batches are not captured: the GPU computes a block for longer than the host needs to launch it, and a captured
shape keeps memory."""
SHORTEST = 16
"""Tokens of the shortest row of attention. Only its doublings are used: more lengths would cost graphs and save little,
because attention is a few percent of a block of short rows."""
STEPS_OF_TOKENS = 4
STEPS_OF_INPUTS = 8
"""Sizes per octave: a shape is at most a quarter, or an eighth, larger than its batch."""
TOKENS_AT_ONCE = 8
"""Numbers of tokens of mixed lengths are multiples of it, as tensor cores take them."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """The shape of a capture: inputs of one length, or inputs of any lengths up to a number of tokens together."""

    num_tokens: int
    num_rows: int
    """Rows of attention. For mixed lengths there is one row more than inputs, for the tokens of no input."""
    longest: int
    """Tokens of a row."""
    mixed: bool
    """Whether lengths differ, or are shorter than a row."""


def shape_of(lengths_B: Lengths, max_length: int) -> Shape:
    """Returns the smallest shape for inputs of these lengths, for a network of up to `max_length` tokens.

    Where all inputs have `max_length`, as images (1) do, packed and padded are the same: no masks, no gaps.
    """
    num_inputs, num_tokens = len(lengths_B), int(lengths_B.sum())
    if num_tokens == num_inputs * max_length:
        return _uniform(num_inputs, max_length)
    return _mixed(num_inputs, num_tokens, int(lengths_B.max()), max_length)


def shapes_within(budget: Budget, max_length: int) -> set[Shape]:
    """Returns all shapes of batches within a budget and of their survivors, up to MOST_TOKENS."""
    most = MOST_TOKENS if budget.tokens is None else max(budget.tokens, max_length)  # one larger input runs alone
    shapes = {_uniform(size, max_length) for size in range(1, budget.inputs + 1) if size * max_length <= most}
    if max_length > 1:
        sizes = [0, *(1 << k for k in range(_power(budget.inputs).bit_length()))]
        for (shorter, longest), (fewer, inputs) in product(pairwise([0, *_lengths(max_length)]), pairwise(sizes)):
            num_tokens = shorter + 1 + fewer  # of the fewest inputs one is as long as it must be, the others are one
            while num_tokens <= min(most, min(inputs, budget.inputs) * longest):
                shape = _mixed(inputs, num_tokens, longest, max_length)
                shapes.add(shape)
                num_tokens = shape.num_tokens + 1
    return {shape for shape in shapes if shape.num_tokens <= MOST_TOKENS}


def _uniform(num_inputs: int, length: int) -> Shape:
    rows = _up(num_inputs, STEPS_OF_INPUTS)
    return Shape(num_tokens=rows * length, num_rows=rows, longest=length, mixed=False)


def _mixed(num_inputs: int, num_tokens: int, longest: int, max_length: int) -> Shape:
    return Shape(
        num_tokens=TOKENS_AT_ONCE * _up(-(-num_tokens // TOKENS_AT_ONCE), STEPS_OF_TOKENS),
        num_rows=_power(num_inputs) + 1,
        longest=min(max_length, max(SHORTEST, _power(longest))),
        mixed=True,
    )


def _lengths(max_length: int) -> list[int]:
    """Returns the lengths of rows, ascending."""
    lengths = [min(SHORTEST, max_length)]
    while lengths[-1] < max_length:
        lengths.append(min(2 * lengths[-1], max_length))
    return lengths


def _up(number: int, steps: int) -> int:
    """Returns the next number on a grid of `steps` per octave."""
    step = max(1, _power(number + 1) // 2 // steps)
    return -(-number // step) * step


def _power(number: int) -> int:
    """Returns the next power of two."""
    return 1 << (number - 1).bit_length()


class StaticLayout(Layout):
    """The layout of a shape. For mixed lengths its tensors follow from `index`, which is overwritten for each batch.

    Attention is padded.
    """

    def __init__(self, shape: Shape, device: torch.device, index: Tensor | None) -> None:
        self.num_inputs, self.num_tokens, self.longest = shape.num_rows, shape.num_tokens, shape.longest
        self.device = device
        if index is None:
            place_N = torch.arange(self.num_tokens, device=device)
            first_B = torch.arange(0, self.num_tokens, self.longest, device=device)
            length_B = torch.full((self.num_inputs,), self.longest, device=device)
        else:
            place_N, first_B, length_B = torch.split(index, [self.num_tokens, self.num_inputs, self.num_inputs])
        vars(self).update(  # in the place of what Layout would compute on the host
            scheme="padded",
            place_N=place_N,
            position_N=place_N % self.longest,
            first_token_B=first_B,
            mask_BT=torch.arange(self.longest, device=device) < length_B[:, None],
            lengths_B1=length_B[:, None].float(),
        )
        self._mixed = shape.mixed

    @property
    def uniform(self) -> bool:
        return not self._mixed


def index_of(shape: Shape, lengths_B: Lengths) -> Tensor:
    """Returns the index of a layout of mixed lengths, int64: each token's place, each row's first token and length.

    Tokens of no input are all at the first place of the last row; rows of no input have length 1.
    """
    num_inputs, num_tokens = len(lengths_B), int(lengths_B.sum())
    index = np.zeros(shape.num_tokens + 2 * shape.num_rows, dtype=np.int64)
    place_N, first_B, length_B = np.split(index, [shape.num_tokens, shape.num_tokens + shape.num_rows])
    starts_B = np.cumsum(lengths_B) - lengths_B
    skipped_B = np.arange(num_inputs) * shape.longest - starts_B
    place_N[:num_tokens] = np.arange(num_tokens) + np.repeat(skipped_B, lengths_B)
    place_N[num_tokens:] = (shape.num_rows - 1) * shape.longest
    first_B[:num_inputs] = starts_B
    length_B[:] = 1
    length_B[:num_inputs] = lengths_B
    return torch.from_numpy(index)


class Buffers:
    """Tensors that stay where they are, shared by recordings of which one runs at a time.

    They begin with zeros, which are valid inputs; later they hold values of earlier runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[Hashable, Tensor] = {}

    def take(self, name: Hashable, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the first rows of the tensor of this name; makes a new one, not shared so far, if it has fewer."""
        key = (name, shape, dtype)
        held = self._held.get(key)
        if held is None or len(held) < rows:
            held = self._held[key] = torch.zeros((rows, *shape), dtype=dtype, device=self._device)
        return held[:rows]


class StaticSegment:
    """A segment recorded on a shape. Two threads must not run it, or another on the same buffers, at once."""

    def __init__(self, model: EarlyExitModel, segment: Segment, shape: Shape, buffers: Buffers) -> None:
        self._model, self._segment, self._shape, self._buffers = model, segment, shape, buffers
        self._after = model.boundary(segment.end - 1)
        self._inputs = tuple(
            buffers.take(
                ("in", place),
                shape.num_tokens if spec.per_token else shape.num_rows,
                spec.shape,
                model.dtype if spec.dtype == "float" else getattr(torch, spec.dtype),
            )
            for place, spec in enumerate(model.boundary(segment.first - 1))
        )
        numbers = shape.num_tokens + 2 * shape.num_rows
        self._index = buffers.take("index", numbers, (), torch.int64) if shape.mixed else None
        self._outputs: Tensors = ()
        self._replay: Callable[[], None]

    @torch.inference_mode()
    def record(self, recorder: Record) -> StaticSegment:
        """Record it; returns itself. Raises RuntimeError where it cannot be recorded."""
        if self._index is not None:
            whole = np.full(1, min(self._shape.longest, self._shape.num_tokens), dtype=np.int32)
            self._index.copy_(index_of(self._shape, whole))
        self._replay = recorder(self._work)
        return self

    @torch.inference_mode()
    def run(self, piece: Piece) -> tuple[Tensors, Tensor | None]:
        """Runs as `SegmentRunner.run`, for inputs that fit the shape; the caller owns the result."""
        if self._index is not None:
            index = index_of(self._shape, piece.lengths_B)
            self._index.copy_(to_device(index, self._index.device))
        for held, given in zip(self._inputs, piece.tensors, strict=True):
            held[: len(given)].copy_(given)
        self._replay()
        # Copies, because the next replay writes to the same addresses while survivors may wait.
        num_inputs, num_tokens = len(piece), int(piece.lengths_B.sum())
        hidden = tuple(
            held[: num_tokens if spec.per_token else num_inputs].clone()
            for held, spec in zip(self._outputs, self._after, strict=False)
        )
        if not self._model.has_exit(self._segment):
            return hidden, None
        return hidden, self._outputs[-1][:num_inputs].clone()

    def takes(self, piece: Piece) -> bool:
        """Whether a piece of this shape has exactly the tensors that it reads."""
        return len(piece.tensors) == len(self._inputs)

    def _work(self) -> None:
        layout = StaticLayout(self._shape, self._model.device, self._index)
        hidden, outputs_BC = self._model.compute(self._segment, self._inputs, layout)
        results = hidden if outputs_BC is None else (*hidden, outputs_BC)
        if not self._outputs:  # the first time, which is never the one that is captured
            self._outputs = tuple(
                self._buffers.take(("out", place), len(each), tuple(each.shape[1:]), each.dtype)
                for place, each in enumerate(results)
            )
        for held, computed in zip(self._outputs, results, strict=True):
            held.copy_(computed)


logger = logging.getLogger(__name__)

Place = tuple[Segment, Shape]


class CapturedSegments(SegmentRunner):
    """Segments of a model whose weights stay where they are, one recording for each segment and shape.

    A GPU computes a transformer block of a small batch in less time than the host needs to launch it. A CUDA graph is
    launched as one, but keeps the shapes and addresses of its capture. So a piece is copied to the inputs of the
    smallest shape that holds it, and results of unused rows are ignored. The model itself runs everything else: larger
    pieces, pieces with more tensors than cross (measured attention), mixed lengths that do not attend padded, and
    segments that could not be captured. So every segment is ready.
    """

    def __init__(self, model: EarlyExitModel, recorder: Record) -> None:
        self._model = model
        self._recorder = recorder
        self._mixes = model.attention in ("auto", "padded")
        self.captured: dict[Place, StaticSegment] = {}
        """The recordings that exist now."""
        self._prepared: frozenset[Place] = frozenset()
        self._running = Lock()
        """Two batches may run at once, on one stream: one at a time fills tensors, replays and takes the results."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        captured = self.captured.get((segment, shape_of(piece.lengths_B, self._model.max_length)))
        if captured is None or not captured.takes(piece):
            return self._model.run(segment, piece)
        with self._running:
            return captured.run(piece)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        """Record the shapes of batches within these budgets, the largest first: its memory also serves the others.

        Other segments may run meanwhile. Recordings that neither this nor the last call wants are given up.
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
        here = {place: captured for place, captured in self.captured.items() if place in kept}
        # No recording runs before all exist: recording writes to tensors that all of them share.
        self.captured = here | self._record(wanted - here.keys())
        self._prepared = wanted

    def _record(self, places: Collection[Place]) -> dict[Place, StaticSegment]:
        recorded: dict[Place, StaticSegment] = {}
        refused: list[str] = []  # not the errors, which keep the failed recording's tensors alive
        hopeless: set[Segment] = set()
        buffers = Buffers(self._model.device)  # new ones: the others' may be in use
        for segment, shape in sorted(places, key=lambda place: place[1], reverse=True):
            if segment in hopeless:
                continue
            try:
                recorded[segment, shape] = StaticSegment(self._model, segment, shape, buffers).record(self._recorder)
            except RuntimeError as error:
                reason = error.__context__ or error  # the end of a failed capture raises too
                refused.append(f"{type(reason).__name__}: {first_line(reason)}")
                if not isinstance(reason, torch.OutOfMemoryError):  # a smaller shape would be refused for it too
                    hopeless.add(segment)
        if refused:
            missing = len(places) - len(recorded)
            logger.warning("%d of %d shapes are not captured, torch runs them: %s", missing, len(places), refused[0])
        return recorded
