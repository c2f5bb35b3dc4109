"""Images whose right answers are joints, from a table, or maps of classes, from files beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from earlyexit.codecs import image as decoding
from earlyexit.codecs.image import ImageSize
from earlyexit.data.images import ImageFiles, check_file, open_images
from earlyexit.data.text_tables import csv_rows
from earlyexit.errors import DataError, UnprocessableInputError
from earlyexit.tasks.checks import Mask, read_mask

Places = npt.NDArray[np.float32]
"""(J, 2): x and y of an image's joints, in pixels of the upright image; 0 is the middle of the first pixel. NaN for
joints that cannot be seen."""
Sides = tuple[int, int]
"""Width and height of the upright image, in pixels."""
JOINT_COLUMNS = ("image", "joint", "x", "y", "visible")
CLASS_COLUMNS = ("id", "name")
IMAGES, MASKS = "image", "label"
"""The folders of a part with the images, and with maps of the same names."""


class Dense(NamedTuple):
    """The rows that a reader of this module found."""

    images: tuple[bytes, ...]
    labels: tuple[Any, ...]
    """`Places`, or the bytes of an index image, of each image."""
    files: tuple[str, ...]
    names: tuple[str, ...]
    """The names of the joints or classes, in the order of a label's parts."""
    sides: tuple[Sides, ...] | None
    """The sides of each image, if labels are places in it."""


def read_joints(path: Path, table: Path, *, part: str | None = None) -> Dense:
    """Reads a folder or .zip of images, and a table `image,joint,x,y,visible` with a line for every joint of an image.

    `image` is the file's name inside the folder or archive; x and y may be empty where `visible` is 0. They refer to
    the upright image, after the rotation by its EXIF block. The order of the joints is that of the first image's lines.
    The table may also contain images of other parts. Raises DataError, with the line, for a joint outside its image and
    for an image without one of the joints.
    """
    lines = _lines_by_image(table)
    with open_images(path, part=part) as files:
        names = tuple(line.joint for line in _lines_of(files.names[0], lines, table))
        images, labels, sides = [], [], []
        for name, content in zip(files.names, files, strict=True):
            size = _sides(content, f"{path}: {name}")[:2]
            images.append(content)
            sides.append(size)
            labels.append(_places(_lines_of(name, lines, table), names, size, table))
        return Dense(tuple(images), tuple(labels), _full_names(files), names, tuple(sides))


def read_maps(path: Path, table: Path, *, part: str | None = None) -> Dense:
    """Reads a folder or .zip with the folders `image` and `label`, and a table `id,name` of the classes.

    Each image has an index image of the same path and name, except its ending: a PNG file with a class id per pixel.
    `part` names a folder above the two. Raises DataError for an image with none or two of them, and for an image that
    its EXIF block rotates, since it is unknown whether its map is rotated too.
    """
    above = "" if part is None else f"{part.rstrip('/')}/"
    with open_images(path, part=f"{above}{IMAGES}") as files, open_images(path, part=f"{above}{MASKS}") as maps:
        at: dict[str, int] = {}
        for k, name in enumerate(maps.names):
            first = at.setdefault(_inside(name, f"{above}{MASKS}"), k)
            if first != k:
                raise DataError(f"{path}: {maps.names[first]!r} and {name!r} are both maps of one image")
        keys = [_inside(name, f"{above}{IMAGES}") for name in files.names]
        alone = next((name for name, key in zip(files.names, keys, strict=True) if key not in at), None)
        if alone is not None:
            raise DataError(f"{path}: {alone!r} has no map in {above}{MASKS}, a PNG file of the same name")
        images = tuple(files)
        for name, content in zip(_full_names(files), images, strict=True):
            _check_unturned(content, name)
        labels = tuple(maps.read(at[key]) for key in keys)
        return Dense(images, labels, _full_names(files), read_classes(table), None)


def read_classes(table: Path) -> tuple[str, ...]:
    """Returns the names of classes 0, 1, ... from a table `id,name`; raises DataError, with the line."""
    names: list[str] = []
    for line, row in _rows(table, CLASS_COLUMNS):
        if row["id"].strip() != str(len(names)):
            raise DataError(f"{table}:{line}: id {row['id']!r}; ids are 0, 1, ..., one line each, in this order")
        name = row["name"].strip()
        if not name or name in names:
            raise DataError(f"{table}:{line}: the name {row['name']!r} is empty, or another class's")
        names.append(name)
    return tuple(names)


def fitted(places: Places, sides: Sides, size: ImageSize) -> Places:
    """Returns the places of an image with these sides after it is resized to `size`; NaN for those that are cut off."""
    left, top, right, bottom = size.source_box(*sides)
    scale = np.array([size.width / (right - left), size.height / (bottom - top)])
    moved = ((places + 0.5 - (left, top)) * scale - 0.5).astype(np.float32)
    inside = ((moved >= -0.5) & (moved <= (size.width - 0.5, size.height - 0.5))).all(1)
    return np.where(inside[:, None], moved, np.float32(np.nan))


def fitted_mask(label: Any, image: bytes, size: ImageSize, *, row: int) -> Mask:
    """Returns a class map resized and cut as its image is, by nearest neighbours.

    `label`: as `read_mask` takes it. Raises DataError, with the row, for a map of other sides than its image.
    """
    width, height, _ = _sides(image, f"row {row}: the image")
    mask = read_mask(
        label, height=height, width=width, row=row, wanted_by="its image, of which the middle is cut out, has"
    )
    box = size.source_box(width, height)
    return np.asarray(Image.fromarray(mask).resize((size.width, size.height), Image.Resampling.NEAREST, box))


class _Line(NamedTuple):
    number: int
    joint: str
    place: tuple[float, float]


def _lines_by_image(table: Path) -> Mapping[str, list[_Line]]:
    lines: dict[str, list[_Line]] = {}
    for number, row in _rows(table, JOINT_COLUMNS):
        lines.setdefault(row["image"], []).append(_Line(number, row["joint"], _place(table, number, row)))
    return lines


def _place(table: Path, line: int, row: Mapping[str, str]) -> tuple[float, float]:
    if row["visible"] not in ("0", "1"):
        raise DataError(f"{table}:{line}: visible is {row['visible']!r}; 0 or 1 is needed")
    if row["visible"] == "0":
        return (np.nan, np.nan)
    try:
        place = (float(row["x"]), float(row["y"]))
    except ValueError:
        raise DataError(f"{table}:{line}: x and y are {row['x']!r} and {row['y']!r}; numbers are needed") from None
    if not np.isfinite(place).all():
        raise DataError(f"{table}:{line}: x and y are {place[0]} and {place[1]}; a joint that is seen has a place")
    return place


def _lines_of(image: str, lines: Mapping[str, list[_Line]], table: Path) -> list[_Line]:
    if image not in lines:
        raise DataError(f"{table}: no line is of {image!r}")
    return lines[image]


def _places(lines: Sequence[_Line], names: Sequence[str], sides: Sides, table: Path) -> Places:
    if sorted(line.joint for line in lines) != sorted(names):
        has = ", ".join(line.joint for line in lines)
        raise DataError(f"{table}:{lines[0].number}: the image's joints are {has}; the first has {', '.join(names)}")
    places = np.empty((len(names), 2), dtype=np.float32)
    width, height = sides
    for number, joint, (x, y) in lines:
        if not np.isnan(x) and not (-0.5 <= x <= width - 0.5 and -0.5 <= y <= height - 0.5):
            raise DataError(
                f"{table}:{number}: joint {joint!r} at ({x:g}, {y:g}) is outside its image of {width} x {height} "
                "pixels; visible is 0 where one cannot be seen"
            )
        places[names.index(joint)] = x, y
    return places


def _rows(table: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of a CSV file with these columns; raises DataError if there are none."""
    check_file(table)
    rows = csv_rows(table, columns, strict=True)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{table}: no rows")
    yield first
    yield from rows


def _sides(content: bytes, name: str) -> decoding.UprightSides:
    try:
        return decoding.sides(content, name)
    except UnprocessableInputError as error:
        raise DataError(str(error)) from None


def _check_unturned(content: bytes, name: str) -> None:
    try:
        turned = decoding.sides(content, name).turned
    except UnprocessableInputError:  # said when the image is decoded
        return
    if turned:
        raise DataError(
            f"{name} is turned by its EXIF block, and whether its map is too cannot be told: save both upright, "
            "without an orientation"
        )


def _inside(name: str, folder: str) -> str:
    """Returns a file's path in a folder, without its ending."""
    return str(PurePosixPath(name).relative_to(folder).with_suffix(""))


def _full_names(files: ImageFiles) -> tuple[str, ...]:
    return tuple(f"{files.source}: {name}" for name in files.names)
