"""Small images, and files of them."""

from __future__ import annotations

import io
import struct
import zlib
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


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says it is so large, and has ten bytes of it."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", size) + _chunk(b"IDAT", zlib.compress(bytes(10))) + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
