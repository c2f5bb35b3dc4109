"""Apparate, figures 12 and 13, tables 1 to 3: recorded streams, served with several strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from experiments.apparate.recording import KINDS, NEEDS, Kind
from experiments.ramp_adjustment import Tune, best_ramps, evenly_spaced, greedy_tuner, of_ramps, run_until_repeat
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
from optimizer.cost.batching import Batching
from optimizer.cost.rescore import joint_reach, rescore
from optimizer.problems.problem import Link, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.search.decision import Planned
from optimizer.search.planner import solve
from profiles.records import ExitRecords
from profiles.table import LatencyTable

Sides = Mapping[str, Callable[[Case], Answered]]
Results = Mapping[str, Mapping[str, Answered]]
"""By stream and side."""
AGREEMENT, P25, MEDIAN, MEAN, P95 = (
    *("agreement (%)", "p25 saved (%)", "median saved (%)"),
    *("mean saved (%)", "p95 saved (%)"),
)
FIGURES: Mapping[str, Callable[[Answered], float]] = {
    AGREEMENT: lambda each: 100 * each.agreement,
    "worst tenth (%)": lambda each: 100 * each.worst_agreement,
    P25: lambda each: 100 * each.saved(25),
    MEDIAN: lambda each: 100 * each.saved(50),
    MEAN: lambda each: 100 * each.mean_saved,
    P95: lambda each: 100 * each.saved(95),
}
"""Savings are relative to the model without ramps; negative if ramps cost more than they save."""


def run_sides(streams: Sequence[Case], sides: Sides) -> Results:
    """Runs every side on every stream."""
    return {case.name: {side: serve(case) for side, serve in sides.items()} for case in streams}


def of_kind(found: Results, kind: Kind, side: str, figure: str) -> list[float]:
    """Returns a side's figure on every stream of a kind."""
    return [FIGURES[figure](sides[side]) for name, sides in found.items() if KINDS[name] == kind and side in sides]


def mean(found: Results, kind: Kind, side: str, figure: str, paper: float | None = None) -> Comparison:
    """Compares the mean over the streams of a kind with the paper's."""
    values = of_kind(found, kind, side, figure)
    return Comparison(f"{kind}, {side}: {figure}", fmean(values) if values else None, paper)


Range = tuple[float | None, float | None]


def extremes(found: Results, kind: Kind, side: str, figure: str, paper: Range = (None, None)) -> list[Comparison]:
    """Compares the lowest and the highest value over the streams of a kind with the paper's."""
    ours = of_kind(found, kind, side, figure)
    pairs = zip(("lowest", "highest"), (min(ours), max(ours)), paper, strict=True)
    return [Comparison(f"{kind}, {side}: {word} {figure}", value, wanted) for word, value, wanted in pairs]


def table(found: Results) -> Table:
    """Returns the table of all figures, stream by stream."""
    return Table(
        "Stream by stream",
        ("stream", "side", *FIGURES),
        tuple(
            (name, side, *(figure(each) for figure in FIGURES.values()))
            for name, sides in found.items()
            for side, each in sides.items()
        ),
    )


def bars(title: str, found: Results, figure: str) -> Bars:
    """Returns the picture of a figure by stream and side."""
    names = list(next(iter(found.values())))
    series = {side: tuple(FIGURES[figure](sides[side]) for sides in found.values()) for side in names}
    return Bars(title, "stream", figure, tuple(found), series)


def _study(name: str, compare: Callable[[Sequence[Case]], StudyResult]) -> Study:
    """Returns a study of the recorded streams; with quick effort of two random ones."""
    return declare(name, lambda effort: compare(cases(effort)), needs=NEEDS, makes_up_quick=True)


by_mover = partial(with_moved_ramps, name="apparate")
by_plan = partial(with_planned_ramps, name="guarantee")
"""Apparate's strategy, and Offramp's."""
plan_with_apparate = partial(with_planned_ramps, name="apparate")
"""Planned ramps, whose thresholds Apparate's tuner sets."""


# Apparate, section 5.4 and figure 12: the gain from adjusting ramps; planned ramps compared with moved ones.

EVEN, MOVED, PLANNED = "no adjustment", "mover", "planned"
PAPER_LEAST = 20.8
"""Lowest median saving without adjustment (%); the highest is 33.4."""
FIG12_SIDES: Sides = {
    EVEN: partial(with_even_ramps, name="apparate"),
    MOVED: by_mover,
    PLANNED: plan_with_apparate,
}


class AtRest(NamedTuple):
    """A stream's first inputs, repeated: the ramps, and the share of the model's time that they save."""

    planned: tuple[tuple[int, ...], float]
    solved: tuple[tuple[int, ...], float]
    """The planner's choice. It gets one threshold per ramp, found with all ramps active."""
    moved: tuple[tuple[int, ...], float]
    """The best ramps among those that the mover visited; it may leave them and return."""
    rounds: int
    """Rounds until the mover returned to earlier ramps."""


def at_rest(case: Case) -> AtRest:
    """Finds thresholds by Apparate's search on the inputs of one period."""
    served, batching, tune = case.stream.served, case.batching, greedy_tuner(case.batching, BUDGET)
    records = served.subset(np.arange(min(STRATEGIES_PERIOD, len(served))))
    planned = best_ramps(records, batching, RAMP_BUDGET, tune)
    history = run_until_repeat(records, batching, tune, RAMP_BUDGET)
    moved = max(
        (saved_with(of_ramps(records, each.active), batching, tune) for each in history), key=lambda each: each[1]
    )
    solved = of_ramps(records, solved_ramps(case, records, tune(records)))
    return AtRest((planned.ramps, planned.saved), saved_with(solved, batching, tune), moved, len(history))


def saved_with(window: ExitRecords, batching: Batching, tune: Tune) -> tuple[tuple[int, ...], float]:
    """Returns the ramps of some records, and their saving with tuned thresholds."""
    return window.ramps, batching.saved(window.outcome(tune(window)), window.ramps) if window.ramps else 0.0


def solved_ramps(case: Case, records: ExitRecords, thresholds: Mapping[int, float]) -> tuple[int, ...]:
    """Returns the ramps of the plan with the least mean answer time: one accelerator, half loaded, batches of one."""
    whole_s, by_one = case.batching.whole_s, case.table
    only_one = LatencyTable(batches=(1,), block_s_NB=by_one.block_s_NB[:, :1], ramp_s_EB=by_one.ramp_s_EB[:, :1])
    problem = PlanProblem(
        num_blocks=records.num_blocks,
        ramps=records.ramps,
        survival_N=records.outcome(thresholds).survival,
        latency={"device": only_one},
        devices={"device": Supply(count=1, usd_per_hour=1.0)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(1.0,) * records.num_blocks,
        slo=Slo(latency_s=100 * whole_s),
        objective=MinimizeLatency(queues=False, rate_per_s=0.5 / whole_s, ramp_budget=RAMP_BUDGET),
    )
    planned = solve(problem)
    assert isinstance(planned, Planned), "an accelerator that is half loaded holds any SLO"
    chosen = rescore(problem, planned, joint_reach(records, thresholds)).planned
    return tuple(ramp for stage in chosen.stages for split in stage.splits for ramp in split.ramps)


def fig12_compare(streams: Sequence[Case]) -> StudyResult:
    """Compares live on the drifting streams, and at rest."""
    found = run_sides(streams, FIG12_SIDES)
    resting = {case.name: at_rest(case) for case in streams}
    later = {name: {side: each.since(STRATEGIES_PERIOD) for side, each in of.items()} for name, of in found.items()}
    kinds = tuple(dict.fromkeys(KINDS[name] for name in found))
    saved = {kind: {side: fmean(of_kind(later, kind, side, MEAN)) for side in FIG12_SIDES} for kind in kinds}
    least = {
        "planned saves at least as much as the mover, live": sum(
            of[PLANNED].mean_saved >= of[MOVED].mean_saved for of in later.values()
        ),
        "the same at rest": sum(each.planned[1] >= each.moved[1] for each in resting.values()),
        "at rest, the planner of services": sum(each.solved[1] >= each.moved[1] for each in resting.values()),
    }
    return StudyResult(
        comparisons=(
            *(
                Comparison(f"{kind}, {side}: mean saved after one period (%)", value)
                for kind, of in saved.items()
                for side, value in of.items()
            ),
            *(
                Comparison(
                    f"{kind}: of the mover's mean savings lost without adjustment (%)",
                    100 * (1 - of[EVEN] / of[MOVED]) if of[MOVED] > 0 else None,
                    PAPER_LEAST,
                )
                for kind, of in saved.items()
            ),
        ),
        pictures=(bars("Ramps as they are, moved, and planned", later, MEAN),),
        tables=(
            facts({name: f"{number} of {len(found)} streams" for name, number in least.items()}),
            Table(
                "On the first period's inputs alone",
                ("stream", "best ramps", "saved (%)", "planner's", "saved (%)", "mover's best", "saved (%)", "rounds"),
                tuple(
                    (
                        name,
                        *(cell for each in of[:3] for cell in (" ".join(map(str, each[0])) or "none", 100 * each[1])),
                        of.rounds,
                    )
                    for name, of in resting.items()
                ),
            ),
            table(later),
        ),
    )


FIG12_STUDY = _study("apparate_fig12_ramp_adjustment", fig12_compare)


# Apparate, figures 13 to 16: saved latency, compared with the optimum of exits.

APPARATE, OURS = "Apparate", "Offramp"
FIG13_PAPER: Mapping[Kind, Mapping[str, tuple[float, float]]] = {
    "vision": {MEDIAN: (40.5, 91.5), P25: (70.2, 94.2)},
    "text": {MEDIAN: (10.0, 24.2), P25: (16.0, 37.3)},
}
"""Lowest and highest over the paper's workloads."""
FIG13_SIDES: Sides = {
    APPARATE: by_mover,
    "planned ramps, Apparate's tuner": plan_with_apparate,
    OURS: by_plan,
    "optimal": lambda case: optimal(case.stream.served, case.batching),
}


def fig13_compare(streams: Sequence[Case]) -> StudyResult:
    """Returns the lowest and highest saving of every side over the streams of a kind."""
    found = run_sides(streams, FIG13_SIDES)
    return StudyResult(
        comparisons=tuple(
            each
            for side in FIG13_SIDES
            for kind, paper in FIG13_PAPER.items()
            for figure, theirs in paper.items()
            for each in extremes(found, kind, side, figure, theirs if side == APPARATE else (None, None))
        ),
        pictures=(bars("Median latency", found, MEDIAN), bars("25th percentile", found, P25)),
        tables=(table(found),),
    )


FIG13_STUDY = _study("apparate_fig13_savings", fig13_compare)


# Apparate, table 1: thresholds tuned once, on the beginning or on a sample, compared with continuous tuning.

SAMPLE = 0.1
"""Share of the stream, drawn evenly: as many inputs as the beginning has."""
INITIAL, SAMPLED, CONTINUAL = "initial only", "uniformly sampled", "continual"
TABLE1_PAPER: Mapping[Kind, Mapping[str, tuple[float, float]]] = {
    "vision": {INITIAL: (84.5, 74.3), SAMPLED: (90.3, 64.2), CONTINUAL: (98.6, 43.5)},
    "text": {INITIAL: (86.8, 73.6), SAMPLED: (87.7, 69.4), CONTINUAL: (98.3, 26.6)},
}
"""Agreement and median saved (%), over the paper's CV and NLP workloads."""


def tuned_once(case: Case, records: ExitRecords) -> Answered:
    """Serves with the thresholds that these inputs allow."""
    ramps = evenly_spaced(case.batching, RAMP_BUDGET)
    return all_ramps(case, greedy_thresholds(records, BUDGET, case.batching, ramps))


def sample(case: Case) -> ExitRecords:
    """Returns a sample of the served inputs."""
    return sampled(case.stream.served, SAMPLE, np.random.default_rng(0))


def all_ramps(case: Case, thresholds: Mapping[int, float]) -> Answered:
    """Evaluates every ramp with a threshold on every input."""
    return answered(case.stream.served, thresholds, case.batching)


TABLE1_SIDES: Sides = {
    INITIAL: lambda case: tuned_once(case, case.stream.initial),
    SAMPLED: lambda case: tuned_once(case, sample(case)),
    CONTINUAL: partial(with_even_ramps, name="apparate"),
    "continual, guarantee": partial(with_even_ramps, name="guarantee"),
    "planned ramps, guarantee": by_plan,
}


def table1_compare(streams: Sequence[Case]) -> StudyResult:
    """Returns agreement and savings by kind of stream, and the number of streams in which the budget was kept."""
    found = run_sides(streams, TABLE1_SIDES)
    kept = {side: sum(of[side].agreement >= 1 - BUDGET for of in found.values()) for side in TABLE1_SIDES}
    return StudyResult(
        comparisons=tuple(
            mean(found, kind, side, figure, theirs)
            for kind, paper in TABLE1_PAPER.items()
            for side in TABLE1_SIDES
            for figure, theirs in zip((AGREEMENT, MEDIAN), paper.get(side, (None, None)), strict=True)
        ),
        pictures=(bars("NewThresholds once, and on and on", found, AGREEMENT),),
        tables=(
            table(found),
            facts({f"streams that keep 99 %, {side}": f"{number} of {len(found)}" for side, number in kept.items()}),
        ),
    )


TABLE1_STUDY = _study("apparate_table1_tuning", table1_compare)


# Apparate, table 2: early-exit models without Apparate, with all ramps always on and constant thresholds.

EVERYWHERE = Budgets(ramps=10.0)
"""A ramp budget that allows all ramps, as the paper gives Apparate in this table."""
SAME, EACH, OPT = "one threshold", "a threshold each", "tuned on the stream"
TABLE2_PAPER: Mapping[Kind, Mapping[str, tuple[Range, Range, Range]]] = {
    "vision": {
        APPARATE: ((99.0, 99.2), (40.9, 88.6), (-1.6, 0.0)),
        SAME: ((85.8, 99.8), (-11.0, 88.3), (-11.0, -11.0)),
        EACH: ((76.1, 99.9), (-11.0, 88.3), (-11.0, -11.0)),
        OPT: ((99.0, 99.7), (-11.0, 74.5), (-11.0, -11.0)),
    },
    "text": {
        APPARATE: ((99.1, 99.3), (9.1, 24.1), (0.7, 1.8)),
        SAME: ((91.7, 97.1), (13.2, 36.1), (-1.3, 6.4)),
        EACH: ((82.2, 90.3), (31.7, 36.1), (5.9, 6.4)),
        OPT: ((99.0, 99.0), (9.8, 36.1), (-1.4, 6.4)),
    },
}
"""Agreement, median and p95 saved: lowest and highest over the paper's workloads, for ResNet-50 (BranchyNet) and
BERT-base (DeeBERT)."""


def tuned_on_the_stream(case: Case) -> Answered:
    """Chooses the better of one common threshold and one per ramp, from the served inputs themselves."""
    served, ramps = case.stream.served, case.stream.records.ramps
    found = (tune(served, BUDGET, case.batching, ramps) for tune in (same_threshold, greedy_thresholds))
    return max((all_ramps(case, thresholds) for thresholds in found), key=lambda each: each.mean_saved)


TABLE2_SIDES: Sides = {
    APPARATE: partial(by_mover, budgets=EVERYWHERE),
    SAME: lambda case: all_ramps(case, same_threshold(sample(case), BUDGET, case.batching, case.stream.records.ramps)),
    EACH: lambda case: all_ramps(
        case, greedy_thresholds(sample(case), BUDGET, case.batching, case.stream.records.ramps)
    ),
    OPT: tuned_on_the_stream,
    OURS: by_plan,
}


def table2_compare(streams: Sequence[Case]) -> StudyResult:
    """Returns the lowest and highest figure of every side over the streams of a kind."""
    found = run_sides(streams, TABLE2_SIDES)
    return StudyResult(
        comparisons=tuple(
            each
            for kind, paper in TABLE2_PAPER.items()
            for side in TABLE2_SIDES
            for figure, theirs in zip((AGREEMENT, MEDIAN, P95), paper.get(side, ((None, None),) * 3), strict=True)
            for each in extremes(found, kind, side, figure, theirs)
        ),
        pictures=(bars("Thresholds set once, and while serving", found, AGREEMENT),),
        tables=(table(found),),
    )


TABLE2_STUDY = _study("apparate_table2_strategies", table2_compare)


# Apparate, table 3 and figure 18: the gain from a larger budget of ramps, or of answers that differ.

TABLE3_PAPER: Mapping[Kind, tuple[float, ...]] = {"vision": (48.9, 49.6, 50.4), "text": (18.5, 22.2, 24.9)}
"""Median saved (%) by ramp budget, of ResNet-50 and GPT-2."""
OF_LOSS = (Budgets(loss=0.02), Budgets(loss=0.05))
BUDGETS = {
    APPARATE: (Budgets(), Budgets(ramps=0.05), Budgets(ramps=0.10), *OF_LOSS),
    OURS: (Budgets(), *OF_LOSS),  # with 10 % of ramps, there would be 16,384 sets to evaluate
}


def label(name: str, budgets: Budgets) -> str:
    """Returns a side's label, such as "Offramp, 2 % of ramps, 1 % lost"."""
    return f"{name}, {100 * budgets.ramps:g} % of ramps, {100 * budgets.loss:g} % lost"


def table3_compare(streams: Sequence[Case]) -> StudyResult:
    """Compares median savings by ramp budget with the paper's, then by allowed loss."""
    serve = {APPARATE: by_mover, OURS: by_plan}
    found = run_sides(
        streams,
        {label(name, each): partial(serve[name], budgets=each) for name, of in BUDGETS.items() for each in of},
    )

    def paper(kind: Kind, name: str, figure: str, index: int) -> float | None:
        of = TABLE3_PAPER[kind]
        return of[index] if name == APPARATE and figure == MEDIAN and index < len(of) else None

    return StudyResult(
        comparisons=tuple(
            mean(found, kind, label(name, budgets), figure, paper(kind, name, figure, index))
            for name, of in BUDGETS.items()
            for kind in TABLE3_PAPER
            for figure in (MEDIAN, MEAN, AGREEMENT)
            for index, budgets in enumerate(of)
        ),
        pictures=(bars("By budgets", found, MEDIAN),),
        tables=(table(found),),
    )


TABLE3_STUDY = _study("apparate_table3_budgets", table3_compare)
