"""Tensors as bytes, as Triton writes them: little-endian, elements of BYTES each behind its length in four bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.errors import InputError
from earlyexit.signature import DATATYPES

STORED = {name: dtype.newbyteorder("<") for name, dtype in DATATYPES.items() if name != "BYTES"}


def packed(datatype: str, column: Iterable[Any]) -> bytes:
    """A column's elements, row by row."""
    if datatype == "BYTES":
        encoded = [each if isinstance(each, bytes) else str(each).encode("utf-8") for each in column]
        return b"".join(struct.pack("<I", len(each)) + each for each in encoded)
    return np.asarray(column, dtype=STORED[datatype]).tobytes()


def unpacked(datatype: str, data: bytes | memoryview, where: str) -> npt.NDArray[Any] | list[bytes]:
    """The elements of a tensor, one after the other; raises InputError, `where` being its place in the request."""
    if datatype == "BYTES":
        return _strings(data, where)
    dtype = STORED[datatype]
    if len(data) % dtype.itemsize:
        raise InputError(f"{where}: {len(data)} bytes; an element of {datatype} has {dtype.itemsize}")
    if datatype == "BOOL" and any(byte > 1 for byte in set(bytes(data))):
        raise InputError(f"{where}: bytes other than 0 and 1, as BOOL")
    return np.frombuffer(data, dtype=dtype).astype(DATATYPES[datatype], copy=False)


def _strings(data: bytes | memoryview, where: str) -> list[bytes]:
    elements: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 4 + (struct.unpack_from("<I", data, at)[0] if at + 4 <= len(data) else len(data))
        if end > len(data):
            raise InputError(f"{where}: element {len(elements)} ends beyond the bytes that were sent")
        elements.append(bytes(data[at + 4 : end]))
        at = end
    return elements
