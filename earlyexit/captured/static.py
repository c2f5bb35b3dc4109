"""One segment on one shape: tensors that stay where they are, and what fills and reads them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

from earlyexit.captured.recorder import Recorder
from earlyexit.captured.shapes import Shape
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.piece import Piece, Tensors
from earlyexit.split import Segment
from earlyexit.transfer import to_device
from earlyexit.wire import Lengths


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
