"""What became of every request, and the figures of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from earlyexit.errors import OfframpError

Outcome = int | Literal["connection", "timeout", "malformed"] | None
"""An HTTP status, or why there is none; None while the request is on its way."""

ANSWERED = 200
REFUSED = (429, 503)
"""A server's own word that it takes no more."""


class LoadResult(BaseModel):
    """Figures of one run; a line of JSON between processes.

    Everything is of counted requests, unless it says otherwise: those due after the warm-up. Latency runs from the time
    a request was due, whether or not the client managed to send it then, so that a server which holds up its client is
    charged for it. Percentiles are by nearest rank: of n values in order the ceil(p/100 * n)-th; None of no values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    duration_s: float
    num_sent: int
    """Warm-up included."""
    num_counted: int
    num_answered: int
    num_refused: int
    failed: dict[str, int]
    """Requests by what went wrong: `status 500`, `connection`, `timeout`, `malformed`."""
    num_within_slo: int
    offered_per_s: float
    goodput_per_s: float
    """Answers within the SLO, per second of `duration_s`; what was refused or failed is missing from it."""
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    max_s: float | None
    """Of answers, like the percentiles: refusals and failures have no latency."""
    from_sent_p99_s: float | None
    """Of answers, from when the client took the request up rather than from when it was due."""
    lateness_p50_s: float | None
    """How long after it was due the client took a request up: its own fault, never the server's."""
    lateness_p99_s: float | None
    num_retried: int
    """Sent again, the server having closed the connection before a byte of the answer; warm-up included."""
    num_waited: int
    """Found no free connection; warm-up included."""
    num_connections: int
    """Opened in all."""
    cpu_s: float
    """Processor time of the client from the first request to the last outcome, warm-up included."""
    labels: dict[str, int] = {}
    """Answers by label, where bodies were kept."""
    exits: dict[str, int] = {}
    """Answers by the ramp that they left at; empty for servers that do not tell."""

    @property
    def num_failed(self) -> int:
        """Whatever was neither answered nor refused."""
        return sum(self.failed.values())

    @property
    def lost_share(self) -> float:
        """Of counted requests, what was refused or failed; 0 of none."""
        return (self.num_refused + self.num_failed) / self.num_counted if self.num_counted else 0.0

    @property
    def answered_per_s(self) -> float:
        """Whether or not in time."""
        return self.num_answered / self.duration_s

    @property
    def cpu_per_request_s(self) -> float:
        """The client's own processor time per request sent."""
        return self.cpu_s / self.num_sent if self.num_sent else 0.0


class Ledger:
    """Every request's times, on the clock of whoever writes, and its outcome; a request is its place in the lists."""

    def __init__(self) -> None:
        self.due_s: list[float] = []
        self.taken_s: list[float] = []
        self.ended_s: list[float] = []
        self.outcomes: list[Outcome] = []
        self.bodies: dict[int, bytes] = {}
        """Of answers, where they are kept."""
        self.num_open = 0
        """Taken, but without an outcome."""
        self.on_end: Callable[[int], None] | None = None
        """Told every request that has its outcome; a closed loop sends its next one then."""

    def take(self, due_s: float, now_s: float) -> int:
        """A new request."""
        self.due_s.append(due_s)
        self.taken_s.append(now_s)
        self.ended_s.append(0.0)
        self.outcomes.append(None)
        self.num_open += 1
        return len(self.due_s) - 1

    def end(self, request: int, outcome: Outcome, now_s: float) -> None:
        """A request's only outcome."""
        assert self.outcomes[request] is None, "a request ends once"
        self.ended_s[request] = now_s
        self.outcomes[request] = outcome
        self.num_open -= 1
        if self.on_end is not None:
            self.on_end(request)

    def between(self, from_s: float, until_s: float) -> list[int]:
        """Requests that were due in a span of time."""
        return [request for request, due_s in enumerate(self.due_s) if from_s <= due_s < until_s]

    def timed_out(self, timeout_s: float) -> None:
        """Write down as timed out what was answered after its timeout, before anybody looked."""
        for request, outcome in enumerate(self.outcomes):
            if outcome == ANSWERED and self.ended_s[request] - self.due_s[request] > timeout_s:
                self.outcomes[request] = "timeout"


def percentile(values: Sequence[float], percent: int) -> float | None:
    """By nearest rank; `values` in ascending order."""
    assert 0 < percent <= 100
    return values[-(-percent * len(values) // 100) - 1] if values else None


def summarize(
    ledger: Ledger,
    counted: Sequence[int],
    *,
    duration_s: float,
    slo_s: float,
    cpu_s: float,
    num_retried: int,
    num_waited: int,
    num_connections: int,
) -> LoadResult:
    """Figures of the counted requests, all of which have their outcome."""
    answered = [request for request in counted if ledger.outcomes[request] == ANSWERED]
    latency_s = sorted(ledger.ended_s[request] - ledger.due_s[request] for request in answered)
    from_sent_s = sorted(ledger.ended_s[request] - ledger.taken_s[request] for request in answered)
    lateness_s = sorted(ledger.taken_s[request] - ledger.due_s[request] for request in counted)
    num_within_slo = sum(each_s <= slo_s for each_s in latency_s)
    failed = Counter(_failure(ledger.outcomes[request]) for request in counted)
    answers = [_rows(ledger.bodies[request]) for request in answered if request in ledger.bodies]
    rows = [row for each in answers for row in each]
    return LoadResult(
        duration_s=duration_s,
        num_sent=len(ledger.due_s),
        num_counted=len(counted),
        num_answered=len(answered),
        num_refused=sum(ledger.outcomes[request] in REFUSED for request in counted),
        failed={kind: count for kind, count in sorted(failed.items()) if kind},
        num_within_slo=num_within_slo,
        offered_per_s=len(counted) / duration_s,
        goodput_per_s=num_within_slo / duration_s,
        p50_s=percentile(latency_s, 50),
        p90_s=percentile(latency_s, 90),
        p99_s=percentile(latency_s, 99),
        max_s=latency_s[-1] if latency_s else None,
        from_sent_p99_s=percentile(from_sent_s, 99),
        lateness_p50_s=percentile(lateness_s, 50),
        lateness_p99_s=percentile(lateness_s, 99),
        num_retried=num_retried,
        num_waited=num_waited,
        num_connections=num_connections,
        cpu_s=cpu_s,
        labels=_count(row.get("label") for row in rows),
        exits=_count(row.get("exit") for row in rows),
    )


def write_answers(path: Path, ledger: Ledger, counted: Iterable[int], num_bodies: int) -> None:
    """A line of JSON per answer: which body it answers, from 0, and its predictions."""
    with path.open("w", encoding="utf-8") as file:
        for request in counted:
            if ledger.outcomes[request] == ANSWERED:
                answer = {"body": request % num_bodies, "predictions": _rows(ledger.bodies[request])}
                file.write(json.dumps(answer) + "\n")


def _failure(outcome: Outcome) -> str:
    """The kind of a failure; empty for an answer and for a refusal."""
    assert outcome is not None, "every request has its outcome"
    if isinstance(outcome, str):
        return outcome
    return "" if outcome == ANSWERED or outcome in REFUSED else f"status {outcome}"


def _count(values: Iterator[Any] | Iterable[Any]) -> dict[str, int]:
    return dict(sorted(Counter(str(value) for value in values if value is not None).items()))


def _rows(body: bytes) -> list[dict[str, Any]]:
    """The predictions of an answer: `predictions` of the peers, `outputs` of Offramp, or the one that it is."""
    try:
        answer = json.loads(body)
        rows = answer.get("predictions", answer.get("outputs", [answer]))
        return [dict(row) for row in rows]
    except (ValueError, TypeError, AttributeError) as error:
        raise OfframpError(f"a server's answer is not a prediction: {body!r:.200}") from error
