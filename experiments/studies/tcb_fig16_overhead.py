"""TCB, figure 16: what choosing a batch by DAS costs, beside the batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from earlyexit.order import OrderSpec
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, ratio
from experiments.tcb import cases
from experiments.tcb.cost import published_v100
from experiments.tcb.device import Served, serve

RATES: Mapping[Effort, tuple[float, ...]] = {"full": (50, 100, 200, 300, 400, 600, 800), "quick": (100, 400)}
PAPERS_RATE = 400.0
PAPER = 2.0
"""Percent of a batch's time at 400 requests per second (section 6.2.5)."""
REQUESTS: Mapping[Effort, int] = {"full": 12_000, "quick": 1500}
VARIANCE = 20.0
ORDERS = {"DAS": cases.DAS, "SJF": cases.SHORTEST, "deadline, the default": OrderSpec()}


def share(served: Served) -> float:
    """Percent of the batches' seconds that went into choosing them: sums, so a tick of the clock does not count."""
    return 100 * float(served.choosing_s.sum()) / float(served.batch_s.sum())


def compare(rates_per_s: tuple[float, ...], found: Mapping[str, tuple[Served, ...]], speed_up: float) -> StudyResult:
    """At the paper's rate; and the same choices beside a V100 that runs as published."""
    shares = {order: tuple(map(share, each)) for order, each in found.items()}
    at = rates_per_s.index(PAPERS_RATE)
    return StudyResult(
        comparisons=(
            Comparison("DAS at 400 requests/s (% of a batch)", shares["DAS"][at], PAPER),
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
        figures={"rates_per_s": rates_per_s, "share": shares, "speed_up": speed_up},
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


def run(effort: Effort) -> StudyResult:
    """Choices by the live engine on the simulated clock; what they cost is real."""
    drawn, cost, rates = cases.lengths(cases.DRAWN, VARIANCE), cases.paper_device(), RATES[effort]
    streams = [cases.stream(rate, REQUESTS[effort], drawn) for rate in rates]
    found = {name: tuple(serve(each, cases.TCB, order, cost) for each in streams) for name, order in ORDERS.items()}
    return compare(rates, found, cost.token_s / published_v100().token_s)


STUDY = declare(__name__, run)
