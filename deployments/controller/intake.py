"""From counts that only grow to what happened since the last look."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

from deployments.wire.messages import BUCKET, IngressReport, ReplicaReport
from earlyexit.engine.times import TimesRun
from earlyexit.network.chain import Chain
from earlyexit.network.split import AfterAnswer

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)
Ran = tuple[int, int, tuple[int, ...], AfterAnswer, int, bool]
"""A split's first block, end and ramps, what its answered inputs do, a batch size, and whether others ran beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What all ingresses did from `since_s` to `at_s`, wall clock."""

    since_s: float
    at_s: float
    arrived: int = 0
    answered: int = 0
    answered_tokens: int = 0
    """Of the answered; as many as these where inputs have no tokens."""
    in_slo: int = 0
    exits: Mapping[int, int] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    latencies: Mapping[int, int] = field(default_factory=dict)
    """By bucket, as in `IngressReport`."""
    crossings: Mapping[int, int] = field(default_factory=dict)
    """By block, as in `IngressReport`; as are the next three."""
    crossing_s: Mapping[int, float] = field(default_factory=dict)
    words: Mapping[int, int] = field(default_factory=dict)
    pruned_words: Mapping[int, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.at_s - self.since_s


def total(intervals: Sequence[Interval]) -> Interval | None:
    """Several intervals as one, from the first's begin to the last's end; None for none."""
    if not intervals:
        return None
    return Interval(
        since_s=min(each.since_s for each in intervals),
        at_s=max(each.at_s for each in intervals),
        arrived=sum(each.arrived for each in intervals),
        answered=sum(each.answered for each in intervals),
        answered_tokens=sum(each.answered_tokens for each in intervals),
        in_slo=sum(each.in_slo for each in intervals),
        exits=_sum(each.exits for each in intervals),
        drops=_sum(each.drops for each in intervals),
        latencies=_sum(each.latencies for each in intervals),
        crossings=_sum(each.crossings for each in intervals),
        crossing_s=_sum(each.crossing_s for each in intervals),
        words=_sum(each.words for each in intervals),
        pruned_words=_sum(each.pruned_words for each in intervals),
    )


def latency_s(latencies: Mapping[int, int], share: float) -> float | None:
    """The latency that a share of the answers did not exceed, the bucket's upper end; None without answers."""
    if not latencies:
        return None
    buckets = sorted(latencies)
    reached = accumulate(latencies[bucket] for bucket in buckets)
    needed = share * sum(latencies.values())
    return next(
        float(BUCKET ** (bucket + 1)) for bucket, count in zip(buckets, reached, strict=True) if count >= needed
    )


class IngressIntake:
    """Remembers every ingress's last counts.

    An ingress seen when any is seen for the first time may have counted for hours before a controller that started
    anew: it only sets the mark. One that appears later began at zero.
    """

    def __init__(self) -> None:
        self._last: dict[str, IngressReport] = {}
        self._at_s: float | None = None

    def take(self, reports: Sequence[IngressReport], now_s: float) -> Interval | None:
        """What happened since the last look; None at the first, and where nobody reports: the next one tells it."""
        if not reports:
            return None
        since_s, self._at_s = self._at_s, now_s
        known = dict(self._last)
        self._last |= {report.name: replace(report, probes=None) for report in reports}
        if since_s is None:
            return None
        grown = [_grown(known.get(report.name), report, since_s, now_s) for report in reports]
        return total([Interval(since_s=since_s, at_s=now_s), *grown])


class ReplicaIntake:
    """Remembers what every replica had run at a mark; one that is newer than the mark began at zero."""

    def __init__(self) -> None:
        self._at_mark: dict[str, dict[Ran, TimesRun]] = {}

    def mark(self, reports: Sequence[ReplicaReport]) -> None:
        """Count from now on."""
        self._at_mark = {report.replica: {_key(each): each for each in report.times} for report in reports}

    def since_mark(self, report: ReplicaReport) -> tuple[TimesRun, ...]:
        """What the replica has run since."""
        before = self._at_mark.get(report.replica, {})
        new = (_longer(before.get(_key(each)), each) for each in report.times)
        return tuple(each for each in new if each.batches > 0)


def _longer(before: TimesRun | None, now: TimesRun) -> TimesRun:
    if before is None:
        return now
    return replace(
        now,
        batches=now.batches - before.batches,
        tokens=now.tokens - before.tokens,
        seconds=now.seconds - before.seconds,
    )


def _key(time: TimesRun) -> Ran:
    return time.first, time.end, time.ramps, time.after_answer, time.size, time.shared


def _grown(before: IngressReport | None, now: IngressReport, since_s: float, at_s: float) -> Interval:
    """Exits are counted anew under every epoch."""
    same_epoch = before is not None and before.epoch == now.epoch
    return Interval(
        since_s=since_s,
        at_s=at_s,
        arrived=now.arrived - (before.arrived if before else 0),
        answered=now.answered - (before.answered if before else 0),
        answered_tokens=now.answered_tokens - (before.answered_tokens if before else 0),
        in_slo=now.in_slo - (before.in_slo if before else 0),
        exits=_less(now.exits, before.exits if before is not None and same_epoch else {}),
        drops=_less(now.drops, before.drops if before else {}),
        latencies=_less(now.latencies, before.latencies if before else {}),
        crossings=_less(now.crossings, before.crossings if before else {}),
        crossing_s=_less(now.crossing_s, before.crossing_s if before else {}),
        words=_less(now.words, before.words if before else {}),
        pruned_words=_less(now.pruned_words, before.pruned_words if before else {}),
    )


def _less(now: Mapping[Key, Number], before: Mapping[Key, Number]) -> dict[Key, Number]:
    return {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}


def _sum(counts: Iterable[Mapping[Key, Number]]) -> dict[Key, Number]:
    summed: dict[Key, Number] = {}
    for each in counts:
        for key, count in each.items():
            summed[key] = summed[key] + count if key in summed else count
    return summed


def network_figures(chain: Chain, used: Collection[int], seen: Interval | None) -> list[dict[str, Any]]:
    """One row per network, in their order; none where there is but one.

    `used`: the places of those that the plan uses. Shares are of answers that left under the plan in force, and None
    before the first.
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
