"""What is counted of each version while two share the requests; counts of several ingresses add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.reports import BUCKET
from earlyexit.tasks.base import Task
from earlyexit.wire import Answer, stacked

Counts = Mapping[tuple[str, str], float]
"""By version and status."""


@dataclass(slots=True)
class VersionTally:
    """Requests of callers that one version was to answer."""

    answered: int = 0
    """Requests."""
    errors: Counter[str] = field(default_factory=Counter)
    """Requests that failed, by kind of error; `unreachable` ones another version answered instead."""
    exits: Counter[int] = field(default_factory=Counter)
    """Inputs by the block they left after."""
    latencies: Counter[int] = field(default_factory=Counter)
    """Answered requests by bucket, as in `IngressReport`."""

    def add(self, other: VersionTally) -> None:
        self.answered += other.answered
        self.errors += other.errors
        self.exits += other.exits
        self.latencies += other.latencies


@dataclass(slots=True)
class Tally:
    """One ingress's counts since default and canary are what they are."""

    versions: dict[str, VersionTally] = field(default_factory=dict)
    same: float = 0
    """Inputs that both versions answered the same; each counts by degrees where answers differ by degrees."""
    other: float = 0
    """Inputs that they did not."""
    failed: int = 0
    """Requests that could not be compared: one of the two did not answer."""
    skipped: int = 0
    """Requests that were not compared, because enough others were at that time."""

    def of(self, version: str) -> VersionTally:
        return self.versions.setdefault(version, VersionTally())

    def compare(self, losses: Sequence[float]) -> None:
        """Count one request's inputs by both versions; see `losses_between`."""
        self.same += len(losses) - sum(losses)
        self.other += sum(losses)

    def add(self, other: Tally) -> None:
        for version, tally in other.versions.items():
            self.of(version).add(tally)
        self.same += other.same
        self.other += other.other
        self.failed += other.failed
        self.skipped += other.skipped


def losses_between(ours: Sequence[Answer], our_task: Task, theirs: Sequence[Answer], their_task: Task) -> list[float]:
    """By input, what it costs that one version answers otherwise, from 0 to 1.

    Versions may number labels differently, or have others: then answers are compared as callers see them. Where they
    mean the same, though other settings of the task differ, the loss is our task's.
    """
    if our_task.compares(their_task):
        early, full = (stacked([answer.value for answer in answers]) for answers in (ours, theirs))
        return [float(loss) for loss in our_task.loss(early, full)]
    return [
        float(our_task.to_json(one.value, 0.0) != their_task.to_json(another.value, 0.0))
        for one, another in zip(ours, theirs, strict=True)
    ]


def quantile_s(latencies: Mapping[int, int], share: float) -> float | None:
    """The seconds within which that share was answered, at most 5 % too long; None where nothing was."""
    needed = share * sum(latencies.values())
    reached = 0
    for bucket in sorted(latencies):
        reached += latencies[bucket]
        if reached >= needed:
            return float(BUCKET ** (bucket + 1))
    return None


def version_figures(tally: VersionTally) -> dict[str, Any]:
    """One version's counts, as `GET /v2/models/{model}/canary` says them."""
    return {
        "requests": tally.answered + sum(tally.errors.values()),
        "errors": dict(tally.errors),
        "p50_s": quantile_s(tally.latencies, 0.50),
        "p99_s": quantile_s(tally.latencies, 0.99),
        "exits": {str(block): tally.exits[block] for block in sorted(tally.exits)},
    }


def compared_figures(tally: Tally) -> dict[str, Any]:
    """How far the two versions agree, in the same place."""
    inputs = round(tally.same + tally.other)
    return {
        "inputs": inputs,
        "same": tally.same,
        "agreement": tally.same / inputs if inputs else None,
        "requests_failed": tally.failed,
        "requests_skipped": tally.skipped,
    }


def counts(tally: Tally) -> dict[tuple[str, str], float]:
    """Requests by version and status; under no version's name, what was compared."""
    found: dict[tuple[str, str], float] = {
        ("", "same"): tally.same,
        ("", "other"): tally.other,
        ("", "failed"): tally.failed,
    }
    for version, each in tally.versions.items():
        found[version, "answered"] = each.answered
        found |= {(version, kind): count for kind, count in each.errors.items()}
    return found


def growth(before: Counts, now: Counts) -> dict[tuple[str, str], float]:
    """What has become more."""
    return {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}
