"""Tensors as bytes, as Triton writes them: little-endian, texts each behind its length in four bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from earlyexit.errors import InputError

CODES = {"FP32": "f", "INT32": "i"}


def packed(datatype: str, column: Sequence[Any]) -> bytes:
    """A column of texts (BYTES), FP32 or INT32."""
    if datatype == "BYTES":
        encoded = [text.encode("utf-8") for text in column]
        return b"".join(struct.pack("<I", len(each)) + each for each in encoded)
    return struct.pack(f"<{len(column)}{CODES[datatype]}", *column)


def unpacked_texts(data: bytes) -> list[str]:
    """The texts of a BYTES tensor; raises InputError."""
    texts: list[str] = []
    at = 0
    while at < len(data):
        end = at + 4 + (struct.unpack_from("<I", data, at)[0] if at + 4 <= len(data) else len(data))
        if end > len(data):
            raise InputError(f"inputs.0: element {len(texts)} ends beyond the bytes that were sent")
        texts.append(decoded(data[at + 4 : end], len(texts)))
        at = end
    return texts


def decoded(element: bytes, index: int) -> str:
    """One text of a tensor; raises InputError."""
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"inputs.0: element {index} is not UTF-8 at byte {error.start}") from error
