"""What every side needs for a fixed rate, by batch limit: the form of E3's figures 14 and 15 (section 5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.problems import PLENTY
from experiments.studies.cheapest import Need, need
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, flat, like_e3
from experiments.studies.picture import Bars, Values
from experiments.studies.sides import BATCHES, SIDES, Workload, facing
from experiments.studies.study import Comparison, Effort, StudyResult, Table, largest_ratios, ratio
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit

BASELINES = ("stock", "early-exit")

Needs = Mapping[str, tuple[Need | None, ...]]
"""By side, one per batch limit; None where no plan holds the rate."""
Case = tuple[PlanProblem, Workload]
"""Circumstances that are asked for at the largest batch alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRate:
    """All needs."""

    rate_per_s: float
    batches: tuple[int, ...]
    needs: Needs
    cases: Mapping[str, Needs]
    """By name; at the largest batch."""

    @property
    def by_label(self) -> dict[str, dict[str, Need | None]]:
        """By "batch 8" and side; then every case."""
        rows = {
            f"batch {batch}": {side: row[at] for side, row in self.needs.items()}
            for at, batch in enumerate(self.batches)
        }
        of_cases = {
            f"batch {self.batches[-1]}, {name}": {side: row[-1] for side, row in needs.items()}
            for name, needs in self.cases.items()
        }
        return rows | of_cases


def e3_cases(cluster: PlanProblem, published: PlanProblem, inputs: Workload) -> dict[str, Case]:
    """Accelerators as fast as published; E3's, which a batch of 8 does not fill; and its exits and ramps, too."""
    return {
        "published speed": (published, inputs),
        "flat times": (flat(cluster, LARGEST_BATCH), inputs),
        "E3's circumstances": (like_e3(cluster), even_exits(cluster)),
    }


def fixed_rate(
    cluster: PlanProblem, inputs: Workload, cases: Mapping[str, Case], effort: Effort, *, rate_per_s: float
) -> FixedRate:
    """What every side needs: at each batch limit, and in other cases at the largest."""
    batches = BATCHES[effort]
    return FixedRate(
        rate_per_s=rate_per_s,
        batches=batches,
        needs=_needs(cluster, inputs, batches, effort, rate_per_s),
        cases={name: _needs(*case, batches[-1:], effort, rate_per_s) for name, case in cases.items()},
    )


def _needs(cluster: PlanProblem, inputs: Workload, batches: Sequence[int], effort: Effort, rate_per_s: float) -> Needs:
    """With more accelerators than the rate takes."""
    plenty = {name: replace(supply, count=PLENTY) for name, supply in cluster.devices.items()}
    problem = facing(replace(cluster, devices=plenty), inputs)
    limited = [with_batch_limit(problem, batch) for batch in batches]
    return {side: tuple(need(each, side, inputs, effort, rate_per_s=rate_per_s) for each in limited) for side in SIDES}


def dearer(row: Mapping[str, Need | None]) -> dict[str, float | None]:
    """How many times e3's cost each baseline has."""
    usd = {side: None if each is None else each.usd_per_hour for side, each in row.items()}
    return {other: ratio(usd[other], usd["e3"]) for other in BASELINES}


def usd_per_hour(needs: Needs) -> dict[str, tuple[float | None, ...]]:
    """Cost by side."""
    return {side: tuple(None if each is None else each.usd_per_hour for each in row) for side, row in needs.items()}


def result_of(found: FixedRate, title: str, unit: str, series: Values) -> StudyResult:
    """Costs of the baselines over e3's, the largest batch first, then the other cases; who buys what."""
    labels, usd = list(found.by_label), usd_per_hour(found.needs)
    by_batch = len(found.batches)
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{other} / e3, {label}", value)
            for label in [*reversed(labels[:by_batch]), *labels[by_batch:]]
            for other, value in dearer(found.by_label[label]).items()
        ),
        pictures=(Bars(title, "largest batch", unit, tuple(map(str, found.batches)), series),),
        e3=largest_ratios(usd, "e3", lower_is_better=True),
        best=largest_ratios(usd, "best", lower_is_better=True),
        figures={
            "rate_per_s": found.rate_per_s,
            "batches": found.batches,
            "needs": _document(found.needs),
            "cases": {name: _document(each) for name, each in found.cases.items()},
        },
        tables=(
            Table(
                "Who holds the rate with what, and what the cost model asks for",
                ("", "side", "buys", "USD/h", "in time", "cost model", "USD/h", "in time"),
                tuple(
                    (label, side, *(["no plan"] if each is None else [*each.cells()]))
                    for label, row in found.by_label.items()
                    for side, each in row.items()
                ),
            ),
        ),
    )


def _document(needs: Needs) -> dict[str, Any]:
    return {side: [None if each is None else each.document() for each in row] for side, row in needs.items()}
