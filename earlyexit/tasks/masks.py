"""Right answers of segmentation: index images, from files or arrays."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError

Mask = npt.NDArray[np.uint8]
"""(height, width): a class id per pixel."""

INDEXED = ("P", "L")
"""Pillow's modes of one byte per pixel: into a palette, or grey."""
DEPTH = 24
"""Where a PNG file says how many bits a pixel's number has: in the chunk that comes first. Fewer bits of grey than 8
are shades, which Pillow spreads over 0 to 255; fewer of a palette stay ids."""
NEEDED = "an index image is needed, a PNG file with one byte per pixel: its class id"


def read_mask(label: Any, *, height: int, width: int, row: int, wanted_by: str = "the model answers") -> Mask:
    """The class ids of a PNG file's bytes, or of an array; raises DataError, naming the row, for anything else.

    `wanted_by` says whose the sides are.
    """
    wanted = _Wanted(width, height, wanted_by)
    mask = _decoded(label, wanted, row) if isinstance(label, bytes) else np.asarray(label)
    if mask.ndim != 2 or mask.dtype != np.uint8:
        raise DataError(
            f"row {row}: a mask of {mask.dtype.name} of the shape {list(mask.shape)}; {NEEDED}, or uint8 (H, W)"
        )
    _check_size(mask.shape[1], mask.shape[0], wanted, row)
    return mask


class _Wanted(NamedTuple):
    width: int
    height: int
    by: str

    def __str__(self) -> str:
        return f"{self.by} {self.width} x {self.height}"


def _decoded(content: bytes, wanted: _Wanted, row: int) -> Mask:
    from PIL import Image, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=("PNG",))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"row {row}: the mask has too many pixels; {wanted}") from None
    except UnidentifiedImageError:
        raise DataError(f"row {row}: the mask is no PNG file, or a broken one; {NEEDED}") from None
    except Exception as error:  # Pillow's readers raise anything at all on broken files
        raise _broken(error, row) from error
    _check_size(*image.size, wanted, row)  # by the header, before anything is decoded
    if image.mode not in INDEXED:
        raise DataError(f"row {row}: the mask is an image of the mode {image.mode}, colours for class ids; {NEEDED}")
    if image.mode == "L" and content[DEPTH] != 8:
        raise DataError(f"row {row}: the mask has {content[DEPTH]} bits of grey for a pixel, not 8; {NEEDED}")
    try:
        return np.array(image, dtype=np.uint8)
    except Exception as error:  # Pillow's readers raise anything at all on broken files
        raise _broken(error, row) from error


def _broken(error: Exception, row: int) -> DataError:
    return DataError(f"row {row}: the mask cannot be decoded: {type(error).__name__}: {error}; {NEEDED}")


def _check_size(width: int, height: int, wanted: _Wanted, row: int) -> None:
    if (width, height) != wanted[:2]:
        raise DataError(f"row {row}: a mask of {width} x {height} pixels, width by height; {wanted}")
