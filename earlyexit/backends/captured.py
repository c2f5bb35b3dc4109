"""One segment on one shape: tensors that stay where they are, and what fills and reads them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from earlyexit.network.layout import Layout
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece, Tensors
from earlyexit.network.split import Budget, Segment
from earlyexit.network.transfer import to_device
from earlyexit.network.wire import Lengths

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


MOST_TOKENS = 8192
"""Larger sets are not captured: computing a block of them takes a GPU longer than telling it what to do takes the host,
and a captured shape keeps memory."""
SHORTEST = 16
"""Tokens of the shortest row of attention; more lengths than its doublings would cost graphs and save next to nothing,
for attention is a few percent of a block of short rows."""
STEPS_OF_TOKENS = 4
STEPS_OF_INPUTS = 8
"""Per octave: a shape has at most a quarter, or an eighth, more than it is asked to hold."""
TOKENS_AT_ONCE = 8
"""Numbers of tokens of mixed lengths are multiples of it, as tensor cores take them."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """What is captured: room for inputs of one length, or for inputs of any lengths with so many tokens together."""

    num_tokens: int
    num_rows: int
    """Of attention. Of mixed lengths one more than there is room for inputs: the tokens that nobody needs go there, so
    that they meet no input's."""
    longest: int
    """Tokens of a row."""
    mixed: bool
    """Whether lengths differ, or are shorter than a row."""


def shape_of(lengths_B: Lengths, max_length: int) -> Shape:
    """The smallest shape that holds inputs of these lengths, of a network that takes up to `max_length` tokens.

    Of inputs that all have `max_length`, images (1) among them, packed and padded are the same: no masks, no gaps.
    """
    num_inputs, num_tokens = len(lengths_B), int(lengths_B.sum())
    if num_tokens == num_inputs * max_length:
        return _uniform(num_inputs, max_length)
    return _mixed(num_inputs, num_tokens, int(lengths_B.max()), max_length)


def shapes_within(budget: Budget, max_length: int) -> set[Shape]:
    """All that `shape_of` gives for batches within a budget, and for what is left of them; none above MOST_TOKENS."""
    most = MOST_TOKENS if budget.tokens is None else max(budget.tokens, max_length)  # one larger input runs alone
    shapes = {_uniform(size, max_length) for size in range(1, budget.inputs + 1) if size * max_length <= most}
    if max_length > 1:
        shapes.update(_all_mixed(budget.inputs, most, max_length))
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


def _all_mixed(most_inputs: int, most_tokens: int, max_length: int) -> Iterator[Shape]:
    sizes = [0, *(1 << k for k in range(_power(most_inputs).bit_length()))]
    for shorter, longest in pairwise([0, *_lengths(max_length)]):
        for fewer, inputs in pairwise(sizes):
            num_tokens = shorter + 1 + fewer  # of the fewest inputs one is as long as it must be, the others are one
            while num_tokens <= min(most_tokens, min(inputs, most_inputs) * longest):
                shape = _mixed(inputs, num_tokens, longest, max_length)
                yield shape
                num_tokens = shape.num_tokens + 1


def _lengths(max_length: int) -> list[int]:
    """Of all rows, ascending."""
    lengths = [min(SHORTEST, max_length)]
    while lengths[-1] < max_length:
        lengths.append(min(2 * lengths[-1], max_length))
    return lengths


def _up(number: int, steps: int) -> int:
    """The next number that has so many steps per octave."""
    step = max(1, _power(number + 1) // 2 // steps)
    return -(-number // step) * step


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


class StaticLayout(Layout):
    """The layout of a shape: of mixed lengths its tensors follow from one that is overwritten, `index`.

    Of one length nothing has to be told. Attention is padded.
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
    """What a layout of mixed lengths follows from, int64: each token's place, each row's first token and its length.

    Tokens that nobody needs are all at the first place of the last row; rows that nobody needs see one.
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
    """Tensors that stay where they are, shared by what is recorded at once: of that, one segment runs at a time.

    They begin with zeros, which are valid inputs; later they hold what others left behind.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[Hashable, Tensor] = {}

    def take(self, name: Hashable, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first rows of the one of this name; a new one where it has fewer, which others then do not share."""
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
    def record(self, recorder: Recorder) -> StaticSegment:
        """Itself, ready to run; raises RuntimeError where that cannot be."""
        if self._index is not None:
            whole = np.full(1, min(self._shape.longest, self._shape.num_tokens), dtype=np.int32)
            self._index.copy_(index_of(self._shape, whole))
        self._replay = recorder.record(self._work)
        return self

    @torch.inference_mode()
    def run(self, piece: Piece) -> tuple[Tensors, Tensor | None]:
        """As `SegmentRunner.run`, of inputs that the shape holds; what it gives is the caller's."""
        if self._index is not None:
            index = index_of(self._shape, piece.lengths_B)
            self._index.copy_(to_device(index, self._index.device))
        for held, given in zip(self._inputs, piece.tensors, strict=True):
            held[: len(given)].copy_(given)
        self._replay()
        # Copies, for the next replay writes to the same addresses while survivors may wait for long.
        num_inputs, num_tokens = len(piece), int(piece.lengths_B.sum())
        hidden = tuple(
            held[: num_tokens if spec.per_token else num_inputs].clone()
            for held, spec in zip(self._outputs, self._after, strict=False)
        )
        if not self._model.has_exit(self._segment):
            return hidden, None
        return hidden, self._outputs[-1][:num_inputs].clone()

    def takes(self, piece: Piece) -> bool:
        """Whether a piece of this shape has the tensors that it reads, and no more."""
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
