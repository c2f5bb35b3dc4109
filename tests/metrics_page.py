"""Helpers for tests of metrics: the table that documents them, and a page in Prometheus' text format."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import httpx

DOCUMENT = Path(__file__).parents[1] / "docs" / "operate.md"
COUNTERS = ("_bucket_total", "_sum_total", "_count_total")
"""Ends of the names of a histogram's counters."""
EVERY_METRIC = "Every metric"
"""Begins the paragraph with the labels that Ray and Serve add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """A row of the table."""

    name: str
    """Name on the page; of a histogram without the three suffixes."""
    kind: str
    labels: frozenset[str]

    @property
    def in_source(self) -> str:
        """The name in the source. Ray adds `ray_` before it, and `_total` after a counter."""
        return self.name.removeprefix("ray_").removesuffix("_total" if self.kind == "counter" else "")

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """Names on the page, and the labels of each."""
        if self.kind != "histogram":
            return {self.name: self.labels}
        return {f"{self.name}{end}": self.labels | ({"le"} if end == COUNTERS[0] else set()) for end in COUNTERS}


def documented() -> list[Documented]:
    """Returns the rows of docs/operate.md in order."""
    rows = re.findall(
        r"^\| `(ray_offramp_\w+)` \| (counter|gauge|histogram) \| ([^|]*) \| [^|]+ \| [^|]+ \|$",
        DOCUMENT.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    return [
        Documented(name=name, kind=kind, labels=frozenset(filter(None, labels.replace("`", "").split(", "))))
        for name, kind, labels in rows
    ]


def documented_series() -> dict[str, frozenset[str]]:
    """Returns Offramp's own labels by name on the page."""
    return {name: labels for row in documented() for name, labels in row.series.items()}


def added_labels() -> frozenset[str]:
    """Returns the labels that Ray and Serve add to every metric."""
    [paragraph] = re.findall(rf"^{EVERY_METRIC}.*?\n\n", DOCUMENT.read_text(encoding="utf-8"), flags=re.M | re.S)
    return frozenset(re.findall(r"`(\w+)`", paragraph))


def labels_on_page(page: str) -> dict[str, set[frozenset[str]]]:
    """Returns the label sets of the series by name; a series without labels has an empty set."""
    found: defaultdict[str, set[frozenset[str]]] = defaultdict(set)
    for line in page.splitlines():
        named = re.match(r"(\w+)(?:\{(.*)\})? ", line)
        if named is not None and not line.startswith("#"):
            found[named[1]].add(frozenset(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', named[2] or "")))
    return dict(found)


def once_on_page(
    port: int, wanted: set[str], patience_s: float, application: str = "offramp"
) -> dict[str, set[frozenset[str]]]:
    """Waits until all `wanted` series are on a node's page; returns the service's series without Ray's labels."""
    until_s = time.monotonic() + patience_s
    while True:
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=20.0).text
        found = labels_on_page("\n".join(line for line in page.splitlines() if f'application="{application}"' in line))
        if wanted <= set(found) or time.monotonic() > until_s:
            return {
                name: {labels - added_labels() for labels in each if labels >= added_labels()}
                for name, each in found.items()
                if name.startswith("ray_offramp_")
            }
        time.sleep(0.5)  # Ray exports metrics every few seconds


def check_series(found: dict[str, set[frozenset[str]]], wanted: set[str]) -> None:
    """Checks that all `wanted` series exist, and that every series is documented with exactly its labels."""
    assert wanted - set(found) == set()
    expected = documented_series()
    assert found == {name: {expected.get(name, frozenset({"not documented"}))} for name in found}
