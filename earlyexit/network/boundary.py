"""What crosses after a block: named tensors, each with a row per token or a row per input. This needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from earlyexit.named import HopDtype
from earlyexit.network.wire import Encoded

DType = Literal["float", "int32", "uint8"]
"""`float` is the float type that the model was loaded in."""
BYTES: dict[DType, int] = {"float": 4, "int32": 4, "uint8": 1}
FloatName = Literal["float32", "bfloat16"]
"""What networks compute in."""
FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by the type that a model is loaded in."""
HALF_BYTES = 2
NUMPY: dict[DType, np.dtype[np.generic]] = {
    "float": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
}
"""The types that codecs produce."""
IMAGE_AXES = 3
MAX_SIDE = 2**15
"""Largest side of an image, in pixels. Resizing holds one side of the file beside one of the result for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a boundary; a model card holds it as it is."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    shape: tuple[int, ...]
    """Of one row."""
    dtype: DType = "float"
    per_token: bool = False
    """Whether it has a row for every token of an input, or one row for the input."""
    below: int | None = None
    """For whole numbers: the first that the network does not take; None where all are taken."""


Boundary = tuple[TensorSpec, ...]


def hop_float_bytes(dtype: str, hop_dtype: HopDtype) -> int:
    """Returns the bytes of one number of a `float` tensor between processes, for a model in `dtype`."""
    return FLOAT_BYTES[dtype] if hop_dtype == "same" else HALF_BYTES


def takes_images(inputs: Boundary) -> bool:
    """Whether a network's inputs are images, (height, width, channels)."""
    return len(inputs) == 1 and not inputs[0].per_token and len(inputs[0].shape) == IMAGE_AXES


def bytes_per_input(boundary: Sequence[TensorSpec], length: float, *, float_bytes: int = BYTES["float"]) -> float:
    """Returns the bytes that one input of `length` tokens carries over a boundary."""
    return sum(
        math.prod(each.shape)
        * (length if each.per_token else 1)
        * (float_bytes if each.dtype == "float" else BYTES[each.dtype])
        for each in boundary
    )


def why_no_exit(boundary: Sequence[TensorSpec]) -> str | None:
    """Returns why no exit can look at what crosses here; None where one can."""
    first = boundary[0]
    return (
        None if first.dtype == "float" else f"exits look at floating point numbers, and {first.name!r} is {first.dtype}"
    )


def misfit(inputs: Sequence[TensorSpec], encoded: Encoded) -> str | None:
    """Returns what a network does not take in an encoded input; None where it takes all of it."""
    if len(encoded.tensors) != len(inputs):
        names = ", ".join(each.name for each in inputs)
        return f"the codec gives {len(encoded.tensors)} tensors; the network takes {len(inputs)}: {names}"
    for spec, values in zip(inputs, encoded.tensors, strict=True):
        dtype, shape = NUMPY[spec.dtype], (encoded.length if spec.per_token else 1, *spec.shape)
        if values.dtype != dtype or values.shape != shape:
            return (
                f"of an input of length {encoded.length} the network takes {spec.name!r} as {dtype} {list(shape)}; "
                f"the codec gives {values.dtype} {list(values.shape)}"
            )
    return None
