"""Checks of tasks' settings, and reading and writing of class maps as indexed PNG files."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError


def listed_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns names as a tuple; raises ValueError for a single string and for elements that are not strings."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a list of names is needed, not {names!r}")
    return tuple(names)


def check_whole(most: int, **numbers: int) -> None:
    """Raises ValueError unless all numbers are integers from 1 to `most`."""
    for name, number in numbers.items():
        if type(number) is not int or not 1 <= number <= most:
            raise ValueError(f"{name} is {number!r}; whole numbers from 1 to {most} are allowed")


Colour: TypeAlias = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""
MOST_CLASSES = 256
"""Maximum number of classes, because a pixel of an indexed PNG file has one byte."""
HUE_STEP = (5**0.5 - 1) / 2
"""Step on the colour wheel from class to class. The golden ratio keeps the hues of any number of classes apart."""
LIGHTNESSES = (0.5, 0.35, 0.7)
COMPRESSION = 1
"""zlib level. Higher levels make class maps at most a third smaller and take up to twenty times as long."""


@cache
def colours(num_classes: int) -> tuple[Colour, ...]:
    """Returns distinct colours. The colour of class k does not depend on the number of classes."""
    tones = (colorsys.hls_to_rgb(k * HUE_STEP % 1, LIGHTNESSES[k % len(LIGHTNESSES)], 0.75) for k in range(num_classes))
    return tuple((round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in tones)


def to_png(class_map_HW: npt.NDArray[np.uint8], num_classes: int) -> bytes:
    """Returns a class map as an indexed PNG file. Its palette indices are the class ids."""
    from PIL import Image

    image = Image.fromarray(class_map_HW).copy()  # a copy, because the map's memory may be read-only
    image.putpalette([channel for colour in colours(num_classes) for channel in colour])
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=COMPRESSION)
    return file.getvalue()


Mask = npt.NDArray[np.uint8]
"""(height, width): the class id of each pixel."""

INDEXED = ("P", "L")
"""Pillow's modes with one byte per pixel: palette and greyscale."""
BIT_DEPTH_OFFSET = 24
"""Position of the bit depth in a PNG file. It is checked, because Pillow rescales greyscale values below 8 bits."""
NEEDED = "an indexed PNG file is needed, with one byte per pixel: its class id"


def read_mask(label: Any, *, height: int, width: int, row: int, wanted_by: str = "the model answers") -> Mask:
    """Returns the class ids of a label, the bytes of a PNG file or an array; raises DataError that names the row.

    `wanted_by`: the beginning of the requirement in messages about a wrong size.
    """
    sides, wanted = (width, height), f"{wanted_by} {width} x {height}"
    mask = _decoded(label, sides, wanted, row) if isinstance(label, bytes) else np.asarray(label)
    if mask.ndim != 2 or mask.dtype != np.uint8:
        raise DataError(
            f"row {row}: a mask of {mask.dtype.name} of the shape {list(mask.shape)}; {NEEDED}, or uint8 (H, W)"
        )
    _check_sides(mask.shape[::-1], sides, wanted, row)
    return mask


def _decoded(content: bytes, sides: tuple[int, ...], wanted: str, row: int) -> Mask:
    from PIL import Image, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=("PNG",))
        _check_sides(image.size, sides, wanted, row)  # reads the header only, before pixels are decoded
        if image.mode not in INDEXED:
            raise DataError(f"row {row}: the mask is an image of the mode {image.mode}, not of class ids; {NEEDED}")
        if image.mode == "L" and content[BIT_DEPTH_OFFSET] != 8:
            raise DataError(f"row {row}: a mask of {content[BIT_DEPTH_OFFSET]} bits of grey per pixel, not 8; {NEEDED}")
        return np.array(image, dtype=np.uint8)
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"row {row}: the mask has too many pixels; {wanted}") from None
    except UnidentifiedImageError:
        raise DataError(f"row {row}: the mask is not a PNG file, or a broken one; {NEEDED}") from None
    except Exception as error:  # Pillow's decoders raise many kinds of errors for broken files
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"row {row}: the mask cannot be decoded: {reason}; {NEEDED}") from error


def _check_sides(sides: tuple[int, ...], needed: tuple[int, ...], wanted: str, row: int) -> None:
    if sides != needed:
        width, height = sides
        raise DataError(f"row {row}: a mask of {width} x {height} pixels, width by height; {wanted}")
