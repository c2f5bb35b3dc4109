"""What travels between processes: pieces and answers, without torch, so that an ingress need not load it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.signature import Encoded

PACKED_FROM_BYTES = 4096
"""Below it packing costs more than it saves. A class map of 240 x 180 pixels becomes 20 to 40 times as small."""
Lengths = npt.NDArray[np.int32]
"""Tokens per input, (B,)."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """An answer of many numbers, as it travels."""

    dtype: str
    shape: tuple[int, ...]
    raw: memoryview
    """Read-only; where it came over a connection, of what was received, which lives as long."""
    packed: bool = False
    """Whether zlib made them fewer."""

    @classmethod
    def of(cls, array: npt.NDArray[np.generic], *, pack: bool = False) -> Numbers:
        """A copy of an array: its own may belong to a batch, and be written to again. `pack`: smaller, if large."""
        packed = pack and array.nbytes >= PACKED_FROM_BYTES
        raw = zlib.compress(array.tobytes(), level=1) if packed else array.tobytes()
        return cls(array.dtype.str, array.shape, memoryview(raw), packed)

    @property
    def num_bytes(self) -> int:
        """Of the array."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def __reduce__(self) -> tuple[Callable[..., Numbers], tuple[str, tuple[int, ...], bytes, bool]]:
        return _of_bytes, (self.dtype, self.shape, bytes(self.raw), self.packed)

    def numpy(self) -> npt.NDArray[Any]:
        """The array, read-only."""
        raw = zlib.decompress(self.raw, bufsize=self.num_bytes) if self.packed else self.raw
        return np.frombuffer(raw, dtype=self.dtype).reshape(self.shape)


def _of_bytes(dtype: str, shape: tuple[int, ...], raw: bytes, packed: bool) -> Numbers:
    return Numbers(dtype, shape, memoryview(raw), packed)


Value = int | float | Numbers
"""An answer, as its task has it: a label's index, a number, an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an input left with."""

    sample_id: str
    value: Value
    score: float
    """How sure the exit was, as its task says; with recorded exits, the recorded score."""
    exit: int
    """The block it left after; the last block's index for inputs that ran the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What an exit said of an input that stays."""

    sample_id: str
    block: int
    """The exit sits after it; the model's last block stands for the full model."""
    score: float
    """In the policy's unit; of the full model NaN."""
    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePiece:
    """A piece as it travels between processes: numpy only, so that neither end needs torch to carry it."""

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths
    tensors: tuple[npt.NDArray[np.generic], ...]
    """What crosses before `next_block`: one array per tensor of the network's boundary, with a row per token of all
    inputs, or a row per input; bfloat16 as its bits (uint16). float16 where hops are in half precision, which their
    reader need not be told. Before a network's first block on the way there its inputs, as its codec gives them. One
    more, `importance`, where that is measured. Empty where nothing is computed."""
    state_BS: npt.NDArray[np.generic] | None
    """The exit policy's state; None of inputs that come from no block: the policy's initial state stands for it."""

    def select(self, keep: Sequence[int]) -> WirePiece:
        """The inputs at the given positions, in the given order."""
        index_K, size = np.array(keep, dtype=np.intp), len(self.sample_ids)
        ends_B = np.cumsum(self.lengths_B)
        rows_M = np.concatenate([np.arange(ends_B[k] - self.lengths_B[k], ends_B[k]) for k in keep])
        return WirePiece(
            sample_ids=tuple([self.sample_ids[k] for k in keep]),
            next_block=self.next_block,
            lengths_B=self.lengths_B[index_K],
            tensors=tuple([values[index_K if len(values) == size else rows_M] for values in self.tensors]),
            state_BS=None if self.state_BS is None else self.state_BS[index_K],
        )


def entering(
    sample_ids: Sequence[str],
    encoded: Sequence[Encoded],
    *,
    block: int = 0,
    state_BS: npt.NDArray[np.generic] | None = None,
    measured: bool = False,
) -> WirePiece:
    """Inputs before the first block of a network, as one piece; `state_BS`: of those that come from another network.

    `measured`: they carry `importance` (N,) beside the network's own inputs, what attention their tokens have received:
    zeros as yet, to which each block adds.
    """
    lengths_B = np.array([each.length for each in encoded], dtype=np.int32)
    tensors = tuple(map(np.concatenate, zip(*(each.tensors for each in encoded), strict=True)))
    return WirePiece(
        sample_ids=tuple(sample_ids),
        next_block=block,
        lengths_B=lengths_B,
        tensors=(*tensors, np.zeros(lengths_B.sum(), dtype=np.float16)) if measured else tensors,
        state_BS=state_BS,
    )


def values_of(array: npt.NDArray[Any], *, pack: bool = False) -> list[Value]:
    """The answers that an array holds, one per row; see `Numbers.of`."""
    if array.ndim > 1:
        return [Numbers.of(row, pack=pack) for row in array]
    values: list[Value] = array.tolist()
    return values


def stacked(values: Sequence[Value]) -> npt.NDArray[Any]:
    """Answers of one task as an array, one row each; of a single one of many numbers its own, read-only."""
    if len(values) == 1 and isinstance(values[0], Numbers):
        return values[0].numpy()[None]
    return np.array([value.numpy() if isinstance(value, Numbers) else value for value in values])
