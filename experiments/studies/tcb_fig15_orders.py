"""TCB, figure 15: utility of the orders by batch size, variance of the lengths, and row length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from earlyexit.order import OrderSpec
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from experiments.tcb import cases
from experiments.tcb.cost import Cost
from experiments.tcb.device import Side, serve
from experiments.tcb.rates import MEASURES, UTILITY, UTILITY_ANSWERED, measured

ORDERS: Mapping[str, OrderSpec] = {
    "DAS": cases.DAS,
    "SJF": cases.SHORTEST,
    "FCFS": cases.ARRIVAL,
    "DEF": cases.DEADLINE,
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

    def das_over(self, measure: str, other: str) -> list[float]:
        """The ratio at every point."""
        of = self.found[measure]
        return [das / theirs for das, theirs in zip(of["DAS"], of[other], strict=True)]


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
    by_row = next((each for each in found if each.name == "row length"), found[0])
    ends = (("least", min), ("most", max))
    return StudyResult(
        comparisons=(
            Comparison("utility by row length, DAS / SJF, most", max(by_row.das_over(UTILITY, "SJF")), PAPER_SJF),
            *(
                Comparison(
                    f"all points, DAS / {other}, {word}, {end}",
                    pick(ratio for each in found for ratio in each.das_over(measure, other)),
                )
                for measure, word in ((UTILITY, "scheduled"), (UTILITY_ANSWERED, "answered"))
                for other in list(ORDERS)[1:]
                for end, pick in ends
            ),
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
