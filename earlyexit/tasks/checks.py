"""Checks of tasks' settings, and index images: class maps as files or arrays, and their colours."""

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
    """Returns texts as they are; raises ValueError for a single text."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a list of names is needed, not {names!r}")
    return tuple(names)


def check_whole(most: int, **numbers: int) -> None:
    """Raise ValueError unless all are whole numbers from 1 to `most`, such as sides of an image in pixels."""
    for called, number in numbers.items():
        if type(number) is not int or not 1 <= number <= most:
            raise ValueError(f"{called} is {number!r}; whole numbers from 1 to {most} are allowed")


Colour: TypeAlias = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""
MOST_CLASSES = 256
"""An answer has a byte per pixel, and a palette has no more colours."""
TURN = (5**0.5 - 1) / 2
"""Step on the colour wheel from class to class: the golden ratio keeps any number of hues apart."""
LIGHTNESSES = (0.5, 0.35, 0.7)
COMPRESSION = 1
"""zlib's level; higher levels make a map of CamVid at most a third smaller, in up to twenty times the time."""


@cache
def colours(num_classes: int) -> tuple[Colour, ...]:
    """Returns distinct colours; class k has the same colour for every number of classes."""
    hues = ((k * TURN % 1, LIGHTNESSES[k % len(LIGHTNESSES)]) for k in range(num_classes))
    tones = (colorsys.hls_to_rgb(hue, lightness, 0.75) for hue, lightness in hues)
    return tuple((round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in tones)


def to_png(class_map_HW: npt.NDArray[np.uint8], num_classes: int) -> bytes:
    """Returns a map as an indexed PNG file: its pixels without the palette are the class ids."""
    from PIL import Image

    image = Image.fromarray(class_map_HW).copy()  # a copy, because the map's own memory may be read-only
    image.putpalette([tone for colour in colours(num_classes) for tone in colour])
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=COMPRESSION)
    return file.getvalue()


Mask = npt.NDArray[np.uint8]
"""(height, width): a class id per pixel."""

INDEXED = ("P", "L")
"""Pillow's modes of one byte per pixel: into a palette, or grey."""
DEPTH = 24
"""Offset of a PNG file's bits per pixel. Pillow spreads fewer than 8 bits of grey over 0 to 255; palette ids stay."""
NEEDED = "an index image is needed, a PNG file with one byte per pixel: its class id"


def read_mask(label: Any, *, height: int, width: int, row: int, wanted_by: str = "the model answers") -> Mask:
    """Returns the class ids of a PNG file's bytes, or of an array; raises DataError, with the row, for anything else.

    `wanted_by` begins the message about wrong sides.
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
        _check_sides(image.size, sides, wanted, row)  # by the header, before anything is decoded
        if image.mode not in INDEXED:
            raise DataError(
                f"row {row}: the mask is an image of the mode {image.mode}, colours for class ids; {NEEDED}"
            )
        if image.mode == "L" and content[DEPTH] != 8:
            raise DataError(f"row {row}: the mask has {content[DEPTH]} bits of grey for a pixel, not 8; {NEEDED}")
        return np.array(image, dtype=np.uint8)
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"row {row}: the mask has too many pixels; {wanted}") from None
    except UnidentifiedImageError:
        raise DataError(f"row {row}: the mask is no PNG file, or a broken one; {NEEDED}") from None
    except Exception as error:  # Pillow's readers raise anything at all on broken files
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"row {row}: the mask cannot be decoded: {reason}; {NEEDED}") from error


def _check_sides(sides: tuple[int, ...], needed: tuple[int, ...], wanted: str, row: int) -> None:
    if sides != needed:
        width, height = sides
        raise DataError(f"row {row}: a mask of {width} x {height} pixels, width by height; {wanted}")
