"""Small images, and files of them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    """Pixels of any value, (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file_of(image: Image.Image | Pixels, form: str = "PNG", **options: Any) -> bytes:
    """An image as a file; PNG and `lossless=True` WebP keep every pixel."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def png_chunks(header: tuple[int, int, int, int], rows: Sequence[bytes], *before: tuple[bytes, bytes]) -> bytes:
    """A PNG file by hand: width, height, bits and colour type, packed rows, and chunks before them."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", *header, 0, 0, 0)),
        *before,
        (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))),
        (b"IEND", b""),
    ]
    sums = (struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
    parts = (
        struct.pack(">I", len(data)) + kind + data + check for (kind, data), check in zip(chunks, sums, strict=True)
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says it is so large, and has ten bytes of it."""
    return png_chunks((width, height, 8, 2), [bytes(9)])
