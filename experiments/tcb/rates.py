"""What TNB, TTB, TCB and packed batches serve at rising rates: the form of TCB's figures 9 to 12."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from earlyexit.order import OrderSpec
from experiments.studies.picture import Lines, Values
from experiments.studies.study import Effort, Table, largest, ratio
from experiments.tcb import cases
from experiments.tcb.cost import Cost
from experiments.tcb.device import Served, Side, serve
from simulator.decisions import IntArray

SIDES: Mapping[str, Side] = {
    "TNB": cases.TNB,
    "TTB": cases.TTB,
    "TCB": cases.TCB,
    "packed, 64 inputs": cases.PACKED,
    "packed, 6400 tokens": cases.PACKED_FULL,
}
RATES: Mapping[Effort, tuple[float, ...]] = {
    "full": (150, 200, 250, 300, 350, 400, 450, 500, 550, 600, 700, 800),
    "quick": (250, 450, 800),
}
REQUESTS: Mapping[Effort, int] = {"full": 12_000, "quick": 1500}

SCHEDULED, UTILITY = "scheduled per s", "utility per s, scheduled"
"""Of those whose batch began before their deadline: what the paper counts."""
ANSWERED, UTILITY_ANSWERED = "answered per s", "utility per s, answered"
"""Of those who were answered before it."""
WAIT = "longest wait s"
SHARE = "answered share"
"""Of all requests."""
MEASURES = (SCHEDULED, UTILITY, ANSWERED, UTILITY_ANSWERED, WAIT, SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRate:
    """Every side at every rate."""

    rates_per_s: tuple[float, ...]
    series: Mapping[str, Values]
    """By measure, then by side."""

    def over(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """How many times the other's largest value the side's is ("maximum throughput")."""
        of = self.series[measure]
        return ratio(largest(of[side]), largest(of[other]))

    def gap(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """How many times the other's it is at the rate where that is most ("maximum performance gap")."""
        of = self.series[measure]
        return largest(ratio(ours, theirs) for ours, theirs in zip(of[side], of[other], strict=True))

    def last_over(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """The same at the highest rate ("after saturation")."""
        of = self.series[measure]
        return ratio(of[side][-1], of[other][-1])

    def holds_per_s(self, side: str, share: float = 0.99) -> float | None:
        """The highest rate of which the share is answered in time, of those simulated."""
        answered = zip(self.rates_per_s, self.series[SHARE][side], strict=True)
        return largest(rate for rate, of_all in answered if of_all is not None and of_all >= share)

    def lines(self, measure: str, title: str, y_label: str) -> Lines:
        """As the paper draws it."""
        return Lines(title, "requests per second", y_label, self.rates_per_s, self.series[measure])

    def table(self) -> Table:
        """All of it."""
        rows = [
            (side, rate, *(self.series[measure][side][at] for measure in MEASURES))
            for side, (at, rate) in product(SIDES, enumerate(self.rates_per_s))
        ]
        return Table("Every side at every rate", ("", "requests/s", *MEASURES), tuple(rows))

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return {"rates_per_s": self.rates_per_s, "series": self.series}


def by_rate(
    drawn: IntArray,
    order: OrderSpec,
    cost: Cost,
    effort: Effort,
    *,
    deadlines_s: tuple[float, float] = cases.DEADLINES_S,
) -> ByRate:
    """Simulate."""
    rates = RATES[effort]
    streams = [cases.stream(rate, REQUESTS[effort], drawn, deadlines_s=deadlines_s) for rate in rates]
    found = {name: [measured(serve(each, side, order, cost)) for each in streams] for name, side in SIDES.items()}
    series = {
        measure: {name: tuple(point[at] for point in points) for name, points in found.items()}
        for at, measure in enumerate(MEASURES)
    }
    return ByRate(rates_per_s=rates, series=series)


def measured(served: Served) -> tuple[float, ...]:
    """In the order of `MEASURES`."""
    began_N, answered_N = served.scheduled_N, served.in_time_N
    return (
        served.per_s(began_N),
        served.utility_per_s(began_N),
        served.per_s(answered_N),
        served.utility_per_s(answered_N),
        served.longest_wait_s,
        float(answered_N.mean()),
    )
