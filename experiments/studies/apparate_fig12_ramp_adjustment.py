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
from optimizer.decision import Planned
from optimizer.live.best_ramps import Tune, best_ramps, greedily, of_ramps
from optimizer.live.exit_times import ExitTimes
from optimizer.live.ramp_mover import settled
from optimizer.planner import solve
from optimizer.problem import Link, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.rescore import joint_reach, rechosen, rescore
from profiles.records import ExitRecords
from profiles.table import LatencyTable

DEVICE = "device"
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
    solved_ramps: tuple[int, ...]
    """What the planner of services chooses: it is told one threshold per ramp, found with all ramps active."""
    solved: float


def at_rest(case: Case) -> AtRest:
    """Both with thresholds by Apparate's search on the inputs of one period."""
    served, times, tune = case.stream.served, case.times, greedily(case.times, BUDGET)
    records = served.subset(np.arange(min(PERIOD, len(served))))
    planned = best_ramps(records, times, RAMP_BUDGET, tune)
    history = settled(records, times, tune, RAMP_BUDGET)
    windows = [of_ramps(records, each.active) for each in history]
    saved = [saved_with(each, times, tune) for each in windows]
    best = int(np.argmax(saved))
    solved = solved_ramps(case, records, tune(records))
    return AtRest(
        planned_ramps=planned.ramps,
        planned=planned.saved,
        moved_ramps=windows[best].ramps,
        moved=saved[best],
        rounds=len(history),
        solved_ramps=solved,
        solved=saved_with(of_ramps(records, solved), times, tune),
    )


def saved_with(window: ExitRecords, times: ExitTimes, tune: Tune) -> float:
    """By the ramps of some records, once their thresholds are tuned."""
    return times.saved(window.outcome(tune(window)), window.ramps) if window.ramps else 0.0


def solved_ramps(case: Case, records: ExitRecords, thresholds: Mapping[int, float]) -> tuple[int, ...]:
    """Of the plan with the least mean answer time: one accelerator, half loaded, batches of one."""
    table, whole_s = case.table, case.times.whole_s
    only_one = LatencyTable(batches=(1,), block_s_NB=table.block_s_NB[:, :1], ramp_s_EB=table.ramp_s_EB[:, :1])
    problem = PlanProblem(
        num_blocks=records.num_blocks,
        ramps=records.ramps,
        survival_N=records.nested_survival(thresholds),
        latency={DEVICE: only_one},
        devices={DEVICE: Supply(count=1, usd_per_hour=1.0)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(1.0,) * records.num_blocks,
        slo=Slo(latency_s=100 * whole_s),
        objective=MinimizeLatency(rate_per_s=0.5 / whole_s, ramp_budget=RAMP_BUDGET),
    )
    planned = solve(problem)
    assert isinstance(planned, Planned), "an accelerator that is half loaded holds any SLO"
    chosen = rechosen(problem, planned, rescore(problem, planned, joint_reach(records, thresholds)))
    return tuple(ramp for stage in chosen.stages for split in stage.splits for ramp in split.ramps)


def compare(streams: Sequence[Case]) -> StudyResult:
    """Live on the drifting streams, and at rest."""
    found = run_sides(streams, SIDES)
    resting = {case.name: at_rest(case) for case in streams}
    later = {name: {side: each.since(PERIOD) for side, each in sides.items()} for name, sides in found.items()}
    ahead = sum(sides[PLANNED].mean_saved >= sides[MOVED].mean_saved for sides in later.values())
    least = sum(each.planned >= each.moved for each in resting.values())
    solved = sum(each.solved >= each.moved for each in resting.values())
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
                    "at rest, the planner of services": f"{solved} of {len(found)} streams",
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
        ("stream", "best ramps", "saved (%)", "planner's", "saved (%)", "mover's best", "saved (%)", "rounds"),
        tuple(
            (
                name,
                " ".join(map(str, each.planned_ramps)) or "none",
                100 * each.planned,
                " ".join(map(str, each.solved_ramps)) or "none",
                100 * each.solved,
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
