"""`offramp bench`: load on a running service, and what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from earlyexit.errors import InputError, OfframpError
from offramp.cli.fields import takes_fields
from offramp.cli.options import ARRIVALS, ApiKeyFile, AsJson, Url, choice, show
from offramp.client.credentials import find_api_key

if TYPE_CHECKING:
    from offramp.client.inputs import Input
    from offramp.load.job import BenchJob
    from offramp.load.run import LoadConfig


@takes_fields("offramp.load.job:BenchJob")
def bench(
    job: BenchJob, url: Url = "http://127.0.0.1:8000", api_key_file: ApiKeyFile = None, as_json: AsJson = False
) -> None:
    """Load a running service and report rate, latency, goodput, exits and errors."""
    from offramp.load.run import LoadConfig

    send_times_s = _send_times_s(job.arrivals, job.seconds, job.seed) if job.is_timed else None
    inputs, labels = _inputs(job)
    config = LoadConfig(
        url=url,
        inputs=inputs,
        labels=labels,
        num_requests=job.requests or 1000 if send_times_s is None else len(send_times_s),
        rate_rps=job.rate,
        arrivals="poisson" if job.is_timed else choice("arrivals", job.arrivals, ARRIVALS),
        send_times_s=send_times_s,
        concurrency=8 if job.rate is None and job.concurrency is None and not job.is_timed else job.concurrency,
        inputs_per_request=job.inputs_per_request,
        timeout_s=job.timeout_s,
        slo_s=job.slo_ms / 1000,
        retries=job.retries,
        seed=job.seed,
    )
    _run(config, find_api_key(api_key_file), as_json=as_json)


def _inputs(job: BenchJob) -> tuple[Sequence[Input], Sequence[str] | None]:
    """With their labels, where the file has some that are texts."""
    from earlyexit.data.rows import read_labelled
    from earlyexit.data.text_tables import read_texts
    from offramp.client.inputs import inputs_of
    from offramp.load.job import LabelledRows

    if job.data.suffix == ".txt":
        return read_texts(job.data), None
    rows = read_labelled(job.data, **job.model_dump(include=set(LabelledRows.model_fields)))
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
