"""Contenders side by side: what each one's plan does on one problem and workload, row by row of a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.studies.e3_case import flat
from experiments.studies.picture import Bars
from experiments.studies.sides import Workload, decide, facing, goodput
from experiments.studies.study import Comparison, Effort, Ratios, Table, largest_ratios, ratio
from experiments.sustained import Capacity
from optimizer.decision import Decision, Planned
from optimizer.plan import Stage
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit

COLUMNS = ("", "side", "goodput", "over its plan's", "splits", "batch", "worst case (ms)", "busy", "last split full")
Choose = Callable[[PlanProblem], Mapping[str, Decision]]
"""From a problem to every contender's decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A contender in one row."""

    decision: Decision
    capacity: Capacity | None
    """None where there is no plan."""

    @property
    def planned(self) -> Planned | None:
        return self.decision if isinstance(self.decision, Planned) else None

    @property
    def rate_per_s(self) -> float | None:
        """Goodput."""
        return None if self.capacity is None else self.capacity.rate_per_s

    @property
    def ramps(self) -> tuple[int, ...]:
        """Those that are active; none without a plan."""
        stages = () if self.planned is None else self.planned.stages
        return tuple(ramp for stage in stages for split in stage.splits for ramp in split.ramps)

    def cells(self) -> tuple[str | float | None, ...]:
        """A row of the table `plans`."""
        if self.planned is None or self.capacity is None:
            return ("no plan", *[None] * (len(COLUMNS) - 3))
        figures, splits = self.capacity.figures, [split for stage in self.planned.stages for split in stage.splits]
        return (
            self.capacity.rate_per_s,
            self.capacity.rate_per_s / self.planned.figures.rate_per_s,
            len(splits),
            max(split.batch for split in splits),
            1e3 * self.planned.figures.latency_s,
            None if figures is None else ", ".join(f"{slot.utilisation:.0%}" for slot in figures.slots),
            None if figures is None else f"{figures.splits[-1].fill:.0%}",
        )


Row = Mapping[str, Point]
"""By contender."""
Rows = Mapping[str, Row]
"""By label: "batch 8", "SLO 50 ms"."""


def simulated(
    problem: PlanProblem, decisions: Mapping[str, Decision], inputs: Workload, effort: Effort
) -> dict[str, Point]:
    """Every contender's goodput; equal plans are simulated once."""
    known: dict[tuple[Stage, ...], Capacity] = {}
    row: dict[str, Point] = {}
    for name, decision in decisions.items():
        capacity = None
        if isinstance(decision, Planned):
            if decision.stages not in known:
                known[decision.stages] = goodput(problem, decision, inputs, effort)
            capacity = known[decision.stages]
        row[name] = Point(decision=decision, capacity=capacity)
    return row


def by_batch(
    problem: PlanProblem, inputs: Workload, batches: Sequence[int], effort: Effort, choose: Choose = decide
) -> dict[str, Row]:
    """A row per largest batch: "batch 8"."""
    limited = {batch: with_batch_limit(facing(problem, inputs), batch) for batch in batches}
    return {f"batch {batch}": simulated(each, choose(each), inputs, effort) for batch, each in limited.items()}


def times(row: Row, one: str, other: str) -> float | None:
    """How many times the other's goodput is the one's; None where either has no plan, or the other no goodput."""
    if one not in row or other not in row:
        return None
    return ratio(row[one].rate_per_s, row[other].rate_per_s)


def series_of(rows: Rows) -> dict[str, tuple[float | None, ...]]:
    """Goodput by contender, row by row; None where a row is without it."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return {name: tuple(row[name].rate_per_s if name in row else None for row in rows.values()) for name in names}


def ratios_of(rows: Rows, side: str) -> Ratios:
    """The largest of a side's ratios over all rows; none where it is in no row."""
    return largest_ratios(series_of(rows), side)


def batch_bars(title: str, rows: Rows) -> Bars:
    """Goodput by largest batch."""
    labels = tuple(label.removeprefix("batch ") for label in rows)
    return Bars(title, "largest batch", "goodput (inputs/s)", labels, series_of(rows))


def plans(rows: Rows) -> Table:
    """What every contender's plan is, and what it does at its highest rate: a row each.

    The planner counts on full batches and even arrivals, and takes exits for nested; so goodput differs from its rate.
    """
    return Table(
        "Plans",
        COLUMNS,
        tuple((label, side, *point.cells()) for label, row in rows.items() for side, point in row.items()),
    )


def with_flat_times(
    problem: PlanProblem, inputs: Workload, batch: int, effort: Effort, choose: Choose = decide
) -> tuple[Comparison, ...]:
    """What e3 gains at one batch size with flat times; nothing with quick effort."""
    if effort == "quick":
        return ()
    e3 = ratios_of(by_batch(flat(problem, batch), inputs, (batch,), effort, choose), "e3")
    return (
        Comparison(f"flat times, batch {batch}: e3 / early-exit", e3.over_early_exit),
        Comparison(f"flat times, batch {batch}: e3 / stock", e3.over_stock),
    )
