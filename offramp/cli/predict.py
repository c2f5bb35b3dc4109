"""`offramp predict`: inputs of arguments, a file or a pipe, and their answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError, OfframpError
from offramp.cli.fields import takes_fields
from offramp.cli.options import ApiKeyFile, AsJson, Url, in_a_folder
from offramp.client.credentials import find_api_key

if TYPE_CHECKING:
    from offramp.client.protocol import Prediction
    from offramp.commands.bulk import Format, MapFiles, Tally
    from offramp.load.data_stream import Given
    from offramp.load.job import PredictJob

STDIN = "-"
IMAGES = {"image": "BYTES"}
"""The inputs of a model of images, and their datatype."""


@takes_fields("offramp.load.job:PredictJob")
def predict(
    job: PredictJob,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts, or paths of images, or a pair of texts; - for a text a line from standard input."),
    ] = None,
    url: Url = "http://127.0.0.1:8000",
    api_key_file: ApiKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running service about inputs: arguments, a file's or a pipe's. Exit status 1 if one of them failed."""
    given = texts or []
    piped = given == [STDIN] or (not given and job.data is None and not sys.stdin.isatty())
    if (job.data is not None) + (bool(given) and not piped) + piped != 1:
        raise InputError("one of these is needed: inputs as arguments, --data PATH, or - for standard input")
    api_key = find_api_key(api_key_file)
    if given and not piped:
        _predict_few(given, job, url, api_key, as_json=as_json)
        return
    from offramp.commands.bulk import format_of

    in_a_folder("out", job.out)
    tally = _predict_many(job, format_of(job.out, job.form), url, api_key)
    print(tally.in_words(), file=sys.stderr)
    if tally.failed:
        raise OfframpError(f"{tally.failed} of {tally.rows} inputs failed; `error` in their rows says why")


def _predict_few(given: Sequence[str], job: PredictJob, url: str, api_key: str | None, *, as_json: bool) -> None:
    from offramp.client.client import Client
    from offramp.commands.bulk import plain

    with Client(url, job.timeout_s, api_key=api_key) as client:
        wanted = _wanted(client.metadata())
        inputs = _arguments(given, wanted)
        files = _map_files(job.maps, wanted, [Path(path) for path in given])
        predictions = client.predict_many([each.value for each in inputs], truncate=job.truncate, in_words=True)
    for one, found in zip(inputs, predictions, strict=True):
        said = found.said if files is None else files.put(str(one.shown["image"]), found.said)
        if as_json:
            print(json.dumps({**one.shown, **plain(said), "exit": found.exit}))
        else:
            print(f"{_told(said, found)}  {' | '.join(map(str, one.shown.values()))}")


def _map_files(maps: Path | None, wanted: Mapping[str, str], inputs: Sequence[Path]) -> MapFiles | None:
    """The folder for class maps, made; raises InputError where inputs have no name to call a map by."""
    from offramp.commands.bulk import MapFiles
    from offramp.load.data_stream import ARRAYS

    if maps is None:
        return None
    if wanted != IMAGES:
        raise InputError("--maps: class maps are answers to images, and the model takes other inputs")
    unnamed = next((path for path in inputs if path.suffix in ARRAYS), None)
    if unnamed is not None:
        raise InputError(f"--maps: class maps are named after images; {unnamed} holds rows: give a folder or a .zip")
    return MapFiles(maps, inputs)


def _arguments(given: Sequence[str], wanted: Mapping[str, str]) -> list[Given]:
    """Texts, or paths of images, or the texts of one pair; raises InputError."""
    from offramp.load.data_stream import Given

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
    """The names of inputs that may be texts; raises InputError for arrays."""
    if set(wanted.values()) != {"BYTES"}:
        raise InputError(f"the model takes {' and '.join(wanted)}, arrays: give a .npy or .npz file with --data")
    return tuple(wanted)


def _told(said: Mapping[str, Any], found: Prediction) -> str:
    values = ", ".join(_in_words(value) for name, value in said.items() if name != "score")
    score = "" if "score" not in found.said else f"score {found.score:.3f}, "
    return f"{values}  ({score}left after block {found.exit})"


def _in_words(value: Any) -> str:
    """What a line of the terminal has room for."""
    from offramp.commands.bulk import is_png

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
    from offramp.load.data_stream import ARRAYS, Given, stream_inputs, stream_lines

    names = tuple(wanted)
    if job.data is None:
        if len(_texts_of(wanted)) > 1 or wanted == IMAGES:
            raise InputError(f"the model takes {' and '.join(names)}: standard input holds texts; give --data")
        return (Given({names[0]: line}, line) for line in stream_lines(sys.stdin, "standard input"))
    from earlyexit.data.images import is_images

    if is_images(job.data) != (wanted == IMAGES) and job.data.suffix not in ARRAYS:
        raise InputError(f"--data {job.data}: the model takes {' and '.join(names)}")
    columns = (job.text_column, *(job.pair_column if job.pair_column is not None else name for name in names[1:]))
    return stream_inputs(job.data, dict(zip(names, columns, strict=True)), part=job.part)


def _predict_many(job: PredictJob, form: Format, url: str, api_key: str | None) -> Tally:
    import asyncio

    from earlyexit.clock import MonotonicClock
    from offramp.client.client import AsyncClient
    from offramp.commands.bulk import predict_all, row_writer, with_files
    from offramp.commands.progress import progress_count
    from offramp.load.data_stream import shown_columns

    async def run() -> Tally:
        async with AsyncClient(url, job.timeout_s, api_key=api_key) as client:
            metadata = await client.metadata()
            wanted = _wanted(metadata)
            inputs = _inputs(job, wanted)
            files = _map_files(job.maps, wanted, [] if job.data is None else [job.data])
            shown = (*shown_columns(job.data, tuple(wanted)), *(each["name"] for each in metadata["outputs"]))
            with row_writer(job.out, form, shown) as write, progress_count("inputs") as on_rows:
                write = write if files is None else with_files(write, files)
                return await predict_all(inputs, client, job, write, clock=MonotonicClock(), on_rows=on_rows)

    return asyncio.run(run())


def _wanted(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The datatypes of a model's inputs, by name."""
    return {each["name"]: each["datatype"] for each in metadata["inputs"]}
