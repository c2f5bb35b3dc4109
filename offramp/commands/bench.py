"""`offramp bench`: sends a load to a running service, and reports the result."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

from earlyexit.data.rows import has_labels
from earlyexit.errors import InputError, OfframpError
from offramp.client.protocol import Input, inputs_of
from offramp.commands.options import BenchJob
from offramp.commands.output import cell, counts_text, make_table, milliseconds_text, print_result, progress_bars
from offramp.load.arrivals import Poisson, parse_arrivals
from offramp.load.generator import LoadConfig, RequestRecord, run_load
from offramp.load.sustained import LATE_SHARE, ProbeResult, Search, percentile

START_PER_S, PROBE_S = 50.0, 10.0
"""Defaults of the first rate of `--sustained`, and of the duration of a probe in seconds."""
MAX_RATE_RATIO = 1000.0
"""Largest ratio between a probed rate and the first rate."""
SCHEMA_VERSION = 1
PERCENTILES = (50, 90, 95, 99)


def run(job: BenchJob) -> None:
    """Sends the load and prints the report; raises OfframpError if no request was answered."""
    times_s = None if job.sustained else _send_times(job)
    inputs, labels = _inputs(job)
    same = job.model_dump(include={"url", "inputs_per_request", "timeout_s", "seed", "retries"})
    load = partial(LoadConfig, inputs=inputs, **same)
    if job.sustained:
        _search(job, load)
        return
    offered_rps = None if times_s is None else job.inputs_per_request * len(times_s) / (job.seconds or times_s[-1])
    config = load(send_times_s=times_s, concurrency=job.concurrency or 8, num_requests=job.requests or 1000)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with progress_bars() as progress:
        records = asyncio.run(run_load(config, partial(progress, "requests"), api_key=job.api_key))
    report = summarize(job, records, started_at, offered_rps, labels)
    print_result(report, lambda: [render(report)], as_json=job.as_json)
    first = {record.error: record.message for record in reversed(records) if record.message is not None}
    for kind, message in first.items():
        print(f"{kind}, {report['errors'][kind]} of {len(records)} requests, the first: {message}", file=sys.stderr)
    if report["num_answers"] == 0:
        raise OfframpError(f"none of {len(records)} requests was answered by {config.url}")


def _inputs(job: BenchJob) -> tuple[Sequence[Input], Sequence[str] | None]:
    """Returns the inputs, and their labels if the data has any that are texts."""
    named = "label_column" in job.model_fields_set and job.data.suffix.lower() != ".txt"
    labelled = named or has_labels(job.data, label_column=job.label_column, part=job.part)
    rows = job.read(job.data, **({} if labelled else {"label_column": None}))
    return inputs_of(rows.columns), rows.labels if labelled and not rows.part_names else None


def _send_times(job: BenchJob) -> list[float] | None:
    """Returns the send times of an open loop, None for a closed one; raises InputError if there are none."""
    if job.seconds is None:
        return None if job.rate is None else _poisson(job, job.rate, job.requests or 1000)
    process, notes = parse_arrivals(job.arrivals or f"poisson:{job.rate}")
    for note in notes:
        print(note, file=sys.stderr)
    times_s: list[float] = process.draw(job.seconds, np.random.default_rng(job.seed)).tolist()
    if not times_s:
        raise InputError(f"no request arrives in {job.seconds:g} s")
    return times_s


def _poisson(job: BenchJob, rate_per_s: float, num_requests: int) -> list[float]:
    """Returns the send times of the first requests of a Poisson process."""
    enough = num_requests + 8 * math.sqrt(num_requests) + 16  # fewer of them arrive with a probability below 1e-9
    times_s = Poisson(rate_per_s=rate_per_s).draw(enough / rate_per_s, np.random.default_rng(job.seed))
    return [*map(float, times_s[:num_requests])]


def _search(job: BenchJob, load: Callable[..., LoadConfig]) -> None:
    """Prints a line per probe on stderr, and the sustained rate; raises OfframpError if a probe gets no connection."""
    start_per_s, seconds, slo_s = job.rate or START_PER_S, job.seconds or PROBE_S, job.slo_ms / 1000
    low_per_s = min(start_per_s, max(start_per_s / MAX_RATE_RATIO, 1 / seconds))  # at least one request per probe
    search = Search(start_per_s=start_per_s, low_per_s=low_per_s, high_per_s=start_per_s * MAX_RATE_RATIO)
    while (rate_per_s := search.next_rate()) is not None:
        probe = load(send_times_s=_poisson(job, rate_per_s, max(1, round(rate_per_s * seconds))))
        records = asyncio.run(run_load(probe, api_key=job.api_key))
        if {each.error for each in records} == {"connection"}:
            raise OfframpError(f"no connection to {probe.url} at {rate_per_s:.1f} requests/s; has the service ended?")
        result = ProbeResult.of(records)
        verdict, p99 = result.verdict(slo_s), milliseconds_text(result.p99_s)
        print(f"{rate_per_s:9.1f} requests/s  p99 {p99}  lost {result.lost_share:.1%}  {verdict}", file=sys.stderr)
        search.add(rate_per_s, verdict)
    probes = [probe._asdict() for probe in search.probes]
    document = {"sustained_per_s": search.best_per_s, "ending": search.ending, "probes": probes}
    line = f"sustained: {search.best_per_s:.1f} requests/s within {1000 * slo_s:g} ms ({search.ending})"
    print_result(document, lines=[line], as_json=job.as_json)


def summarize(
    job: BenchJob,
    records: Sequence[RequestRecord],
    started_at: str,
    offered_rps: float | None,
    labels: Sequence[str] | None,
) -> dict[str, Any]:
    """Returns the figures of a load run as JSON data. Rates count inputs rather than requests, which may have several.

    `started_at`: ISO date and time with the time zone. `offered_rps`: the rate of sent inputs, None for a closed loop.
    `labels`: the correct label of each input, if known. Values that are unknown without answers are None.
    """
    answered = [record for record in records if record.error is None]
    answers = [answer for record in answered for answer in record.predictions]
    exits, slo_s = sorted(Counter(answer.exit for answer in answers).items()), job.slo_ms / 1000
    latencies_s, latency, accuracy = [record.latency_s for record in answered], None, None
    if latencies_s:
        latency = {f"p{share}_s": percentile(latencies_s, share) for share in PERCENTILES}
        latency |= {"max_s": max(latencies_s), "mean_s": float(np.mean(latencies_s))}
    if labels is not None and answers and all("label" in answer.task_values for answer in answers):
        expected = (labels[index] for record in answered for index in record.input_indices)
        accuracy = sum(map(str.__eq__, expected, (str(answer.label) for answer in answers))) / len(answers)
    duration_s = max([job.seconds or 0.0, *(record.done_s for record in records)])  # until the last outcome
    lateness_p99_s = None if offered_rps is None else percentile([record.lateness_s for record in records], 99)
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started_at,
        "seed": job.seed,
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_inputs": sum(len(record.input_indices) for record in records),
        "num_answers": len(answers),
        "num_retries": sum(record.num_attempts - 1 for record in records),
        "offered_rps": offered_rps,
        "achieved_rps": len(answers) / (duration_s or math.inf),
        "goodput_rps": sum(len(r.predictions) for r in answered if r.latency_s <= slo_s) / (duration_s or math.inf),
        "slo_s": slo_s,
        "latency": latency,
        "answers_by_exit": {str(block): number for block, number in exits},
        # An answer at the exit after block 0 took one block.
        "mean_exit_blocks": float(np.mean([answer.exit + 1 for answer in answers])) if answers else None,
        "accuracy": accuracy,
        # By the server's error kind, or `connection`, `timeout` or `malformed`.
        "errors": dict(sorted(Counter(record.error for record in records if record.error is not None).items())),
        "lateness_p99_s": lateness_p99_s,
        # Whether the client was so late that the latencies do not describe the server.
        "is_client_bound": lateness_p99_s is not None and lateness_p99_s > LATE_SHARE * slo_s,
    }


def render(report: Mapping[str, Any]) -> Table:
    """Returns the figures of a load run as a table, with times in milliseconds."""
    title = f"load of {report['started_at']}, seed {report['seed']}"
    late = "The client was late: measure with fewer requests per second, or from more machines."
    caption = late if report["is_client_bound"] else None
    offered_rps, lateness_s, latencies = report["offered_rps"], report["lateness_p99_s"], report["latency"] or {}
    rows = (
        ("requests", f"{report['num_requests']} in {report['duration_s']:.1f} s, {report['num_retries']} repeated"),
        ("answers", f"{report['num_answers']} of {report['num_inputs']} inputs"),
        ("offered", "closed loop" if offered_rps is None else f"{offered_rps:.1f} inputs/s"),
        ("achieved", f"{report['achieved_rps']:.1f} answers/s"),
        ("goodput", f"{report['goodput_rps']:.1f} answers/s within {milliseconds_text(report['slo_s'])}"),
        *((f"latency {name.removesuffix('_s')}", milliseconds_text(value)) for name, value in latencies.items()),
        ("answers by exit", counts_text(report["answers_by_exit"], "none")),
        ("blocks per answer", cell(report["mean_exit_blocks"], ".2f")),
        ("accuracy", cell(report["accuracy"], ".2%")),
        ("errors", counts_text(report["errors"], "none")),
        ("client lateness p99", milliseconds_text(lateness_s)),
    )
    return make_table("", "value", title=title, title_justify="left", caption=caption, rows=rows)
