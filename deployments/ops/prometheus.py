"""`GET /metrics`: the metrics of all processes in Prometheus' text format, read for each request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
"""Characters that the text format escapes in labels."""


class Sample(NamedTuple):
    """A metric's value in one process."""

    name: str
    """The name on Ray's page without `ray_`. Names that end in `_total` are counters, all others are gauges."""
    description: str
    labels: Mapping[str, str]
    value: float


def metrics_text(samples: Iterable[Sample]) -> str:
    """Returns the samples of all processes, grouped by name."""
    by_name: defaultdict[str, list[Sample]] = defaultdict(list)
    for each in samples:
        by_name[each.name].append(each)
    return "".join(_lines(name, group) for name, group in by_name.items())


def _lines(name: str, samples: Sequence[Sample]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {samples[0].description}\n# TYPE {name} {kind}\n"]
    for each in samples:
        label_text = ",".join(f'{label}="{text.translate(ESCAPED)}"' for label, text in each.labels.items())
        lines.append(f"{name}{{{label_text}}} {each.value:.15g}\n")
    return "".join(lines)
