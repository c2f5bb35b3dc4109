"""Apparate, table 1: thresholds tuned once, on the beginning or on a sample, against thresholds that are tuned on.

Replayed on records of eight drifting streams, with the same evenly spaced ramps for every side but one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.apparate.cases import BUDGET, RAMP_BUDGET, Case, cases
from experiments.apparate.one_time import answered, greedy_thresholds, sampled
from experiments.apparate.recording import NEEDS, Kind
from experiments.apparate.strategies import with_even_ramps, with_planned_ramps
from experiments.apparate.times import Answered
from experiments.studies.served_streams import Found, bars, document, mean, run_sides, table
from experiments.studies.study import Effort, StudyResult, declare, facts
from optimizer.live.ramp_mover import spread_out
from profiles.records import ExitRecords

SAMPLE = 0.1
"""Of the stream, drawn evenly: as much as the beginning."""
SEED = 0
INITIAL, SAMPLED, CONTINUAL = "initial only", "uniformly sampled", "continual"
GUARANTEE, OFFRAMP = "continual, guarantee", "planned ramps, guarantee"
PAPER: Mapping[Kind, Mapping[str, tuple[float, float]]] = {
    "vision": {INITIAL: (84.5, 74.3), SAMPLED: (90.3, 64.2), CONTINUAL: (98.6, 43.5)},
    "text": {INITIAL: (86.8, 73.6), SAMPLED: (87.7, 69.4), CONTINUAL: (98.3, 26.6)},
}
"""Agreement and median saved (%), over the paper's CV and NLP workloads."""


def tuned_once(case: Case, records: ExitRecords) -> Answered:
    """With the thresholds that these inputs allow."""
    ramps = spread_out(case.times, RAMP_BUDGET)
    return answered(case.stream.served, greedy_thresholds(records, BUDGET, case.times, ramps), case.times)


def sample(case: Case) -> ExitRecords:
    """Of what is to come."""
    return sampled(case.stream.served, SAMPLE, np.random.default_rng(SEED))


SIDES: Mapping[str, Callable[[Case], Answered]] = {
    INITIAL: lambda case: tuned_once(case, case.stream.initial),
    SAMPLED: lambda case: tuned_once(case, sample(case)),
    CONTINUAL: lambda case: with_even_ramps(case, "apparate").answered,
    GUARANTEE: lambda case: with_even_ramps(case, "guarantee").answered,
    OFFRAMP: lambda case: with_planned_ramps(case, "guarantee").answered,
}


def compare(streams: Sequence[Case]) -> StudyResult:
    """Agreement and savings by kind of stream, and in how many streams the budget was kept."""
    found = run_sides(streams, SIDES)
    return StudyResult(
        comparisons=tuple(
            mean(found, kind, side, figure, paper.get(side, (None, None))[index])
            for kind, paper in PAPER.items()
            for side in SIDES
            for index, figure in enumerate(("agreement (%)", "median saved (%)"))
        ),
        pictures=(bars("Tuned once, and on and on", found, "agreement (%)"),),
        figures={"streams": document(found)},
        tables=(table(found), facts({f"streams that keep 99 %, {side}": kept(found, side) for side in SIDES})),
    )


def kept(found: Found, side: str) -> str:
    """How many of all."""
    return f"{sum(sides[side].agreement >= 1 - BUDGET for sides in found.values())} of {len(found)}"


def run(effort: Effort) -> StudyResult:
    """The recorded streams; two made-up ones with quick effort."""
    return compare(cases(effort))


STUDY = declare(__name__, run, needs=NEEDS, makes_up_quick=True)
