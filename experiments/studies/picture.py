"""What a picture shows, as plain data; `drawing.py` draws it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from earlyexit.errors import InputError

Values = Mapping[str, tuple[float | None, ...]]
"""Name (a strategy has a colour of its own) -> a value per place; None is a gap."""


@dataclass(frozen=True, slots=True)
class _Axes:
    title: str
    x_label: str
    """With its unit, where it has one: "input batch", "SLO (ms)"."""
    y_label: str
    """The same: "goodput (inputs/s)"."""
    log_y: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Bars(_Axes):
    """A group of bars per label, a bar of it per series; a gap says "none"."""

    labels: tuple[str, ...]
    """Under the groups, from left to right."""
    series: Values
    paper: Values = field(default_factory=dict)
    """The paper's values of the same series, drawn over ours as diamonds; None where it gives none."""
    kind: Literal["bars"] = "bars"

    def __post_init__(self) -> None:
        _check(self.title, len(self.labels), self.series, self.paper)


@dataclass(frozen=True, slots=True)
class Lines(_Axes):
    """Series over a common, rising x; a gap interrupts its line."""

    x: tuple[float, ...]
    series: Values
    paper: Values = field(default_factory=dict)
    """As in `Bars`."""
    log_x: bool = False
    kind: Literal["lines"] = "lines"

    def __post_init__(self) -> None:
        if list(self.x) != sorted(set(self.x)):
            raise InputError(f"{self.title}: x must rise")
        _check(self.title, len(self.x), self.series, self.paper)


@dataclass(frozen=True, slots=True)
class Box:
    """How values are spread."""

    minimum: float
    quartile: float
    median: float
    third_quartile: float
    maximum: float

    def __post_init__(self) -> None:
        values = (self.minimum, self.quartile, self.median, self.third_quartile, self.maximum)
        if not all(map(math.isfinite, values)) or list(values) != sorted(values):
            raise InputError(f"a box must be finite and rise from minimum to maximum: {values}")


@dataclass(frozen=True, slots=True)
class Boxes(_Axes):
    """A group of boxes per label, a box of it per series; whiskers end at minimum and maximum."""

    labels: tuple[str, ...]
    series: Mapping[str, tuple[Box | None, ...]]
    limit: float | None = None
    """A line across, such as the SLO; None for no line."""
    kind: Literal["boxes"] = "boxes"

    def __post_init__(self) -> None:
        _check_lengths(self.title, len(self.labels), self.series)


Picture = Bars | Lines | Boxes


def _check(title: str, length: int, series: Values, paper: Values) -> None:
    _check_lengths(title, length, series)
    alone = paper.keys() - series.keys()
    if alone:
        raise InputError(f"{title}: the paper's series {', '.join(alone)} has none of ours beside it")
    for values in (*series.values(), *paper.values()):
        if len(values) != length or not all(value is None or math.isfinite(value) for value in values):
            raise InputError(f"{title}: a series needs {length} finite values or None, not {values}")


def _check_lengths(title: str, length: int, series: Mapping[str, tuple[object, ...]]) -> None:
    if not series or not length:
        raise InputError(f"{title}: nothing to show")
    for name, values in series.items():
        if len(values) != length:
            raise InputError(f"{title}: {name} has {len(values)} values for {length} places")
