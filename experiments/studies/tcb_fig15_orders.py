"""TCB, figure 15: utility of the orders by batch size, variance of the lengths, and row length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from earlyexit.order import OrderSpec
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, largest, ratio
from experiments.tcb import cases
from experiments.tcb.cost import Cost
from experiments.tcb.device import Side, serve
from experiments.tcb.rates import MEASURES, UTILITY, UTILITY_ANSWERED, measured

ORDERS: Mapping[str, OrderSpec] = {
    "DAS": cases.DAS,
    "SJF": OrderSpec(name="shortest"),
    "FCFS": cases.ARRIVAL,
    "DEF": OrderSpec(name="deadline"),
}
"""The paper's names: DAS, shortest job first, first come first served, earliest deadline first."""
OVERLOAD = 1.5
"""Of what the device can do: below it every order serves everybody. The paper does not say."""
BATCHES, VARIANCES, ROWS = (10, 16, 32, 64), (10.0, 20.0, 50.0, 100.0), (100, 200, 300, 400)
MIDDLE = 16
"""The batch where variance and row length change (section 6.2.4)."""
VARIANCE = 20.0
REQUESTS: Mapping[Effort, int] = {"full": 12_000, "quick": 3000}
PAPER_SJF = 1.4
"""DAS over SJF by row length: "about 40 % higher"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One part of the figure."""

    name: str
    x: tuple[float, ...]
    found: Mapping[str, Mapping[str, tuple[float, ...]]]
    """By measure, then by order: a value per x."""

    def das_over(self, measure: str, other: str) -> float | None:
        """The largest ratio."""
        of = self.found[measure]
        return largest(ratio(das, theirs) for das, theirs in zip(of["DAS"], of[other], strict=True))


def swept(name: str, x: Sequence[float], sides: Sequence[tuple[Side, float]], cost: Cost, effort: Effort) -> Sweep:
    """Every order at every point: a side and the variance of the lengths."""
    points: dict[str, list[tuple[float, ...]]] = {order: [] for order in ORDERS}
    for side, variance in sides:
        drawn = cases.lengths(cases.DRAWN, variance)
        per_s = OVERLOAD * cases.capacity(side, drawn[: cases.DRAWN // 2], cost)
        offered = cases.stream(per_s, REQUESTS[effort], drawn)
        for order, spec in ORDERS.items():
            points[order].append(measured(serve(offered, side, spec, cost)))
    found = {
        measure: {order: tuple(point[at] for point in each) for order, each in points.items()}
        for at, measure in enumerate(MEASURES)
    }
    return Sweep(name=name, x=tuple(map(float, x)), found=found)


def sweeps(effort: Effort) -> list[Sweep]:
    """The figure's three parts."""
    cost = cases.paper_device()
    by_batch = [(rows_of(batch), VARIANCE) for batch in BATCHES]
    by_variance = [(rows_of(MIDDLE), variance) for variance in VARIANCES]
    by_row = [(rows_of(MIDDLE, row), VARIANCE) for row in ROWS]
    return [
        swept("batch size", BATCHES, by_batch, cost, effort),
        swept("variance", VARIANCES, by_variance, cost, effort),
        swept("row length", ROWS, by_row, cost, effort),
    ]


def rows_of(batch: int, row: int = cases.ROW) -> Side:
    """TCB's batch of so many rows."""
    return Side(scheme="rows", inputs=cases.ANY, tokens=batch * row, row=row)


def compare(found: Sequence[Sweep]) -> StudyResult:
    """DAS over the others, counted as the paper counts and by answers."""
    papers = {("row length", "SJF"): PAPER_SJF}
    return StudyResult(
        comparisons=tuple(
            Comparison(
                f"utility by {each.name}, DAS / {other}, {word}",
                each.das_over(measure, other),
                papers.get((each.name, other)) if measure == UTILITY else None,
            )
            for measure, word in ((UTILITY, "scheduled"), (UTILITY_ANSWERED, "answered"))
            for each in sorted(found, key=lambda sweep: sweep.name != "row length")
            for other in list(ORDERS)[1:]
        ),
        pictures=tuple(
            Lines(f"Utility by {each.name}", each.name, "sum of 1 / tokens, per second", each.x, each.found[UTILITY])
            for each in found
        ),
        figures={each.name: {"x": each.x, **each.found} for each in found},
        tables=tuple(
            Table(
                f"By {each.name}",
                (each.name, "order", *MEASURES),
                tuple(
                    (x, order, *(each.found[measure][order][at] for measure in MEASURES))
                    for at, x in enumerate(each.x)
                    for order in ORDERS
                ),
            )
            for each in found
        ),
    )


def run(effort: Effort) -> StudyResult:
    """Simulated."""
    return compare(sweeps(effort))


STUDY = declare(__name__, run)
