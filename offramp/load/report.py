"""The result of a load run: a record per request, and the report that summarizes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from offramp.client.protocol import Prediction
from offramp.commands.output import make_table

LATE_SHARE = 0.1
"""Lateness of the client, as a share of the SLO, above which its measurements are distorted."""
SCHEMA_VERSION = 1
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The outcome of one request. Times are seconds after the start of the run."""

    request_id: str
    input_indices: tuple[int, ...]
    """The positions of its inputs in the run's `inputs`."""
    scheduled_s: float
    sent_s: float
    done_s: float
    num_attempts: int
    predictions: tuple[Prediction, ...] = ()
    error: str | None = None
    """The kind of error, if the request failed."""
    message: str | None = None
    """The server's or the client's description of the error, if there is one."""

    def __post_init__(self) -> None:
        assert (self.error is None) == bool(self.predictions), "a request has either an answer or an error"

    @property
    def latency_s(self) -> float:
        """Seconds from the scheduled send time to the outcome, so that a late client is not hidden."""
        return self.done_s - self.scheduled_s

    @property
    def lateness_s(self) -> float:
        """Seconds by which the client itself was late."""
        return self.sent_s - self.scheduled_s


def summarize(
    records: Sequence[RequestRecord],
    *,
    started_at: str,
    seed: int,
    slo_s: float,
    offered_rps: float | None,
    labels: Sequence[str] | None,
) -> dict[str, Any]:
    """Returns the figures of a load run as JSON data. Rates count inputs rather than requests, which may have several.

    `started_at`: ISO date and time with the time zone. `offered_rps`: the requested rate, None for a closed loop.
    `labels`: the correct label of each input, if known. Values that are unknown without answers are None.
    """
    answered = [record for record in records if record.error is None]
    answers = [prediction for record in answered for prediction in record.predictions]
    exits = sorted(Counter(answer.exit for answer in answers).items())
    duration_s = max((record.done_s for record in records), default=0.0)  # until the last outcome
    lateness_p99_s = None if offered_rps is None else percentile([record.lateness_s for record in records], 99)
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started_at,
        "seed": seed,
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_inputs": sum(len(record.input_indices) for record in records),
        "num_answers": len(answers),
        "num_retries": sum(record.num_attempts - 1 for record in records),
        "offered_rps": offered_rps,
        "achieved_rps": len(answers) / (duration_s or math.inf),
        "goodput_rps": sum(len(r.predictions) for r in answered if r.latency_s <= slo_s) / (duration_s or math.inf),
        "slo_s": slo_s,
        "latency": _latency([record.latency_s for record in answered]),
        "answers_by_exit": {str(block): number for block, number in exits},
        # An answer at the exit after block 0 took one block.
        "mean_exit_blocks": float(np.mean([answer.exit + 1 for answer in answers])) if answers else None,
        "accuracy": _accuracy(answered, labels) if answers and labels is not None else None,
        # By the server's error kind, or `connection`, `timeout` or `malformed`.
        "errors": dict(sorted(Counter(record.error for record in records if record.error is not None).items())),
        "lateness_p99_s": lateness_p99_s,
        # Whether the client was so late that the latencies do not describe the server.
        "is_client_bound": lateness_p99_s is not None and lateness_p99_s > LATE_SHARE * slo_s,
    }


def _latency(latencies_s: Sequence[float]) -> dict[str, float] | None:
    if not latencies_s:
        return None
    by_share = zip(PERCENTILES, np.percentile(latencies_s, PERCENTILES).tolist(), strict=True)
    figures = {f"p{share}_s": value for share, value in by_share}
    return figures | {"max_s": max(latencies_s), "mean_s": float(np.mean(latencies_s))}


def render(report: Mapping[str, Any]) -> Table:
    """Returns the figures of a load run as a table, with times in milliseconds."""
    title = f"load of {report['started_at']}, seed {report['seed']}"
    late = "The client was late: measure with fewer requests per second, or from more machines."
    caption = late if report["is_client_bound"] else None
    offered_rps, blocks, accuracy = report["offered_rps"], report["mean_exit_blocks"], report["accuracy"]
    lateness_s, latencies = report["lateness_p99_s"], report["latency"] or {}
    rows = (
        ("requests", f"{report['num_requests']} in {report['duration_s']:.1f} s, {report['num_retries']} repeated"),
        ("answers", f"{report['num_answers']} of {report['num_inputs']} inputs"),
        ("offered", "closed loop" if offered_rps is None else f"{offered_rps:.1f} inputs/s"),
        ("achieved", f"{report['achieved_rps']:.1f} answers/s"),
        ("goodput", f"{report['goodput_rps']:.1f} answers/s within {_milliseconds(report['slo_s'])}"),
        *((f"latency {name.removesuffix('_s')}", _milliseconds(value)) for name, value in latencies.items()),
        ("answers by exit", _counts(report["answers_by_exit"])),
        ("blocks per answer", "-" if blocks is None else f"{blocks:.2f}"),
        ("accuracy", "-" if accuracy is None else f"{accuracy:.2%}"),
        ("errors", _counts(report["errors"])),
        ("client lateness p99", "-" if lateness_s is None else _milliseconds(lateness_s)),
    )
    return make_table("", "value", title=title, title_justify="left", caption=caption, rows=rows)


def _accuracy(answered: Sequence[RequestRecord], labels: Sequence[str]) -> float | None:
    """Returns the share of correct answers; None if the answers are not labels."""
    if not all("label" in prediction.task_values for record in answered for prediction in record.predictions):
        return None
    pairs = [pair for record in answered for pair in zip(record.input_indices, record.predictions, strict=True)]
    return sum(labels[index] == prediction.label for index, prediction in pairs) / len(pairs)


def percentile(values_N: npt.ArrayLike, percent: float) -> float | None:
    """Returns the percentile of the values that are not NaN; None if there are none."""
    known_N = np.asarray(values_N, dtype=np.float64)
    known_N = known_N[~np.isnan(known_N)]
    return float(np.percentile(known_N, percent)) if len(known_N) else None


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
