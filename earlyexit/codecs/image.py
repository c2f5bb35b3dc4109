"""Decoding and resizing of image files, which are untrusted input."""

from __future__ import annotations

import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ExifTags import Base

from earlyexit.codecs.base import Codec, Columns
from earlyexit.errors import InputError, UnprocessableInputError
from earlyexit.network.boundary import MAX_SIDE, Column, Encoded

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""(height, width, 3), red, green and blue."""

FORMATS = ("JPEG", "PNG", "WEBP")
INTERPOLATIONS: Mapping[str, Image.Resampling] = {each.name.lower(): each for each in Image.Resampling}
MAX_PIXELS = 50_000_000
"""Maximum pixels of a file, enough for large cameras. Decoding needs 3 or 4 bytes per pixel."""
MAX_SCANS = 100
"""Maximum scans of a progressive JPEG file. Each scan takes time for the whole image; files usually have 1 or 10."""
START_OF_SCAN = b"\xff\xda"
TURNED, SIDEWAYS = range(2, 9), range(5, 9)
"""EXIF orientations that are not upright, and those that exchange width and height."""
SUPPORTED = f"JPEG, PNG and WebP files of one frame are supported, up to {MAX_PIXELS} pixels and {MAX_SIDE} on a side"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """The size to which images are resized, in the terms of timm and transformers. Raises ValueError."""

    height: int
    width: int
    shortest_edge: int | None = None
    """Length to which the shorter side is resized, with the aspect ratio kept, before the centre is cropped. None:
    images are resized to height and width without regard to the aspect ratio."""
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1 or max(self.height, self.width) > MAX_SIDE:
            raise ValueError(f"an image of {self.height} x {self.width} pixels; 1 to {MAX_SIDE} are allowed")
        if self.shortest_edge is not None and self.shortest_edge < max(self.height, self.width):
            raise ValueError(f"shortest_edge {self.shortest_edge} is less than {self.height} x {self.width}")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation {self.interpolation!r}; known: {', '.join(INTERPOLATIONS)}")

    def source_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Returns left, top, right and bottom of the part of an image that is kept, in pixels of the image.

        As in torchvision, the longer side after resizing is rounded down, and the crop's offset half to even.
        """
        if self.shortest_edge is None:
            return 0.0, 0.0, float(width), float(height)
        shorter = min(width, height)
        resized_w, resized_h = (self.shortest_edge * side // shorter for side in (width, height))
        left, top = round((resized_w - self.width) / 2), round((resized_h - self.height) / 2)
        x, y = width / resized_w, height / resized_h
        return left * x, top * y, (left + self.width) * x, (top + self.height) * y


def decode(content: bytes, size: ImageSize, name: str) -> Pixels:
    """Returns an image file's pixels, upright and resized.

    Greyscale and palettes are converted to RGB, and 16 bits to 8. Transparency is dropped. Raises
    UnprocessableInputError, whose message calls the image `name`.
    """
    with _refusing(name):
        image = _opened(content)
        image.load()
        with suppress(Exception):  # a broken EXIF block does not make the image invalid
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16-bit greyscale, which Pillow's conversion would clip at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image.info.pop("transparency", None)  # Pillow warns about the transparency of palettes
        if image.mode != "RGB":
            image = image.convert("RGB")
        box = size.source_box(*image.size)
        resized = image.resize((size.width, size.height), INTERPOLATIONS[size.interpolation], box)
        return np.asarray(resized)


class UprightSides(NamedTuple):
    """Width and height of an image in pixels, after its EXIF orientation was applied."""

    width: int
    height: int
    turned: bool
    """Whether the pixels in the file are rotated or mirrored."""


def sides(content: bytes, name: str) -> UprightSides:
    """Returns the sides of an image file without decoding its pixels. Raises as `decode` does."""
    with _refusing(name):
        image, orientation = _opened(content), 1
        with suppress(Exception):  # as in `decode`
            orientation = image.getexif().get(Base.Orientation, 1)
        width, height = image.size[:: -1 if orientation in SIDEWAYS else 1]
        return UprightSides(width, height, turned=orientation in TURNED)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except UnprocessableInputError as error:
        raise UnprocessableInputError(f"{name}: {error}; {SUPPORTED}") from None
    except Exception as error:  # Pillow's decoders raise many kinds of errors for broken files
        reason = f"{type(error).__name__}: {error}"
        raise UnprocessableInputError(f"{name} cannot be decoded: {reason}; {SUPPORTED}") from error


def _opened(content: bytes) -> Image.Image:
    """Returns the image's first frame, of which only the header has been read."""
    if content.startswith(b"\xff\xd8") and content.count(START_OF_SCAN) > MAX_SCANS:
        raise UnprocessableInputError(f"it has more than {MAX_SCANS} scans")
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnprocessableInputError("it has too many pixels") from None
    except UnidentifiedImageError:
        raise UnprocessableInputError("it is not an image, or a broken one") from None
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise UnprocessableInputError(f"it has {width} x {height} pixels")
    # A JPEG file of a camera may have several images (MPO). The first one is the photo.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise UnprocessableInputError("it is an animation")
    return image


def to_pixels(array: npt.NDArray[Any], name: str) -> Pixels:
    """Returns pixels as uint8. Floating point values are multiplied by 255 and rounded. Raises as `decode` does."""
    if array.dtype == np.uint8:
        return array
    if not (array.min() >= 0 and array.max() <= 1):  # also refuses NaN
        raise UnprocessableInputError(
            f"{name}: floating point pixels must be from 0 to 1, the value divided by 255; the network itself "
            "normalises by mean and standard deviation"
        )
    return np.rint(array.astype(np.float32) * 255).astype(np.uint8)


ImageRow: TypeAlias = bytes | npt.NDArray[np.generic]
"""The bytes of a file, or pixels (height, width, 3): uint8, or floating point from 0 to 1."""
LARGE_BYTES = 1_000_000
"""Pixels of a request in bytes above which encoding takes a millisecond."""
FILE: Mapping[str, Any] = {"type": "string", "contentEncoding": "base64", "minLength": 1}


class ImageCodec(Codec[ImageRow]):
    """Encodes images to uint8 pixels of one size. The network normalises them."""

    name = "image"
    content_types = ("image/jpeg", "image/png", "image/webp")
    row_schema = FILE
    described = "One JPEG, PNG or WebP file in base64, or a list of them."
    needed = "an image file in base64, or a list of them,"

    def __init__(
        self, height: int, width: int, shortest_edge: int | None = None, interpolation: str = "bilinear"
    ) -> None:
        """See `ImageSize` for the arguments and errors."""
        self.size = ImageSize(height=height, width=width, shortest_edge=shortest_edge, interpolation=interpolation)
        self.inputs = (
            Column(name="image", datatypes=("BYTES",)),
            Column(name="image", datatypes=("UINT8", "FP32", "FP16"), shape=(height, width, 3)),
        )

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self.size)}

    def from_columns(self, columns: Columns) -> list[ImageRow]:
        images = columns["image"]
        if isinstance(images, list) or images.dtype == object:
            return [_file(element, f"image: element {k}") for k, element in enumerate(images)]
        return list(images)

    def row_from_json(self, value: object, where: str) -> ImageRow:
        return _file(value, where)

    def from_content(self, content_type: str, body: bytes) -> ImageRow:
        return _file(body, "the body")

    def is_slow(self, rows: Sequence[ImageRow]) -> bool:
        """Returns True for files of any size, because a small file may have a large image."""
        return sum(LARGE_BYTES + 1 if isinstance(row, bytes) else row.nbytes for row in rows) > LARGE_BYTES

    def surely_accepts(self, row: ImageRow) -> bool:
        """Returns True for files, which can be resized, and for pixels of the right size."""
        return isinstance(row, bytes) or row.shape[:2] == (self.size.height, self.size.width)

    def encode(self, rows: Sequence[ImageRow], *, truncate: bool = False) -> list[Encoded]:
        pixels = [
            decode(row, self.size, f"input {k}") if isinstance(row, bytes) else to_pixels(row, f"input {k}")
            for k, row in enumerate(rows)
        ]
        return [Encoded(length=1, tensors=(each[None],)) for each in pixels]


def _file(element: object, where: str) -> bytes:
    """Returns the bytes of a file. In JSON, they are base64."""
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
