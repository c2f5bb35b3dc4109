"""Predictions of any number of inputs: many requests under way, answers in the inputs' order, little held in memory.

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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from earlyexit.clock import Clock
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
from offramp.client.client import AsyncClient
from offramp.client.protocol import Prediction
from offramp.load.data_stream import Given
from offramp.load.job import PredictJob

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n")[:-2].decode()
"""What a PNG file in base64 begins with, but for the end, which depends on what follows."""


def is_png(value: object) -> bool:
    """Whether what is said of an input is a PNG file in base64."""
    return isinstance(value, str) and value.startswith(PNG)


class MapFiles:
    """A folder that pictures are put into, each under the name of the image that it is of."""

    def __init__(self, folder: Path, inputs: Iterable[Path] = ()) -> None:
        """Make the folder, where it is not there; raises InputError, also where it is, or holds, one of the inputs."""
        held = next((path for path in inputs if path.resolve().is_relative_to(folder.resolve())), None)
        if held is not None:
            raise InputError(f"--maps {folder}: {held} lies there, an input: class maps need another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}") from error
        self._folder = folder
        self._numbers: Counter[str] = Counter()

    def put(self, image: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """What is said of an image, with every picture written and its path in its place."""
        return {name: self._write(image, value) if is_png(value) else value for name, value in said.items()}

    def _write(self, image: str, content: str) -> str:
        """Under the first name that no file has yet: images of one name lie in several folders, and none is lost."""
        stem = Path(image).stem
        while True:
            self._numbers[stem] += 1
            number = self._numbers[stem]
            path = self._folder / (f"{stem}.png" if number == 1 else f"{stem}-{number}.png")
            try:
                with path.open("xb") as file:
                    file.write(base64.b64decode(content))
            except FileExistsError:
                continue
            return str(path)


Format = Literal["jsonl", "csv"]
ERROR = "error"
WAITING = 2
"""Requests that are read or kept in order, for each one under way: a slow one does not hold the others up."""
OF_ONE_INPUT = (PayloadTooLargeError, UnprocessableInputError, ExecutionError)
"""Errors of a request that one of its inputs may have brought on all of them; so may a 400, which is no more than an
InputError."""
OF_THE_MOMENT = (OverloadedError, AdmissionError, StageUnavailableError, DeadlineError)
"""The client has tried again by then; the next inputs may fare better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An input and what became of it: exactly one of `prediction` and `error` is set."""

    shown: Mapping[str, object]
    """What says which input it is."""
    prediction: Prediction | None = None
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        if self.prediction is None:
            return {**self.shown, "error": self.error}
        return {**self.shown, **plain(self.prediction.said), "exit": self.prediction.exit}


def plain(said: Mapping[str, Any]) -> dict[str, object]:
    """An answer as JSON has it: lists for arrays."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in said.items()}


@dataclass(slots=True)
class Tally:
    """What was written so far."""

    rows: int = 0
    failed: int = 0
    seconds: float = 0.0
    exits: Counter[int] = field(default_factory=Counter)

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    def in_words(self) -> str:
        exits = ", ".join(f"{block}: {count}" for block, count in sorted(self.exits.items())) or "none"
        return (
            f"{self.rows} rows in {self.seconds:.1f} s, {self.rows_per_s:.1f} rows/s, {self.failed} failed; "
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
    """Ask about every input, and `write` their rows in order; `on_rows` hears how many were written.

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
    """The rows of one request after the other, in order, while others are under way."""
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
    """Begin a request for every so many inputs, as long as there is room; None is the end, of whatever kind."""
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
    """What becomes of some inputs; halved, where one of them may have spoilt the request of all."""
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
    """What `--format` says, else what the file's ending says; raises InputError where the two disagree."""
    named: Format | None = "csv" if out is not None and out.suffix == ".csv" else None
    if out is not None and out.suffix == ".jsonl":
        named = "jsonl"
    if named is not None and asked is not None and named != asked:
        raise InputError(f"--format {asked}: the ending of --out {out} says {named}")
    return named or asked or "jsonl"


@contextmanager
def row_writer(out: Path | None, form: Format, columns: Sequence[str]) -> Iterator[Callable[[Row], None]]:
    """A function that writes a row to a file, or to stdout; `columns` are those of CSV, but for the error.

    What answers hold beside them has no place in a table: at the end a line on stderr names it.
    """
    left_out: dict[str, None] = {}
    if out is None:
        yield _writer(sys.stdout, form, columns, left_out)
        sys.stdout.flush()
    else:
        with out.open("w", encoding="utf-8", newline="") as file:
            yield _writer(file, form, columns, left_out)
    if left_out:
        sys.stderr.write(f"no columns of CSV, so left out: {', '.join(left_out)}; --format jsonl has them\n")


def with_files(write: Callable[[Row], None], maps: MapFiles) -> Callable[[Row], None]:
    """The same, with the pictures of answers to images in files of their own."""

    def put(row: Row) -> None:
        if row.prediction is not None:
            found = row.prediction
            said = maps.put(str(row.shown["image"]), found.said)
            row = replace(row, prediction=Prediction(exit=found.exit, request_id=found.request_id, **said))
        write(row)

    return put


def _writer(file: TextIO, form: Format, columns: Sequence[str], left_out: dict[str, None]) -> Callable[[Row], None]:
    if form == "jsonl":
        return lambda row: print(json.dumps(row.to_json(), ensure_ascii=False), file=file)
    names = (*columns, ERROR)
    table = csv.DictWriter(file, names, lineterminator="\n")
    table.writeheader()

    def write(row: Row) -> None:
        cells = row.to_json()
        left_out.update(dict.fromkeys(name for name in cells if name not in names))
        table.writerow({name: _cell(value) for name, value in cells.items() if name in names})

    return write


def _cell(value: object) -> object:
    """Lists and objects as JSON, which other programs read."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
