"""Segments captured as CUDA graphs, one graph per segment and batch shape."""

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
from earlyexit.network.boundary import Budget, Lengths, Segment, round_up
from earlyexit.network.model import EarlyExitModel, SegmentRunner
from earlyexit.network.piece import Layout, Piece, Tensors, to_device

Work = Callable[[], None]
Record = Callable[[Work], Work]
"""Records work on one device. Returns a function that replays the work on the same tensors. Raises RuntimeError if the
work cannot be captured. Other threads may use the device during the recording."""


def run_again(work: Work) -> Work:
    """A recorder that runs the work itself every time, for tests and dry runs without a GPU."""
    work()
    return work


class CudaRecorder:
    """Records CUDA graphs that share one memory pool.

    Intermediate results of two graphs may have the same address. So graphs are replayed one after the other on one
    stream, and their results are in tensors outside the pool. Work is recorded and replayed in inference mode, because
    every graph uses the tensors of the random generator, which belong to the mode of the first capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._warm_up_stream: Any = None
        self._pool: Any = None
        self._first: Any = None
        """An empty graph that keeps the pool alive. A pool without graphs cannot be used for another capture."""

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
        self._stream, self._warm_up_stream = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            torch.zeros(1, device=self._device)
        self._first = graph

    def _warm_up(self, work: Work) -> None:
        """Runs the work once, so that libraries choose kernels and create their handles.

        It runs on a stream of its own. cuBLAS has a workspace per stream, and a graph uses the workspace of the stream
        on which it was captured. If a kernel ran there during a replay, both could wait for each other forever.
        """
        self._warm_up_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._warm_up_stream):
            work()
        torch.cuda.current_stream().wait_stream(self._warm_up_stream)
        self._warm_up_stream.synchronize()

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # Not `torch.cuda.graph`: before every capture it waits for the device and empties the allocators' caches, which
        # would disturb the threads that serve. `thread_local`: the work of those threads need not be capturable.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()


@cache
def recorder_of(device: torch.device) -> Record:
    """Returns the recorder of a device. There is one per device, so that all captures share its pool."""
    return CudaRecorder(device).record if device.type == "cuda" else run_again


MOST_TOKENS = 8192
"""Larger batches are not captured: the GPU needs longer for one of their blocks than the host needs to launch it, and
each captured shape occupies memory."""
SHORTEST = 16
"""The tokens of the shortest row of attention. Longer rows are doublings of it. More row lengths would need more graphs
but save little, because attention takes a few percent of the time of a block with short rows."""
STEPS_OF_TOKENS = 4
STEPS_OF_INPUTS = 8
"""Sizes per octave. A shape is at most a quarter (tokens) or an eighth (inputs) larger than its batch."""
TOKENS_AT_ONCE = 8
"""For mixed lengths, the number of tokens is a multiple of this, which suits tensor cores."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """The shape of a capture: inputs of one length, or inputs of mixed lengths up to a total number of tokens."""

    num_tokens: int
    num_rows: int
    """Rows of attention. For mixed lengths, one extra row holds the padding tokens."""
    longest: int
    """Tokens per row."""
    mixed: bool
    """Whether lengths may differ, or may be shorter than a row."""


def shape_of(lengths_B: Lengths, max_length: int) -> Shape:
    """Returns the smallest shape for inputs of these lengths. `max_length`: the network's longest input, in tokens.

    If all inputs have `max_length`, which is 1 for images, the packed and the padded form are equal and need no masks.
    """
    num_inputs, num_tokens = len(lengths_B), int(lengths_B.sum())
    if num_tokens == num_inputs * max_length:
        return _uniform(num_inputs, max_length)
    return _mixed(num_inputs, num_tokens, int(lengths_B.max()), max_length)


def shapes_within(budget: Budget, max_length: int) -> set[Shape]:
    """Returns the shapes of all batches within a budget, and of their survivors, up to `MOST_TOKENS`."""
    most = MOST_TOKENS if budget.tokens is None else max(budget.tokens, max_length)  # one larger input runs alone
    shapes = {_uniform(size, max_length) for size in range(1, budget.inputs + 1) if size * max_length <= most}
    if max_length > 1:
        sizes = [0, *(1 << k for k in range(_next_power(budget.inputs).bit_length()))]
        for (shorter, longest), (fewer, inputs) in product(pairwise([0, *_row_lengths(max_length)]), pairwise(sizes)):
            # The fewest tokens of this shape: `fewer` + 1 inputs, one of `shorter` + 1 tokens, the others of one token.
            num_tokens = shorter + 1 + fewer
            while num_tokens <= min(most, min(inputs, budget.inputs) * longest):
                shape = _mixed(inputs, num_tokens, longest, max_length)
                shapes.add(shape)
                num_tokens = shape.num_tokens + 1
    return {shape for shape in shapes if shape.num_tokens <= MOST_TOKENS}


def _uniform(num_inputs: int, length: int) -> Shape:
    rows = round_up(num_inputs, STEPS_OF_INPUTS)
    return Shape(num_tokens=rows * length, num_rows=rows, longest=length, mixed=False)


def _mixed(num_inputs: int, num_tokens: int, longest: int, max_length: int) -> Shape:
    return Shape(
        num_tokens=TOKENS_AT_ONCE * round_up(-(-num_tokens // TOKENS_AT_ONCE), STEPS_OF_TOKENS),
        num_rows=_next_power(num_inputs) + 1,
        longest=min(max_length, max(SHORTEST, _next_power(longest))),
        mixed=True,
    )


def _row_lengths(max_length: int) -> list[int]:
    """Returns the possible lengths of rows, ascending."""
    lengths = [min(SHORTEST, max_length)]
    while lengths[-1] < max_length:
        lengths.append(min(2 * lengths[-1], max_length))
    return lengths


def _next_power(number: int) -> int:
    """Returns the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


class StaticLayout(Layout):
    """The layout of a shape, with padded attention. For mixed lengths it follows from `index`, which batches set."""

    def __init__(self, shape: Shape, device: torch.device, index: Tensor | None) -> None:
        self.num_inputs, self.num_tokens, self.longest = shape.num_rows, shape.num_tokens, shape.longest
        self.device = device
        if index is None:
            place_N = torch.arange(self.num_tokens, device=device)
            first_B = torch.arange(0, self.num_tokens, self.longest, device=device)
            length_B = torch.full((self.num_inputs,), self.longest, device=device)
        else:
            place_N, first_B, length_B = torch.split(index, [self.num_tokens, self.num_inputs, self.num_inputs])
        vars(self).update(  # replaces cached properties that Layout would compute on the host
            uniform=not shape.mixed,
            scheme="padded",
            place_N=place_N,
            position_N=place_N % self.longest,
            first_token_B=first_B,
            last_token_B=first_B + length_B - 1,
            mask_BT=torch.arange(self.longest, device=device) < length_B[:, None],
            lengths_B1=length_B[:, None].float(),
        )


def index_of(shape: Shape, lengths_B: Lengths) -> Tensor:
    """Returns the `index` of a layout of mixed lengths, int64: each token's place, each row's first token and length.

    All padding tokens are at the first place of the last row. Rows without an input have length 1.
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
    """Tensors at fixed addresses. Recordings share them, so only one recording may run at a time.

    New tensors are zero, which is a valid input. Later they hold the values of earlier runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[Hashable, Tensor] = {}

    def take(self, name: Hashable, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the first rows of the tensor of this name. Allocates a new tensor if it has too few rows."""
        key = (name, shape, dtype)
        tensor = self._tensors.get(key)
        if tensor is None or len(tensor) < rows:
            tensor = self._tensors[key] = torch.zeros((rows, *shape), dtype=dtype, device=self._device)
        return tensor[:rows]


class StaticSegment:
    """A segment recorded for one shape. Segments on the same buffers must not run at the same time."""

    def __init__(self, model: EarlyExitModel, segment: Segment, shape: Shape, buffers: Buffers) -> None:
        self._model, self._segment, self._shape, self._buffers = model, segment, shape, buffers
        self._after = model.takes(segment.end)
        self.inputs = tuple(
            buffers.take(
                ("in", place),
                shape.num_tokens if spec.per_token else shape.num_rows,
                spec.shape,
                model.dtype if spec.dtype == "float" else getattr(torch, spec.dtype),
            )
            for place, spec in enumerate(model.takes(segment.first))
        )
        numbers = shape.num_tokens + 2 * shape.num_rows
        self._index = buffers.take("index", numbers, (), torch.int64) if shape.mixed else None
        self._outputs: Tensors = ()
        self._replay: Callable[[], None]

    @torch.inference_mode()
    def record(self, recorder: Record) -> StaticSegment:
        """Records the segment and returns itself. Raises RuntimeError if it cannot be recorded."""
        if self._index is not None:
            one_input = np.full(1, min(self._shape.longest, self._shape.num_tokens), dtype=np.int32)
            self._index.copy_(index_of(self._shape, one_input))
        self._replay = recorder(self._work)
        return self

    @torch.inference_mode()
    def run(self, piece: Piece) -> tuple[Tensors, Tensor | None]:
        """Runs inputs that fit the shape: see `SegmentRunner.run`. The results are copies."""
        if self._index is not None:
            index = index_of(self._shape, piece.lengths_B)
            self._index.copy_(to_device(index, self._index.device))
        for buffer, values in zip(self.inputs, piece.tensors, strict=True):
            buffer[: len(values)].copy_(values)
        self._replay()
        # Copies, because the next replay overwrites the buffers while survivors may still be queued.
        num_inputs, num_tokens = len(piece), int(piece.lengths_B.sum())
        hidden = tuple(
            buffer[: num_tokens if spec.per_token else num_inputs].clone()
            for buffer, spec in zip(self._outputs, self._after, strict=False)
        )
        if not self._model.has_exit(self._segment):
            return hidden, None
        return hidden, self._outputs[-1][:num_inputs].clone()

    def _work(self) -> None:
        layout = StaticLayout(self._shape, self._model.device, self._index)
        hidden, outputs_BC = self._model.compute(self._segment, self.inputs, layout)
        results = hidden if outputs_BC is None else (*hidden, outputs_BC)
        if not self._outputs:  # in the first run, which is a warm-up and never captured
            self._outputs = tuple(
                self._buffers.take(("out", place), len(each), tuple(each.shape[1:]), each.dtype)
                for place, each in enumerate(results)
            )
        for buffer, values in zip(self._outputs, results, strict=True):
            buffer.copy_(values)


logger = logging.getLogger(__name__)

Key = tuple[Segment, Shape]


class CapturedSegments(SegmentRunner):
    """Runs the segments of a model whose weights keep their addresses. There is a recording per segment and shape.

    For a small batch, a GPU computes a transformer block in less time than the host needs to launch its kernels. A CUDA
    graph is launched at once, but only for the shapes and addresses of its capture. So a piece is copied to the inputs
    of the smallest shape that holds it, and the results of unused rows are ignored.

    The model itself runs all other pieces: larger ones, pieces with `importance`, pieces of mixed lengths if
    attention is not padded, and segments that could not be captured.
    """

    def __init__(self, model: EarlyExitModel, recorder: Record) -> None:
        self._model = model
        self._recorder = recorder
        self._captures_mixed = model.attention in ("auto", "padded")
        self.captured: dict[Key, StaticSegment] = {}
        """The recordings that exist now."""
        self._prepared: frozenset[Key] = frozenset()
        self._running = Lock()
        """Held from the copy of inputs to the copy of results, because two batches may run at once on one stream."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        captured = self.captured.get((segment, shape_of(piece.lengths_B, self._model.max_length)))
        if captured is None or len(piece.tensors) != len(captured.inputs):  # it has `importance`
            return self._model.run(segment, piece)
        with self._running:
            return captured.run(piece)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        """Records the shapes of all batches within these budgets, while other segments may run.

        Recordings that neither this call nor the last one needs are released.
        """
        wanted = frozenset(
            (segment, shape)
            for segment, budget in segments.items()
            for shape in shapes_within(budget, self._model.max_length)
            if self._captures_mixed or not shape.mixed
        )
        if wanted == self._prepared:
            return
        kept = wanted | self._prepared
        existing = {key: captured for key, captured in self.captured.items() if key in kept}
        # New recordings share buffers, and recording writes to them. So none of them is used before all are recorded.
        self.captured = existing | self._record(wanted - existing.keys())
        self._prepared = wanted

    def _record(self, keys: Collection[Key]) -> dict[Key, StaticSegment]:
        """Records segments, the largest shapes first, so that smaller shapes reuse their memory."""
        recorded: dict[Key, StaticSegment] = {}
        failures: list[str] = []  # not the errors themselves, which would keep tensors of failed recordings alive
        failed: set[Segment] = set()
        buffers = Buffers(self._model.device)  # buffers of other recordings may be in use
        for segment, shape in sorted(keys, key=lambda key: key[1], reverse=True):
            if segment in failed:
                continue
            try:
                recorded[segment, shape] = StaticSegment(self._model, segment, shape, buffers).record(self._recorder)
            except RuntimeError as error:
                reason = error.__context__ or error  # after a failed capture, `capture_end` raises too
                failures.append(f"{type(reason).__name__}: {first_line(reason)}")
                if not isinstance(reason, torch.OutOfMemoryError):  # smaller shapes would fail for the same reason
                    failed.add(segment)
        if failures:
            missing = len(keys) - len(recorded)
            logger.warning("%d of %d shapes are not captured, torch runs them: %s", missing, len(keys), failures[0])
        return recorded
