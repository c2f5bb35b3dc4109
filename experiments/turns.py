"""Measures sides in turns, so that a drifting machine affects all of them, and reports medians and ratios."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median

from experiments.kit import print_table, spread

Figures = dict[str, float]
"""The figures of one run, by name with unit."""
Side = Callable[[], Figures]
Found = Mapping[str, Mapping[str, list[float]]]
"""Every round's figures, by side."""


def in_turns(sides: Mapping[str, Side], rounds: int, *, warm_ups: int = 1) -> Found:
    """Runs every side once per round, in rotated order; the first rounds only warm up."""
    names = list(sides)
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    for turn in range(warm_ups + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for figure, value in sides[name]().items():
                if turn >= warm_ups:
                    found[name][figure].append(value)
    return found


def print_figures(title: str, found: Found) -> None:
    """Prints medians, and each further side's ratio to the first within each round, so that drift cancels out."""
    base = next(iter(found))
    rows = [
        (figure, side, median(figures[figure]), "" if side == base else _ratio(figures[figure], values))
        for figure, values in found[base].items()
        for side, figures in found.items()
        if figure in figures
    ]
    print_table(title, ("figure", "side", "median of rounds", f"x {base}"), rows)


def _ratio(values: list[float], base: list[float]) -> str:
    found = spread(value / other if other else None for value, other in zip(values, base, strict=False))
    return "-" if found is None else found.as_text()
