"""Labelled rows of any kind from files: tables of texts, folders and archives of images, arrays."""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from earlyexit.data.images import IGNORED, check_file, is_images, open_images
from earlyexit.data.text_tables import has_column, read_table, read_texts
from earlyexit.errors import DataError, InputError
from earlyexit.network.boundary import Column, Encoded, fitting

if TYPE_CHECKING:
    from earlyexit.codecs.base import Codec
    from earlyexit.data.dense_rows import Dense, Sides
    from earlyexit.tasks.base import Task

Array = npt.NDArray[Any]
TEXT, PAIR, IMAGE = "text", "text_pair", "image"
"""Names of the columns of the codecs for texts, pairs and images."""
OF_A_ROW = re.compile(r"row (\d+): (.*)", re.DOTALL)
"""A task's message about a label; rows count from 1."""
LABELS = "labels"
"""The array of an .npz file with the labels; all others are inputs."""


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
                _check_file(name, {each: column[[row]] for each, column in columns.items()}, codec)
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
        from earlyexit.data.dense_rows import fitted, fitted_mask

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
        return _dense(path, joints, classes, part)
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


def _dense(path: Path, joints: Path | None, classes: Path | None, part: str | None) -> LabelledRows:
    from earlyexit.data.dense_rows import read_joints, read_maps

    if not is_images(path):
        raise DataError(f"{path}: joints and maps of classes are of images, a folder or a .zip")
    if joints is not None and classes is not None:
        raise DataError("rows have joints, or maps of classes: one table is needed, not both")
    found: Dense
    if joints is not None:
        found = read_joints(path, joints, part=part)
    else:
        assert classes is not None
        found = read_maps(path, classes, part=part)
    return LabelledRows(
        columns={IMAGE: objects(found.images)},
        labels=found.labels,
        files=found.files,
        part_names=found.names,
        sides=found.sides,
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
        return _write_images(data, folder / f"{name}.zip")
    if data.are_objects:
        return _write_table(data, folder / f"{name}.csv")
    path = folder / f"{name}.npz"
    arrays: dict[str, Any] = {**data.columns, LABELS: np.array(data.labels)}
    np.savez_compressed(path, **arrays)
    return path


def _write_table(data: LabelledRows, path: Path) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow((*data.columns, "label"))
        table.writerows(zip(*data.columns.values(), data.labels, strict=True))
    return path


def check_folder_names(labels: Iterable[str]) -> None:
    """Raise DataError for labels that cannot be the name of a folder in an archive of images."""
    for label in labels:
        if not label or label.startswith(IGNORED) or any(character in label for character in "/\\\0"):
            raise DataError(
                f"the label {label!r} cannot be the name of a folder of images: none begins with "
                f"{' or '.join(map(repr, IGNORED))}, none has '/' or '\\' in it"
            )


def _write_images(data: LabelledRows, path: Path) -> Path:
    check_folder_names(data.label_names)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:  # image files are compressed already
        for row, (image, label) in enumerate(zip(data.columns[IMAGE], data.labels, strict=True)):
            archive.writestr(f"{label}/{row:06}{_suffix(image)}", image)
    return path


def _suffix(image: bytes) -> str:
    if image.startswith(b"\x89PNG"):
        return ".png"
    return ".webp" if image.startswith(b"RIFF") else ".jpg"


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
    why = ""
    for form in forms:
        if form.datatype == "BYTES":
            if column.dtype.kind == "O":
                return column
        elif _has_shape(column, form):
            try:
                return fitting(column, form.datatype)
            except ValueError as error:
                why = f": {error}"
    allowed = " or ".join(f"{'/'.join(form.datatypes)} of the shape {list(form.shape)}" for form in forms)
    raise DataError(
        f"{name!r} holds {column.dtype.name} of the shape {list(column.shape[1:])}; the model takes {allowed}{why}"
    )


def _has_shape(column: Array, form: Column) -> bool:
    row = column.shape[1:]
    return len(row) == len(form.shape) and all(size in (-1, has) for size, has in zip(form.shape, row, strict=True))


def _check_file(name: str, columns: Mapping[str, Array], codec: Codec[Any]) -> None:
    try:
        codec.encode(codec.from_columns(columns), truncate=True)
    except InputError as error:
        why = str(error).removeprefix("input 0: ").removeprefix(f"{IMAGE}: element 0: ")
        raise DataError(f"{name}: {why}") from error


def objects(values: Iterable[Any]) -> Array:
    """Returns a column of texts or of files' bytes."""
    kept = list(values)
    column = np.empty(len(kept), dtype=object)
    column[:] = kept
    return column
