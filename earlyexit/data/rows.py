"""Labelled data sets from files: tables of texts, folders and archives of images, and arrays."""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.data.images import IGNORED, ImageFiles, check_file, is_images, open_images
from earlyexit.data.text_tables import csv_rows, has_column, read_table
from earlyexit.errors import DataError, InputError, UnprocessableInputError, raising
from earlyexit.network.boundary import Column, Encoded, cast_column
from earlyexit.tasks.checks import Mask, read_mask

if TYPE_CHECKING:
    from earlyexit.codecs.base import Codec
    from earlyexit.codecs.image import ImageSize, UprightSides
    from earlyexit.tasks.base import Task

Array = npt.NDArray[Any]
TEXT, PAIR, IMAGE = "text", "text_pair", "image"
"""Column names of the codecs for texts, pairs and images."""
ROW_MESSAGE = re.compile(r"(?:row (?P<number>\d+)|(?:input|image: element) (?P<index>\d+)):? (?P<reason>.*)", re.DOTALL)
"""An error message about a row, by a task, in which rows count from 1, or by a codec, in which they count from 0."""
LABELS = "labels"
"""The array of an .npz file that has the labels. All other arrays are inputs."""
Places = npt.NDArray[np.float32]
"""(J, 2): x and y of joints in pixels of the upright image, 0 the centre of the first pixel; NaN if not visible."""
Sides = tuple[int, int]
"""Width and height of the upright image, in pixels."""
JOINT_COLUMNS = ("image", "joint", "x", "y", "visible")
CLASS_COLUMNS = ("id", "name")
SUFFIXES = {b"\x89PNG": ".png", b"RIFF": ".webp"}
"""Suffixes of image files by their first bytes; .jpg for other bytes."""
IMAGE_FOLDER, MASK_FOLDER = "image", "label"
"""Folders with images, and with class maps of the same names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledRows:
    """Inputs and their labels, in file order."""

    columns: Mapping[str, Array]
    """Inputs by column, in the form of a codec's `from_columns`."""
    labels: tuple[Any, ...]
    """Labels in the form of `task.targets`: texts, positions of joints (J, 2), or the bytes of class maps."""
    files: tuple[str, ...] | None = None
    """The name of each row's file, or its place in a file of arrays; None for texts."""
    part_names: tuple[str, ...] = ()
    """Names of the joints or classes in a label; empty if labels are texts."""
    sides: tuple[Sides, ...] | None = None
    """The sides of each image, if labels are positions of joints; else None."""

    @classmethod
    def of_texts(cls, texts: Iterable[str], labels: Iterable[str]) -> LabelledRows:
        """Returns rows of one text each."""
        return cls(columns={TEXT: objects(texts)}, labels=tuple(labels))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def kind(self) -> tuple[str, ...]:
        """The names of the columns if they have texts, image files, or pixels for an image codec; else empty."""
        images = self.columns.get(IMAGE, np.empty(0))
        are_pixels = images.dtype == np.uint8 and images.ndim == 4 and images.shape[-1] == 3
        return tuple(self.columns) if self.are_objects or are_pixels else ()

    @property
    def are_objects(self) -> bool:
        """Whether rows are texts or files rather than arrays."""
        return all(column.dtype == object for column in self.columns.values())

    @property
    def label_names(self) -> tuple[str, ...]:
        """The distinct labels, sorted, whole numbers of arrays by their value; empty if labels are not texts."""
        names = [] if self.part_names else sorted(set(self.labels))
        return tuple(names if self.are_objects or not all(map(str.isdecimal, names)) else sorted(names, key=int))

    @property
    def are_labelled(self) -> bool:
        """Whether some row has a label."""
        return self.label_names != ("",)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts, if each row is one text; raises DataError for other rows."""
        if tuple(self.columns) != (TEXT,):
            raise DataError(f"single texts are needed; the data has {', '.join(self.columns)}")
        return tuple(self.columns[TEXT])

    def with_labels(self, labels: Iterable[str]) -> LabelledRows:
        """Returns the same inputs with other labels."""
        return replace(self, labels=tuple(labels))

    def divide(self, share: float, seed: int) -> tuple[LabelledRows, LabelledRows]:
        """Returns the rows in two parts, both in file order: the second one has a random share of each label's rows.

        Every label has at least one row in the first part. Labels that are not texts count as one label.
        """
        rng, second = Random(seed), set[int]()
        groups: dict[str, list[int]] = {}
        for row, label in enumerate(self.labels):
            groups.setdefault("" if self.part_names else label, []).append(row)
        for _, rows in sorted(groups.items()):
            second.update(rng.sample(rows, min(round(len(rows) * share), len(rows) - 1)))
        return self.select(row for row in range(len(self)) if row not in second), self.select(sorted(second))

    def encode(self, codec: Codec[Any]) -> list[Encoded]:
        """Returns the encodings of all rows. Rows that are too long are truncated.

        Raises DataError for wrong columns and for files that cannot be encoded, and InputError for other rows.
        """
        columns = self._columns_for(codec)
        with self._errors_by_file():
            return codec.encode(codec.from_columns(columns), truncate=True)

    def rows(self, codec: Codec[Any]) -> list[Any]:
        """Returns the inputs as the codec's rows, such as texts. Raises as `encode` does."""
        return codec.from_columns(self._columns_for(codec))

    def _columns_for(self, codec: Codec[Any]) -> dict[str, Any]:
        forms = codec.inputs
        if {form.name for form in forms} != set(self.columns):
            wanted = ", ".join(dict.fromkeys(form.name for form in forms))
            hint = "; --pair-column names the second" if tuple(self.columns) == (TEXT,) and PAIR in wanted else ""
            raise DataError(f"the model takes {wanted}; the data has {', '.join(self.columns)}{hint}")
        return {
            name: _fitting(name, column, [form for form in forms if form.name == name])
            for name, column in self.columns.items()
        }

    def targets(self, task: Task, codec: Codec[Any]) -> Array:
        """Returns the right answers. Raises DataError for invalid labels, with the row's file if rows are files."""
        with self._errors_by_file():
            return task.targets(self._scaled_labels(codec))

    @contextmanager
    def _errors_by_file(self) -> Iterator[None]:
        """Replaces the number of a row in errors by its file, if rows are files."""
        try:
            yield
        except InputError as error:
            found = ROW_MESSAGE.match(str(error))
            if self.files is None or found is None:
                raise
            row = int(found["index"] or int(found["number"]) - 1)
            raise DataError(f"{self.files[row]}: {found['reason']}") from error

    def _scaled_labels(self, codec: Codec[Any]) -> Sequence[Any]:
        """Returns the labels for the resized images. Positions and class maps are resized like the images.

        Class maps must have the network's size, or, if the codec crops the centre of images, the size of their image.
        """
        from earlyexit.codecs.image import ImageCodec

        if not self.part_names:
            return self.labels
        if self.sides is None:
            if not (isinstance(codec, ImageCodec) and codec.size.shortest_edge is not None):
                return self.labels
            pairs = zip(self.labels, self.columns[IMAGE], strict=True)
            return [scaled_mask(mask, image, codec.size, row=k) for k, (mask, image) in enumerate(pairs, start=1)]
        if not isinstance(codec, ImageCodec):
            raise DataError(f"the model takes {', '.join(form.name for form in codec.inputs)}; joints need images")
        return [scaled_joints(places, sides, codec.size) for places, sides in zip(self.labels, self.sides, strict=True)]

    def select(self, rows: Iterable[int]) -> LabelledRows:
        """Returns the rows at the given positions, in the given order."""
        kept = list(rows)
        columns = {name: column[kept] for name, column in self.columns.items()}
        per_row: dict[str, Any] = {name: getattr(self, name) for name in ("labels", "files", "sides")}
        taken = {name: each and tuple(each[row] for row in kept) for name, each in per_row.items()}
        return replace(self, columns=columns, **taken)


def read_labelled(
    path: Path,
    *,
    text_column: str = "text",
    pair_column: str | None = None,
    label_column: str | None = "label",
    part: str | None = None,
    joints: Path | None = None,
    classes: Path | None = None,
) -> LabelledRows:
    """Returns the rows of a file or folder. Labels are empty without a `label_column`.

    - .csv, .tsv, .jsonl: texts, or pairs of texts with a `pair_column`; .txt without labels: texts
    - .json in CLINC150's form: texts; `part` names a list in it
    - a folder or .zip that has one folder of images per label; `part` names a folder above these
    - a folder or .zip with a table of `joints` (see `read_joints`), or of `classes` (see `read_maps`)
    - .npz: arrays with one row per input, and the array `labels`

    Raises DataError with file, line and what is allowed.
    """
    check_part(path, part)
    if joints is not None and classes is not None:
        raise DataError("a table of joints or a table of classes is needed, not both")
    if (joints or classes) and not is_images(path):
        raise DataError(f"{path}: joints and class maps need images, a folder or a .zip")
    if joints is not None:
        return read_joints(path, joints, part=part)
    if classes is not None:
        return read_maps(path, classes, part=part)
    if is_images(path):
        with open_images(path, part=part) as images:
            labels = images.labels if label_column is not None else ("",) * len(images)
            return LabelledRows(columns={IMAGE: objects(images)}, labels=labels, files=_full_names(images))
    if path.suffix.lower() == ".npz":
        return _labelled_arrays(path, labelled=label_column is not None)
    names = {TEXT: text_column} if pair_column is None else {TEXT: text_column, PAIR: pair_column}
    rows = read_table(path, tuple(names.values()), label_column, part)
    columns = zip(*(texts for _, texts, _ in rows), strict=True)
    return LabelledRows(
        columns={name: objects(column) for name, column in zip(names, columns, strict=True)},
        labels=tuple(label for _, _, label in rows),
    )


def check_part(path: Path, part: str | None) -> None:
    """Raises DataError if a part is named of a file that has none."""
    if part is not None and path.suffix.lower() != ".json" and not is_images(path):
        raise DataError(f"{path}: no part {part!r}: only CLINC150's .json, folders and .zip have parts")


def has_labels(path: Path, *, label_column: str = "label", part: str | None = None) -> bool:
    """Returns whether a file or folder has labels. Raises DataError for a table or images that cannot be read."""
    if is_images(path):
        with open_images(path, part=part) as images, suppress(DataError):
            return bool(images.labels)
    if path.suffix.lower() == ".npz" and zipfile.is_zipfile(path):
        with raising(DataError, f"{path}: not an .npz file", zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            return f"{LABELS}.npy" in archive.namelist()
    return path.suffix.lower() == ".json" or has_column(path, label_column)


def read_arrays(path: Path) -> dict[str, Array]:
    """Returns the arrays of an .npz file by name. The array of an .npy file has the name ''. Raises DataError."""
    check_file(path)
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except Exception as error:  # zip, zlib and numpy raise many kinds of errors for broken files
        raise DataError(f"{path}: not an .npz or .npy file: {str(error).partition('. If you trust')[0]}") from error


def write_labelled(data: LabelledRows, folder: Path, name: str) -> Path:
    """Writes the rows to a .zip, .csv or .npz file, which `read_labelled` reads; returns the path of the file."""
    if data.are_objects and IMAGE in data.columns:
        path = folder / f"{name}.zip"
        check_folder_names(data.label_names)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:  # image files are compressed already
            for row, (image, label) in enumerate(zip(data.columns[IMAGE], data.labels, strict=True)):
                archive.writestr(f"{label}/{row:06}{SUFFIXES.get(image[:4], '.jpg')}", image)
        return path
    if data.are_objects:
        path = folder / f"{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow((*data.columns, "label"))
            table.writerows(zip(*data.columns.values(), data.labels, strict=True))
        return path
    path = folder / f"{name}.npz"
    arrays: dict[str, Any] = {**data.columns, LABELS: np.array(data.labels)}
    np.savez_compressed(path, **arrays)
    return path


def check_folder_names(labels: Iterable[str]) -> None:
    """Raises DataError for a label that cannot be the name of a folder in an archive of images."""
    for label in labels:
        if not label or label.startswith(IGNORED) or any(character in label for character in "/\\\0"):
            raise DataError(
                f"the label {label!r} cannot be the name of a folder of images: it must not be empty, begin with "
                f"{' or '.join(map(repr, IGNORED))}, or contain '/' or '\\'"
            )


def _labelled_arrays(path: Path, *, labelled: bool) -> LabelledRows:
    arrays = read_arrays(path)
    labels = arrays.pop(LABELS, None)
    if not labelled:
        labels = np.full(max((len(array) for array in arrays.values() if array.ndim), default=0), "")
    if labels is None or labels.ndim != 1 or not arrays:
        raise DataError(f"{path}: {LABELS!r}, with one label per row, and at least one other array are needed")
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != len(labels):
            raise DataError(f"{path}: {name!r} has the shape {list(array.shape)}, and there are {len(labels)} labels")
    if not len(labels):
        raise DataError(f"{path}: no rows")
    names = [each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in labels.tolist()]
    if labels.dtype.kind == "f":  # 3.0 is the label 3
        names = [name.removesuffix(".0") for name in names]
    if empty := [row for row, name in enumerate(names, start=1) if labelled and not name.strip()]:
        raise DataError(f"{path}: the label of row {empty[0]} is empty")
    places = tuple(f"{path}: row {row}" for row in range(1, len(labels) + 1))
    return LabelledRows(columns=arrays, labels=tuple(names), files=places)


def _fitting(name: str, column: Array, forms: Sequence[Column]) -> Array:
    """Returns a column, converted to the first form that it fits; raises DataError if it fits none."""
    reason, row = "", column.shape[1:]
    for form in forms:
        if form.datatype == "BYTES":
            if column.dtype.kind == "O":
                return column
        elif len(row) == len(form.shape) and all(a in (-1, b) for a, b in zip(form.shape, row, strict=True)):
            try:
                return cast_column(column, form.datatype)
            except ValueError as error:
                reason = f": {error}"
    allowed = " or ".join(f"{'/'.join(form.datatypes)} of the shape {list(form.shape)}" for form in forms)
    raise DataError(f"{name!r} has {column.dtype.name} of the shape {list(row)}; the model takes {allowed}{reason}")


def objects(values: Iterable[Any]) -> Array:
    """Returns an object array of texts or of the bytes of files."""
    elements = list(values)
    column = np.empty(len(elements), dtype=object)
    column[:] = elements
    return column


def read_joints(path: Path, table: Path, *, part: str | None = None) -> LabelledRows:
    """Returns images from a folder or .zip, and their joints from a CSV table `image,joint,x,y,visible`.

    The table has a line for each joint of each image. `image` is the file's name inside the folder or archive. x and y
    refer to the upright image, after its EXIF rotation, and may be empty if `visible` is 0. The joints have the order
    of the first image's lines. The table may have images of other parts. Raises DataError with the line for a joint
    outside its image, and for an image without one of the joints.
    """
    lines: dict[str, list[_Line]] = {}
    for number, row in csv_rows(table, JOINT_COLUMNS, strict=True):
        lines.setdefault(row["image"], []).append(_Line(number, row["joint"], _position(table, number, row)))
    with open_images(path, part=part) as files:
        if missing := next((name for name in files.names if name not in lines), None):
            raise DataError(f"{table}: there is no line for {missing!r}")
        names, images = tuple(line.joint for line in lines[files.names[0]]), tuple(files)
        sides = tuple(_sides(image, name)[:2] for name, image in zip(_full_names(files), images, strict=True))
        labels = (_positions(lines[name], names, size, table) for name, size in zip(files.names, sides, strict=True))
        return LabelledRows(
            columns={IMAGE: objects(images)},
            labels=tuple(labels),
            files=_full_names(files),
            part_names=names,
            sides=sides,
        )


def read_maps(path: Path, table: Path, *, part: str | None = None) -> LabelledRows:
    """Returns images and class maps from a folder or .zip with the folders `image` and `label`.

    An image's class map is an indexed PNG file, whose palette indices are class ids, with the same path and name but
    for the suffix. `table`: a CSV table `id,name` of the classes. `part`: a folder above the two folders. Raises
    DataError for an image without a map or with two maps, and for an image with an EXIF rotation.
    """
    from earlyexit.codecs.image import sides

    above = "" if part is None else f"{part.rstrip('/')}/"
    image_folder, mask_folder = above + IMAGE_FOLDER, above + MASK_FOLDER
    with open_images(path, part=image_folder) as files, open_images(path, part=mask_folder) as maps:
        index_of: dict[str, int] = {}
        for k, name in enumerate(maps.names):
            first = index_of.setdefault(_inside(name, mask_folder), k)
            if first != k:
                raise DataError(f"{path}: {maps.names[first]!r} and {name!r} are both maps of one image")
        inside, images = {name: _inside(name, image_folder) for name in files.names}, tuple(files)
        if missing := next((name for name, stem in inside.items() if stem not in index_of), None):
            raise DataError(f"{path}: {missing!r} has no map in {mask_folder}, a PNG file of the same name")
        for name, content in zip(_full_names(files), images, strict=True):
            with suppress(UnprocessableInputError):  # decoding the image reports the error
                if sides(content, name).turned:
                    raise DataError(
                        f"{name} is rotated by its EXIF block, and it is unknown whether its map is rotated too: save "
                        "both upright, without an orientation"
                    )
        return LabelledRows(
            columns={IMAGE: objects(images)},
            labels=tuple(maps.read(index_of[stem]) for stem in inside.values()),
            files=_full_names(files),
            part_names=read_classes(table),
        )


def read_classes(table: Path) -> tuple[str, ...]:
    """Returns the names of classes 0, 1, ... from a CSV table `id,name`; raises DataError with the line."""
    names: list[str] = []
    for line, row in csv_rows(table, CLASS_COLUMNS, strict=True):
        if row["id"].strip() != str(len(names)):
            raise DataError(f"{table}:{line}: id {row['id']!r}; ids must be 0, 1, ..., one line each, in this order")
        name = row["name"].strip()
        if not name or name in names:
            raise DataError(f"{table}:{line}: the name {row['name']!r} is empty, or the name of another class")
        names.append(name)
    return tuple(names)


def scaled_joints(places: Places, sides: Sides, size: ImageSize) -> Places:
    """Returns positions after an image with these sides is resized to `size`; NaN for positions that are cropped."""
    left, top, right, bottom = size.source_box(*sides)
    scale = np.array([size.width / (right - left), size.height / (bottom - top)])
    moved = ((places + 0.5 - (left, top)) * scale - 0.5).astype(np.float32)
    inside = ((moved >= -0.5) & (moved <= (size.width - 0.5, size.height - 0.5))).all(1)
    return np.where(inside[:, None], moved, np.float32(np.nan))


def scaled_mask(label: Any, image: bytes, size: ImageSize, *, row: int) -> Mask:
    """Returns a class map, resized and cropped like its image, with nearest neighbours.

    `label`: see `read_mask`. Raises DataError that names the row if the map and its image differ in size.
    """
    from PIL import Image

    width, height, _ = _sides(image, f"row {row}: the image")
    mask = read_mask(label, height=height, width=width, row=row, wanted_by="its image, whose centre is cropped, has")
    box = size.source_box(width, height)
    return np.asarray(Image.fromarray(mask).resize((size.width, size.height), Image.Resampling.NEAREST, box))


class _Line(NamedTuple):
    number: int
    joint: str
    position: tuple[float, float]


def _position(table: Path, line: int, row: Mapping[str, str]) -> tuple[float, float]:
    if row["visible"] not in ("0", "1"):
        raise DataError(f"{table}:{line}: visible is {row['visible']!r}; 0 or 1 is needed")
    if row["visible"] == "0":
        return (np.nan, np.nan)
    try:
        x, y = float(row["x"]), float(row["y"])
    except ValueError:
        raise DataError(f"{table}:{line}: x and y are {row['x']!r} and {row['y']!r}; numbers are needed") from None
    if not np.isfinite([x, y]).all():
        raise DataError(f"{table}:{line}: x and y are {x} and {y}; finite numbers are needed for a visible joint")
    return x, y


def _positions(lines: Sequence[_Line], names: Sequence[str], sides: Sides, table: Path) -> Places:
    if sorted(line.joint for line in lines) != sorted(names):
        has = ", ".join(line.joint for line in lines)
        raise DataError(
            f"{table}:{lines[0].number}: the image's joints are {has}; those of the first image are {', '.join(names)}"
        )
    positions = np.empty((len(names), 2), dtype=np.float32)
    width, height = sides
    for number, joint, (x, y) in lines:
        if not np.isnan(x) and not (-0.5 <= x <= width - 0.5 and -0.5 <= y <= height - 0.5):
            raise DataError(
                f"{table}:{number}: joint {joint!r} at ({x:g}, {y:g}) is outside its image of {width} x {height} "
                "pixels; set visible to 0 for joints that are not visible"
            )
        positions[names.index(joint)] = x, y
    return positions


def _sides(content: bytes, name: str) -> UprightSides:
    from earlyexit.codecs.image import sides

    try:
        return sides(content, name)
    except UnprocessableInputError as error:
        raise DataError(str(error)) from None


def _inside(name: str, folder: str) -> str:
    """Returns the path of a file relative to a folder, without its suffix."""
    return str(PurePosixPath(name).relative_to(folder).with_suffix(""))


def _full_names(files: ImageFiles) -> tuple[str, ...]:
    return tuple(f"{files.source}: {name}" for name in files.names)
