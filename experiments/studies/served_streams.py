"""What sides made of the streams of Apparate's studies: shares by kind of stream, tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from experiments.apparate.cases import Case
from experiments.apparate.recording import KINDS, Kind
from experiments.apparate.times import Answered
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Table

Figure = Callable[[Answered], float]
Found = Mapping[str, Mapping[str, Answered]]
"""By stream and side."""

FIGURES: Mapping[str, Figure] = {
    "agreement (%)": lambda each: 100 * each.agreement,
    "worst tenth (%)": lambda each: 100 * each.worst_agreement,
    "p25 saved (%)": lambda each: 100 * each.saved(25),
    "median saved (%)": lambda each: 100 * each.saved(50),
    "mean saved (%)": lambda each: 100 * each.mean_saved,
    "p95 saved (%)": lambda each: 100 * each.saved(95),
}
"""Savings are of the model without ramps; below 0 ramps cost more than they save."""


def run_sides(cases: Sequence[Case], sides: Mapping[str, Callable[[Case], Answered]]) -> Found:
    """Every side on every stream."""
    return {case.name: {side: serve(case) for side, serve in sides.items()} for case in cases}


def of_kind(found: Found, kind: Kind, side: str, figure: str) -> list[float]:
    """A side's figure on every stream of a kind."""
    return [FIGURES[figure](sides[side]) for name, sides in found.items() if KINDS[name] == kind and side in sides]


def mean(found: Found, kind: Kind, side: str, figure: str, paper: float | None = None) -> Comparison:
    """Over the streams of a kind, beside the paper's."""
    values = of_kind(found, kind, side, figure)
    return Comparison(f"{kind}, {side}: {figure}", fmean(values) if values else None, paper)


def table(found: Found) -> Table:
    """Everything, stream by stream."""
    return Table(
        "Stream by stream",
        ("stream", "side", *FIGURES),
        tuple(
            (name, side, *(figure(each) for figure in FIGURES.values()))
            for name, sides in found.items()
            for side, each in sides.items()
        ),
    )


def bars(title: str, found: Found, figure: str) -> Bars:
    """A figure by stream and side."""
    names = list(next(iter(found.values())))
    series = {side: tuple(FIGURES[figure](sides[side]) for sides in found.values()) for side in names}
    return Bars(title, "stream", figure, tuple(found), series)


def document(found: Found) -> dict[str, dict[str, dict[str, float]]]:
    """As plain data."""
    return {
        name: {side: {label: figure(each) for label, figure in FIGURES.items()} for side, each in sides.items()}
        for name, sides in found.items()
    }
