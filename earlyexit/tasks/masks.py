"""Right answers of segmentation: index images, from files or arrays."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError

Mask = npt.NDArray[np.uint8]
"""(height, width): a class id per pixel."""

INDEXED = ("P", "L")
"""Pillow's modes of one byte per pixel: into a palette, or grey."""
NEEDED = "an index image is needed, a PNG file with one byte per pixel: its class id"


def read_mask(label: Any, *, height: int, width: int, row: int) -> Mask:
    """The class ids of a PNG file's bytes, or of an array; raises DataError, naming the row, for anything else."""
    mask = _decoded(label, (width, height), row) if isinstance(label, bytes) else np.asarray(label)
    if mask.ndim != 2 or mask.dtype != np.uint8:
        raise DataError(
            f"row {row}: a mask of {mask.dtype.name} of the shape {list(mask.shape)}; {NEEDED}, or uint8 (H, W)"
        )
    _check_size(mask.shape[1], mask.shape[0], (width, height), row)
    return mask


def _decoded(content: bytes, size: tuple[int, int], row: int) -> Mask:
    from PIL import Image, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=("PNG",))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"row {row}: the mask has too many pixels; the model answers {size[0]} x {size[1]}") from None
    except UnidentifiedImageError:
        raise DataError(f"row {row}: the mask is no PNG file, or a broken one; {NEEDED}") from None
    _check_size(*image.size, size, row)  # by the header, before anything is decoded
    if image.mode not in INDEXED:
        raise DataError(f"row {row}: the mask is an image of the mode {image.mode}, colours for class ids; {NEEDED}")
    try:
        return np.array(image, dtype=np.uint8)
    except Exception as error:  # Pillow's readers raise anything at all on broken files
        raise DataError(f"row {row}: the mask cannot be decoded: {type(error).__name__}: {error}; {NEEDED}") from error


def _check_size(width: int, height: int, wanted: tuple[int, int], row: int) -> None:
    if (width, height) != wanted:
        raise DataError(
            f"row {row}: a mask of {width} x {height} pixels, width by height; "
            f"the model answers {wanted[0]} x {wanted[1]}"
        )
