"""Differences between successive reports, whose counts only grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from deployments.wire.messages import BUCKET, COUNT_FIELDS, Counts, IngressReport, Interval, ReplicaReport, total
from earlyexit.engine.engine import TimesRun

_key_of = attrgetter("first", "end", "ramps", "after_answer", "size", "shared")
"""Returns what identifies a `TimesRun` of a replica."""


def latency_s(latencies: Mapping[int, int], share: float) -> float | None:
    """Returns a quantile of the latency, as the upper end of its bucket; None without answers."""
    reached, needed = 0, share * sum(latencies.values())
    for bucket in sorted(latencies):
        reached += latencies[bucket]
        if reached >= needed:
            return float(BUCKET ** (bucket + 1))
    return None


def counts_between(
    before: Mapping[str, IngressReport], now: Sequence[IngressReport], since_s: float, at_s: float
) -> Interval | None:
    """Returns the counts of all ingresses since their earlier reports, by name; None without new reports or time.

    An ingress without an earlier report started at zero.
    """
    if not now or at_s <= since_s:
        return None
    grown = [_grown(before.get(report.name), report, since_s, at_s) for report in now]
    return total([Interval(since_s=since_s, at_s=at_s), *grown])


def ran_since(before: ReplicaReport | None, now: ReplicaReport) -> tuple[TimesRun, ...]:
    """Returns the batches of a replica between two reports. A replica without an earlier report started at zero."""
    known: dict[Any, TimesRun] = {} if before is None else {_key_of(each): each for each in before.times}
    new = (_difference(known.get(_key_of(each)), each) for each in now.times)
    return tuple(each for each in new if each.batches > 0)


def _difference(before: TimesRun | None, now: TimesRun) -> TimesRun:
    if before is None:
        return now
    batches, tokens = now.batches - before.batches, now.tokens - before.tokens
    return replace(now, batches=batches, tokens=tokens, seconds=now.seconds - before.seconds)


def _grown(before: IngressReport | None, now: IngressReport, since_s: float, at_s: float) -> Interval:
    """Returns the counts between two reports. Exits restart at zero under every epoch."""
    start = before or Counts()
    counted: dict[str, Any] = {name: _less(getattr(now, name), getattr(start, name)) for name in COUNT_FIELDS}
    if before is not None and before.epoch != now.epoch:
        counted["exits"] = dict(now.exits)
    return Interval(since_s=since_s, at_s=at_s, **counted)


def _less(now: Any, before: Any) -> Any:
    """Returns the difference of two numbers, or of two counts by key."""
    return now - before if isinstance(now, int) else dict(Counter(now) - Counter(before))
