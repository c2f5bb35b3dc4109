"""TCB, figures 9, 10, 15 and 16: utility, throughput and the price of orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.engine.order import OrderSpec
from experiments import tcb_device
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, ratio
from experiments.tcb_device import (
    ANSWERED,
    MEASURES,
    SCHEDULED,
    UTILITY,
    UTILITY_ANSWERED,
    ByRate,
    Cost,
    Served,
    Side,
    by_rate,
    measured,
    published_v100,
    serve,
)

# TCB, figure 9: utility at rising rates, every side scheduled by DAS.

VARIANCE = 20.0
FIG09_PAPER = {"TNB": 2.20, "TTB": 1.29}
"""TCB's total utility over theirs "after saturation" (section 6.2.1)."""
HOLDS = {"TNB": 350.0, "TTB": 350.0, "TCB": 450.0}
"""Requests per second that the paper says they handle."""
MEASURED = (UTILITY, UTILITY_ANSWERED, SCHEDULED, ANSWERED)
DEADLINES_S: Mapping[str, tuple[float, float]] = {
    "half as long": (0.5, 1.5),
    "as taken": tcb_device.DEADLINES_S,
    "three times as long": (3.0, 9.0),
}


def simulated(effort: Effort, deadlines_s: tuple[float, float] = tcb_device.DEADLINES_S) -> ByRate:
    """Figures 9 and 10."""
    drawn = tcb_device.lengths(tcb_device.DRAWN, VARIANCE)
    return by_rate(drawn, tcb_device.DAS, tcb_device.paper_device(), effort, deadlines_s=deadlines_s)


def fig09_compare(found: ByRate, others: Mapping[str, ByRate]) -> StudyResult:
    """After saturation, and by other deadlines."""
    ratios = (
        Comparison(f"utility after saturation, TCB / {other}", found.last_over(UTILITY, other), paper)
        for other, paper in FIG09_PAPER.items()
    )
    return StudyResult(
        comparisons=(
            *ratios,
            *(
                Comparison(
                    f"{side}: rate of which 99 % is answered in time (requests/s)", found.holds_per_s(side), paper
                )
                for side, paper in HOLDS.items()
            ),
        ),
        pictures=(found.lines(UTILITY, "Utility, every side scheduled by DAS", "sum of 1 / tokens, per second"),),
        tables=(
            Table(
                "At the highest rate, by how long deadlines are: TCB / other",
                ("deadlines", "other", "utility, scheduled", "utility, answered", "scheduled", "answered"),
                tuple(
                    (name, other, *(each.last_over(measure, other) for measure in MEASURED))
                    for name, each in others.items()
                    for other in (*FIG09_PAPER, "packed, 6400 tokens")
                ),
            ),
            found.table(),
        ),
    )


def fig09_run(effort: Effort) -> StudyResult:
    """Simulated at all rates, by three kinds of deadlines."""
    by_deadlines = {name: simulated(effort, deadlines_s) for name, deadlines_s in DEADLINES_S.items()}
    return fig09_compare(by_deadlines["as taken"], by_deadlines)


FIG09_STUDY = declare("tcb_fig09_utility", fig09_run)


# TCB, figure 10: throughput at rising rates, every side scheduled by DAS.

FIG10_PAPER = {"TNB": 2.22, "TTB": 1.48}
"""The largest ratio of TCB's throughput to theirs (section 6.2.1)."""


def fig10_compare(found: ByRate) -> StudyResult:
    """What is scheduled before its deadline, as the paper counts, and what is answered."""
    counts = ((SCHEDULED, "scheduled"), (ANSWERED, "answered"))
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{word} in time, TCB / {other}, where it is most", found.gap(measure, other), paper)
            for measure, word in counts
            for other, paper in FIG10_PAPER.items()
        )
        + tuple(
            Comparison(f"answered in time, packed with as many tokens / {other}, where it is most", ours)
            for other in (*FIG10_PAPER, "TCB")
            for ours in (found.gap(ANSWERED, other, "packed, 6400 tokens"),)
        ),
        pictures=(
            found.lines(SCHEDULED, "Throughput, every side scheduled by DAS", "scheduled in time per second"),
            found.lines(ANSWERED, "The same, answered by the deadline", "answered in time per second"),
        ),
        tables=(found.table(),),
    )


def fig10_run(effort: Effort) -> StudyResult:
    """Simulated at all rates."""
    return fig10_compare(simulated(effort))


FIG10_STUDY = declare("tcb_fig10_throughput", fig10_run)


# TCB, figure 15: utility of the orders by batch size, variance of the lengths, and row length.

FIG15_ORDERS: Mapping[str, OrderSpec] = {
    "DAS": tcb_device.DAS,
    "SJF": tcb_device.SHORTEST,
    "FCFS": tcb_device.ARRIVAL,
    "DEF": tcb_device.DEADLINE,
}
"""The paper's names: DAS, shortest job first, first come first served, earliest deadline first."""
OVERLOAD = 1.5
"""Of what the device can do: below it every order serves all requests. The paper does not say."""
BATCHES, VARIANCES, ROWS = (10, 16, 32, 64), (10.0, 20.0, 50.0, 100.0), (100, 200, 300, 400)
MIDDLE = 16
"""The batch where variance and row length change (section 6.2.4)."""
FIG15_REQUESTS: Mapping[Effort, int] = {"full": 12_000, "quick": 3000}
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
    points: dict[str, list[tuple[float, ...]]] = {order: [] for order in FIG15_ORDERS}
    for side, variance in sides:
        drawn = tcb_device.lengths(tcb_device.DRAWN, variance)
        per_s = OVERLOAD * tcb_device.capacity(side, drawn[: tcb_device.DRAWN // 2], cost)
        offered = tcb_device.stream(per_s, FIG15_REQUESTS[effort], drawn)
        for order, spec in FIG15_ORDERS.items():
            points[order].append(measured(serve(offered, side, spec, cost)))
    found = {
        measure: {order: tuple(point[at] for point in each) for order, each in points.items()}
        for at, measure in enumerate(MEASURES)
    }
    return Sweep(name=name, x=tuple(map(float, x)), found=found)


def sweeps(effort: Effort) -> list[Sweep]:
    """The figure's three parts."""
    cost = tcb_device.paper_device()
    by_batch = [(rows_of(batch), VARIANCE) for batch in BATCHES]
    by_variance = [(rows_of(MIDDLE), variance) for variance in VARIANCES]
    by_row = [(rows_of(MIDDLE, row), VARIANCE) for row in ROWS]
    return [
        swept("batch size", BATCHES, by_batch, cost, effort),
        swept("variance", VARIANCES, by_variance, cost, effort),
        swept("row length", ROWS, by_row, cost, effort),
    ]


def rows_of(batch: int, row: int = tcb_device.ROW) -> Side:
    """TCB's batch of so many rows."""
    return Side(scheme="rows", inputs=tcb_device.ANY, tokens=batch * row, row=row)


def fig15_compare(found: Sequence[Sweep]) -> StudyResult:
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
                for other in list(FIG15_ORDERS)[1:]
                for end, pick in ends
            ),
        ),
        pictures=tuple(
            Lines(f"Utility by {each.name}", each.name, "sum of 1 / tokens, per second", each.x, each.found[UTILITY])
            for each in found
        ),
        tables=tuple(
            Table(
                f"By {each.name}",
                (each.name, "order", *MEASURES),
                tuple(
                    (x, order, *(each.found[measure][order][at] for measure in MEASURES))
                    for at, x in enumerate(each.x)
                    for order in FIG15_ORDERS
                ),
            )
            for each in found
        ),
    )


def fig15_run(effort: Effort) -> StudyResult:
    """Simulated."""
    return fig15_compare(sweeps(effort))


FIG15_STUDY = declare("tcb_fig15_orders", fig15_run)


# TCB, figure 16: what choosing a batch by DAS costs, beside the batch.

RATES: Mapping[Effort, tuple[float, ...]] = {"full": (50, 100, 200, 300, 400, 600, 800), "quick": (100, 400)}
PAPERS_RATE = 400.0
FIG16_PAPER = 2.0
"""Percent of a batch's time at 400 requests per second (section 6.2.5)."""
FIG16_REQUESTS: Mapping[Effort, int] = {"full": 12_000, "quick": 1500}
FIG16_ORDERS = {"DAS": tcb_device.DAS, "SJF": tcb_device.SHORTEST, "deadline, the default": OrderSpec()}


def share(served: Served) -> float:
    """Percent of the batches' seconds that went into choosing them: sums, so a tick of the clock does not count."""
    return 100 * float(served.choosing_s.sum()) / float(served.batch_s.sum())


def fig16_compare(
    rates_per_s: tuple[float, ...], found: Mapping[str, tuple[Served, ...]], speed_up: float
) -> StudyResult:
    """At the paper's rate; and the same choices beside a V100 that runs as published."""
    shares = {order: tuple(map(share, each)) for order, each in found.items()}
    at = rates_per_s.index(PAPERS_RATE)
    return StudyResult(
        comparisons=(
            Comparison("DAS at 400 requests/s (% of a batch)", shares["DAS"][at], FIG16_PAPER),
            *(
                Comparison(f"{order} at 400 requests/s (% of a batch)", of[at])
                for order, of in shares.items()
                if order != "DAS"
            ),
            Comparison(
                f"DAS at {rates_per_s[-1]:g} requests/s, overloaded (% of a batch)",
                shares["DAS"][-1],
            ),
        ),
        pictures=(
            Lines("Choosing a batch, beside running it", "requests per second", "% of a batch", rates_per_s, shares),
        ),
        tables=(
            Table(
                f"Processor time of a choice; the published V100 is {speed_up:.0f} times as fast as this device",
                ("order", "requests/s", "inputs of a batch", "us per choice", "us per input", "% of a batch"),
                tuple(
                    (order, rate, *_costs(served))
                    for order, each in found.items()
                    for rate, served in zip(rates_per_s, each, strict=True)
                ),
            ),
        ),
    )


def _costs(served: Served) -> tuple[float, float | None, float | None, float]:
    microseconds, inputs = 1e6 * float(served.choosing_s.sum()), float(served.batch_inputs.sum())
    batches = float(len(served.batch_s))
    return (
        float(np.mean(served.batch_inputs)),
        ratio(microseconds, batches),
        ratio(microseconds, inputs),
        share(served),
    )


def fig16_run(effort: Effort) -> StudyResult:
    """Choices by the live engine on the simulated clock; what they cost is real."""
    drawn, cost, rates = tcb_device.lengths(tcb_device.DRAWN, VARIANCE), tcb_device.paper_device(), RATES[effort]
    streams = [tcb_device.stream(rate, FIG16_REQUESTS[effort], drawn) for rate in rates]
    found = {
        name: tuple(serve(each, tcb_device.TCB, order, cost) for each in streams)
        for name, order in FIG16_ORDERS.items()
    }
    return fig16_compare(rates, found, cost.token_s / published_v100().token_s)


FIG16_STUDY = declare("tcb_fig16_overhead", fig16_run)
