"""`offramp bench`: sends a load to a running service, and reports the result."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from earlyexit.data.text_tables import read_texts
from earlyexit.errors import InputError, OfframpError
from offramp.client.inputs import Input, inputs_of
from offramp.commands.options import BenchJob
from offramp.commands.output import print_result
from offramp.commands.progress import progress_bars
from offramp.load.arrivals import parse_arrivals
from offramp.load.generator import LoadConfig, run_load
from offramp.load.report import render
from offramp.load.sustained import ProbeResult, Search

ARRIVALS = ("poisson", "constant")
START_PER_S, PROBE_S = 50.0, 10.0
"""Defaults of the first rate of `--sustained`, and of the duration of a probe in seconds."""
MAX_RATE_RATIO = 1000.0
"""Largest ratio between a probed rate and the first rate."""


def run(job: BenchJob) -> None:
    """Sends the load and prints the report; raises OfframpError if no request was answered."""
    if not job.is_timed and job.arrivals not in ARRIVALS:
        raise InputError(f"--arrivals {job.arrivals!r}; allowed: {', '.join(ARRIVALS)}")
    send_times_s = _send_times_s(job.arrivals, job.seconds, job.seed) if job.is_timed else None
    inputs, labels = _inputs(job)
    is_closed = job.rate is None and job.concurrency is None and not job.is_timed and not job.sustained
    config = LoadConfig(
        url=job.url,
        inputs=inputs,
        labels=labels,
        num_requests=job.requests or 1000 if send_times_s is None else len(send_times_s),
        rate_rps=START_PER_S if job.sustained and job.rate is None else job.rate,
        arrivals="constant" if job.arrivals == "constant" else "poisson",
        send_times_s=send_times_s,
        concurrency=8 if is_closed else job.concurrency,
        inputs_per_request=job.inputs_per_request,
        timeout_s=job.timeout_s,
        slo_s=job.slo_ms / 1000,
        retries=job.retries,
        seed=job.seed,
    )
    if job.sustained:
        _search(config, job.seconds or PROBE_S, job.api_key, as_json=job.as_json)
        return
    with progress_bars() as progress:
        report = asyncio.run(run_load(config, partial(progress, "requests"), api_key=job.api_key))
    print_result(report.to_json(), lambda: [render(report)], as_json=job.as_json)
    for kind, message in report.error_messages.items():
        print(f"{kind}, {report.errors[kind]} of {report.num_requests} requests, the first: {message}", file=sys.stderr)
    if report.num_answers == 0:
        raise OfframpError(f"none of {report.num_requests} requests was answered by {config.url}")


def _inputs(job: BenchJob) -> tuple[Sequence[Input], Sequence[str] | None]:
    """Returns the inputs, and their labels if the data has any (None for joints and class maps)."""
    if job.data.suffix == ".txt":
        return read_texts(job.data), None
    rows = job.read(job.data)
    return inputs_of(rows.columns), None if rows.part_names else rows.labels


def _send_times_s(arrivals: str, seconds: float | None, seed: int) -> list[float]:
    """Returns the send times that `--arrivals` and `--seconds` define; raises InputError if one of them is missing."""
    if seconds is None or ":" not in arrivals:
        raise InputError(
            "--seconds goes with --arrivals that include a rate, such as poisson:100: give both or neither"
        )
    parsed = parse_arrivals(arrivals)
    for note in parsed.notes:
        print(note, file=sys.stderr)
    times_s: list[float] = parsed.process.draw(seconds, np.random.default_rng(seed)).tolist()
    if not times_s:
        raise InputError(f"--arrivals {arrivals}: no request arrives in {seconds:g} s")
    return times_s


def _search(config: LoadConfig, seconds: float, api_key: str | None, *, as_json: bool) -> None:
    """Searches for the sustained rate: prints a line per probe on stderr, and the highest rate that passed."""
    assert config.rate_rps is not None
    start_per_s = config.rate_rps
    low_per_s = min(start_per_s, max(start_per_s / MAX_RATE_RATIO, 1 / seconds))  # at least one request per probe
    search = Search(start_per_s=start_per_s, low_per_s=low_per_s, high_per_s=start_per_s * MAX_RATE_RATIO)
    while (rate_per_s := search.next_rate()) is not None:
        probe = replace(config, rate_rps=rate_per_s, num_requests=max(1, round(rate_per_s * seconds)))
        result = ProbeResult.of(asyncio.run(run_load(probe, api_key=api_key)).records)
        verdict = result.verdict(config.slo_s)
        p99 = "-" if result.p99_s is None else f"{1000 * result.p99_s:.0f}"
        print(f"{rate_per_s:9.1f} requests/s  p99 {p99} ms  lost {result.lost_share:.1%}  {verdict}", file=sys.stderr)
        search = search.with_probe(rate_per_s, verdict)
    if as_json:
        probes = [probe._asdict() for probe in search.probes]
        print(json.dumps({"sustained_per_s": search.best_per_s, "ending": search.ending, "probes": probes}))
    else:
        print(f"sustained: {search.best_per_s:.1f} requests/s within {1000 * config.slo_s:g} ms ({search.ending})")
