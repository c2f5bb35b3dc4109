"""What crosses after a block: named tensors, each with a row per token or a row per input. Without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DType = Literal["float", "int32", "uint8"]
"""`float` is the float type that the model was loaded in."""
BYTES: dict[DType, int] = {"float": 4, "int32": 4, "uint8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a boundary."""

    name: str
    shape: tuple[int, ...]
    """Of one row."""
    dtype: DType = "float"
    per_token: bool = False
    """Whether it has a row for every token of an input, or one for the input."""
    below: int | None = None
    """Of whole numbers: the first that the network does not take; None where all are taken."""


Boundary = tuple[TensorSpec, ...]


def bytes_per_input(boundary: Sequence[TensorSpec], length: float, *, float_bytes: int = BYTES["float"]) -> float:
    """Bytes that one input of `length` tokens carries over a boundary."""
    return sum(
        math.prod(each.shape)
        * (length if each.per_token else 1)
        * (float_bytes if each.dtype == "float" else BYTES[each.dtype])
        for each in boundary
    )
