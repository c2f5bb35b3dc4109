"""Contenders side by side: what each one's plan does on one problem and workload, row by row of a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from experiments.studies.by_batch import Choose, Point
from experiments.studies.sides import Workload, facing, goodput_of
from experiments.studies.study import Effort, ratio
from optimizer.decision import Decision, NoPlan
from optimizer.plan import Stage
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit
from simulator.goodput import PRECISION, Capacity

Row = Mapping[str, Point]
"""By contender."""
Rows = Mapping[str, Row]
"""By label: "batch 8", "SLO 50 ms"."""


def simulated(
    problem: PlanProblem, decisions: Mapping[str, Decision], inputs: Workload, effort: Effort, *, seed: int = 0
) -> dict[str, Point]:
    """Every contender's goodput; equal plans are simulated once."""
    known: dict[tuple[Stage, ...], Capacity] = {}
    row: dict[str, Point] = {}
    for name, decision in decisions.items():
        if isinstance(decision, NoPlan):
            row[name] = Point(decision=decision, capacity=None)
            continue
        if decision.stages not in known:
            known[decision.stages] = goodput_of(problem, decision, inputs, effort, seed=seed)
        row[name] = Point(decision=decision, capacity=known[decision.stages])
    return row


def by_batch_limit(
    problem: PlanProblem, inputs: Workload, batches: Sequence[int], choose: Choose, effort: Effort, *, seed: int = 0
) -> dict[str, Row]:
    """A row per largest batch."""
    rows: dict[str, Row] = {}
    for batch in batches:
        limited = with_batch_limit(facing(problem, inputs), batch)
        rows[f"batch {batch}"] = simulated(limited, choose(limited), inputs, effort, seed=seed)
    return rows


def times(row: Row, one: str, other: str) -> float | None:
    """How many times the other's goodput is the one's; None where either has no plan, or the other no goodput."""
    if one not in row or other not in row:
        return None
    return ratio(row[one].rate_per_s, row[other].rate_per_s)


def series_of(rows: Rows) -> dict[str, tuple[float | None, ...]]:
    """Goodput by contender, row by row; None where a row is without it."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return {name: tuple(row[name].rate_per_s if name in row else None for row in rows.values()) for name in names}


def out_of_order(rows: Rows, names: Sequence[str]) -> tuple[str, ...]:
    """A sentence for every row in which a contender does less than the one named before it, by more than precision."""
    return tuple(
        f"At {label}, {better} does {1 - share:.1%} less than {worse}."
        for label, row in rows.items()
        for worse, better in pairwise(names)
        if (share := times(row, better, worse)) is not None and share < 1 - PRECISION
    )


def document(rows: Rows) -> dict[str, Any]:
    """Plain data."""
    return {label: {name: point.document() for name, point in row.items()} for label, row in rows.items()}
