"""Splits of a network, the tensors at its block boundaries, and answers. This module needs no torch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from earlyexit.data.strict import FromFile
from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.named import HopDtype

AfterAnswer = Literal["stop", "stay"]
"""Whether inputs leave after their answer at a ramp, so that batches shrink (`stop`, E3), or run on to the model's end,
so that the full model's answer to every input is known (`stay`, Apparate, section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive blocks without an active ramp between them."""

    first: int
    end: int
    ramp: int | None
    """The active ramp after its last block, `end` - 1; None if that block has no active ramp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most that a batch may hold."""

    inputs: int
    tokens: int | None = None
    """The most tokens. None: any number."""

    def tokens_when_full(self, mean_tokens: float, num_inputs: int = 0, num_tokens: int = 0) -> float:
        """Returns the expected tokens of a full batch: `num_inputs` known inputs, and others of `mean_tokens` each.

        If an input of `mean_tokens` exceeds the token budget, it is a batch by itself.
        """
        expected = num_tokens + max(0, self.inputs - num_inputs) * mean_tokens
        return expected if self.tokens is None else min(expected, max(self.tokens, mean_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(FromFile):
    """Consecutive blocks that run on one batch without regrouping, and their batch size.

    Inputs may be answered at its active ramps; the survivors go on at its end. Raises PlanError for
    contradictory values.
    """

    first: int
    """First block."""
    end: int
    """One past the last block."""
    batch: Annotated[int, Field(ge=1)]
    """The inputs of a full batch."""
    tokens: Annotated[int | None, Field(ge=1)] = None
    """The most tokens in a batch. A larger input runs alone. None: no limit."""
    ramps: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """The active ramps, ascending. Ramp r is after block r."""
    after_answer: Annotated[AfterAnswer, Field(exclude=True)] = "stop"
    """Whether answered inputs stop or stay. In files, this and `overlap_below` are fields of the plan."""
    overlap_below: Annotated[int | None, Field(exclude=True)] = None
    """While fewer than this many inputs remain in a running batch, the device may run its next batch beside it
    (PAME section 4.2: the batch size threshold tau_b of parallel batch scheduling). None: never."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise PlanError(f"a split needs 0 <= first < end, not first {self.first} and end {self.end}")
        if self.batch < 1:
            raise PlanError(f"a split's batch must be at least 1, not {self.batch}")
        if self.tokens is not None and self.tokens < 1:
            raise PlanError(f"a split's tokens must be at least 1, not {self.tokens}; leave them out for no limit")
        if self.overlap_below is not None and self.overlap_below < 1:
            raise PlanError(f"overlap_below must be at least 1, not {self.overlap_below}; leave it out for no overlap")
        if list(self.ramps) != sorted(set(self.ramps)):
            raise PlanError(f"a split's ramps must ascend without repeats, not {list(self.ramps)}")
        for ramp in self.ramps:
            if not self.first <= ramp < self.end:
                raise PlanError(f"ramp {ramp} is outside its split, whose blocks are {self.first} to {self.end - 1}")

    @property
    def budget(self) -> Budget:
        """The budget of one batch."""
        return Budget(inputs=self.batch, tokens=self.tokens)

    @property
    def stays(self) -> bool:
        """Whether its inputs run on after their answer."""
        return self.after_answer == "stay"

    @property
    def side_by_side(self) -> int:
        """The number of batches that a device may start at once: 2 if a batch may run beside a full one, else 1."""
        return 1 if self.overlap_below is None or self.overlap_below <= self.batch else 2

    def segments(self) -> tuple[Segment, ...]:
        """Returns the segments of the split: it is cut after each active ramp."""
        bounds = sorted({self.first, *(ramp + 1 for ramp in self.ramps), self.end})
        return tuple(
            Segment(first=first, end=end, ramp=end - 1 if end - 1 in self.ramps else None)
            for first, end in pairwise(bounds)
        )

    def rest(self, block: int) -> Split:
        """Returns the split from `block` on, which must be one of its blocks."""
        if block == self.first:
            return self
        return replace(self, first=block, ramps=tuple(ramp for ramp in self.ramps if ramp >= block))


def rest_of(block: int, splits: Sequence[Split], fallback: Sequence[Split] = ()) -> Split:
    """Returns the first split that contains a block, from that block on. Raises PlanError if none contains it."""
    for split in (*splits, *fallback):
        if split.first <= block < split.end:
            return split.rest(block)
    hosted = ", ".join(f"{split.first} to {split.end - 1}" for split in splits)
    raise PlanError(f"no split here holds block {block}; splits hold the blocks {hosted or 'of no model'}")


DType = Literal["float", "int32", "uint8"]
"""`float` is the float type in which the model was loaded."""
FloatName = Literal["float32", "bfloat16"]
"""The float types in which networks compute."""
FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number."""
NUMPY: dict[DType, np.dtype[np.generic]] = {
    "float": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
}
"""The types of the tensors that codecs return."""
IMAGE_AXES = 3
MAX_SIDE = 2**15
"""The largest side of an image, in pixels. It bounds the memory of resizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The description of one tensor of a boundary. Model cards store it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    shape: tuple[int, ...]
    """The shape of one row."""
    dtype: DType = "float"
    per_token: bool = False
    """Whether it has one row per token of an input, or one row per input."""
    below: int | None = None
    """For integers: all values must be below this bound, the rows of a lookup table; `NO_TABLE`: it is unknown."""


NO_TABLE = 2
"""Value of `below` of an integer input whose lookup table is unknown."""
Boundary = tuple[TensorSpec, ...]
"""The tensors that pass from one block to the next."""


def hop_float_bytes(dtype: str, hop_dtype: HopDtype) -> int:
    """Returns the bytes of one `float` number between processes, for a model in `dtype`."""
    return FLOAT_BYTES[dtype if hop_dtype == "same" else hop_dtype]


def takes_images(inputs: Boundary) -> bool:
    """Whether a network's inputs are images (height, width, channels)."""
    return len(inputs) == 1 and not inputs[0].per_token and len(inputs[0].shape) == IMAGE_AXES


def bytes_per_input(boundary: Sequence[TensorSpec], length: float, *, float_bytes: int = 4) -> float:
    """Returns the bytes of one input of `length` tokens at a boundary, by default of a float32 model."""
    return sum(
        math.prod(each.shape)
        * (length if each.per_token else 1)
        * (float_bytes if each.dtype == "float" else NUMPY[each.dtype].itemsize)
        for each in boundary
    )


def why_no_exit(boundary: Sequence[TensorSpec]) -> str | None:
    """Returns why a boundary cannot have an exit; None if it can."""
    first = boundary[0]
    return None if first.dtype == "float" else f"an exit needs floating point numbers; {first.name!r} is {first.dtype}"


def mismatch(inputs: Sequence[TensorSpec], encoded: Encoded) -> str | None:
    """Returns why an encoded input does not fit a network's inputs; None if it fits."""
    if len(encoded.tensors) != len(inputs):
        names = ", ".join(each.name for each in inputs)
        return f"the codec returns {len(encoded.tensors)} tensors; the network takes {len(inputs)}: {names}"
    for spec, values in zip(inputs, encoded.tensors, strict=True):
        dtype, shape = NUMPY[spec.dtype], (encoded.length if spec.per_token else 1, *spec.shape)
        if values.dtype != dtype or values.shape != shape:
            return (
                f"for an input of length {encoded.length} the network takes {spec.name!r} as {dtype} {list(shape)}; "
                f"the codec returns {values.dtype} {list(values.shape)}"
            )
        rows = spec.below or NO_TABLE
        if rows > NO_TABLE and (outside := values[np.less(values, 0) | np.greater_equal(values, rows)]).size:
            return f"{spec.name!r} has the value {outside[0]}; the network's lookup table has {rows} rows"
    return None


def check_fit(inputs: Sequence[TensorSpec], encodings: Sequence[Encoded]) -> None:
    """Raises UnprocessableInputError that names an encoded input which does not fit a network's inputs."""
    for k, each in enumerate(encodings):
        if (reason := mismatch(inputs, each)) is not None:
            raise UnprocessableInputError(f"input {k}: {reason}")


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
"""The datatypes of the Open Inference Protocol and their numpy types. BYTES are strings of any length."""
JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""The accepted JSON types, by numpy's `dtype.kind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A named input or output of a model."""

    name: str
    datatypes: tuple[str, ...]
    """The accepted datatypes, the preferred one first. An output has one."""
    shape: tuple[int, ...] = ()
    """The shape of one row; -1: any size. A column of n rows is (n, *shape)."""

    @property
    def datatype(self) -> str:
        return self.datatypes[0]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An input in the form that the network takes before block 0."""

    length: int
    """The length in tokens; 1 for inputs without tokens."""
    tensors: tuple[npt.NDArray[np.generic], ...]
    """One array per input tensor of the network, (length, ...), or (1, ...) for a tensor with one row per input."""


def parse_numbers(value: object, datatype: str) -> npt.NDArray[Any]:
    """Returns a JSON number or nested lists of numbers as an array. Raises ValueError if one does not fit."""
    _check_types(value, datatype)
    try:
        with np.errstate(over="ignore"):  # numbers too large for FP16 become infinite
            return np.array(value, dtype=DATATYPES[datatype])
    except OverflowError:
        raise ValueError(f"not all {datatype}") from None
    except ValueError:  # lists of different lengths
        raise ValueError("not an array of numbers") from None


def _check_types(value: object, datatype: str) -> None:
    """Raises ValueError for types that numpy would convert, such as numbers in a list with a string."""
    level: list[Any] = [value]
    while (types := set(map(type, level))) == {list}:
        level = list(chain.from_iterable(level))
    if list in types:
        raise ValueError("not an array of numbers")
    if not types <= JSON_TYPES[DATATYPES[datatype].kind]:
        raise ValueError(f"not all {datatype}")


def cast_column(column: npt.NDArray[Any], datatype: str) -> npt.NDArray[Any]:
    """Returns a column in another datatype.

    Raises ValueError if an integer does not fit the datatype, and for casts that numpy's rule `same_kind` forbids.
    """
    dtype: np.dtype[Any] = DATATYPES[datatype]
    if column.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        ends = (int(column.min()), int(column.max())) if column.size else ()
        if outside := [end for end in ends if not limits.min <= end <= limits.max]:
            raise ValueError(f"{datatype} holds {limits.min} to {limits.max}, not {outside[0]}")
    elif not np.can_cast(column.dtype, dtype, "same_kind"):
        raise ValueError(f"{column.dtype.name} is no {datatype}")
    return column.astype(dtype, copy=False)


PACKED_FROM_BYTES = 4096
"""Smaller arrays are not compressed. A class map of 240 x 180 pixels shrinks to a 20th or less."""
Lengths = npt.NDArray[np.int32]
"""Tokens per input, (B,)."""


@dataclass(frozen=True, slots=True)
class PackedArray:
    """An answer that is an array, as bytes for other processes."""

    dtype: str
    shape: tuple[int, ...]
    raw: memoryview
    """Read-only. After a transfer it is a view of the received bytes."""
    packed: bool = False
    """Whether the bytes are compressed by zlib."""

    @classmethod
    def of(cls, array: npt.NDArray[np.generic], *, pack: bool = False) -> PackedArray:
        """Returns a copy of an array, because a later batch may reuse its memory. `pack`: compress large arrays."""
        packed = pack and array.nbytes >= PACKED_FROM_BYTES
        raw = zlib.compress(array.tobytes(), level=1) if packed else array.tobytes()
        return cls(array.dtype.str, array.shape, memoryview(raw), packed)

    @property
    def num_bytes(self) -> int:
        """The bytes of the uncompressed array."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def __reduce__(self) -> tuple[Callable[..., PackedArray], tuple[str, tuple[int, ...], bytes, bool]]:
        return _of_bytes, (self.dtype, self.shape, bytes(self.raw), self.packed)

    def numpy(self) -> npt.NDArray[Any]:
        """Returns the array, read-only."""
        raw = zlib.decompress(self.raw, bufsize=self.num_bytes) if self.packed else self.raw
        return np.frombuffer(raw, dtype=self.dtype).reshape(self.shape)


def _of_bytes(dtype: str, shape: tuple[int, ...], raw: bytes, packed: bool) -> PackedArray:
    return PackedArray(dtype, shape, memoryview(raw), packed)


Value = int | float | PackedArray
"""An answer: the index of a label, a number, or an array, depending on the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of one exit to an input, whether the input leaves there or stays."""

    sample_id: str
    value: Value
    score: float
    """The exit's score in the policy's unit. For an input that stays, the full model's score is NaN."""
    exit: int
    """The block before the exit. For the full model: the last block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePiece:
    """A piece as numpy arrays, for other processes. They need no torch to pass it on."""

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths
    tensors: tuple[npt.NDArray[np.generic], ...]
    """One array per tensor of the boundary before `next_block`, with a row per token of all inputs or a row per input.
    Before a network's first block they are the arrays of its codec. bfloat16 is stored as its bits (uint16), and hops
    in half precision as float16. `importance` is last if it is measured. Emulated devices have no tensors."""
    state_BS: npt.NDArray[np.generic] | None
    """The exit policy's state. None: the policy's initial state, before the first block."""

    def select(self, keep: Sequence[int]) -> WirePiece:
        """Returns the inputs at the given positions, in the given order."""
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


def entry_piece(
    sample_ids: Sequence[str],
    encoded: Sequence[Encoded],
    *,
    block: int = 0,
    state_BS: npt.NDArray[np.generic] | None = None,
    measured: bool = False,
) -> WirePiece:
    """Returns inputs before a network's first block as one piece.

    `state_BS`: the policy's state of inputs from an earlier network. `measured`: add `importance` (N,), the attention
    that each token received; it begins at zero, and each block adds to it.
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
    """Returns one answer per row of an array. `pack`: see `PackedArray.of`."""
    if array.ndim > 1:
        return [PackedArray.of(row, pack=pack) for row in array]
    values: list[Value] = array.tolist()
    return values


def array_of(value: Value) -> npt.NDArray[Any]:
    """Returns an answer that is an array, read-only."""
    assert isinstance(value, PackedArray)
    return value.numpy()


def stack_values(values: Sequence[Value]) -> npt.NDArray[Any]:
    """Returns answers of one task as an array with one row each. A single array answer is a read-only view."""
    if len(values) == 1 and isinstance(values[0], PackedArray):
        return values[0].numpy()[None]
    return np.array([value.numpy() if isinstance(value, PackedArray) else value for value in values])


def round_up(number: int, steps: int, *, least: int = 1) -> int:
    """Returns the next number on a grid with `steps` numbers per octave, which are at least `least` apart."""
    step = max(least, (1 << number.bit_length()) // 2 // steps)
    return -(-number // step) * step
