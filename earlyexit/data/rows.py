"""Labelled rows of any kind from files: tables of texts, folders and archives of images, arrays."""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.data.images import IGNORED, ImageFiles, check_file, is_images, open_images
from earlyexit.data.text_tables import csv_rows, has_column, read_table, read_texts
from earlyexit.errors import DataError, InputError, UnprocessableInputError
from earlyexit.network.boundary import Column, Encoded, cast_column
from earlyexit.tasks.checks import Mask, read_mask

if TYPE_CHECKING:
    from earlyexit.codecs.base import Codec
    from earlyexit.codecs.image import ImageSize, UprightSides
    from earlyexit.tasks.base import Task

Array = npt.NDArray[Any]
TEXT, PAIR, IMAGE = "text", "text_pair", "image"
"""Names of the columns of the codecs for texts, pairs and images."""
OF_A_ROW = re.compile(r"row (\d+): (.*)", re.DOTALL)
"""A task's message about a label; rows count from 1."""
LABELS = "labels"
"""The array of an .npz file with the labels; all others are inputs."""
Places = npt.NDArray[np.float32]
"""(J, 2): x and y of an image's joints, in pixels of the upright image; 0 is the middle of the first pixel. NaN for
joints that cannot be seen."""
Sides = tuple[int, int]
"""Width and height of the upright image, in pixels."""
JOINT_COLUMNS = ("image", "joint", "x", "y", "visible")
CLASS_COLUMNS = ("id", "name")
ENDINGS = {b"\x89PNG": ".png", b"RIFF": ".webp"}
"""Endings of image files by their first bytes; else .jpg."""
IMAGE_FOLDER, MASK_FOLDER = "image", "label"
"""The folders of a part with the images, and with maps of the same names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledRows:
    """Inputs by column, as a codec's `from_columns` takes them, and their labels, in file order."""

    columns: Mapping[str, Array]
    labels: tuple[Any, ...]
    """Texts, places of joints (J, 2), or the bytes of class maps, as `task.targets` reads them."""
    files: tuple[str, ...] | None = None
    """The names of the rows' files, if each row is a file."""
    part_names: tuple[str, ...] = ()
    """The names of the parts of a label, joints or classes; empty for labels without parts."""
    sides: tuple[Sides, ...] | None = None
    """The sides of each image, if labels are places in it."""

    @classmethod
    def of_texts(cls, texts: Iterable[str], labels: Iterable[str]) -> LabelledRows:
        """Returns rows of one text each."""
        return cls(columns={TEXT: objects(texts)}, labels=tuple(labels))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def kind(self) -> tuple[str, ...]:
        """The names of the columns if they contain texts, image files, or pixels as an image codec takes them.

        It is empty for all other arrays, whatever their names are.
        """
        pixels = self.columns.get(IMAGE, np.empty(0))
        of_pixels = pixels.dtype == np.uint8 and pixels.ndim == 4 and pixels.shape[-1] == 3
        return tuple(self.columns) if self.are_objects or of_pixels else ()

    @property
    def are_objects(self) -> bool:
        """Whether rows are texts or files rather than arrays."""
        return all(column.dtype == object for column in self.columns.values())

    @property
    def label_names(self) -> tuple[str, ...]:
        """The distinct labels, sorted; empty if labels are not texts."""
        return () if self.part_names else tuple(sorted(set(self.labels)))

    @property
    def are_labelled(self) -> bool:
        """Whether any row has a label."""
        return self.label_names != ("",)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of rows of one text each; raises DataError for other rows."""
        if tuple(self.columns) != (TEXT,):
            raise DataError(f"single texts are needed; the data holds {', '.join(self.columns)}")
        return tuple(self.columns[TEXT])

    def with_labels(self, labels: Iterable[str]) -> LabelledRows:
        """Returns the same inputs with other labels."""
        return replace(self, labels=tuple(labels))

    def divide(self, share: float, seed: int) -> tuple[LabelledRows, LabelledRows]:
        """Returns the rows without a random share of every label's rows, and that share, both in file order.

        Every label keeps at least one row in the first part. Labels that are not texts count as one label.
        """
        rng, held = Random(seed), set[int]()
        groups: dict[str, list[int]] = {}
        for row, label in enumerate(self.labels):
            groups.setdefault("" if self.part_names else label, []).append(row)
        for _, rows in sorted(groups.items()):
            held.update(rng.sample(rows, min(round(len(rows) * share), len(rows) - 1)))
        return self.select(row for row in range(len(self)) if row not in held), self.select(sorted(held))

    def encode(self, codec: Codec[Any]) -> list[Encoded]:
        """Returns what a network takes, one per row; rows that are too long are cut.

        Raises DataError if the columns are not the codec's, and InputError for a row that cannot be encoded (DataError
        if the row is a file).
        """
        columns = self._columns_for(codec)
        try:
            return codec.encode(codec.from_columns(columns), truncate=True)
        except InputError:
            for row, name in enumerate(self.files or ()):
                try:
                    codec.encode(codec.from_columns({key: each[[row]] for key, each in columns.items()}), truncate=True)
                except InputError as error:
                    why = str(error).removeprefix("input 0: ").removeprefix(f"{IMAGE}: element 0: ")
                    raise DataError(f"{name}: {why}") from error
            raise

    def rows(self, codec: Codec[Any]) -> list[Any]:
        """Returns the inputs as the codec's rows, such as texts; raises as `encode`."""
        return codec.from_columns(self._columns_for(codec))

    def _columns_for(self, codec: Codec[Any]) -> dict[str, Any]:
        forms = codec.inputs
        if {form.name for form in forms} != set(self.columns):
            wanted = ", ".join(dict.fromkeys(form.name for form in forms))
            raise DataError(f"the model takes {wanted}; the data holds {', '.join(self.columns)}")
        return {
            name: _fitting(name, column, [form for form in forms if form.name == name])
            for name, column in self.columns.items()
        }

    def targets(self, task: Task, codec: Codec[Any]) -> Array:
        """Returns the right answers; raises DataError, with the row's file if any, for labels that do not fit."""
        try:
            return task.targets(self._fitted_labels(codec))
        except DataError as error:
            found = OF_A_ROW.match(str(error))
            if self.files is None or found is None:
                raise
            raise DataError(f"{self.files[int(found[1]) - 1]}: {found[2]}") from error

    def _fitted_labels(self, codec: Codec[Any]) -> Sequence[Any]:
        """Returns labels for the image as the network gets it: places and class maps are resized with the image.

        Class maps already have the network's size, unless the codec cuts the middle out of images; they then have the
        size of their image.
        """
        from earlyexit.codecs.image import ImageCodec

        if not self.part_names:
            return self.labels
        if self.sides is None:
            if not (isinstance(codec, ImageCodec) and codec.size.shortest_edge is not None):
                return self.labels
            pairs = zip(self.labels, self.columns[IMAGE], strict=True)
            return [fitted_mask(*pair, codec.size, row=row) for row, pair in enumerate(pairs, start=1)]
        if not isinstance(codec, ImageCodec):
            raise DataError(f"the model takes {', '.join(form.name for form in codec.inputs)}; joints are of images")
        return [fitted(places, each, codec.size) for places, each in zip(self.labels, self.sides, strict=True)]

    def select(self, rows: Iterable[int]) -> LabelledRows:
        """Returns the rows at the given positions, in the given order."""
        kept = list(rows)
        columns = {name: column[kept] for name, column in self.columns.items()}
        return replace(
            self,
            columns=columns,
            labels=tuple(self.labels[row] for row in kept),
            files=None if self.files is None else tuple(self.files[row] for row in kept),
            sides=None if self.sides is None else tuple(self.sides[row] for row in kept),
        )


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
    """Reads the rows of a path by its ending; labels are empty without a `label_column`.

    - .csv, .tsv, .jsonl, and .json in CLINC150's form, of which `part` names a list: texts; with `pair_column` pairs
    - a folder or .zip with a folder of images per label, of which `part` names a folder above those
    - with a table of `joints`, or of `classes`, a folder or .zip as `read_joints` or `read_maps` takes it
    - .npz: arrays of one row per input, and `labels`

    Raises DataError, with file, line and what is allowed, for anything else.
    """
    if joints is not None or classes is not None:
        if not is_images(path):
            raise DataError(f"{path}: joints and maps of classes are of images, a folder or a .zip")
        if joints is not None and classes is not None:
            raise DataError("rows have joints, or maps of classes: one table is needed, not both")
    if joints is not None:
        return read_joints(path, joints, part=part)
    if classes is not None:
        return read_maps(path, classes, part=part)
    if is_images(path):
        with open_images(path, part=part) as images:
            files = tuple(f"{path}: {name}" for name in images.names)
            labels = images.labels if label_column is not None else ("",) * len(images)
            return LabelledRows(columns={IMAGE: objects(images)}, labels=labels, files=files)
    if path.suffix == ".npz":
        return _labelled_arrays(path, labelled=label_column is not None)
    if path.suffix == ".txt" and label_column is None:
        texts = read_texts(path)
        return LabelledRows.of_texts(texts, ("",) * len(texts))
    names = (TEXT,) if pair_column is None else (TEXT, PAIR)
    of_file = (text_column,) if pair_column is None else (text_column, pair_column)
    rows = read_table(path, of_file, label_column, part)
    columns = zip(*(texts for _, texts, _ in rows), strict=True)
    return LabelledRows(
        columns={name: objects(column) for name, column in zip(names, columns, strict=True)},
        labels=tuple(label for _, _, label in rows),
    )


def has_labels(path: Path, *, label_column: str = "label", part: str | None = None) -> bool:
    """Whether `read_labelled` finds labels there; also False for files that it cannot read."""
    if is_images(path):
        with open_images(path, part=part) as images:
            try:
                return bool(images.labels)
            except DataError:
                return False
    if path.suffix == ".npz":
        return LABELS in read_arrays(path)
    return path.suffix == ".json" or has_column(path, label_column)


def read_arrays(path: Path) -> dict[str, Array]:
    """Returns the arrays of a file by name; the array of a .npy file has the name ''. Raises DataError."""
    check_file(path)
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"": loaded}
            return {name: loaded[name] for name in loaded.files}
    # Zip, zlib and numpy's reader of array headers raise various exceptions, not all of them documented.
    except Exception as error:
        raise DataError(f"{path}: no file of arrays: {error}") from error


def write_labelled(data: LabelledRows, folder: Path, name: str) -> Path:
    """Writes the rows to a file that `read_labelled` reads, whose ending fits their kind; returns its path."""
    if data.are_objects and IMAGE in data.columns:
        path = folder / f"{name}.zip"
        check_folder_names(data.label_names)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:  # image files are compressed already
            for row, (image, label) in enumerate(zip(data.columns[IMAGE], data.labels, strict=True)):
                ending = next((each for start, each in ENDINGS.items() if image.startswith(start)), ".jpg")
                archive.writestr(f"{label}/{row:06}{ending}", image)
        return path
    if data.are_objects:
        path = folder / f"{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow((*data.columns, "label"))
            table.writerows(zip(*data.columns.values(), data.labels, strict=True))
        return path
    path = folder / f"{name}.npz"
    arrays: dict[str, Any] = {**data.columns, LABELS: np.array(data.labels)}
    np.savez_compressed(path, **arrays)
    return path


def check_folder_names(labels: Iterable[str]) -> None:
    """Raise DataError for labels that cannot be the name of a folder in an archive of images."""
    for label in labels:
        if not label or label.startswith(IGNORED) or any(character in label for character in "/\\\0"):
            raise DataError(
                f"the label {label!r} cannot be the name of a folder of images: none begins with "
                f"{' or '.join(map(repr, IGNORED))}, none has '/' or '\\' in it"
            )


def _labelled_arrays(path: Path, *, labelled: bool) -> LabelledRows:
    arrays = read_arrays(path)
    labels = arrays.pop(LABELS, None)
    if not labelled:
        labels = np.full(max((len(array) for array in arrays.values() if array.ndim), default=0), "")
    if labels is None or labels.ndim != 1 or not arrays:
        raise DataError(f"{path}: {LABELS!r}, one for each row, and at least one other array are needed")
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != len(labels):
            raise DataError(f"{path}: {name!r} has the shape {list(array.shape)}; {len(labels)} rows have a label")
    if not len(labels):
        raise DataError(f"{path}: no rows")
    empty = [row for row, label in enumerate(labels.tolist(), start=1) if labelled and not str(label).strip()]
    if empty:
        raise DataError(f"{path}: the label of row {empty[0]} is empty")
    return LabelledRows(columns=arrays, labels=tuple(map(str, labels.tolist())))


def _fitting(name: str, column: Array, forms: Sequence[Column]) -> Array:
    """Returns a column in the first form that it fits."""
    why, row = "", column.shape[1:]
    for form in forms:
        if form.datatype == "BYTES":
            if column.dtype.kind == "O":
                return column
        elif len(row) == len(form.shape) and all(a in (-1, b) for a, b in zip(form.shape, row, strict=True)):
            try:
                return cast_column(column, form.datatype)
            except ValueError as error:
                why = f": {error}"
    allowed = " or ".join(f"{'/'.join(form.datatypes)} of the shape {list(form.shape)}" for form in forms)
    raise DataError(f"{name!r} holds {column.dtype.name} of the shape {list(row)}; the model takes {allowed}{why}")


def objects(values: Iterable[Any]) -> Array:
    """Returns a column of texts or of files' bytes."""
    kept = list(values)
    column = np.empty(len(kept), dtype=object)
    column[:] = kept
    return column


def read_joints(path: Path, table: Path, *, part: str | None = None) -> LabelledRows:
    """Reads a folder or .zip of images, and a table `image,joint,x,y,visible` with a line for every joint of an image.

    `image` is the file's name inside the folder or archive; x and y may be empty where `visible` is 0. They refer to
    the upright image, after the rotation by its EXIF block. The order of the joints is that of the first image's lines.
    The table may also contain images of other parts. Raises DataError, with the line, for a joint outside its image and
    for an image without one of the joints.
    """
    lines: dict[str, list[_Line]] = {}
    for number, row in _table_rows(table, JOINT_COLUMNS):
        lines.setdefault(row["image"], []).append(_Line(number, row["joint"], _place(table, number, row)))
    with open_images(path, part=part) as files:
        names = tuple(line.joint for line in _lines_of(files.names[0], lines, table))
        images, labels, sides = [], [], []
        for name, content in zip(files.names, files, strict=True):
            size = _sides(content, f"{path}: {name}")[:2]
            images.append(content)
            sides.append(size)
            labels.append(_places(_lines_of(name, lines, table), names, size, table))
        return LabelledRows(
            columns={IMAGE: objects(images)},
            labels=tuple(labels),
            files=_full_names(files),
            part_names=names,
            sides=tuple(sides),
        )


def read_maps(path: Path, table: Path, *, part: str | None = None) -> LabelledRows:
    """Reads a folder or .zip with the folders `image` and `label`, and a table `id,name` of the classes.

    Each image has an index image of the same path and name, except its ending: a PNG file with a class id per pixel.
    `part` names a folder above the two. Raises DataError for an image with none or two of them, and for an image that
    its EXIF block rotates, since it is unknown whether its map is rotated too.
    """
    from earlyexit.codecs.image import sides

    above = "" if part is None else f"{part.rstrip('/')}/"
    folders = above + IMAGE_FOLDER, above + MASK_FOLDER
    with open_images(path, part=folders[0]) as files, open_images(path, part=folders[1]) as maps:
        at: dict[str, int] = {}
        for k, name in enumerate(maps.names):
            first = at.setdefault(_inside(name, folders[1]), k)
            if first != k:
                raise DataError(f"{path}: {maps.names[first]!r} and {name!r} are both maps of one image")
        keys = [_inside(name, folders[0]) for name in files.names]
        alone = next((name for name, key in zip(files.names, keys, strict=True) if key not in at), None)
        if alone is not None:
            raise DataError(f"{path}: {alone!r} has no map in {folders[1]}, a PNG file of the same name")
        images = tuple(files)
        for name, content in zip(_full_names(files), images, strict=True):
            with suppress(UnprocessableInputError):  # said when the image is decoded
                if sides(content, name).turned:
                    raise DataError(
                        f"{name} is turned by its EXIF block, and whether its map is too cannot be told: save both "
                        "upright, without an orientation"
                    )
        labels, names = tuple(maps.read(at[key]) for key in keys), read_classes(table)
        return LabelledRows(columns={IMAGE: objects(images)}, labels=labels, files=_full_names(files), part_names=names)


def read_classes(table: Path) -> tuple[str, ...]:
    """Returns the names of classes 0, 1, ... from a table `id,name`; raises DataError, with the line."""
    names: list[str] = []
    for line, row in _table_rows(table, CLASS_COLUMNS):
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
    from PIL import Image

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


def _table_rows(table: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of a CSV file with these columns; raises DataError if there are none."""
    check_file(table)
    rows = csv_rows(table, columns, strict=True)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{table}: no rows")
    yield first
    yield from rows


def _sides(content: bytes, name: str) -> UprightSides:
    from earlyexit.codecs.image import sides

    try:
        return sides(content, name)
    except UnprocessableInputError as error:
        raise DataError(str(error)) from None


def _inside(name: str, folder: str) -> str:
    """Returns a file's path in a folder, without its ending."""
    return str(PurePosixPath(name).relative_to(folder).with_suffix(""))


def _full_names(files: ImageFiles) -> tuple[str, ...]:
    return tuple(f"{files.source}: {name}" for name in files.names)
