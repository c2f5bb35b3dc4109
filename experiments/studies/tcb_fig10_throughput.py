"""TCB, figure 10: throughput at rising rates, every side scheduled by DAS."""

from __future__ import annotations

from experiments.studies.study import Comparison, Effort, StudyResult, declare
from experiments.studies.tcb_fig09_utility import simulated
from experiments.tcb.rates import ANSWERED, SCHEDULED, ByRate

PAPER = {"TNB": 2.22, "TTB": 1.48}
"""The largest ratio of TCB's throughput to theirs (section 6.2.1)."""


def compare(found: ByRate) -> StudyResult:
    """What is scheduled before its deadline, as the paper counts, and what is answered."""
    counts = ((SCHEDULED, "scheduled"), (ANSWERED, "answered"))
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{word} in time, TCB / {other}, where it is most", found.gap(measure, other), paper)
            for measure, word in counts
            for other, paper in PAPER.items()
        )
        + tuple(
            Comparison(f"answered in time, packed with as many tokens / {other}, where it is most", ours)
            for other in (*PAPER, "TCB")
            for ours in (found.gap(ANSWERED, other, "packed, 6400 tokens"),)
        ),
        pictures=(
            found.lines(SCHEDULED, "Throughput, every side scheduled by DAS", "scheduled in time per second"),
            found.lines(ANSWERED, "The same, answered by the deadline", "answered in time per second"),
        ),
        figures=found.document(),
        tables=(found.table(),),
    )


def run(effort: Effort) -> StudyResult:
    """Simulated at all rates."""
    return compare(simulated(effort))


STUDY = declare(__name__, run)
