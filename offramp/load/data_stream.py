"""Streams inputs from a file, a folder or a pipe, so that not all of them are in memory at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from earlyexit.data.images import check_file, is_images, open_images
from earlyexit.data.rows import LABELS, read_arrays, read_labelled
from earlyexit.data.text_tables import TABLES, stream_table
from earlyexit.errors import DataError
from offramp.client.inputs import Input

STREAMED = (*TABLES, ".txt")
CLINC = ".json"
ARRAYS = (".npy", ".npz")


@dataclass(frozen=True, slots=True)
class InputRow:
    """An input of a stream."""

    id_columns: Mapping[str, object]
    """The first columns of the input's row in the output, which identify it."""
    value: Input


def stream_inputs(path: Path, columns: Mapping[str, str], *, part: str | None = None) -> Iterator[InputRow]:
    """Yields the inputs of a file or folder, in order. The ending gives the format, and labels are not needed.

    `columns` maps the names of the model's inputs to columns of the file. Arrays have the names of the inputs. Raises
    DataError at once for a file that cannot be read, and during iteration for an invalid row.
    """
    if is_images(path):
        return _images(path, part)
    if path.suffix in ARRAYS:
        return _arrays(path, tuple(columns))
    names, texts = tuple(columns), stream_texts(path, tuple(columns.values()), part=part)
    return (
        InputRow(dict(zip(names, row, strict=True)), row[0] if len(row) == 1 else (row[0], row[1])) for row in texts
    )


def id_columns_of(path: Path | None, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of `InputRow.id_columns` for the inputs of a path."""
    if path is not None and is_images(path):
        return ("image",)
    return ("row",) if path is not None and path.suffix in ARRAYS else tuple(names)


def stream_texts(path: Path, columns: Sequence[str], *, part: str | None = None) -> Iterator[tuple[str, ...]]:
    """Yields a tuple of texts per row of a file, one text per column."""
    if path.suffix not in (*STREAMED, CLINC):
        raise DataError(
            f"{path}: unknown ending {path.suffix!r}; allowed: {', '.join((*STREAMED, *ARRAYS))}, .json (of CLINC150), "
            "and images in a folder or .zip"
        )
    check_file(path)
    if len(columns) > 1 and path.suffix in (".txt", CLINC):
        raise DataError(f"{path}: rows of {' and '.join(columns)} must be .csv, .tsv or .jsonl")
    if path.suffix == CLINC:
        return ((text,) for text in read_labelled(path, part=part).texts)
    if path.suffix == ".txt":
        return _lines_of(path)
    return (texts for _, texts, _ in stream_table(path, columns))


def stream_lines(file: Iterable[str], name: str) -> Iterator[str]:
    """Yields one text per line that is not blank; raises DataError if the bytes are not UTF-8."""
    try:
        yield from (line.rstrip("\r\n") for line in file if line.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8: {error.reason}") from error


def _images(path: Path, part: str | None) -> Iterator[InputRow]:
    opened = ExitStack()
    images = opened.enter_context(open_images(path, part=part))  # lists the files before any output is written

    def rows() -> Iterator[InputRow]:
        with opened:
            yield from (InputRow({"image": name}, content) for name, content in zip(images.names, images, strict=True))

    return rows()


def _arrays(path: Path, names: Sequence[str]) -> Iterator[InputRow]:
    arrays = read_arrays(path)
    if LABELS not in names:
        arrays.pop(LABELS, None)
    if not arrays or any(array.ndim == 0 for array in arrays.values()) or len({*map(len, arrays.values())}) > 1:
        raise DataError(f"{path}: all arrays must have the same number of rows")
    if "" not in arrays and set(arrays) != set(names):
        raise DataError(f"{path}: the model takes {', '.join(names)}; the file holds {', '.join(arrays)}")
    rows = zip(*arrays.values(), strict=True)
    return (
        InputRow({"row": k}, row[0] if len(row) == 1 else dict(zip(arrays, row, strict=True)))
        for k, row in enumerate(rows)
    )


def _lines_of(path: Path) -> Iterator[tuple[str]]:
    with path.open(encoding="utf-8") as file:
        yield from ((line,) for line in stream_lines(file, str(path)))
