"""`offramp predict`: parses, calls, prints. Registered on the app of `offramp.cli`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from earlyexit.errors import InputError, OfframpError
from offramp.credentials import find_api_key
from offramp.options import ApiKeyFile, AsJson, Part, TextColumn, Url, above_zero, choice, completes, in_a_folder

if TYPE_CHECKING:
    from offramp.bulk import BulkJob, Tally
    from offramp.row_writer import Format

STDIN = "-"
FORMATS = ("jsonl", "csv")

commands = typer.Typer()


@commands.command()
def predict(
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts to classify; - for one a line from standard input.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Texts instead of arguments: .csv, .tsv, .jsonl, .txt, CLINC150's .json."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --data or -: .jsonl or .csv to write; default: print.")] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="jsonl or csv; default: --out's ending, else jsonl.", **completes(FORMATS)),
    ] = None,
    text_column: TextColumn = "text",
    part: Part = None,
    batch: Annotated[int, typer.Option(min=1, help="With --data or -: texts of one request.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="With --data or -: requests under way at once.")] = 8,
    timeout_s: Annotated[
        float, typer.Option(callback=above_zero, help="For a whole request, repetitions included.")
    ] = 30.0,
    url: Url = "http://127.0.0.1:8000",
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    api_key_file: ApiKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Classify texts with a running service: arguments, a file's or a pipe's. Exit status 1 if a text failed."""
    given = texts or []
    piped = given == [STDIN] or (not given and data is None and not sys.stdin.isatty())
    if (data is not None) + (bool(given) and not piped) + piped != 1:
        raise InputError("one of these is needed: texts as arguments, --data FILE, or - for standard input")
    api_key = find_api_key(api_key_file)
    if given and not piped:
        _predict_few(given, url=url, timeout_s=timeout_s, api_key=api_key, truncate=truncate, as_json=as_json)
        return
    from offramp.bulk import BulkJob
    from offramp.row_writer import format_of

    in_a_folder("out", out)
    asked = None if form is None else choice("format", form, FORMATS)
    job = BulkJob(batch=batch, concurrency=concurrency, truncate=truncate)
    tally = _predict_many(
        _texts(data, text_column, part),
        job,
        out,
        format_of(out, asked),
        url=url,
        timeout_s=timeout_s,
        api_key=api_key,
    )
    print(tally.in_words(), file=sys.stderr)
    if tally.failed:
        raise OfframpError(f"{tally.failed} of {tally.rows} texts failed; `error` in their rows says why")


def _predict_few(
    texts: Sequence[str], *, url: str, timeout_s: float, api_key: str | None, truncate: bool, as_json: bool
) -> None:
    from offramp.client import Client

    with Client(url, timeout_s, api_key=api_key) as client:
        predictions = client.predict_many(texts, truncate=truncate)
    for text, each in zip(texts, predictions, strict=True):
        if as_json:
            print(json.dumps({"text": text, "label": each.label, "score": each.score, "exit": each.exit}))
        else:
            print(f"{each.label}  (score {each.score:.3f}, left after block {each.exit})  {text}")


def _texts(data: Path | None, text_column: str, part: str | None) -> Iterator[str]:
    from offramp.text_stream import stream_lines, stream_texts

    if data is None:
        return stream_lines(sys.stdin, "standard input")
    return stream_texts(data, text_column=text_column, part=part)


def _predict_many(
    texts: Iterator[str],
    job: BulkJob,
    out: Path | None,
    form: Format,
    *,
    url: str,
    timeout_s: float,
    api_key: str | None,
) -> Tally:
    import asyncio

    from earlyexit.clock import MonotonicClock
    from offramp.bulk import predict_all
    from offramp.client import AsyncClient
    from offramp.progress import progress_count
    from offramp.row_writer import row_writer

    async def run() -> Tally:
        async with AsyncClient(url, timeout_s, api_key=api_key) as client:
            return await predict_all(texts, client, job, write, clock=MonotonicClock(), on_rows=on_rows)

    with row_writer(out, form) as write, progress_count("texts") as on_rows:
        return asyncio.run(run())
