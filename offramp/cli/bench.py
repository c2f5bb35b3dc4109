"""`offramp bench`: load on a running service, and what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError, OfframpError
from offramp.cli.options import (
    ARRIVALS,
    ApiKeyFile,
    AsJson,
    Classes,
    Joints,
    LabelColumn,
    PairColumn,
    Part,
    Seed,
    TextColumn,
    Url,
    above_zero,
    choice,
    completes,
    show,
)
from offramp.client.credentials import find_api_key

if TYPE_CHECKING:
    from offramp.client.inputs import Input
    from offramp.load.run import LoadConfig


DataOption = Annotated[
    Path, typer.Option("--data", help="Labelled rows as for train, or a .txt with one text per line.")
]
Requests = Annotated[int | None, typer.Option(min=1, help="Default: 1000, without --seconds.")]
Rate = Annotated[
    float | None, typer.Option(callback=above_zero, help="Open loop: requests per second, sent whatever comes back.")
]
Arrivals = Annotated[
    str,
    typer.Option(
        help="poisson or constant; or with --seconds all of the load, like trace:FILE,rate=100.", **completes(ARRIVALS)
    ),
]
Duration = Annotated[
    float | None, typer.Option(callback=above_zero, help="How long to send an --arrivals that says its rate.")
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Closed loop: clients that wait for answers; default: 8, without --rate.")
]
SloMs = Annotated[float, typer.Option(callback=above_zero, help="Latency within which an answer counts as goodput.")]
TimeoutS = Annotated[float, typer.Option(callback=above_zero, help="For a whole request, retries included.")]


def bench(
    data: DataOption,
    url: Url = "http://127.0.0.1:8000",
    requests: Requests = None,
    rate: Rate = None,
    arrivals: Arrivals = "poisson",
    seconds: Duration = None,
    concurrency: Concurrency = None,
    inputs_per_request: Annotated[int, typer.Option(min=1)] = 1,
    slo_ms: SloMs = 100.0,
    timeout_s: TimeoutS = 30.0,
    retries: Annotated[int, typer.Option(min=0)] = 0,
    api_key_file: ApiKeyFile = None,
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    part: Part = None,
    joints: Joints = None,
    classes: Classes = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Load a running service and report rate, latency, goodput, exits and errors."""
    from offramp.load.run import LoadConfig

    if rate is not None and concurrency is not None:
        raise InputError("--rate (open loop) and --concurrency (closed loop) exclude each other: give one of them")
    timed = ":" in arrivals or seconds is not None
    if timed and (rate, concurrency, requests) != (None, None, None):
        raise InputError("--arrivals poisson:100 --seconds 60 is a whole load: no --rate, --concurrency or --requests")
    send_times_s = _send_times_s(arrivals, seconds, seed) if timed else None
    columns = {"text_column": text_column, "pair_column": pair_column, "label_column": label_column}
    inputs, labels = _inputs(data, columns, part=part, joints=joints, classes=classes)
    config = LoadConfig(
        url=url,
        inputs=inputs,
        labels=labels,
        num_requests=requests or 1000 if send_times_s is None else len(send_times_s),
        rate_rps=rate,
        arrivals="poisson" if timed else choice("arrivals", arrivals, ARRIVALS),
        send_times_s=send_times_s,
        concurrency=8 if rate is None and concurrency is None and not timed else concurrency,
        inputs_per_request=inputs_per_request,
        timeout_s=timeout_s,
        slo_s=slo_ms / 1000,
        retries=retries,
        seed=seed,
    )
    _run(config, find_api_key(api_key_file), as_json=as_json)


def _inputs(data: Path, columns: Mapping[str, Any], **options: Any) -> tuple[Sequence[Input], Sequence[str] | None]:
    """With their labels, where the file has some that are texts."""
    from earlyexit.data.rows import read_labelled
    from earlyexit.data.text_tables import read_texts
    from offramp.client.inputs import inputs_of

    if data.suffix == ".txt":
        return read_texts(data), None
    rows = read_labelled(data, **columns, **options)
    return inputs_of(rows.columns), None if rows.part_names else rows.labels


def _send_times_s(arrivals: str, seconds: float | None, seed: int) -> list[float]:
    """What `--arrivals` and `--seconds` ask for; raises InputError where one of them is missing."""
    import numpy as np

    from offramp.load.arrivals import parse_arrivals

    if seconds is None or ":" not in arrivals:
        raise InputError("--seconds and an --arrivals that says its rate, like poisson:100, need each other")
    found = parse_arrivals(arrivals)
    for note in found.notes:
        print(note, file=sys.stderr)
    times_s = [float(time_s) for time_s in found.draw(seconds, np.random.default_rng(seed))]
    if not times_s:
        raise InputError(f"--arrivals {arrivals}: no request arrives in {seconds:g} s")
    return times_s


def _run(config: LoadConfig, api_key: str | None, *, as_json: bool) -> None:
    import asyncio

    from offramp.commands.progress import progress_bars
    from offramp.load.report import render
    from offramp.load.run import run_load

    with progress_bars() as progress:
        report = asyncio.run(run_load(config, partial(progress, "requests"), api_key=api_key))
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        show(render(report))
    if report.num_answers == 0:
        raise OfframpError(f"none of {report.num_requests} requests was answered by {config.url}")
