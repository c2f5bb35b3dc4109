"""`offramp predict`: predicts any number of inputs with concurrent requests, and writes the answers in order.

An error of one input is written into its row. An error of the service ends the run, after all earlier rows are written.
Only the inputs of running requests are in memory.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import json
import math
import os
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, count, cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from rich.console import Console
from rich.segment import Segment, Segments
from rich.table import Column, Table

from earlyexit.clock import Clock, MonotonicClock
from earlyexit.data.images import is_images, open_images
from earlyexit.data.rows import LABELS, check_part, read_arrays
from earlyexit.data.text_tables import stream_rows
from earlyexit.errors import DataError, DeadlineError, InputError, OfframpError, RetryableError
from offramp.client.client import AsyncClient, Client, Generation, Prompt
from offramp.client.protocol import Input, NoServerError, Prediction, pause_s
from offramp.commands.options import GenerateJob, PredictJob, RowOptions
from offramp.commands.output import make_table, new_folder, progress_bars

PNG = re.compile(base64.b64encode(b"\x89PNG\r\n\x1a\n")[:-2].decode() + "[A-Za-z0-9+/]*={0,2}")
"""A PNG file in base64, whose length is a multiple of 4."""
Format = Literal["jsonl", "csv"]
ENDINGS: Mapping[str, Format] = {".csv": "csv", ".jsonl": "jsonl"}
WAITING = 2
"""Unwritten requests per concurrent request, so that a slow request does not hold up the others."""
INPUT_STATUSES = (400, 413, 422, 500)
"""Statuses of errors of a request that one of its inputs can cause."""
ARRAYS = (".npy", ".npz")


class InputRow(NamedTuple):
    """An input of a stream."""

    id_columns: Mapping[str, object]
    """The first columns of the input's row in the output, which identify it."""
    value: Input


Sleep: TypeAlias = Callable[[float], Awaitable[object]]
Row: TypeAlias = dict[str, Any]
"""The columns that identify an input, and the values of its answer and its `exit`, or an `error`."""
Exits: TypeAlias = Counter[int | None]
"""Numbers of rows by the block after which their input left; None for inputs that failed."""


async def predict_all(
    inputs: Iterator[InputRow],
    client: AsyncClient,
    job: PredictJob,
    write: Callable[[Row], object],
    *,
    clock: Clock,
    on_rows: Callable[[int], object],
    sleep: Sleep = asyncio.sleep,
) -> Exits:
    """Predicts every input and passes the rows to `write`, in order, while later batches are running.

    `on_rows` gets the number of written rows. Raises the error that ended the run early: DataError or the service's.
    """
    room, exits = threading.Semaphore(WAITING * job.concurrency), Exits()
    tasks = _start_batches(inputs, job, Sender(client, job, clock, sleep), room)
    try:
        while isinstance(task := await tasks.get(), asyncio.Task):
            for row in await task:
                write(row)
                exits[row.get("exit")] += 1
            on_rows(exits.total())
            room.release()
        if task is not None:
            raise task
    finally:
        unwritten = [task for _ in range(tasks.qsize()) if isinstance(task := tasks.get_nowait(), asyncio.Task)]
        for each in unwritten:
            each.cancel()
        await asyncio.gather(*unwritten, return_exceptions=True)  # only the first error is raised
    return exits


def _start_batches(
    inputs: Iterator[InputRow], job: PredictJob, sender: Sender, room: threading.Semaphore
) -> asyncio.Queue[asyncio.Task[list[Row]] | BaseException | None]:
    """Returns a queue of tasks, one for each batch, in order. After the last one it holds None, or the inputs' error.

    A task is started whenever there is `room` for a batch, and `job.concurrency` of them run at a time. Inputs are read
    in a daemon thread, so that answers are written while a pipe is silent, and Ctrl-C has an effect.
    """
    loop, running = asyncio.get_running_loop(), asyncio.Semaphore(job.concurrency)
    tasks: asyncio.Queue[asyncio.Task[list[Row]] | BaseException | None] = asyncio.Queue()

    async def rows(batch: Sequence[InputRow]) -> list[Row]:
        async with running:
            return await sender.rows(batch)

    def start(batch: Sequence[InputRow]) -> None:
        tasks.put_nowait(loop.create_task(rows(batch)))

    def read() -> None:
        end: BaseException | None = None
        with suppress(RuntimeError):  # the loop is closed, because the command has ended
            try:
                while room.acquire() and (batch := list(islice(inputs, job.batch))):
                    loop.call_soon_threadsafe(start, batch)
            except Exception as error:  # raised again in the event loop
                end = error
            loop.call_soon_threadsafe(tasks.put_nowait, end)

    threading.Thread(target=read, daemon=True).start()
    return tasks


class Sender:
    """Sends batches of inputs. Those that a busy service refuses or answers too late are sent again, one at a time."""

    def __init__(self, client: AsyncClient, job: PredictJob, clock: Clock, sleep: Sleep) -> None:
        self._client, self._job, self._clock, self._sleep = client, job, clock, sleep
        self._rng = random.Random()
        self._sending_again = asyncio.Lock()
        self._busy_since_s = math.inf
        """The time of the first error of a busy service since its last answer."""

    async def rows(self, batch: Sequence[InputRow], *, is_again: bool = False) -> list[Row]:
        """Returns the rows of a batch. If its request fails, sends each half of the batch.

        An error of a busy service is final for a single input when the service has answered nothing for `timeout_s`.
        Raises errors that have other causes.
        """
        attempt = 0
        while True:
            attempt += 1
            sent_s, inputs = self._clock.now_s(), [each.value for each in batch]
            try:
                predictions = await self._client.predict_many(inputs, truncate=self._job.truncate, in_words=True)
                self._busy_since_s = math.inf
                return [_row(each, prediction) for each, prediction in zip(batch, predictions, strict=True)]
            except OfframpError as raised:
                error = raised
            now_s, is_broken = self._clock.now_s(), isinstance(error, NoServerError)  # a lost server may come back
            is_busy = is_broken or isinstance(error, RetryableError | DeadlineError)
            if not is_busy and error.http_status not in INPUT_STATUSES:
                raise error
            if is_busy:
                self._busy_since_s = min(self._busy_since_s, now_s)
                if not is_again:
                    async with self._sending_again:
                        return await self.rows(batch, is_again=True)
            if is_busy and self._busy_since_s > now_s - self._job.timeout_s:
                await self._sleep(pause_s(error, attempt, self._rng))
            elif is_broken:
                raise error
            elif len(batch) == 1 or sent_s <= now_s - self._job.timeout_s:
                return [{**each.id_columns, "error": f"{error.kind}: {error}"} for each in batch]
            if len(batch) > 1:
                halves = batch[: len(batch) // 2], batch[len(batch) // 2 :]
                return [row for half in halves for row in await self.rows(half, is_again=is_again)]


def _row(given: InputRow, prediction: Prediction) -> Row:
    return {**given.id_columns, **prediction.task_values, "exit": prediction.exit}


def format_of(out: Path | None, requested: Format | None) -> Format:
    """Returns the format by `--format` or the file's ending; raises InputError if they disagree."""
    by_ending = None if out is None else ENDINGS.get(out.suffix.lower())
    if by_ending is not None and requested is not None and by_ending != requested:
        raise InputError(f"--format {requested} contradicts the ending of --out {out}")
    return by_ending or requested or "jsonl"


@contextmanager
def row_writer(out: Path | None, form: Format, columns: Sequence[str]) -> Iterator[Callable[[Row], None]]:
    """Yields a function that writes a row to a file or to stdout. `columns` are those of CSV, except `error`.

    CSV leaves out all other values of the answers. A line on stderr names them at the end.
    """
    to_json = partial(json.dumps, ensure_ascii=False, default=np.ndarray.tolist)
    names, left_out, nested = (*columns, "error"), dict[str, None](), (list, dict, np.ndarray)
    opened = partial(open, mode="w", encoding="utf-8", errors="backslashreplace", newline="")
    with nullcontext(sys.stdout) if out is None else opened(out) as file:

        def put(line: str) -> None:
            file.write(line.removesuffix("\r\n") + "\n")

        # The writer quotes carriage returns only if they end its own lines.
        table = csv.DictWriter(cast(Any, SimpleNamespace(write=put)), names, extrasaction="ignore")

        def write(row: Row) -> None:
            if form == "jsonl":
                put(to_json(row))
                return
            left_out.update(dict.fromkeys(name for name in row if name not in names))
            table.writerow({name: to_json(each) if isinstance(each, nested) else each for name, each in row.items()})

        if form == "csv":
            table.writeheader()
        yield write
        file.flush()
    if left_out:
        sys.stderr.write(f"left out of the CSV file: {', '.join(left_out)}; --format jsonl includes them\n")


def map_folder(job: PredictJob, model_inputs: Mapping[str, str]) -> AbstractContextManager[None]:
    """Returns the `new_folder` of class maps, if there is one.

    Raises InputError for inputs other than image files, and for a folder that contains an input.
    """
    if (folder := job.maps) is None:
        return nullcontext()
    if model_inputs != IMAGES:
        raise InputError("--maps: only models for images answer class maps, and this model takes other inputs")
    for path in map(Path, job.texts) if job.data is None else [job.data]:
        if path.suffix.lower() in ARRAYS:
            raise InputError(f"--maps: class maps are named after image files; {path} has none: give a folder or .zip")
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise InputError(f"--maps {folder}: the folder contains the input {path}; choose another folder")
    return new_folder(folder)


def with_pictures(row: Row, folder: Path | None) -> Row:
    """Writes the PNG files of an answer, and returns the row with their paths instead."""
    if folder is None:
        return row
    stem = Path(str(row["image"])).stem
    return {name: _write_png(folder, stem, value) if is_png(value) else value for name, value in row.items()}


def is_png(value: object) -> bool:
    """Returns whether a value of an answer is a PNG file in base64."""
    return isinstance(value, str) and len(value) % 4 == 0 and PNG.fullmatch(value) is not None


def _write_png(folder: Path, stem: str, content: str) -> str:
    """Writes a PNG file under the first unused name, because images of several folders may have the same name."""
    for number in count(1):
        path = folder / (f"{stem}.png" if number == 1 else f"{stem}-{number}.png")
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(base64.b64decode(content))
            return str(path)
    raise AssertionError("unreachable")


IMAGES = {"image": "BYTES"}
"""Name and datatype of the input of a model for images."""


def run(job: PredictJob) -> None:
    """Predicts, and prints or writes the answers; raises OfframpError if an input failed."""
    is_open = sys.stdin is not None and not sys.stdin.isatty()  # None: the caller has closed it
    piped = job.texts == ("-",) or (not job.texts and job.data is None and is_open)
    if (job.data is not None) + (bool(job.texts) and not piped) + piped != 1:
        raise InputError("give one of these: inputs as arguments, --data PATH, or - for standard input")
    if job.data is None and set(RowOptions.model_fields) & job.model_fields_set:
        raise InputError("--text-column, --pair-column and --part go with --data")
    if job.texts and not piped:
        if {"out", "form", "batch", "concurrency"} & job.model_fields_set:
            raise InputError("--out, --format, --batch and --concurrency go with --data or -, not with arguments")
        _predict_few(job)
        return
    clock = MonotonicClock()
    started_s = clock.now_s()
    exits = asyncio.run(_predict_many(job, format_of(job.out, "jsonl" if job.as_json else job.form), clock))
    seconds, num_rows, num_failed = clock.now_s() - started_s, exits.total(), exits[None]
    blocks = sorted(block for block in exits if block is not None)
    by_exit = ", ".join(f"{block}: {exits[block]}" for block in blocks) or "none"
    took = f"{num_rows} rows in {seconds:.1f} s, {num_rows / seconds:.1f} rows/s"
    print(f"{took}, {num_failed} failed; answers by exit {by_exit}", file=sys.stderr)
    if num_failed:
        raise OfframpError(f"{num_failed} of {num_rows} inputs failed; see the column `error` of their rows")


def _predict_few(job: PredictJob) -> None:
    """Predicts the arguments in one request, and prints a line for each."""
    with Client(job.url, job.timeout_s, api_key=job.api_key) as client:
        model_inputs = _input_datatypes(client.metadata())
        inputs = _inputs_of_arguments(job.texts, model_inputs)
        with map_folder(job, model_inputs):
            predictions = client.predict_many([each.value for each in inputs], truncate=job.truncate, in_words=True)
    for each, prediction in zip(inputs, predictions, strict=True):
        row = with_pictures(_row(each, prediction), job.maps)
        summary = f"{_summary_line(row, each.id_columns)}  {' | '.join(map(str, each.id_columns.values()))}"
        print(json.dumps(row, default=np.ndarray.tolist) if job.as_json else summary)


async def _predict_many(job: PredictJob, form: Format, clock: Clock) -> Exits:
    """Predicts the inputs of a file or of standard input, and writes their rows."""
    async with AsyncClient(job.url, job.timeout_s, max_attempts=1, api_key=job.api_key) as client:
        metadata = await client.metadata()
        model_inputs = _input_datatypes(metadata)
        id_columns, inputs = _inputs(job, model_inputs)
        columns = (*id_columns, *(each["name"] for each in metadata["outputs"]))
        with map_folder(job, model_inputs), row_writer(job.out, form, columns) as write, progress_bars() as progress:
            return await predict_all(
                inputs,
                client,
                job,
                lambda row: write(with_pictures(row, job.maps)),
                clock=clock,
                on_rows=lambda done: progress("inputs", done, 0),
            )


def _inputs_of_arguments(arguments: Sequence[str], model_inputs: Mapping[str, str]) -> list[InputRow]:
    """Returns the arguments as inputs: texts, paths of images, or the texts of one pair; raises InputError."""
    if model_inputs == IMAGES:
        if missing := [path for path in arguments if not Path(path).exists()]:
            raise InputError(f"the model takes images, and there is no file {missing[0]!r}: give paths of image files")
        return [InputRow({"image": path}, Path(path)) for path in arguments]
    names = _text_names(model_inputs)
    if len(names) == 1:
        return [InputRow({names[0]: text}, text) for text in arguments]
    if len(arguments) == len(names) == 2:
        return [InputRow(dict(zip(names, arguments, strict=True)), (arguments[0], arguments[1]))]
    raise InputError(f"the model takes {' and '.join(names)}: give one of each, or many rows with --data")


def _text_names(model_inputs: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the model's inputs, which must be texts; raises InputError for arrays."""
    if set(model_inputs.values()) != {"BYTES"}:
        raise InputError(f"the model takes {' and '.join(model_inputs)}, arrays: give a .npy or .npz file with --data")
    return tuple(model_inputs)


def _summary_line(row: Row, id_columns: Collection[str]) -> str:
    names = [name for name in row if name not in (*id_columns, "score", "exit")]
    score = f"score {row['score']:.3f}, " if "score" in row else ""
    return f"{', '.join(_short_text(row[name]) for name in names)}  ({score}left after block {row['exit']})"


def _short_text(value: Any) -> str:
    """Returns a value as a short text for a line of the terminal."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if is_png(value):
        return f"a PNG file of {len(value) * 3 // 4} bytes"
    if isinstance(value, list):  # classes with their shares, or joints with their positions
        return ", ".join(map(_short_text, value))
    if isinstance(value, dict) and isinstance(value.get("share"), float):
        return f"{value.get('name')} {value['share']:.1%}"
    if isinstance(value, dict):
        return " ".join(map(_short_text, value.values()))
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "shape") else str(value)


def _inputs(job: PredictJob, model_inputs: Mapping[str, str]) -> tuple[tuple[str, ...], Iterator[InputRow]]:
    """Returns the names of `InputRow.id_columns`, and the inputs of the file or of standard input."""
    are_arrays = job.data is not None and job.data.suffix.lower() in ARRAYS
    names = tuple(model_inputs) if are_arrays else _text_names(model_inputs)
    if job.data is None:
        if len(names) > 1 or model_inputs == IMAGES:
            raise InputError(f"the model takes {' and '.join(names)}, not single texts: give --data")
        return names, (InputRow({names[0]: line}, line) for line in lines_of(sys.stdin or (), "standard input"))
    if is_images(job.data) != (model_inputs == IMAGES) and not are_arrays:
        raise InputError(f"--data {job.data}: the model takes {' and '.join(names)}")
    if job.pair_column is not None and len(names) < 2:
        raise InputError(f"--pair-column {job.pair_column}: the model takes no pairs of texts")
    columns = (job.text_column, *(job.pair_column if job.pair_column is not None else name for name in names[1:]))
    rows = stream_inputs(job.data, dict(zip(names, columns, strict=True)), part=job.part)
    first = list(islice(rows, 1))  # refuses a file that cannot be read before any output is written
    return ("row",) if are_arrays else names, chain(first, rows)


def stream_inputs(path: Path, columns: Mapping[str, str], *, part: str | None = None) -> Iterator[InputRow]:
    """Yields the inputs of a file or folder, in order. The ending gives the format, and labels are not needed.

    `columns` maps the names of the model's inputs to columns of the file. Arrays have the names of the inputs. Raises
    DataError for a file that cannot be read, and for an invalid row.
    """
    check_part(path, part)
    if is_images(path):
        with open_images(path, part=part) as images:
            yield from (InputRow({"image": name}, content) for name, content in zip(images.names, images, strict=True))
    elif path.suffix.lower() in ARRAYS:
        yield from _arrays(path, tuple(columns))
    else:
        for _, row, _ in stream_rows(path, tuple(columns.values()), part=part):
            yield InputRow(dict(zip(columns, row, strict=True)), row[0] if len(row) == 1 else (row[0], row[1]))


def lines_of(file: Iterable[str], name: str) -> Iterator[str]:
    """Yields one text per line that is not blank; raises DataError if the bytes are not UTF-8."""
    try:
        yield from (line.rstrip("\r\n").removeprefix("\ufeff") for line in file if line.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8: {error.reason}") from error


def _arrays(path: Path, names: Sequence[str]) -> Iterator[InputRow]:
    arrays = read_arrays(path)
    if LABELS not in names:
        arrays.pop(LABELS, None)
    if not arrays or any(array.ndim == 0 for array in arrays.values()) or len({*map(len, arrays.values())}) > 1:
        raise DataError(f"{path}: all arrays must have the same number of rows")
    if "" not in arrays and set(arrays) != set(names):
        raise DataError(f"{path}: the model takes {', '.join(names)}; the file holds {', '.join(arrays)}")
    for number, row in enumerate(zip(*arrays.values(), strict=True)):
        yield InputRow({"row": number}, row[0] if len(row) == 1 else dict(zip(arrays, row, strict=True)))


def _input_datatypes(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the datatypes of the model's inputs, by name."""
    return {each["name"]: each["datatype"] for each in metadata["inputs"]}


COLOURS = ("bright_green", "bright_cyan", "bright_yellow", "bright_magenta", "bright_blue", "bright_red")
"""Colours of the ramps in their order, repeated. Tokens that ran all blocks are not coloured."""


def run_generate(job: GenerateJob) -> None:
    """Prints the answer as it arrives, and with `exits` the blocks after which its tokens left."""
    with Client(job.url, job.timeout_s, api_key=job.api_key) as client:
        facts = client.generates()["offramp"]
        prompt: Prompt = job.prompt if job.raw or not facts["chats"] else [{"role": "user", "content": job.prompt}]
        colours = dict(zip(sorted(facts["ramps"]) if job.exits else [], cycle(COLOURS), strict=False))
        sampling = job.model_dump(include={"max_tokens", "temperature", "top_p", "seed", "stop"})
        with client.stream(prompt, **sampling) as pieces:
            console = Console(highlight=False)
            for piece in pieces:
                style = console.get_style(colours.get(piece.exits[-1] if piece.exits else -1, "none"))
                console.print(Segments([Segment(piece.text, style)]), end="", soft_wrap=True)  # a str loses its tabs
            console.print()
            if job.exits:
                console.print(exits_table(pieces.result(), colours, facts["num_blocks"]))
            if (cut_short := pieces.result().cut_short) is not None:
                print(f"note: {cut_short}", file=sys.stderr)


def exits_table(answer: Generation, colours: Mapping[int, str], num_blocks: int) -> Table:
    """Returns the number of tokens that left after each ramp or ran all blocks, in the ramps' colours."""
    columns = (Column(name, justify="right") for name in ("left after block", "tokens", "share"))
    table = make_table(*columns, title=f"{len(answer.exits)} tokens after {answer.num_prompt}, ended by {answer.ended}")
    for block, number in sorted(Counter(answer.exits).items()):
        share = f"{number / len(answer.exits):.1%}"
        name = "all blocks" if block == num_blocks - 1 else str(block)
        table.add_row(name, str(number), share, style=colours.get(block))
    return table
