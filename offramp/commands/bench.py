"""`offramp bench`: loads a running service, and reports the result."""

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
from offramp.load.sustained import Measured, Search

ARRIVALS = ("poisson", "constant")
START_PER_S, PROBE_S = 50.0, 10.0
"""First rate of a search for the sustained rate, and the duration of a probe in seconds."""
SPAN = 1000.0
"""Largest ratio between the result and the first rate."""


def run(job: BenchJob) -> None:
    """Sends the load, and prints the report; raises OfframpError if no request was answered."""
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
    if report.num_answers == 0:
        raise OfframpError(f"none of {report.num_requests} requests was answered by {config.url}")


def _inputs(job: BenchJob) -> tuple[Sequence[Input], Sequence[str] | None]:
    """Returns inputs, with their labels if these are texts."""
    if job.data.suffix == ".txt":
        return read_texts(job.data), None
    rows = job.read(job.data)
    return inputs_of(rows.columns), None if rows.part_names else rows.labels


def _send_times_s(arrivals: str, seconds: float | None, seed: int) -> list[float]:
    """Returns the send times of `--arrivals` and `--seconds`; raises InputError if one of them is missing."""
    if seconds is None or ":" not in arrivals:
        raise InputError("--seconds and an --arrivals that says its rate, like poisson:100, need each other")
    found = parse_arrivals(arrivals)
    for note in found.notes:
        print(note, file=sys.stderr)
    times_s = [float(time_s) for time_s in found.process.draw(seconds, np.random.default_rng(seed))]
    if not times_s:
        raise InputError(f"--arrivals {arrivals}: no request arrives in {seconds:g} s")
    return times_s


def _search(config: LoadConfig, seconds: float, api_key: str | None, *, as_json: bool) -> None:
    """Probes rates, with a line each on stderr, and prints the highest that passed."""
    assert config.rate_rps is not None
    start_per_s = config.rate_rps
    low_per_s = min(start_per_s, max(start_per_s / SPAN, 1 / seconds))  # below one request a probe, it only waits
    search = Search(start_per_s=start_per_s, low_per_s=low_per_s, high_per_s=start_per_s * SPAN)
    while (rate_per_s := search.next_rate()) is not None:
        probe = replace(config, rate_rps=rate_per_s, num_requests=max(1, round(rate_per_s * seconds)))
        found = Measured.of(asyncio.run(run_load(probe, api_key=api_key)).records)
        verdict = found.verdict(config.slo_s)
        p99 = "-" if found.p99_s is None else f"{1000 * found.p99_s:.0f}"
        print(f"{rate_per_s:9.1f} requests/s  p99 {p99} ms  lost {found.lost_share:.1%}  {verdict}", file=sys.stderr)
        search = search.learn(rate_per_s, verdict)
    if as_json:
        probes = [probe._asdict() for probe in search.probes]
        print(json.dumps({"sustained_per_s": search.best_per_s, "ending": search.ending, "probes": probes}))
    else:
        print(f"sustained: {search.best_per_s:.1f} requests/s within {1000 * config.slo_s:g} ms ({search.ending})")
