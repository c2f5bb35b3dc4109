"""TCB, figures 9, 10, 15 and 16: utility, throughput and the cost of orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from earlyexit.engine.queue import OrderSpec
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

VARIANCE = 20.0


def simulated(effort: Effort, deadlines_s: tuple[float, float] = tcb_device.DEADLINES_S) -> ByRate:
    """Simulates every side, scheduled by DAS, at rising rates: figures 9 and 10."""
    drawn = tcb_device.lengths(tcb_device.DRAWN, VARIANCE)
    return by_rate(drawn, tcb_device.DAS, tcb_device.paper_device(), effort, deadlines_s=deadlines_s)


# TCB, figure 9: utility at rising rates.

FIG09_PAPER = {"TNB": 2.20, "TTB": 1.29}
"""TCB's total utility relative to the others' "after saturation" (section 6.2.1)."""
HOLDS = {"TNB": 350.0, "TTB": 350.0, "TCB": 450.0}
"""Requests per second that each handles according to the paper."""
MEASURED = (UTILITY, UTILITY_ANSWERED, SCHEDULED, ANSWERED)
DEADLINES_S: Mapping[str, tuple[float, float]] = {
    "half as long": (0.5, 1.5),
    "as taken": tcb_device.DEADLINES_S,
    "three times as long": (3.0, 9.0),
}


def fig09_run(effort: Effort) -> StudyResult:
    """Runs rates after saturation, with three kinds of deadlines."""
    others = {name: simulated(effort, deadlines_s) for name, deadlines_s in DEADLINES_S.items()}
    found = others["as taken"]
    holds = "rate of which 99 % is answered in time (requests/s)"
    return StudyResult(
        comparisons=(
            *(
                Comparison(f"utility after saturation, TCB / {other}", found.last_over(UTILITY, other), paper)
                for other, paper in FIG09_PAPER.items()
            ),
            *(Comparison(f"{side}: {holds}", found.holds_per_s(side), paper) for side, paper in HOLDS.items()),
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


FIG09_STUDY = declare("tcb_fig09_utility", fig09_run)


# TCB, figure 10: throughput at rising rates.

FIG10_PAPER = {"TNB": 2.22, "TTB": 1.48}
"""The largest ratio of TCB's throughput to the others' (section 6.2.1)."""


def fig10_run(effort: Effort) -> StudyResult:
    """Counts requests that are scheduled before their deadline, as in the paper, and requests that are answered."""
    found, full = simulated(effort), "packed, 6400 tokens"
    return StudyResult(
        comparisons=(
            *(
                Comparison(f"{word} in time, TCB / {other}, where it is most", found.gap(measure, other), paper)
                for measure, word in ((SCHEDULED, "scheduled"), (ANSWERED, "answered"))
                for other, paper in FIG10_PAPER.items()
            ),
            *(
                Comparison(
                    f"answered in time, packed with as many tokens / {other}, where it is most",
                    found.gap(ANSWERED, other, full),
                )
                for other in (*FIG10_PAPER, "TCB")
            ),
        ),
        pictures=(
            found.lines(SCHEDULED, "Throughput, every side scheduled by DAS", "scheduled in time per second"),
            found.lines(ANSWERED, "The same, answered by the deadline", "answered in time per second"),
        ),
        tables=(found.table(),),
    )


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
"""Rate relative to the device's capacity. Below it every order serves all requests. The paper does not state it."""
BATCHES, VARIANCES, ROWS = (10, 16, 32, 64), (10.0, 20.0, 50.0, 100.0), (100, 200, 300, 400)
MIDDLE = 16
"""The batch for which variance and row length vary (section 6.2.4)."""
FIG15_REQUESTS: Mapping[Effort, int] = {"full": 12_000, "quick": 3000}
PAPER_SJF = 1.4
"""DAS over SJF by row length: "about 40 % higher"."""


class Sweep(NamedTuple):
    """One part of the figure."""

    name: str
    x: tuple[float, ...]
    found: Mapping[str, Mapping[str, tuple[float, ...]]]
    """By measure, then by order: a value per x."""

    def das_over(self, measure: str, other: str) -> list[float]:
        """Returns the ratio at every point."""
        of = self.found[measure]
        return [das / theirs for das, theirs in zip(of["DAS"], of[other], strict=True)]


def swept(name: str, sides: Mapping[float, tuple[Side, float]], cost: Cost, effort: Effort) -> Sweep:
    """Runs every order at every point, which is a side and a variance of the lengths."""
    points: dict[str, list[tuple[float, ...]]] = {order: [] for order in FIG15_ORDERS}
    for side, variance in sides.values():
        drawn = tcb_device.lengths(tcb_device.DRAWN, variance)
        per_s = OVERLOAD * tcb_device.capacity(side, drawn[: tcb_device.DRAWN // 2], cost)
        offered = tcb_device.stream(per_s, FIG15_REQUESTS[effort], drawn)
        for order, spec in FIG15_ORDERS.items():
            points[order].append(measured(serve(offered, side, spec, cost)))
    found = {
        measure: {order: tuple(point[at] for point in each) for order, each in points.items()}
        for at, measure in enumerate(MEASURES)
    }
    return Sweep(name, tuple(map(float, sides)), found)


def rows_of(batch: int, row: int = tcb_device.ROW) -> Side:
    """Returns TCB's batch of this number of rows."""
    return Side(scheme="rows", inputs=tcb_device.ANY, tokens=batch * row, row=row)


def fig15_run(effort: Effort) -> StudyResult:
    """Compares DAS with the others, by the paper's counts and by answers."""
    cost = tcb_device.paper_device()
    parts: Mapping[str, Mapping[float, tuple[Side, float]]] = {
        "batch size": {batch: (rows_of(batch), VARIANCE) for batch in BATCHES},
        "variance": {variance: (rows_of(MIDDLE), variance) for variance in VARIANCES},
        "row length": {row: (rows_of(MIDDLE, row), VARIANCE) for row in ROWS},
    }
    found = [swept(name, sides, cost, effort) for name, sides in parts.items()]
    return StudyResult(
        comparisons=(
            Comparison("utility by row length, DAS / SJF, most", max(found[-1].das_over(UTILITY, "SJF")), PAPER_SJF),
            *(
                Comparison(
                    f"all points, DAS / {other}, {word}, {end}",
                    pick(over for each in found for over in each.das_over(measure, other)),
                )
                for measure, word in ((UTILITY, "scheduled"), (UTILITY_ANSWERED, "answered"))
                for other in list(FIG15_ORDERS)[1:]
                for end, pick in (("least", min), ("most", max))
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


FIG15_STUDY = declare("tcb_fig15_orders", fig15_run)


# TCB, figure 16: the time that DAS takes to choose a batch, relative to the batch.

RATES: Mapping[Effort, tuple[float, ...]] = {"full": (50, 100, 200, 300, 400, 600, 800), "quick": (100, 400)}
PAPERS_RATE = 400.0
FIG16_PAPER = 2.0
"""Percent of a batch's time at 400 requests per second (section 6.2.5)."""
FIG16_REQUESTS: Mapping[Effort, int] = {"full": 12_000, "quick": 1500}
FIG16_ORDERS = {"DAS": tcb_device.DAS, "SJF": tcb_device.SHORTEST, "deadline, the default": OrderSpec()}


def share(served: Served) -> float:
    """Returns the time of choosing batches in percent of the batches' time; sums hide the clock's resolution."""
    return 100 * float(served.choosing_s.sum()) / float(served.batch_s.sum())


def fig16_run(effort: Effort) -> StudyResult:
    """Measures the live engine's choices on the simulated clock, relative to the batches of a published V100."""
    drawn, cost, rates = tcb_device.lengths(tcb_device.DRAWN, VARIANCE), tcb_device.paper_device(), RATES[effort]
    streams = [tcb_device.stream(rate, FIG16_REQUESTS[effort], drawn) for rate in rates]
    found: Mapping[str, Sequence[Served]] = {
        name: [serve(each, tcb_device.TCB, order, cost) for each in streams] for name, order in FIG16_ORDERS.items()
    }
    shares = {order: tuple(map(share, each)) for order, each in found.items()}
    at, das, speed_up = rates.index(PAPERS_RATE), shares["DAS"], cost.token_s / published_v100().token_s
    return StudyResult(
        comparisons=(
            Comparison("DAS at 400 requests/s (% of a batch)", das[at], FIG16_PAPER),
            *(
                Comparison(f"{order} at 400 requests/s (% of a batch)", of[at])
                for order, of in list(shares.items())[1:]
            ),
            Comparison(f"DAS at {rates[-1]:g} requests/s, overloaded (% of a batch)", das[-1]),
        ),
        pictures=(Lines("Choosing a batch, beside running it", "requests per second", "% of a batch", rates, shares),),
        tables=(
            Table(
                f"Processor time of a choice; the published V100 is {speed_up:.0f} times as fast as this device",
                ("order", "requests/s", "inputs of a batch", "us per choice", "us per input", "% of a batch"),
                tuple(
                    (order, rate, *_costs(served))
                    for order, each in found.items()
                    for rate, served in zip(rates, each, strict=True)
                ),
            ),
        ),
    )


def _costs(served: Served) -> tuple[float | None, ...]:
    microseconds, inputs = 1e6 * float(served.choosing_s.sum()), float(served.batch_inputs.sum())
    batches = float(len(served.batch_s))
    return inputs / batches, ratio(microseconds, batches), ratio(microseconds, inputs), share(served)


FIG16_STUDY = declare("tcb_fig16_overhead", fig16_run)
