"""Predicts any number of inputs with concurrent requests; answers are in order, and few inputs are in memory.

What is wrong with one input is said in its row; what is wrong with the service ends the run, once every row before it
is written.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from earlyexit.clock import Clock, MonotonicClock
from earlyexit.data.images import is_images
from earlyexit.errors import (
    AdmissionError,
    DeadlineError,
    ExecutionError,
    InputError,
    OfframpError,
    OverloadedError,
    PayloadTooLargeError,
    StageUnavailableError,
    UnprocessableInputError,
)
from offramp.client.client import AsyncClient, Client
from offramp.client.protocol import Prediction
from offramp.commands.options import PredictJob
from offramp.commands.progress import progress_bars
from offramp.load.data_stream import ARRAYS, Given, shown_columns, stream_inputs, stream_lines

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n")[:-2].decode()
"""Prefix of PNG files in base64, without the last characters, which depend on the content."""


def is_png(value: object) -> bool:
    """Returns whether a value of an answer is a PNG file in base64."""
    return isinstance(value, str) and value.startswith(PNG)


Format = Literal["jsonl", "csv"]
ENDINGS: Mapping[str, Format] = {".csv": "csv", ".jsonl": "jsonl"}
ERROR = "error"
WAITING = 2
"""Requests that may wait for their turn, per concurrent one, so that a slow request does not stop the others."""
OF_ONE_INPUT = (PayloadTooLargeError, UnprocessableInputError, ExecutionError)
"""Errors of a request that one of its inputs may have caused; so may a 400, an InputError of no subclass."""
OF_THE_MOMENT = (OverloadedError, AdmissionError, StageUnavailableError, DeadlineError)
"""Errors after the client's retries; the next inputs may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An input and its result: exactly one of `prediction` and `error` is set."""

    shown: Mapping[str, object]
    """What identifies the input."""
    prediction: Prediction | None = None
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        """Returns the row for JSON, with lists instead of arrays."""
        if self.prediction is None:
            return {**self.shown, "error": self.error}
        said = self.prediction.said.items()
        lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in said}
        return {**self.shown, **lists, "exit": self.prediction.exit}


@dataclass(slots=True)
class Tally:
    """Counts of written rows."""

    rows: int = 0
    failed: int = 0
    seconds: float = 0.0
    exits: Counter[int] = field(default_factory=Counter)

    def in_words(self) -> str:
        exits = ", ".join(f"{block}: {count}" for block, count in sorted(self.exits.items())) or "none"
        rows_per_s = self.rows / self.seconds if self.seconds > 0 else 0.0
        return (
            f"{self.rows} rows in {self.seconds:.1f} s, {rows_per_s:.1f} rows/s, {self.failed} failed; "
            f"answers by exit {exits}"
        )


async def predict_all(
    inputs: Iterator[Given],
    client: AsyncClient,
    job: PredictJob,
    write: Callable[[Row], object],
    *,
    clock: Clock,
    on_rows: Callable[[int], object],
) -> Tally:
    """Predicts every input, and `write`s the rows in order; `on_rows` gets the number of written rows.

    Raises what ended the run before the last input: DataError of the inputs, or an error of the service as a whole.
    """
    tally, started_s = Tally(), clock.now_s()
    async for rows in _answered(inputs, client, job):
        for row in rows:
            write(row)
            tally.failed += row.prediction is None
            if row.prediction is not None:
                tally.exits[row.prediction.exit] += 1
        tally.rows += len(rows)
        on_rows(tally.rows)
    tally.seconds = clock.now_s() - started_s
    return tally


async def _answered(inputs: Iterator[Given], client: AsyncClient, job: PredictJob) -> AsyncIterator[list[Row]]:
    """Yields the rows of each request in order, while others are running."""
    asked: asyncio.Queue[asyncio.Task[list[Row]] | None] = asyncio.Queue()
    room = asyncio.Semaphore(WAITING * job.concurrency)
    reading = asyncio.create_task(_read(inputs, client, job, asked, room))
    try:
        while (request := await asked.get()) is not None:
            yield await request
            room.release()
        await reading
    finally:
        left = [each for _ in range(asked.qsize()) if (each := asked.get_nowait()) is not None]
        reading.cancel()
        for task in left:
            task.cancel()
        await asyncio.gather(reading, *left, return_exceptions=True)  # what else went wrong is the same thing again


async def _read(
    inputs: Iterator[Given],
    client: AsyncClient,
    job: PredictJob,
    asked: asyncio.Queue[asyncio.Task[list[Row]] | None],
    room: asyncio.Semaphore,
) -> None:
    """Starts a request for each batch of inputs when there is room; puts None at the end or after an error."""
    under_way = asyncio.Semaphore(job.concurrency)

    async def request(batch: Sequence[Given]) -> list[Row]:
        async with under_way:
            return await _rows(batch, client, job)

    try:
        # In a thread: a pipe may be silent for long, and answers are to come out meanwhile.
        while batch := await asyncio.to_thread(lambda: list(islice(inputs, job.batch))):
            await room.acquire()
            asked.put_nowait(asyncio.create_task(request(batch)))
    finally:
        asked.put_nowait(None)


async def _rows(batch: Sequence[Given], client: AsyncClient, job: PredictJob) -> list[Row]:
    """Returns the rows of some inputs; halves them if one may have failed the request of all."""
    try:
        inputs = [each.value for each in batch]
        predictions = await client.predict_many(inputs, truncate=job.truncate, in_words=True)
    except OfframpError as error:
        if _may_be_one_inputs(error) and len(batch) > 1:
            middle = len(batch) // 2
            return [*await _rows(batch[:middle], client, job), *await _rows(batch[middle:], client, job)]
        if not (_may_be_one_inputs(error) or isinstance(error, OF_THE_MOMENT)):
            raise
        return [Row(shown=each.shown, error=f"{error.kind}: {error}") for each in batch]
    return [Row(shown=each.shown, prediction=found) for each, found in zip(batch, predictions, strict=True)]


def _may_be_one_inputs(error: OfframpError) -> bool:
    return isinstance(error, OF_ONE_INPUT) or type(error) is InputError


def format_of(out: Path | None, asked: Format | None) -> Format:
    """Returns the format by `--format` or the file's ending; raises InputError if they disagree."""
    named = None if out is None else ENDINGS.get(out.suffix)
    if named is not None and asked is not None and named != asked:
        raise InputError(f"--format {asked}: the ending of --out {out} says {named}")
    return named or asked or "jsonl"


@contextmanager
def row_writer(out: Path | None, form: Format, columns: Sequence[str]) -> Iterator[Callable[[Row], None]]:
    """Yields a function that writes a row to a file or stdout; `columns` of CSV, without that of errors.

    What answers hold beside them has no place in a table: at the end a line on stderr names it.
    """
    left_out: dict[str, None] = {}
    with nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8", newline="") as file:
        yield _writer(file, form, columns, left_out)
        file.flush()
    if left_out:
        sys.stderr.write(f"no columns of CSV, so left out: {', '.join(left_out)}; --format jsonl has them\n")


def map_folder(folder: Path | None, wanted: Mapping[str, str], inputs: Iterable[Path]) -> Path | None:
    """Makes the folder for class maps, if one is asked for.

    Raises InputError if that fails, for inputs without names, and for a folder that is or holds one of the inputs.
    """
    if folder is None:
        return None
    if wanted != IMAGES:
        raise InputError("--maps: class maps are answers to images, and the model takes other inputs")
    for path in inputs:
        if path.suffix in ARRAYS:
            raise InputError(f"--maps: class maps are named after images; {path} holds rows: give a folder or a .zip")
        if path.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"--maps {folder}: {path} lies there, an input: class maps need another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from error
    return folder


def with_pictures(row: Row, folder: Path | None) -> Row:
    """Writes the pictures of an answer, and returns the row with their paths instead."""
    if folder is None or row.prediction is None:
        return row
    stem = Path(str(row.shown["image"])).stem
    said = vars(row.prediction).items()
    put = {name: _picture(folder, stem, value) if is_png(value) else value for name, value in said}
    return replace(row, prediction=Prediction(**put))


def _picture(folder: Path, stem: str, content: str) -> str:
    """Writes a picture under the first unused name, since images of several folders may have one name."""
    for number in count(1):
        path = folder / (f"{stem}.png" if number == 1 else f"{stem}-{number}.png")
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(base64.b64decode(content))
            return str(path)
    raise AssertionError("numbers do not end")


def _writer(file: TextIO, form: Format, columns: Sequence[str], left_out: dict[str, None]) -> Callable[[Row], None]:
    if form == "jsonl":
        return lambda row: print(json.dumps(row.to_json(), ensure_ascii=False), file=file)
    names = (*columns, ERROR)
    table = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")
    table.writeheader()

    def write(row: Row) -> None:
        cells = row.to_json()
        left_out.update(dict.fromkeys(name for name in cells if name not in names))
        table.writerow(  # lists and objects as JSON, which other programs read
            {
                name: json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
                for name, value in cells.items()
            }
        )

    return write


STDIN = "-"
IMAGES = {"image": "BYTES"}
"""Inputs of a model of images, with their datatype."""


def run(job: PredictJob) -> None:
    """Predicts, and prints or writes the answers; raises OfframpError if an input failed."""
    given = list(job.texts)
    piped = given == [STDIN] or (not given and job.data is None and not sys.stdin.isatty())
    if (job.data is not None) + (bool(given) and not piped) + piped != 1:
        raise InputError("one of these is needed: inputs as arguments, --data PATH, or - for standard input")
    if job.data is not None and job.out is not None and job.out.resolve() == job.data.resolve():
        raise InputError(f"--out {job.out} is the file of --data, which would be lost; name another")
    if given and not piped:
        if {"out", "form", "batch", "concurrency"} & job.model_fields_set:
            raise InputError("--out, --format, --batch and --concurrency go with --data or -, not with arguments")
        _predict_few(given, job)
        return
    tally = _predict_many(job, format_of(job.out, job.form))
    print(tally.in_words(), file=sys.stderr)
    if tally.failed:
        raise OfframpError(f"{tally.failed} of {tally.rows} inputs failed; `error` in their rows says why")


def _predict_few(given: Sequence[str], job: PredictJob) -> None:
    with Client(job.url, job.timeout_s, api_key=job.api_key) as client:
        wanted = _wanted(client.metadata())
        inputs = _arguments(given, wanted)
        maps = map_folder(job.maps, wanted, map(Path, given))
        predictions = client.predict_many([each.value for each in inputs], truncate=job.truncate, in_words=True)
    for one, found in zip(inputs, predictions, strict=True):
        row = with_pictures(Row(shown=one.shown, prediction=found), maps)
        shown = " | ".join(map(str, row.shown.values()))
        print(json.dumps(row.to_json()) if job.as_json else f"{_told(row)}  {shown}")


def _arguments(given: Sequence[str], wanted: Mapping[str, str]) -> list[Given]:
    """Returns texts, paths of images, or the texts of one pair; raises InputError."""
    if wanted == IMAGES:
        missing = next((path for path in given if not Path(path).exists()), None)
        if missing is not None:
            raise InputError(f"the model takes images, and there is no file {missing!r}: give the paths of image files")
        return [Given({"image": path}, Path(path)) for path in given]
    names = _texts_of(wanted)
    if len(names) == 1:
        return [Given({names[0]: text}, text) for text in given]
    if len(given) == len(names) == 2:
        return [Given(dict(zip(names, given, strict=True)), (given[0], given[1]))]
    raise InputError(f"the model takes {' and '.join(names)}: give one of each, or many with --data")


def _texts_of(wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of inputs that are texts; raises InputError for arrays."""
    if set(wanted.values()) != {"BYTES"}:
        raise InputError(f"the model takes {' and '.join(wanted)}, arrays: give a .npy or .npz file with --data")
    return tuple(wanted)


def _told(row: Row) -> str:
    assert row.prediction is not None, "where one of few inputs fails the command does"
    found = row.prediction
    values = ", ".join(_in_words(value) for name, value in found.said.items() if name != "score")
    score = f"score {found.score:.3f}, " if "score" in found.said else ""
    return f"{values}  ({score}left after block {found.exit})"


def _in_words(value: Any) -> str:
    """Returns a value in few words, for a line of the terminal."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if is_png(value):
        return f"a PNG file of {len(value) * 3 // 4} bytes"
    if isinstance(value, list):  # of classes, each with its share, or of joints with their places
        return ", ".join(map(_in_words, value))
    if isinstance(value, dict) and "share" in value:
        return f"{value['name']} {value['share']:.1%}"
    if isinstance(value, dict):
        return " ".join(map(_in_words, value.values()))
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "shape") else str(value)


def _inputs(job: PredictJob, wanted: Mapping[str, str]) -> Iterator[Given]:
    names = tuple(wanted)
    if job.data is None:
        if len(_texts_of(wanted)) > 1 or wanted == IMAGES:
            raise InputError(f"the model takes {' and '.join(names)}: standard input holds texts; give --data")
        return (Given({names[0]: line}, line) for line in stream_lines(sys.stdin, "standard input"))
    if is_images(job.data) != (wanted == IMAGES) and job.data.suffix not in ARRAYS:
        raise InputError(f"--data {job.data}: the model takes {' and '.join(names)}")
    columns = (job.text_column, *(job.pair_column if job.pair_column is not None else name for name in names[1:]))
    return stream_inputs(job.data, dict(zip(names, columns, strict=True)), part=job.part)


def _predict_many(job: PredictJob, form: Format) -> Tally:
    async def ask() -> Tally:
        async with AsyncClient(job.url, job.timeout_s, api_key=job.api_key) as client:
            metadata = await client.metadata()
            wanted = _wanted(metadata)
            inputs = _inputs(job, wanted)
            maps = map_folder(job.maps, wanted, [] if job.data is None else [job.data])
            shown = (*shown_columns(job.data, tuple(wanted)), *(each["name"] for each in metadata["outputs"]))
            with row_writer(job.out, form, shown) as write, progress_bars() as progress:
                return await predict_all(
                    inputs,
                    client,
                    job,
                    lambda row: write(with_pictures(row, maps)),
                    clock=MonotonicClock(),
                    on_rows=lambda done: progress("inputs", done, 0),
                )

    return asyncio.run(ask())


def _wanted(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the datatypes of a model's inputs, by name."""
    return {each["name"]: each["datatype"] for each in metadata["inputs"]}
