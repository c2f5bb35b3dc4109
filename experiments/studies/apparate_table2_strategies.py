"""Apparate, table 2: early-exit models as they were before it, all ramps always on and thresholds set once.

Replayed on records. BranchyNet and DeeBERT give every ramp the same threshold, their "+" variants one each, both tuned
on a sample of the stream; "opt" is tuned on the very stream it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.apparate.cases import BUDGET, RAMP_BUDGET, Case, cases
from experiments.apparate.one_time import answered, greedy_thresholds, same_threshold, sampled
from experiments.apparate.recording import NEEDS, Kind
from experiments.apparate.strategies import Budgets, with_moved_ramps, with_planned_ramps
from experiments.apparate.times import Answered
from experiments.studies.served_streams import bars, document, of_kind, run_sides, table
from experiments.studies.study import Comparison, Effort, StudyResult, declare
from profiles.records import ExitRecords

SAMPLE = 0.1
SEED = 0
EVERYWHERE = 10.0
"""A ramp budget that allows all of them, as the paper gives Apparate here."""
APPARATE, SAME, EACH, OPT, OURS = "Apparate", "one threshold", "a threshold each", "tuned on the stream", "Offramp"
AGREEMENT, MEDIAN, P95 = "agreement (%)", "median saved (%)", "p95 saved (%)"
PAPER: Mapping[Kind, Mapping[str, Mapping[str, tuple[float, float]]]] = {
    "vision": {
        APPARATE: {AGREEMENT: (99.0, 99.2), MEDIAN: (40.9, 88.6), P95: (-1.6, 0.0)},
        SAME: {AGREEMENT: (85.8, 99.8), MEDIAN: (-11.0, 88.3), P95: (-11.0, -11.0)},
        EACH: {AGREEMENT: (76.1, 99.9), MEDIAN: (-11.0, 88.3), P95: (-11.0, -11.0)},
        OPT: {AGREEMENT: (99.0, 99.7), MEDIAN: (-11.0, 74.5), P95: (-11.0, -11.0)},
    },
    "text": {
        APPARATE: {AGREEMENT: (99.1, 99.3), MEDIAN: (9.1, 24.1), P95: (0.7, 1.8)},
        SAME: {AGREEMENT: (91.7, 97.1), MEDIAN: (13.2, 36.1), P95: (-1.3, 6.4)},
        EACH: {AGREEMENT: (82.2, 90.3), MEDIAN: (31.7, 36.1), P95: (5.9, 6.4)},
        OPT: {AGREEMENT: (99.0, 99.0), MEDIAN: (9.8, 36.1), P95: (-1.4, 6.4)},
    },
}
"""Lowest and highest over the paper's workloads: ResNet-50 against BranchyNet, BERT-base against DeeBERT."""


def all_ramps(case: Case, thresholds: Mapping[int, float]) -> Answered:
    """Every ramp is evaluated, always."""
    return answered(case.stream.served, thresholds, case.times)


def sample(case: Case) -> ExitRecords:
    """Of what is to come."""
    return sampled(case.stream.served, SAMPLE, np.random.default_rng(SEED))


def tuned_on_the_stream(case: Case) -> Answered:
    """The better of one threshold and one each, chosen by what is to come."""
    served, ramps = case.stream.served, case.times.ramps
    found = (tune(served, BUDGET, case.times, ramps) for tune in (same_threshold, greedy_thresholds))
    return max((all_ramps(case, thresholds) for thresholds in found), key=lambda each: each.mean_saved)


SIDES: Mapping[str, Callable[[Case], Answered]] = {
    APPARATE: lambda case: with_moved_ramps(case, "apparate", Budgets(ramps=EVERYWHERE)).answered,
    SAME: lambda case: all_ramps(case, same_threshold(sample(case), BUDGET, case.times, case.times.ramps)),
    EACH: lambda case: all_ramps(case, greedy_thresholds(sample(case), BUDGET, case.times, case.times.ramps)),
    OPT: tuned_on_the_stream,
    OURS: lambda case: with_planned_ramps(case, "guarantee", Budgets(ramps=RAMP_BUDGET)).answered,
}


def compare(streams: Sequence[Case]) -> StudyResult:
    """Lowest and highest figure of every side over the streams of a kind."""
    found = run_sides(streams, SIDES)
    comparisons = []
    for kind, paper in PAPER.items():
        for side in SIDES:
            for figure in (AGREEMENT, MEDIAN, P95):
                ours = of_kind(found, kind, side, figure)
                theirs = paper[side][figure] if side in paper else (None, None)
                for word, value, wanted in zip(("lowest", "highest"), (min(ours), max(ours)), theirs, strict=True):
                    comparisons.append(Comparison(f"{kind}, {side}: {word} {figure}", value, wanted))
    return StudyResult(
        comparisons=tuple(comparisons),
        pictures=(bars("Thresholds set once, and while serving", found, AGREEMENT),),
        figures={"streams": document(found)},
        tables=(table(found),),
    )


def run(effort: Effort) -> StudyResult:
    """The recorded streams; two made-up ones with quick effort."""
    return compare(cases(effort))


STUDY = declare(__name__, run, needs=NEEDS, makes_up_quick=True)
