"""Image files to pixels of one size; the files are not trusted."""

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
"""Largest file in pixels, as large cameras make; decoding takes 3 or 4 bytes per pixel."""
MAX_SCANS = 100
"""Most scans of a JPEG file, each of which covers all of it; usual are 1 and 10."""
START_OF_SCAN = b"\xff\xda"
TURNED, SIDEWAYS = range(2, 9), range(5, 9)
"""EXIF's orientations that are not upright, and those in which width and height change places."""
TAKEN = f"JPEG, PNG and WebP files are taken, of one frame, at most {MAX_PIXELS} pixels and {MAX_SIDE} on a side"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """How an image gets its size, in the terms of timm and transformers; raises ValueError for impossible sizes."""

    height: int
    width: int
    shortest_edge: int | None = None
    """Resize so that the shorter side is this, keeping proportions, and cut the middle out; None: resize to height and
    width, whatever the proportions."""
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1 or max(self.height, self.width) > MAX_SIDE:
            raise ValueError(f"an image of {self.height} x {self.width} pixels; 1 to {MAX_SIDE} are allowed")
        if self.shortest_edge is not None and self.shortest_edge < max(self.height, self.width):
            raise ValueError(f"shortest_edge {self.shortest_edge} is less than {self.height} x {self.width}")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation {self.interpolation!r}; known: {', '.join(INTERPOLATIONS)}")

    def source_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Returns left, top, right and bottom of the part of an image that is kept, in its pixels.

        The resized long side is cut to whole pixels, and the middle begins at a whole pixel, rounded half to even; both
        as in torchvision.
        """
        if self.shortest_edge is None:
            return 0.0, 0.0, float(width), float(height)
        shorter = min(width, height)
        resized_w, resized_h = (self.shortest_edge * side // shorter for side in (width, height))
        left, top = round((resized_w - self.width) / 2), round((resized_h - self.height) / 2)
        x, y = width / resized_w, height / resized_h
        return left * x, top * y, (left + self.width) * x, (top + self.height) * y


def decode(content: bytes, size: ImageSize, name: str) -> Pixels:
    """Returns an image file's pixels, upright, in the given size.

    Grey and palettes become RGB, 16 bits 8, transparency is dropped. Raises UnprocessableInputError that calls the
    image by `name`.
    """
    with _refusing(name):
        image = _opened(content)
        image.load()
        with suppress(Exception):  # the EXIF block is broken; the image may be fine
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image.info.pop("transparency", None)  # of a palette, which Pillow warns of
        if image.mode != "RGB":
            image = image.convert("RGB")
        box = size.source_box(*image.size)
        resized = image.resize((size.width, size.height), INTERPOLATIONS[size.interpolation], box)
        return np.asarray(resized)


class UprightSides(NamedTuple):
    """Sides of an image file, upright, in pixels."""

    width: int
    height: int
    turned: bool
    """Whether the file's pixels lie otherwise."""


def sides(content: bytes, name: str) -> UprightSides:
    """Returns an image file's sides as `decode` sees them, mostly by its header; raises as `decode`."""
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
        raise UnprocessableInputError(f"{name}: {error}; {TAKEN}") from None
    except Exception as error:  # Pillow's readers raise anything at all on broken files
        raise UnprocessableInputError(f"{name} cannot be decoded: {type(error).__name__}: {error}; {TAKEN}") from error


def _opened(content: bytes) -> Image.Image:
    """Returns the first frame after reading the header only."""
    if content.startswith(b"\xff\xd8") and content.count(START_OF_SCAN) > MAX_SCANS:
        raise UnprocessableInputError(f"it has more than {MAX_SCANS} scans")
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnprocessableInputError("it has too many pixels") from None
    except UnidentifiedImageError:
        raise UnprocessableInputError("it is no image, or a broken one") from None
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise UnprocessableInputError(f"it has {width} x {height} pixels")
    # A camera may put several pictures in one JPEG file (MPO); the first is the photo.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise UnprocessableInputError("it is an animation")
    return image


def to_pixels(array: npt.NDArray[Any], name: str) -> Pixels:
    """Returns a tensor's pixels: uint8 as they are, floating point times 255, rounded; raises as `decode`."""
    if array.dtype == np.uint8:
        return array
    if not (array.min() >= 0 and array.max() <= 1):  # NaN is neither
        raise UnprocessableInputError(
            f"{name}: pixels in floating point are from 0 to 1, the value divided by 255; mean and standard deviation "
            "are the network's affair"
        )
    return np.rint(array.astype(np.float32) * 255).astype(np.uint8)


ImageRow: TypeAlias = bytes | npt.NDArray[np.generic]
"""A file's bytes, or pixels (height, width, 3): uint8, or floating point from 0 to 1."""
LARGE_BYTES = 1_000_000
"""Bytes of a request's pixels above which reading each takes a millisecond."""
FILE: Mapping[str, Any] = {"type": "string", "contentEncoding": "base64", "minLength": 1}


class ImageCodec(Codec[ImageRow]):
    """Images to pixels of one size, uint8, per input; the network normalises them."""

    name = "image"
    content_types = ("image/jpeg", "image/png", "image/webp")
    row_schema = FILE
    described = "One JPEG, PNG or WebP file in base64, or a list of them."
    needed = "an image file in base64, or a list of them,"

    def __init__(
        self, height: int, width: int, shortest_edge: int | None = None, interpolation: str = "bilinear"
    ) -> None:
        """See `ImageSize`; raises ValueError."""
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
        """Files are always slow: a small one may hold a large image."""
        return sum(LARGE_BYTES + 1 if isinstance(row, bytes) else row.nbytes for row in rows) > LARGE_BYTES

    def surely_takes(self, row: ImageRow) -> bool:
        """A file that could be read can have any size; pixels have one."""
        return isinstance(row, bytes) or row.shape[:2] == (self.size.height, self.size.width)

    def encode(self, rows: Sequence[ImageRow], *, truncate: bool = False) -> list[Encoded]:
        pixels = [
            decode(row, self.size, f"input {k}") if isinstance(row, bytes) else to_pixels(row, f"input {k}")
            for k, row in enumerate(rows)
        ]
        return [Encoded(length=1, tensors=(each[None],)) for each in pixels]


def _file(element: object, where: str) -> bytes:
    """Returns a file's bytes, which are base64 in JSON."""
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
