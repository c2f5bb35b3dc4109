"""Streams inputs from a file, a folder or a pipe; only those of running requests are in memory."""

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
class Given:
    """An input, and the first columns of its row in the output."""

    shown: Mapping[str, object]
    value: Input


def stream_inputs(path: Path, columns: Mapping[str, str], *, part: str | None = None) -> Iterator[Given]:
    """Yields the inputs of a path, in order; its ending names the format, and labels are not needed.

    `columns` maps the names of the model's inputs to columns of the file. Arrays have the names of the inputs.
    Raises DataError at once for a file that cannot be read, and at its line for a row that holds no input.
    """
    if is_images(path):
        return _images(path, part)
    if path.suffix in ARRAYS:
        return _arrays(path, tuple(columns))
    names, texts = tuple(columns), stream_texts(path, tuple(columns.values()), part=part)
    return (Given(dict(zip(names, row, strict=True)), row[0] if len(row) == 1 else (row[0], row[1])) for row in texts)


def shown_columns(path: Path | None, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns of `Given.shown` for a path's inputs."""
    if path is not None and is_images(path):
        return ("image",)
    return ("row",) if path is not None and path.suffix in ARRAYS else tuple(names)


def stream_texts(path: Path, columns: Sequence[str], *, part: str | None = None) -> Iterator[tuple[str, ...]]:
    """Yields the texts of a file's rows, one per column."""
    if path.suffix not in (*STREAMED, CLINC):
        raise DataError(
            f"{path}: unknown ending {path.suffix!r}; known: {', '.join((*STREAMED, *ARRAYS))}, .json (CLINC150's "
            "form), and images in a folder or .zip"
        )
    check_file(path)
    if len(columns) > 1 and path.suffix in (".txt", CLINC):
        raise DataError(f"{path}: rows of {' and '.join(columns)} come as .csv, .tsv or .jsonl")
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


def _images(path: Path, part: str | None) -> Iterator[Given]:
    opened = ExitStack()
    images = opened.enter_context(open_images(path, part=part))  # at once: an output may be written beside them

    def rows() -> Iterator[Given]:
        with opened:
            yield from (Given({"image": name}, content) for name, content in zip(images.names, images, strict=True))

    return rows()


def _arrays(path: Path, names: Sequence[str]) -> Iterator[Given]:
    arrays = read_arrays(path)
    if LABELS not in names:
        arrays.pop(LABELS, None)
    if not arrays or any(array.ndim == 0 for array in arrays.values()) or len({*map(len, arrays.values())}) > 1:
        raise DataError(f"{path}: arrays of as many rows each are needed")
    if "" not in arrays and set(arrays) != set(names):
        raise DataError(f"{path}: the model takes {', '.join(names)}; the file holds {', '.join(arrays)}")
    rows = zip(*arrays.values(), strict=True)
    return (
        Given({"row": k}, row[0] if len(row) == 1 else dict(zip(arrays, row, strict=True)))
        for k, row in enumerate(rows)
    )


def _lines_of(path: Path) -> Iterator[tuple[str]]:
    with path.open(encoding="utf-8") as file:
        yield from ((line,) for line in stream_lines(file, str(path)))
