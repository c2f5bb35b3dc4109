"""TCB, figure 9: utility at rising rates, every side scheduled by DAS."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from experiments.tcb import cases
from experiments.tcb.rates import ANSWERED, SCHEDULED, UTILITY, UTILITY_ANSWERED, ByRate, by_rate

VARIANCE = 20.0
PAPER = {"TNB": 2.20, "TTB": 1.29}
"""TCB's total utility over theirs "after saturation" (section 6.2.1)."""
HOLDS = {"TNB": 350.0, "TTB": 350.0, "TCB": 450.0}
"""Requests per second that the paper says they handle."""
MEASURED = (UTILITY, UTILITY_ANSWERED, SCHEDULED, ANSWERED)
DEADLINES_S: Mapping[str, tuple[float, float]] = {
    "half as long": (0.5, 1.5),
    "as taken": cases.DEADLINES_S,
    "three times as long": (3.0, 9.0),
}


def simulated(effort: Effort, deadlines_s: tuple[float, float] = cases.DEADLINES_S) -> ByRate:
    """Figures 9 and 10."""
    drawn = cases.lengths(cases.DRAWN, VARIANCE)
    return by_rate(drawn, cases.DAS, cases.paper_device(), effort, deadlines_s=deadlines_s)


def compare(found: ByRate, others: Mapping[str, ByRate]) -> StudyResult:
    """After saturation, and by other deadlines."""
    ratios = (
        Comparison(f"utility after saturation, TCB / {other}", found.last_over(UTILITY, other), paper)
        for other, paper in PAPER.items()
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
        figures={name: each.document() for name, each in others.items()},
        tables=(
            Table(
                "At the highest rate, by how long deadlines are: TCB / other",
                ("deadlines", "other", "utility, scheduled", "utility, answered", "scheduled", "answered"),
                tuple(
                    (name, other, *(each.last_over(measure, other) for measure in MEASURED))
                    for name, each in others.items()
                    for other in (*PAPER, "packed, 6400 tokens")
                ),
            ),
            found.table(),
        ),
    )


def run(effort: Effort) -> StudyResult:
    """Simulated at all rates, by three kinds of deadlines."""
    by_deadlines = {name: simulated(effort, deadlines_s) for name, deadlines_s in DEADLINES_S.items()}
    return compare(by_deadlines["as taken"], by_deadlines)


STUDY = declare(__name__, run)
