"""What is counted of each version while two share the requests; counts of several ingresses add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.reports import BUCKET
from earlyexit.wire import Answer, label_of

Counts = Mapping[tuple[str, str], int]
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
        """Take another ingress's counts in."""
        self.answered += other.answered
        self.errors += other.errors
        self.exits += other.exits
        self.latencies += other.latencies


@dataclass(slots=True)
class Tally:
    """One ingress's counts since default and canary are what they are."""

    versions: dict[str, VersionTally] = field(default_factory=dict)
    same: int = 0
    """Inputs that both versions gave the same label."""
    other: int = 0
    """Inputs that they did not."""
    failed: int = 0
    """Requests that could not be compared: one of the two did not answer."""
    skipped: int = 0
    """Requests that were not compared, because enough others were at that time."""

    def of(self, version: str) -> VersionTally:
        """A version's counts."""
        return self.versions.setdefault(version, VersionTally())

    def compare(self, ours: Iterable[str], theirs: Iterable[str]) -> None:
        """Count the labels of one request by both versions."""
        for one, another in zip(ours, theirs, strict=True):
            if one == another:
                self.same += 1
            else:
                self.other += 1

    def add(self, other: Tally) -> None:
        """Take another ingress's counts in."""
        for version, tally in other.versions.items():
            self.of(version).add(tally)
        self.same += other.same
        self.other += other.other
        self.failed += other.failed
        self.skipped += other.skipped


def labels_of(answers: Iterable[Answer], names: tuple[str, ...]) -> list[str]:
    """The answers' labels by name: versions may number them differently."""
    return [names[label_of(answer)] for answer in answers]


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
    inputs = tally.same + tally.other
    return {
        "inputs": inputs,
        "same": tally.same,
        "agreement": tally.same / inputs if inputs else None,
        "requests_failed": tally.failed,
        "requests_skipped": tally.skipped,
    }


def counts(tally: Tally) -> dict[tuple[str, str], int]:
    """Requests by version and status; under no version's name, what was compared."""
    found = {("", "same"): tally.same, ("", "other"): tally.other, ("", "failed"): tally.failed}
    for version, each in tally.versions.items():
        found[version, "answered"] = each.answered
        found |= {(version, kind): count for kind, count in each.errors.items()}
    return found


def growth(before: Counts, now: Counts) -> dict[tuple[str, str], int]:
    """What has become more."""
    return {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}
