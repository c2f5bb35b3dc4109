"""Apparate, section 5.4 and figure 12: what adjusting ramps is worth, and ramps planned at once beside ramps moved.

Replayed on records, Apparate's own tuner on every side. Beside it, on the first inputs alone, as if the stream stayed
as it is: the mover until it comes back to where it was, and the best of all sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from experiments.apparate.cases import BUDGET, RAMP_BUDGET, Case, cases
from experiments.apparate.recording import KINDS, NEEDS
from experiments.apparate.strategies import PERIOD, with_even_ramps, with_moved_ramps, with_planned_ramps
from experiments.apparate.times import Answered
from experiments.studies.served_streams import Found, bars, document, run_sides, table
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, facts
from optimizer.live.best_ramps import best_ramps, greedily, of_ramps
from optimizer.live.ramp_mover import settled

EVEN, MOVED, PLANNED = "no adjustment", "mover", "planned"
PAPER_LEAST = 20.8
"""Of the median savings, without adjustment (%); up to 33.4."""
SIDES: Mapping[str, Callable[[Case], Answered]] = {
    EVEN: lambda case: with_even_ramps(case, "apparate").answered,
    MOVED: lambda case: with_moved_ramps(case, "apparate").answered,
    PLANNED: lambda case: with_planned_ramps(case, "apparate").answered,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRest:
    """A stream's first inputs, over and over: shares of the model's time that answers come earlier, on average."""

    planned_ramps: tuple[int, ...]
    planned: float
    moved_ramps: tuple[int, ...]
    """The best that the mover was at, though it may go on from there and come back."""
    moved: float
    rounds: int
    """Until the mover came back to where it was."""


def at_rest(case: Case) -> AtRest:
    """Both with thresholds by Apparate's search on the inputs of one period."""
    served, times, tune = case.stream.served, case.times, greedily(case.times, BUDGET)
    records = served.subset(np.arange(min(PERIOD, len(served))))
    planned = best_ramps(records, times, RAMP_BUDGET, tune)
    history = settled(records, times, tune, RAMP_BUDGET)
    windows = [of_ramps(records, each.active) for each in history]
    saved = [times.saved(each.outcome(tune(each)), each.ramps) if each.ramps else 0.0 for each in windows]
    best = int(np.argmax(saved))
    return AtRest(
        planned_ramps=planned.ramps,
        planned=planned.saved,
        moved_ramps=windows[best].ramps,
        moved=saved[best],
        rounds=len(history),
    )


def compare(streams: Sequence[Case]) -> StudyResult:
    """Live on the drifting streams, and at rest."""
    found = run_sides(streams, SIDES)
    resting = {case.name: at_rest(case) for case in streams}
    later = {name: {side: each.since(PERIOD) for side, each in sides.items()} for name, sides in found.items()}
    ahead = sum(sides[PLANNED].mean_saved >= sides[MOVED].mean_saved for sides in later.values())
    least = sum(each.planned >= each.moved for each in resting.values())
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{kind}, {side}: mean saved after one period (%)", mean_saved(later, kind, side))
            for kind in dict.fromkeys(KINDS[name] for name in found)
            for side in SIDES
        )
        + tuple(
            Comparison(f"{kind}: of the mover's mean savings lost without adjustment (%)", value, PAPER_LEAST)
            for kind, value in lost_without(later).items()
        ),
        pictures=(bars("Ramps as they are, moved, and planned", later, "mean saved (%)"),),
        figures={"streams": document(found), "after one period": document(later), "at rest": resting},
        tables=(
            facts(
                {
                    "planned saves at least as much as the mover, live": f"{ahead} of {len(found)} streams",
                    "the same at rest": f"{least} of {len(found)} streams",
                }
            ),
            rest_table(resting),
            table(later),
        ),
    )


def mean_saved(found: Found, kind: str, side: str) -> float:
    """Over the streams of a kind, in percent."""
    return 100 * fmean(sides[side].mean_saved for name, sides in found.items() if KINDS[name] == kind)


def lost_without(found: Found) -> dict[str, float | None]:
    """By kind: how much of the mover's savings those have who leave the ramps as they are."""
    kinds = dict.fromkeys(KINDS[name] for name in found)
    saved = {kind: (mean_saved(found, kind, EVEN), mean_saved(found, kind, MOVED)) for kind in kinds}
    return {kind: 100 * (1 - even / moved) if moved > 0 else None for kind, (even, moved) in saved.items()}


def rest_table(resting: Mapping[str, AtRest]) -> Table:
    """Stream by stream."""
    return Table(
        "On the first period's inputs alone",
        ("stream", "planned ramps", "saved (%)", "mover's best ramps", "saved (%)", "rounds"),
        tuple(
            (
                name,
                " ".join(map(str, each.planned_ramps)) or "none",
                100 * each.planned,
                " ".join(map(str, each.moved_ramps)) or "none",
                100 * each.moved,
                each.rounds,
            )
            for name, each in resting.items()
        ),
    )


def run(effort: Effort) -> StudyResult:
    """The recorded streams; two made-up ones with quick effort."""
    return compare(cases(effort))


STUDY = declare(__name__, run, needs=NEEDS, makes_up_quick=True)
