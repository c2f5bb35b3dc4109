"""Apparate, figures 13 to 16: how much sooner answers come, beside the best that exits could do.

Replayed on records at batch 1, without queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from experiments.apparate.cases import Case, cases
from experiments.apparate.one_time import optimal
from experiments.apparate.recording import NEEDS, Kind
from experiments.apparate.strategies import with_moved_ramps, with_planned_ramps
from experiments.apparate.times import Answered
from experiments.studies.served_streams import bars, document, of_kind, run_sides, table
from experiments.studies.study import Comparison, Effort, StudyResult, declare

APPARATE, OURS, OURS_OWN, OPTIMAL = "Apparate", "Offramp", "planned ramps, Apparate's tuner", "optimal"
PAPER: Mapping[Kind, Mapping[str, tuple[float, float]]] = {
    "vision": {"median saved (%)": (40.5, 91.5), "p25 saved (%)": (70.2, 94.2)},
    "text": {"median saved (%)": (10.0, 24.2), "p25 saved (%)": (16.0, 37.3)},
}
"""Lowest and highest over the paper's workloads."""
SIDES: Mapping[str, Callable[[Case], Answered]] = {
    APPARATE: lambda case: with_moved_ramps(case, "apparate").answered,
    OURS_OWN: lambda case: with_planned_ramps(case, "apparate").answered,
    OURS: lambda case: with_planned_ramps(case, "guarantee").answered,
    OPTIMAL: lambda case: optimal(case.stream.served, case.times),
}


def compare(streams: Sequence[Case]) -> StudyResult:
    """Lowest and highest saving of every side over the streams of a kind."""
    found = run_sides(streams, SIDES)
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{kind}, {side}: {word} {figure}", value, wanted if side == APPARATE else None)
            for side in SIDES
            for kind, paper in PAPER.items()
            for figure, range_ in paper.items()
            for ours in (of_kind(found, kind, side, figure),)
            for word, value, wanted in zip(("lowest", "highest"), (min(ours), max(ours)), range_, strict=True)
        ),
        pictures=(bars("Median latency", found, "median saved (%)"), bars("25th percentile", found, "p25 saved (%)")),
        figures={"streams": document(found)},
        tables=(table(found),),
    )


def run(effort: Effort) -> StudyResult:
    """The recorded streams; two made-up ones with quick effort."""
    return compare(cases(effort))


STUDY = declare(__name__, run, needs=NEEDS, makes_up_quick=True)
