"""Differences between successive reports, whose counts only grow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from typing import Any

from deployments.wire.messages import BUCKET, COUNT_FIELDS, Counts, IngressReport, Interval, ReplicaReport, total
from earlyexit.engine.engine import TimesRun
from earlyexit.network.boundary import Split
from earlyexit.network.chain import Chain

_key_of = attrgetter("first", "end", "ramps", "after_answer", "size", "shared")
"""Returns what identifies a `TimesRun` of a replica."""


def latency_s(latencies: Mapping[int, int], share: float) -> float | None:
    """Returns a quantile of the latency, as the upper end of its bucket; None without answers."""
    if not latencies:
        return None
    buckets = sorted(latencies)
    reached = accumulate(latencies[bucket] for bucket in buckets)
    needed = share * sum(latencies.values())
    return next(
        float(BUCKET ** (bucket + 1)) for bucket, count in zip(buckets, reached, strict=True) if count >= needed
    )


class IngressIntake:
    """The last reports of all ingresses.

    Ingresses of the first reports may have counted for hours, so these reports are only the baseline. Ingresses that
    appear later started at zero.
    """

    def __init__(self) -> None:
        self._last: dict[str, IngressReport] = {}
        self._at_s: float | None = None

    def take(self, reports: Sequence[IngressReport], now_s: float) -> Interval | None:
        """Returns the counts since the last call; None at the first call, and without reports."""
        if not reports:
            return None
        since_s, self._at_s = self._at_s, now_s
        known = dict(self._last)
        self._last |= {report.name: replace(report, probes=None) for report in reports}
        if since_s is None:
            return None
        grown = [_grown(known.get(report.name), report, since_s, now_s) for report in reports]
        return total([Interval(since_s=since_s, at_s=now_s), *grown])


def ran_since(before: ReplicaReport | None, now: ReplicaReport) -> tuple[TimesRun, ...]:
    """Returns the batches of a replica between two reports. A replica without an earlier report started at zero."""
    known: dict[Any, TimesRun] = {} if before is None else {_key_of(each): each for each in before.times}
    new = (_difference(known.get(_key_of(each)), each) for each in now.times)
    return tuple(each for each in new if each.batches > 0)


def batch_means(split: Split, times: Sequence[TimesRun]) -> dict[str, Any]:
    """Returns the mean inputs and tokens of a split's batches, and their shares of the limits; None without batches."""
    batches = sum(each.batches for each in times)
    size = sum(each.batches * each.size for each in times) / batches if batches else None
    size_tokens = sum(each.tokens for each in times) / batches if batches else None
    return {
        "batches": batches,
        "size": size,
        "size_tokens": size_tokens,
        "fill": None if size is None else size / split.batch,
        "token_fill": None if size_tokens is None or split.tokens is None else size_tokens / split.tokens,
    }


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
    if isinstance(now, int):
        return now - before
    return {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}


def network_figures(chain: Chain, used: Collection[int], seen: Interval | None) -> list[dict[str, Any]]:
    """Returns one row per network of a cascade; no rows for a single network.

    `used`: the positions of the networks that the plan uses. Shares are of the answers under the current plan, and None
    before the first answer.
    """
    if chain.is_one:
        return []
    seen = seen or Interval(since_s=0.0, at_s=0.0)
    return [_figures(chain, network, network in used, seen) for network in range(len(chain.names))]


def _figures(chain: Chain, network: int, is_used: bool, seen: Interval) -> dict[str, Any]:
    first, end = chain.starts[network], chain.bounds[network]
    answers = sum(count for block, count in seen.exits.items() if first <= block < end)
    reached = sum(count for block, count in seen.exits.items() if block >= first)
    total = sum(seen.exits.values())
    crossings, words = seen.crossings.get(first, 0), seen.words.get(first, 0)
    return {
        "name": chain.names[network],
        "first": first,
        "end": end,
        "used": is_used,
        "answers": answers,
        "share": answers / total if total else None,
        "returned": answers / reached if reached and is_used else None,
        "crossings_per_s": crossings / seen.seconds if seen.seconds else None,
        "crossing_s": seen.crossing_s.get(first, 0.0) / crossings if crossings else None,
        "pruned_words": seen.pruned_words.get(first, 0) / words if words else None,
    }
