"""Prometheus metrics, through Ray's own exporter; every name starts with `offramp_`."""

from __future__ import annotations

import asyncio
import math
from collections import Counter as Tally
from collections import defaultdict
from typing import Any

from ray.serve.metrics import Counter, Histogram

from earlyexit.network.chain import Chain

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class IngressMetrics:
    """Counts requests and answers of an ingress.

    Ray gets the counts once a second: a call per request cost an ingress 3 % of its time.
    """

    def __init__(self, chain: Chain) -> None:
        """`chain`: the networks of the model that answers."""
        self._chain = chain
        self._requests = Counter("offramp_requests", "Requests, by route and status", tags("route", "status"))
        self._answers = Counter("offramp_answers", "Answers, by the block they left after", tags("exit", "network"))
        self._hop_s = histogram("offramp_hop_seconds", "Time a call spent outside its stage", SECONDS, "slot")
        self._finished: Tally[tuple[str, int]] = Tally()
        self._drops = Counter("offramp_drops", "Inputs without an answer, by reason", tags("reason"))
        self._retries = Counter("offramp_retries", "Inputs sent again because a replica failed", tags("slot"))
        self._dropped: Tally[str] = Tally()
        self._exits: Tally[int] = Tally()
        self._hops: list[tuple[str, float]] = []
        self._is_due = False

    def request(self, route: str, status: int) -> None:
        """Count a finished request; one over gRPC by the status that HTTP has for the same."""
        self._flush_soon()
        self._finished[route, status] += 1

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(1.0, self._flush)

    def _flush(self) -> None:
        self._is_due = False
        for block, count in self._exits.items():
            self._answers.inc(count, {"exit": str(block), "network": self._chain.name_of(block)})
        self._exits.clear()
        for slot, seconds in self._hops:
            self._hop_s.observe(seconds, {"slot": slot})
        self._hops.clear()
        for reason, count in self._dropped.items():
            self._drops.inc(count, {"reason": reason})
        self._dropped.clear()
        for (route, status), count in self._finished.items():
            self._requests.inc(count, {"route": route, "status": str(status)})
        self._finished.clear()

    def answers(self, exits: list[int]) -> None:
        """Count answers by exit."""
        self._flush_soon()
        for block in exits:
            self._exits[block] += 1

    def hop(self, slot: str, seconds: float) -> None:
        """Record the way to a stage's slot and back."""
        self._flush_soon()
        self._hops.append((slot, seconds))

    def dropped(self, reason: str, num_inputs: int) -> None:
        """Count inputs without an answer."""
        self._flush_soon()
        self._dropped[reason] += num_inputs

    def retried(self, slot: str, num_inputs: int) -> None:
        """Count inputs sent again."""
        self._retries.inc(num_inputs, {"slot": slot})


class Totals:
    """Counters that are given their totals."""

    def __init__(self) -> None:
        self._told: defaultdict[tuple[Counter, str], float] = defaultdict(float)

    def grow(self, counter: Counter, total: float, **labels: str) -> None:
        """Counts the difference to the last total."""
        key = counter, "".join(labels.values())
        if total > self._told[key]:  # a counter refuses zero
            counter.inc(total - self._told[key], labels)
            self._told[key] = total


def le(end_s: float) -> str:
    """Returns the label of a bucket by its upper end."""
    return "+Inf" if math.isinf(end_s) else f"{end_s:g}"


def histogram(name: str, description: str, boundaries: tuple[float, ...], *names: str) -> Histogram:
    """A histogram with the given tags."""
    return Histogram(name, description, list(boundaries), tags(*names))


def tags(*names: str) -> Any:
    """Tag names in the form that Ray's metrics take."""
    return names  # ray's annotation allows one name only, its code any number
