"""Strategies side by side at several batch sizes: the form of most of E3's goodput figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.studies.kit import Bars, Effort
from experiments.studies.sides import Workload, decide, facing, goodput
from optimizer.decision import Decision, NoPlan
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit
from simulator.goodput import Capacity

Choose = Callable[[PlanProblem], Mapping[str, Decision]]
"""From a problem to every side's decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A side at one batch size."""

    decision: Decision
    capacity: Capacity | None
    """None where there is no plan."""

    @property
    def rate_per_s(self) -> float | None:
        return None if self.capacity is None else self.capacity.rate_per_s

    @property
    def ramps(self) -> tuple[int, ...]:
        """Those that are active; none without a plan."""
        if isinstance(self.decision, NoPlan):
            return ()
        return tuple(ramp for stage in self.decision.stages for split in stage.splits for ramp in split.ramps)

    def document(self) -> dict[str, Any] | None:
        """The plan, and what it did at its highest rate, as plain data."""
        if isinstance(self.decision, NoPlan) or self.capacity is None:
            return None
        figures = self.capacity.figures
        return {
            "goodput_per_s": self.capacity.rate_per_s,
            "planned_per_s": self.decision.figures.rate_per_s,
            "stages": [
                [
                    stage.device,
                    stage.replicas,
                    [[each.first, each.end, each.batch, each.ramps] for each in stage.splits],
                ]
                for stage in self.decision.stages
            ],
            "p99_s": None if figures is None else figures.p99_s,
            "utilisation": None if figures is None else figures.utilisation,
            "fill": None if figures is None else [split.fill for split in figures.splits],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ByBatch:
    """Every side at every batch size."""

    words: str
    """Of the workload."""
    batches: tuple[int, ...]
    points: Mapping[str, tuple[Point, ...]]
    """By side; a point per batch size."""

    @property
    def rates(self) -> dict[str, tuple[float | None, ...]]:
        """Goodput in inputs per second; None where there is no plan."""
        return {name: tuple(point.rate_per_s for point in points) for name, points in self.points.items()}

    def bars(self, title: str) -> Bars:
        """As a picture."""
        return Bars(
            title=title,
            x_label="largest batch",
            y_label="goodput (inputs/s)",
            labels=tuple(map(str, self.batches)),
            series=self.rates,
        )

    def document(self) -> dict[str, Any]:
        """Plain data."""
        sides = {name: [point.document() for point in points] for name, points in self.points.items()}
        return {"exits": self.words, "batches": self.batches, "sides": sides}


def by_batch(
    problem: PlanProblem, inputs: Workload, batches: Sequence[int], effort: Effort, choose: Choose = decide
) -> ByBatch:
    """Plan and simulate every side at every largest batch size."""
    points: dict[str, list[Point]] = {}
    for batch in batches:
        limited = with_batch_limit(facing(problem, inputs), batch)
        for name, decision in choose(limited).items():
            capacity = goodput(limited, decision, inputs, effort)
            points.setdefault(name, []).append(Point(decision=decision, capacity=capacity))
    by_side = {name: tuple(each) for name, each in points.items()}
    return ByBatch(words=inputs.words, batches=tuple(batches), points=by_side)
