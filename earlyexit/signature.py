"""What crosses between a caller and a model: named columns, one row per input, in the words of the v2 protocol."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
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
