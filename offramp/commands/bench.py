"""`offramp bench`: sends a load to a running service, and reports the result."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
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
from offramp.load.processes import Poisson, Uniform
from offramp.load.report import render, summarize
from offramp.load.sustained import ProbeResult, Search

ARRIVALS: Mapping[str, type[Poisson | Uniform]] = {"poisson": Poisson, "constant": Uniform}
START_PER_S, PROBE_S = 50.0, 10.0
"""Defaults of the first rate of `--sustained`, and of the duration of a probe in seconds."""
MAX_RATE_RATIO = 1000.0
"""Largest ratio between a probed rate and the first rate."""


def run(job: BenchJob) -> None:
    """Sends the load and prints the report; raises OfframpError if no request was answered."""
    if not job.is_timed and job.arrivals not in ARRIVALS:
        raise InputError(f"--arrivals {job.arrivals!r}; allowed: {', '.join(ARRIVALS)}")
    times_s = _send_times_s(job.arrivals, job.seconds, job.seed) if job.is_timed else None
    inputs, labels = _inputs(job)
    load = partial(
        LoadConfig,
        url=job.url,
        inputs=inputs,
        inputs_per_request=job.inputs_per_request,
        timeout_s=job.timeout_s,
        seed=job.seed,
        retries=job.retries,
    )
    if job.sustained:
        _search(job, load)
        return
    num_requests, offered_rps = job.requests or 1000, None
    if times_s is not None:  # the rate up to the last send time
        offered_rps = len(times_s) * job.inputs_per_request / times_s[-1]
    elif job.rate is not None:
        offered_rps = job.rate * job.inputs_per_request
        times_s = _first_s(job, job.rate, num_requests)
    concurrency = job.concurrency or 8 if times_s is None else None
    config = load(send_times_s=times_s, concurrency=concurrency, num_requests=num_requests)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with progress_bars() as progress:
        records = asyncio.run(run_load(config, partial(progress, "requests"), api_key=job.api_key))
    report = summarize(
        records,
        started_at=started_at,
        seed=job.seed,
        slo_s=job.slo_ms / 1000,
        offered_rps=offered_rps,
        labels=labels,
    )
    print_result(report, lambda: [render(report)], as_json=job.as_json)
    first = {record.error: record.message for record in reversed(records) if record.message is not None}
    for kind, message in first.items():
        print(f"{kind}, {report['errors'][kind]} of {len(records)} requests, the first: {message}", file=sys.stderr)
    if report["num_answers"] == 0:
        raise OfframpError(f"none of {len(records)} requests was answered by {config.url}")


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
    if not times_s[-1]:
        raise InputError(f"{len(times_s)} send times are needed, one per request, the last above 0")
    return times_s


def _first_s(job: BenchJob, rate_per_s: float, num_requests: int) -> list[float]:
    """Returns the send times of the first requests at a rate."""
    process = ARRIVALS[job.arrivals](rate_per_s=rate_per_s)
    times_s: list[float] = process.first(num_requests, np.random.default_rng(job.seed)).tolist()
    return times_s


def _search(job: BenchJob, load: Callable[..., LoadConfig]) -> None:
    """Searches for the sustained rate: prints a line per probe on stderr, and the highest rate that passed."""
    start_per_s, seconds, slo_s = job.rate or START_PER_S, job.seconds or PROBE_S, job.slo_ms / 1000
    low_per_s = min(start_per_s, max(start_per_s / MAX_RATE_RATIO, 1 / seconds))  # at least one request per probe
    search = Search(start_per_s=start_per_s, low_per_s=low_per_s, high_per_s=start_per_s * MAX_RATE_RATIO)
    while (rate_per_s := search.next_rate()) is not None:
        probe = load(send_times_s=_first_s(job, rate_per_s, max(1, round(rate_per_s * seconds))))
        result = ProbeResult.of(asyncio.run(run_load(probe, api_key=job.api_key)))
        verdict = result.verdict(slo_s)
        p99 = "-" if result.p99_s is None else f"{1000 * result.p99_s:.0f}"
        print(f"{rate_per_s:9.1f} requests/s  p99 {p99} ms  lost {result.lost_share:.1%}  {verdict}", file=sys.stderr)
        search = search.with_probe(rate_per_s, verdict)
    if job.as_json:
        probes = [probe._asdict() for probe in search.probes]
        print(json.dumps({"sustained_per_s": search.best_per_s, "ending": search.ending, "probes": probes}))
    else:
        print(f"sustained: {search.best_per_s:.1f} requests/s within {1000 * slo_s:g} ms ({search.ending})")
