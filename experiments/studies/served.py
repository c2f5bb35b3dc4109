"""Apparate, figures 12 and 13, tables 1 to 3: recorded streams, served by several sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from experiments.apparate.recording import KINDS, NEEDS, Kind
from experiments.served_streams import (
    BUDGET,
    RAMP_BUDGET,
    STRATEGIES_PERIOD,
    Answered,
    Budgets,
    Case,
    answered,
    cases,
    greedy_thresholds,
    optimal,
    same_threshold,
    sampled,
    with_even_ramps,
    with_moved_ramps,
    with_planned_ramps,
)
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Study, StudyResult, Table, declare, facts
from optimizer.decision import Planned
from optimizer.live.best_ramps import Tune, best_ramps, greedily, of_ramps
from optimizer.live.exit_times import ExitTimes
from optimizer.live.ramp_mover import settled, spread_out
from optimizer.planner import solve
from optimizer.problem import Link, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.rescore import joint_reach, rechosen, rescore
from profiles.records import ExitRecords
from profiles.table import LatencyTable

# What sides made of the streams of Apparate's studies: shares by kind of stream, tables and pictures.

Figure = Callable[[Answered], float]
Found = Mapping[str, Mapping[str, Answered]]
"""By stream and side."""

FIGURES: Mapping[str, Figure] = {
    "agreement (%)": lambda each: 100 * each.agreement,
    "worst tenth (%)": lambda each: 100 * each.worst_agreement,
    "p25 saved (%)": lambda each: 100 * each.saved(25),
    "median saved (%)": lambda each: 100 * each.saved(50),
    "mean saved (%)": lambda each: 100 * each.mean_saved,
    "p95 saved (%)": lambda each: 100 * each.saved(95),
}
"""Savings are of the model without ramps; below 0 ramps cost more than they save."""


def run_sides(cases: Sequence[Case], sides: Mapping[str, Callable[[Case], Answered]]) -> Found:
    """Every side on every stream."""
    return {case.name: {side: serve(case) for side, serve in sides.items()} for case in cases}


def of_kind(found: Found, kind: Kind, side: str, figure: str) -> list[float]:
    """A side's figure on every stream of a kind."""
    return [FIGURES[figure](sides[side]) for name, sides in found.items() if KINDS[name] == kind and side in sides]


def mean(found: Found, kind: Kind, side: str, figure: str, paper: float | None = None) -> Comparison:
    """Over the streams of a kind, beside the paper's."""
    values = of_kind(found, kind, side, figure)
    return Comparison(f"{kind}, {side}: {figure}", fmean(values) if values else None, paper)


def table(found: Found) -> Table:
    """Everything, stream by stream."""
    return Table(
        "Stream by stream",
        ("stream", "side", *FIGURES),
        tuple(
            (name, side, *(figure(each) for figure in FIGURES.values()))
            for name, sides in found.items()
            for side, each in sides.items()
        ),
    )


def bars(title: str, found: Found, figure: str) -> Bars:
    """A figure by stream and side."""
    names = list(next(iter(found.values())))
    series = {side: tuple(FIGURES[figure](sides[side]) for sides in found.values()) for side in names}
    return Bars(title, "stream", figure, tuple(found), series)


def _study(name: str, compare: Callable[[Sequence[Case]], StudyResult]) -> Study:
    """On the recorded streams; with quick effort on two made-up ones."""
    return declare(name, lambda effort: compare(cases(effort)), needs=NEEDS, makes_up_quick=True)


# Apparate, section 5.4 and figure 12: what adjusting ramps is worth, and ramps planned at once beside ramps moved.

DEVICE = "device"
EVEN, MOVED, PLANNED = "no adjustment", "mover", "planned"
PAPER_LEAST = 20.8
"""Of the median savings, without adjustment (%); up to 33.4."""
FIG12_SIDES: Mapping[str, Callable[[Case], Answered]] = {
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
    records = served.subset(np.arange(min(STRATEGIES_PERIOD, len(served))))
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


def fig12_compare(streams: Sequence[Case]) -> StudyResult:
    """Live on the drifting streams, and at rest."""
    found = run_sides(streams, FIG12_SIDES)
    resting = {case.name: at_rest(case) for case in streams}
    later = {
        name: {side: each.since(STRATEGIES_PERIOD) for side, each in sides.items()} for name, sides in found.items()
    }
    ahead = sum(sides[PLANNED].mean_saved >= sides[MOVED].mean_saved for sides in later.values())
    least = sum(each.planned >= each.moved for each in resting.values())
    solved = sum(each.solved >= each.moved for each in resting.values())
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{kind}, {side}: mean saved after one period (%)", mean_saved(later, kind, side))
            for kind in dict.fromkeys(KINDS[name] for name in found)
            for side in FIG12_SIDES
        )
        + tuple(
            Comparison(f"{kind}: of the mover's mean savings lost without adjustment (%)", value, PAPER_LEAST)
            for kind, value in lost_without(later).items()
        ),
        pictures=(bars("Ramps as they are, moved, and planned", later, "mean saved (%)"),),
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
    """By kind: how much of the mover's savings is lost where ramps stay as they are."""
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


FIG12_STUDY = _study("apparate_fig12_ramp_adjustment", fig12_compare)


# Apparate, figures 13 to 16: how much sooner answers come, beside the best that exits could do.

FIG13_APPARATE, FIG13_OURS, OURS_OWN, OPTIMAL = "Apparate", "Offramp", "planned ramps, Apparate's tuner", "optimal"
FIG13_PAPER: Mapping[Kind, Mapping[str, tuple[float, float]]] = {
    "vision": {"median saved (%)": (40.5, 91.5), "p25 saved (%)": (70.2, 94.2)},
    "text": {"median saved (%)": (10.0, 24.2), "p25 saved (%)": (16.0, 37.3)},
}
"""Lowest and highest over the paper's workloads."""
FIG13_SIDES: Mapping[str, Callable[[Case], Answered]] = {
    FIG13_APPARATE: lambda case: with_moved_ramps(case, "apparate").answered,
    OURS_OWN: lambda case: with_planned_ramps(case, "apparate").answered,
    FIG13_OURS: lambda case: with_planned_ramps(case, "guarantee").answered,
    OPTIMAL: lambda case: optimal(case.stream.served, case.times),
}


def fig13_compare(streams: Sequence[Case]) -> StudyResult:
    """Lowest and highest saving of every side over the streams of a kind."""
    found = run_sides(streams, FIG13_SIDES)
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{kind}, {side}: {word} {figure}", value, wanted if side == FIG13_APPARATE else None)
            for side in FIG13_SIDES
            for kind, paper in FIG13_PAPER.items()
            for figure, range_ in paper.items()
            for ours in (of_kind(found, kind, side, figure),)
            for word, value, wanted in zip(("lowest", "highest"), (min(ours), max(ours)), range_, strict=True)
        ),
        pictures=(bars("Median latency", found, "median saved (%)"), bars("25th percentile", found, "p25 saved (%)")),
        tables=(table(found),),
    )


FIG13_STUDY = _study("apparate_fig13_savings", fig13_compare)


# Apparate, table 1: thresholds tuned once, on the beginning or on a sample, against thresholds that are tuned on.

SAMPLE = 0.1
"""Of the stream, drawn evenly: as much as the beginning."""
SEED = 0
INITIAL, SAMPLED, CONTINUAL = "initial only", "uniformly sampled", "continual"
GUARANTEE, OFFRAMP = "continual, guarantee", "planned ramps, guarantee"
TABLE1_PAPER: Mapping[Kind, Mapping[str, tuple[float, float]]] = {
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


TABLE1_SIDES: Mapping[str, Callable[[Case], Answered]] = {
    INITIAL: lambda case: tuned_once(case, case.stream.initial),
    SAMPLED: lambda case: tuned_once(case, sample(case)),
    CONTINUAL: lambda case: with_even_ramps(case, "apparate").answered,
    GUARANTEE: lambda case: with_even_ramps(case, "guarantee").answered,
    OFFRAMP: lambda case: with_planned_ramps(case, "guarantee").answered,
}


def table1_compare(streams: Sequence[Case]) -> StudyResult:
    """Agreement and savings by kind of stream, and in how many streams the budget was kept."""
    found = run_sides(streams, TABLE1_SIDES)
    return StudyResult(
        comparisons=tuple(
            mean(found, kind, side, figure, paper.get(side, (None, None))[index])
            for kind, paper in TABLE1_PAPER.items()
            for side in TABLE1_SIDES
            for index, figure in enumerate(("agreement (%)", "median saved (%)"))
        ),
        pictures=(bars("Tuned once, and on and on", found, "agreement (%)"),),
        tables=(table(found), facts({f"streams that keep 99 %, {side}": kept(found, side) for side in TABLE1_SIDES})),
    )


def kept(found: Found, side: str) -> str:
    """How many of all."""
    return f"{sum(sides[side].agreement >= 1 - BUDGET for sides in found.values())} of {len(found)}"


TABLE1_STUDY = _study("apparate_table1_tuning", table1_compare)


# Apparate, table 2: early-exit models as they were before it, all ramps always on and thresholds set once.

EVERYWHERE = 10.0
"""A ramp budget that allows all of them, as the paper gives Apparate here."""
TABLE2_APPARATE, SAME, EACH, OPT, TABLE2_OURS = (
    "Apparate",
    "one threshold",
    "a threshold each",
    "tuned on the stream",
    "Offramp",
)
AGREEMENT, MEDIAN, P95 = "agreement (%)", "median saved (%)", "p95 saved (%)"
TABLE2_PAPER: Mapping[Kind, Mapping[str, Mapping[str, tuple[float, float]]]] = {
    "vision": {
        TABLE2_APPARATE: {AGREEMENT: (99.0, 99.2), MEDIAN: (40.9, 88.6), P95: (-1.6, 0.0)},
        SAME: {AGREEMENT: (85.8, 99.8), MEDIAN: (-11.0, 88.3), P95: (-11.0, -11.0)},
        EACH: {AGREEMENT: (76.1, 99.9), MEDIAN: (-11.0, 88.3), P95: (-11.0, -11.0)},
        OPT: {AGREEMENT: (99.0, 99.7), MEDIAN: (-11.0, 74.5), P95: (-11.0, -11.0)},
    },
    "text": {
        TABLE2_APPARATE: {AGREEMENT: (99.1, 99.3), MEDIAN: (9.1, 24.1), P95: (0.7, 1.8)},
        SAME: {AGREEMENT: (91.7, 97.1), MEDIAN: (13.2, 36.1), P95: (-1.3, 6.4)},
        EACH: {AGREEMENT: (82.2, 90.3), MEDIAN: (31.7, 36.1), P95: (5.9, 6.4)},
        OPT: {AGREEMENT: (99.0, 99.0), MEDIAN: (9.8, 36.1), P95: (-1.4, 6.4)},
    },
}
"""Lowest and highest over the paper's workloads: ResNet-50 against BranchyNet, BERT-base against DeeBERT."""


def all_ramps(case: Case, thresholds: Mapping[int, float]) -> Answered:
    """Every ramp is evaluated, always."""
    return answered(case.stream.served, thresholds, case.times)


def tuned_on_the_stream(case: Case) -> Answered:
    """The better of one threshold and one each, chosen by what is to come."""
    served, ramps = case.stream.served, case.times.ramps
    found = (tune(served, BUDGET, case.times, ramps) for tune in (same_threshold, greedy_thresholds))
    return max((all_ramps(case, thresholds) for thresholds in found), key=lambda each: each.mean_saved)


TABLE2_SIDES: Mapping[str, Callable[[Case], Answered]] = {
    TABLE2_APPARATE: lambda case: with_moved_ramps(case, "apparate", Budgets(ramps=EVERYWHERE)).answered,
    SAME: lambda case: all_ramps(case, same_threshold(sample(case), BUDGET, case.times, case.times.ramps)),
    EACH: lambda case: all_ramps(case, greedy_thresholds(sample(case), BUDGET, case.times, case.times.ramps)),
    OPT: tuned_on_the_stream,
    TABLE2_OURS: lambda case: with_planned_ramps(case, "guarantee", Budgets(ramps=RAMP_BUDGET)).answered,
}


def table2_compare(streams: Sequence[Case]) -> StudyResult:
    """Lowest and highest figure of every side over the streams of a kind."""
    found = run_sides(streams, TABLE2_SIDES)
    comparisons = []
    for kind, paper in TABLE2_PAPER.items():
        for side in TABLE2_SIDES:
            for figure in (AGREEMENT, MEDIAN, P95):
                ours = of_kind(found, kind, side, figure)
                theirs = paper[side][figure] if side in paper else (None, None)
                for word, value, wanted in zip(("lowest", "highest"), (min(ours), max(ours)), theirs, strict=True):
                    comparisons.append(Comparison(f"{kind}, {side}: {word} {figure}", value, wanted))
    return StudyResult(
        comparisons=tuple(comparisons),
        pictures=(bars("Thresholds set once, and while serving", found, AGREEMENT),),
        tables=(table(found),),
    )


TABLE2_STUDY = _study("apparate_table2_strategies", table2_compare)


# Apparate, table 3 and figure 18: what a larger budget of ramps, or of answers that differ, is worth.

RAMP_BUDGETS = (RAMP_BUDGET, 0.05, 0.10)
LOSS_BUDGETS = (BUDGET, 0.02, 0.05)
TABLE3_PAPER: Mapping[Kind, tuple[float, ...]] = {"vision": (48.9, 49.6, 50.4), "text": (18.5, 22.2, 24.9)}
"""Median saved (%) by ramp budget, of ResNet-50 and GPT-2."""
OWN, TABLE3_OURS = "Apparate", "Offramp"


def sides() -> dict[str, Callable[[Case], Answered]]:
    """Apparate's way at every budget; Offramp's at every loss: with ramps for 10 % there are 16,384 sets to look at."""

    def side(serve: Callable[[Case, Budgets], Answered], budgets: Budgets) -> Callable[[Case], Answered]:
        return lambda case: serve(case, budgets)

    own = {label(OWN, budgets): side(_own, budgets) for budgets in budgets_of(OWN)}
    return own | {label(TABLE3_OURS, budgets): side(_ours, budgets) for budgets in budgets_of(TABLE3_OURS)}


def budgets_of(who: str) -> list[Budgets]:
    """First one is larger, then the other."""
    by_ramps = [Budgets(ramps=ramps) for ramps in (RAMP_BUDGETS if who == OWN else RAMP_BUDGETS[:1])]
    return by_ramps + [Budgets(loss=loss) for loss in LOSS_BUDGETS[1:]]


def label(who: str, budgets: Budgets) -> str:
    """Of a side."""
    return f"{who}, {in_words(budgets)}"


def in_words(budgets: Budgets) -> str:
    """Such as "2 % of ramps, 1 % lost"."""
    return f"{100 * budgets.ramps:g} % of ramps, {100 * budgets.loss:g} % lost"


def _own(case: Case, budgets: Budgets) -> Answered:
    return with_moved_ramps(case, "apparate", budgets).answered


def _ours(case: Case, budgets: Budgets) -> Answered:
    return with_planned_ramps(case, "guarantee", budgets).answered


def table3_compare(streams: Sequence[Case]) -> StudyResult:
    """Median savings by ramp budget beside the paper's, then by what may be lost."""
    found = run_sides(streams, sides())
    return StudyResult(
        comparisons=tuple(
            mean(found, kind, label(who, budgets), figure, _paper(kind, who, figure, index))
            for who in (OWN, TABLE3_OURS)
            for kind in TABLE3_PAPER
            for figure in ("median saved (%)", "mean saved (%)", "agreement (%)")
            for index, budgets in enumerate(budgets_of(who))
        ),
        pictures=(bars("By budgets", found, "median saved (%)"),),
        tables=(table(found),),
    )


def _paper(kind: Kind, who: str, figure: str, index: int) -> float | None:
    return (
        TABLE3_PAPER[kind][index] if who == OWN and figure == "median saved (%)" and index < len(RAMP_BUDGETS) else None
    )


TABLE3_STUDY = _study("apparate_table3_budgets", table3_compare)
