"""What travels between processes: pieces and answers, without torch, so that an ingress need not load it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

DATATYPES: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}
"""Of the Open Inference Protocol, and numpy's for each; BYTES are strings of any length."""
JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""What stands in JSON for numbers of a kind of numpy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A named input or output of a model."""

    name: str
    datatypes: tuple[str, ...]
    """Those that are taken, the preferred one first; of an output there is one."""
    shape: tuple[int, ...] = ()
    """Of one row; -1 where any size is taken. A column of n rows is (n, *shape)."""

    @property
    def datatype(self) -> str:
        return self.datatypes[0]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An input as the network takes it before block 0."""

    length: int
    """In tokens; 1 for inputs that have none."""
    tensors: tuple[npt.NDArray[np.generic], ...]
    """One array per tensor of the network's inputs, each (length, ...), or (1, ...) where it is per input."""


def as_numbers(value: object, datatype: str) -> npt.NDArray[Any]:
    """Numbers of JSON, nested or not, as an array; raises ValueError where some are none of the datatype."""
    dtype: np.dtype[Any] = DATATYPES[datatype]
    _check_types(value, datatype)
    try:
        given = np.array(value)
    except (ValueError, OverflowError):  # lists of different lengths
        raise ValueError("not an array of numbers") from None
    if dtype == np.uint64 and given.dtype.kind in "fO":  # what numpy makes of small numbers beside the largest
        given = np.array(value, dtype=object)
        if all(0 <= each < 2**64 for each in given.flat):
            return given.astype(dtype)
    if not _fits(given, dtype):
        raise ValueError(f"not all {datatype}")
    with np.errstate(over="ignore"):  # too large for FP16 is infinite there
        return given.astype(dtype)


def _check_types(value: object, datatype: str) -> None:
    """Raise ValueError for what numpy would convert: beside one long string, to as long a string of every number."""
    level: list[Any] = [value]
    while (types := set(map(type, level))) == {list}:
        level = list(chain.from_iterable(level))
    if list in types:
        raise ValueError("not an array of numbers")
    if not types <= JSON_TYPES[DATATYPES[datatype].kind]:
        raise ValueError(f"not all {datatype}")


def _fits(given: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "f":
        return given.dtype.kind in "fiu"
    if dtype.kind == "b" or not given.size:
        return given.dtype.kind == dtype.kind or not given.size
    limits = np.iinfo(dtype)
    return given.dtype.kind in "iu" and int(given.min()) >= limits.min and int(given.max()) <= limits.max


def fitting(column: npt.NDArray[Any], datatype: str) -> npt.NDArray[Any]:
    """Whole numbers of any type as another that holds all of them; other numbers as one of their own kind.

    Raises ValueError where the datatype holds other kinds of numbers or not all of these.
    """
    dtype: np.dtype[Any] = DATATYPES[datatype]
    if column.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        outside = [int(end) for end in _ends(column) if not limits.min <= int(end) <= limits.max]
        if outside:
            raise ValueError(f"{datatype} holds {limits.min} to {limits.max}, not {outside[0]}")
    elif not np.can_cast(column.dtype, dtype, "same_kind"):
        raise ValueError(f"{column.dtype.name} is no {datatype}")
    return column.astype(dtype, copy=False)


def _ends(column: npt.NDArray[Any]) -> tuple[Any, ...]:
    return (column.min(), column.max()) if column.size else ()


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
