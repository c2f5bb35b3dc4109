"""One image per input: a file, or pixels."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from earlyexit.codecs.base import Codec, Columns
from earlyexit.codecs.decoding import ImageSize, decode, to_pixels
from earlyexit.errors import InputError
from earlyexit.signature import Column, Encoded

ImageRow: TypeAlias = bytes | npt.NDArray[np.generic]
"""A file's bytes, or pixels (height, width, 3): uint8, or floating point from 0 to 1."""
LARGE_BYTES = 1_000_000
"""Of a request's pixels together; above this, looking at every one takes a millisecond."""
FILE = {"type": "string", "contentEncoding": "base64", "minLength": 1}


class ImageCodec(Codec[ImageRow]):
    """Images to pixels of one size, uint8, per input; normalising them is the network's affair."""

    name = "image"
    content_types = ("image/jpeg", "image/png", "image/webp")
    json_schema: ClassVar[Mapping[str, Any]] = {
        "anyOf": [FILE, {"type": "array", "items": FILE, "minItems": 1}],
        "description": "One JPEG, PNG or WebP file in base64, or a list of them.",
    }

    def __init__(
        self, height: int, width: int, shortest_edge: int | None = None, interpolation: str = "bilinear"
    ) -> None:
        """See `ImageSize`; raises ValueError."""
        self.size = ImageSize(height=height, width=width, shortest_edge=shortest_edge, interpolation=interpolation)

    @property
    def inputs(self) -> tuple[Column, ...]:
        shape = (self.size.height, self.size.width, 3)
        return (
            Column(name="image", datatypes=("BYTES",)),
            Column(name="image", datatypes=("UINT8", "FP32", "FP16"), shape=shape),
        )

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self.size)}

    def from_columns(self, columns: Columns) -> list[ImageRow]:
        images = columns["image"]
        if isinstance(images, list) or images.dtype == object:
            return [_file(element, f"image: element {k}") for k, element in enumerate(images)]
        return list(images)

    def from_json(self, inputs: object) -> tuple[list[ImageRow], bool]:
        many = isinstance(inputs, list)
        if not (many and inputs) and not isinstance(inputs, str):
            raise InputError("inputs: an image file in base64, or a list of them, is needed")
        rows = inputs if isinstance(inputs, list) else [inputs]
        return [_file(row, f"inputs.{k}" if many else "inputs") for k, row in enumerate(rows)], many

    def from_content(self, content_type: str, body: bytes) -> ImageRow:
        return _file(body, "the body")

    def is_slow(self, rows: Sequence[ImageRow]) -> bool:
        """Files always: a small one may hold a large image."""
        return any(isinstance(row, bytes) for row in rows) or sum(map(_num_bytes, rows)) > LARGE_BYTES

    def surely_takes(self, row: ImageRow) -> bool:
        """A file that could be read can be made any size; pixels are of one."""
        return isinstance(row, bytes) or row.shape[:2] == (self.size.height, self.size.width)

    def encode(self, rows: Sequence[ImageRow], *, truncate: bool = False) -> list[Encoded]:
        pixels = [
            decode(row, self.size, f"input {k}") if isinstance(row, bytes) else to_pixels(row, f"input {k}")
            for k, row in enumerate(rows)
        ]
        return [Encoded(length=1, tensors=(each[None],)) for each in pixels]


def _file(element: object, where: str) -> bytes:
    """A file's bytes; in JSON they are base64."""
    if isinstance(element, str):
        try:
            element = binascii.a2b_base64(element, strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise InputError(f"{where}: an image file in base64 is needed: {error}") from error
    if not isinstance(element, bytes):
        raise InputError(f"{where}: an image file is needed, not {type(element).__name__}")
    if not element:
        raise InputError(f"{where}: the image file is empty")
    return element


def _num_bytes(row: ImageRow) -> int:
    return len(row) if isinstance(row, bytes) else row.nbytes
