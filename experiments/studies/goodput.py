"""E3, figures 7, 8, 18 and 23 to 26: goodput of several contenders on 16 accelerators of one type.

Simulated: E3's 16 V100 at its speed, Poisson arrivals, 99 % of inputs within 100 ms unless a figure varies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from earlyexit.errors import DataError
from experiments.problems import PROBLEMS, RAMPS_AT_SPLIT_ENDS, RAMPS_CHOSEN, SLOS_S
from experiments.ramp_adjustment import of_ramps
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.served_streams import VISION_RAMP
from experiments.studies.e3_case import (
    LARGEST_BATCH,
    RAMPS_OFF_GAIN,
    even_exits,
    exits_at_once,
    first_ramp,
    flat,
    like_e3,
    ramp_share,
    with_flat_times,
    with_ramps_of,
)
from experiments.studies.load_changes import NEEDS, of_kind
from experiments.studies.load_changes import recorded as recorded_images
from experiments.studies.picture import Bars, Lines
from experiments.studies.sides import (
    BATCHES,
    NUM_ROWS,
    SEED,
    SHORT,
    Case,
    Row,
    Rows,
    Workload,
    allowed,
    allowed_table,
    batch_bars,
    by_batch,
    decide,
    equal_cluster,
    facing,
    plans,
    ratios_of,
    savings,
    series_of,
    simulated,
    sst2,
    times,
    with_slo,
    workload,
)
from experiments.studies.study import (
    Comparison,
    Effort,
    Ratios,
    StudyResult,
    Table,
    declare,
    facts,
    largest,
    largest_ratios,
    ratio,
)
from optimizer.cost.evaluate import evaluate, objective_value
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_file import read_problem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy
from optimizer.search.planner import solve
from optimizer.search.space import Space
from profiles.records import ExitOutcome, ExitRecords
from simulator.inputs import NOWHERE, patient, recorded

DEVICE = "V100"
AT_LARGEST = f"batch {LARGEST_BATCH}"


# Figures 7 and 8: goodput of BERT-base and of a ResNet by batch size, and the causes of the difference to the paper.

BEYOND = 16
"""A batch that broke E3's SLO."""
PAPERS: tuple[Strategy, ...] = ("stock", "early-exit", "e3")  # the contenders of E3's figures
COMPARED: dict[Effort, tuple[Strategy, ...]] = {"full": (*PAPERS, "best"), "quick": PAPERS}
CONTENDERS: dict[Effort, tuple[Strategy, ...]] = {"full": (*PAPERS, "serial", "best"), "quick": PAPERS}
FIG07_PAPER = Ratios(over_stock=1.30, over_early_exit=1.44)
PAPER_AT_ONE = 0.97
"""e3 over early-exit at batch 1 (sections 5.1.1 and 5.9)."""


def fig07_run(effort: Effort) -> StudyResult:
    """Runs recorded exits on E3's cluster; full effort adds other cases at batch 1 and 8, in shorter runs.

    Each case adds one of E3's circumstances: its exits, V100 that 8 inputs do not fill, its ramps. The last case has
    other exits.
    """
    problem, inputs, choose = equal_cluster(), sst2(), partial(decide, strategies=CONTENDERS[effort])
    rows = by_batch(problem, inputs, BATCHES[effort], effort, choose)
    beyond: Rows = {}
    others: dict[str, Case] = {}
    if effort == "full":
        beyond = by_batch(problem, inputs, (BEYOND,), effort, choose)
        even, dear = even_exits(problem), like_e3(problem)
        others = {
            "E3's exits": (problem, even),
            "+ flat times": (flat(problem, LARGEST_BATCH), even),
            "+ dear ramps": (dear, even),
            "exits at once": (dear, exits_at_once(problem)),
        }
    of_cases = _in_cases(others, COMPARED["full"])
    with_beyond = {**rows, **beyond}
    return StudyResult(
        comparisons=tuple(_by_batch_comparisons(rows, of_cases, FIG07_PAPER)),
        pictures=(
            batch_bars("BERT-base on 16 V100, recorded exits", with_beyond),
            *([_steps({"recorded": rows, **of_cases})] if of_cases else []),
        ),
        e3=ratios_of(rows, "e3"),
        best=ratios_of(rows, "best"),
        tables=(plans(with_beyond), *([_of_cases(problem, others["E3's exits"][1])] if others else [])),
    )


def _in_cases(others: Mapping[str, Case], strategies: Sequence[Strategy]) -> dict[str, Rows]:
    choose = partial(decide, strategies=strategies)
    return {name: by_batch(*case, (1, LARGEST_BATCH), "short", choose) for name, case in others.items()}


def _by_batch_comparisons(rows: Rows, of_cases: Mapping[str, Rows], paper: Ratios) -> Iterator[Comparison]:
    for name, found in {"": rows, **of_cases}.items():
        of, row = name and f"{name}: ", found[AT_LARGEST]
        yield Comparison(f"{of}e3 / early-exit, batch 8", times(row, "e3", "early-exit"), paper.over_early_exit)
        yield Comparison(f"{of}e3 / stock, batch 8", times(row, "e3", "stock"), paper.over_stock)
        if "batch 1" in found:
            at_one = times(found["batch 1"], "e3", "early-exit")
            yield Comparison(f"{of}e3 / early-exit, batch 1", at_one, PAPER_AT_ONE)
        if "best" in row:
            yield Comparison(f"{of}best / e3, batch 8", times(row, "best", "e3"))


def _steps(by_case: Mapping[str, Rows]) -> Bars:
    """Returns e3's gain at batch 8, from our case to E3's."""
    paper = {"early-exit": FIG07_PAPER.over_early_exit, "stock": FIG07_PAPER.over_stock}
    return Bars(
        "Towards E3's circumstances, one after the other (batch 8)",
        "each with those before it; the last with other exits",
        "times the goodput",
        tuple(name.removeprefix("exits ") for name in by_case),
        {f"e3 / {other}": tuple(times(rows[AT_LARGEST], "e3", other) for rows in by_case.values()) for other in paper},
        {f"e3 / {other}": (value,) * len(by_case) for other, value in paper.items()},
    )


def _of_cases(problem: PlanProblem, even: Workload) -> Table:
    table = problem.latency[DEVICE]
    one_s, most_s = table.blocks_at(np.array([1.0, LARGEST_BATCH])).sum(0)
    saved = savings(even.survival_N, table, problem.ramps)
    return facts(
        {
            "latency that E3's exits save at batch 1 (%); E3's figure 2: 42.7": 100 * saved.latency,
            f"V100 of TensorRT: time of a batch of {LARGEST_BATCH} over that of 1": float(most_s / one_s),
            "a dear ramp, over the block before it": ramp_share(problem),
            "a ramp of the profile, over the block before it": first_ramp(problem),
        }
    )


FIG07_STUDY = declare("fig07_homogeneous", fig07_run, paper=FIG07_PAPER, needs=(BERT12_SST2,))

MOST_LOST = 0.02
"""Allowed share of answers that differ from the full model's. E3's exits lose less (section 5)."""
STEP = 0.01
"""Distance of the candidate thresholds."""
BRANCHY_NET = (0, 4)
"""BranchyNet's exits in a ResNet-110, after layers 2 and 37, at the same depths of a ResNet-32."""
FIG08_PAPER = Ratios(over_stock=1.58, over_early_exit=1.74)


def vision(records: ExitRecords, words: str) -> Case:
    """Returns E3's 16 V100 for a ResNet-50, with the recorded exits of CIFAR's ResNet-32.

    Ramps are moved to equal depths, and each takes the time of BranchyNet's (Apparate, table 2). All have one
    threshold, the lowest confidence that loses at most `MOST_LOST` on these inputs.
    """
    published = read_problem(PROBLEMS / "resnet50_16_v100.yaml").problem
    ramps = tuple(round((ramp + 1) / records.num_blocks * published.num_blocks) - 1 for ramp in records.ramps)
    latency = {
        device: replace(table, ramp_s_EB=np.tile(VISION_RAMP * table.block_s_NB.sum(0), (len(ramps), 1)))
        for device, table in published.latency.items()
    }
    problem = replace(published, ramps=ramps, latency=latency)
    tried: list[float] = np.arange(0.5, 1 + STEP / 2, STEP).round(2).tolist()
    threshold = next(
        at for at in tried if records.outcome(dict.fromkeys(records.ramps, at)).losses_N.mean() <= MOST_LOST
    )
    decisions = replace(recorded(records, dict.fromkeys(records.ramps, threshold)), ramps=ramps)
    rows_N = np.random.default_rng(SEED).integers(len(records), size=NUM_ROWS)
    return problem, workload(f"recorded: {words}, confidence {threshold:g}", decisions, rows_N, problem)


def fig08_run(effort: Effort) -> StudyResult:
    """Runs recorded exits after every block; full effort adds other cases in shorter simulations.

    They are BranchyNet's places; then exits as E3's figure 3 may mean them, and V100 that 8 inputs do not fill.
    """
    clear = of_kind(recorded_images(effort), "clear")
    case = vision(clear, "ResNet-32 on CIFAR-10, a ramp after every block")
    problem, _ = case
    others: dict[str, Case] = {}
    if effort == "full":
        others = {
            "BranchyNet's places": vision(of_ramps(clear, BRANCHY_NET), "ResNet-32 on CIFAR-10, two ramps"),
            "E3's exits": (problem, even_exits(problem)),
            "exits at once": (problem, exits_at_once(problem)),
            "exits at once, flat times": (flat(problem, LARGEST_BATCH), exits_at_once(problem)),
        }
    rows = by_batch(*case, BATCHES[effort], effort, partial(decide, strategies=COMPARED[effort]))
    of_cases = _in_cases(others, PAPERS)
    return StudyResult(
        comparisons=tuple(_by_batch_comparisons(rows, of_cases, FIG08_PAPER)),
        pictures=(batch_bars("ResNet-50 on 16 V100, recorded exits", rows),),
        e3=ratios_of(rows, "e3"),
        best=ratios_of(rows, "best"),
        tables=(plans(rows), allowed_table({"recorded": case, **others}, LARGEST_BATCH)),
    )


FIG08_STUDY = declare("fig08_vision", fig08_run, paper=FIG08_PAPER, needs=NEEDS)


# Figure 18: PABEE, whose exits depend on each other. `early-exit` is PABEE itself.

AGREEMENT = 0.98
"""Minimum agreement, as with DeeBERT's rule at entropy 0.4: "less than 2 % error" (E3 section 5)."""
PABEE_PATIENCE = 6
"""PABEE's own default."""
ALL_RAMPS = Space(ramps="all")
"""Every plan with all ramps active. Exits that depend on each other must all be evaluated (E3 section 3.4)."""
FIG18_PAPER = 1.55


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The effect of a patience on recorded inputs, all ramps active."""

    patience: int
    agreement: float
    """Share of answers that equal the full model's."""
    accuracy: float | None
    """Share of right answers, if labels are known."""


def patience_of(records: ExitRecords, patience: int) -> Patience:
    """Returns the effect of PABEE's rule with this patience."""
    left_N = patient(records, patience).leaves_N(records.ramps, records.ramps)
    column_N = np.searchsorted(records.ramps, np.maximum(left_N, records.ramps[0]))
    stays_N, rows = left_N == NOWHERE, np.arange(len(records))
    losses_N = np.where(stays_N, 0.0, records.losses_NR[rows, column_N])
    truth_NE = records.true_losses_NE
    return Patience(
        patience=patience,
        agreement=1 - float(losses_N.mean()),
        accuracy=None if truth_NE is None else 1 - float(truth_NE[rows, np.where(stays_N, -1, column_N)].mean()),
    )


def least_patience(records: ExitRecords) -> Patience:
    """Returns the least patience that keeps `AGREEMENT`; raises DataError if there is none."""
    for patience in range(1, len(records.ramps)):
        if (found := patience_of(records, patience)).agreement >= AGREEMENT:
            return found
    raise DataError(f"no patience below {len(records.ramps)} keeps {AGREEMENT:.0%} of the answers")


def with_all_ramps(problem: PlanProblem) -> Mapping[str, Decision]:
    """Returns every side's decision with all ramps active."""
    return {**decide(problem, PAPERS), "best": solve(problem, ALL_RAMPS)}


def fig18_run(effort: Effort) -> StudyResult:
    """Runs the patience that keeps the answers at all batch sizes; full effort adds PABEE's default at the largest."""
    records, problem = bert12_sst2("entropy"), equal_cluster()
    chosen, rows_N = least_patience(records), np.random.default_rng(SEED).integers(len(records), size=NUM_ROWS)
    inputs, usual = (
        workload(f"recorded: BERT-base on SST-2 dev, patience {each}", patient(records, each), rows_N, problem)
        for each in (chosen.patience, PABEE_PATIENCE)
    )
    found = by_batch(problem, inputs, BATCHES[effort], effort, with_all_ramps)
    other: Rows = {}
    if effort == "full":
        other = by_batch(problem, usual, (LARGEST_BATCH,), effort, with_all_ramps)
    e3, best = (ratios_of(found, side) for side in ("e3", "best"))
    smallest, last = next(iter(found)), list(found.values())[-1]
    full = ratio(allowed(problem, inputs, LARGEST_BATCH).most_times, times(last, "early-exit", "stock"))
    return StudyResult(
        comparisons=(
            Comparison("e3 / PABEE, largest", e3.over_early_exit, FIG18_PAPER),
            Comparison("best / PABEE, largest", best.over_early_exit, FIG18_PAPER),
            Comparison(f"e3 / PABEE, {smallest}", times(found[smallest], "e3", "early-exit")),
            Comparison("e3 / stock, largest", e3.over_stock),
            Comparison("best / stock, largest", best.over_stock),
            Comparison("full batches throughout / PABEE, batch 8", full),
            *with_flat_times(problem, inputs, LARGEST_BATCH, effort, with_all_ramps),
            *(
                Comparison(
                    f"patience {PABEE_PATIENCE}, {label}: e3 / PABEE", times(row, "e3", "early-exit"), FIG18_PAPER
                )
                for label, row in other.items()
            ),
        ),
        pictures=(batch_bars(f"PABEE (early-exit) with patience {chosen.patience}", found),),
        e3=e3,
        best=best,
        tables=(
            Table(
                "What a patience does",
                ("patience", "as the full model (%)", "right (%)", "leave at once (%)", "blocks of the mean input"),
                (_patience_cells(chosen, inputs), _patience_cells(patience_of(records, PABEE_PATIENCE), usual)),
            ),
            plans(found),
        ),
    )


def _patience_cells(found: Patience, inputs: Workload) -> tuple[float | None, ...]:
    """The rule lets easy inputs leave as soon as it can, one block after the patience."""
    right = None if found.accuracy is None else 100 * found.accuracy
    at_once = 1 - min(inputs.survival_N[: found.patience + 2])
    return found.patience, 100 * found.agreement, right, 100 * at_once, sum(inputs.survival_N)


FIG18_STUDY = declare("fig18_pabee", fig18_run, paper=Ratios(over_early_exit=FIG18_PAPER), needs=(BERT12_SST2,))


# Figure 23: goodput by tolerated errors, with batches of up to 8.

ENTROPIES = {"full": (0.3, 0.35, 0.4, 0.45, 0.5), "quick": (0.5,)}
FIG23_PAPER = 1.43


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """All figures at one entropy."""

    entropy: float
    row: Row
    outcome: ExitOutcome
    """The recorded inputs with all ramps active."""
    off: tuple[int, ...]
    """Ramps that `best` switches off."""
    changed: int
    """Recorded inputs whose answers change because these ramps are off: they leave later, or not at all."""

    @property
    def lost(self) -> float | None:
        """Lost accuracy in points."""
        if self.outcome.accuracy is None or self.outcome.full_accuracy is None:
            return None
        return 100 * (self.outcome.full_accuracy - self.outcome.accuracy)


def tolerance(records: ExitRecords, problem: PlanProblem, entropy: float, effort: Effort) -> Tolerance:
    """Runs all sides at one entropy."""
    row = by_batch(problem, sst2(entropy=entropy), (LARGEST_BATCH,), effort)[AT_LARGEST]
    outcome = records.outcome(dict.fromkeys(records.ramps, entropy))
    left_on = {ramp: entropy for ramp in records.ramps if ramp in row["best"].ramps}
    assert outcome.answers_N is not None
    return Tolerance(
        entropy=entropy,
        row=row,
        outcome=outcome,
        off=tuple(ramp for ramp in records.ramps if ramp not in left_on),
        changed=int((outcome.answers_N != records.outcome(left_on).answers_N).sum()),
    )


def fig23_run(effort: Effort) -> StudyResult:
    """Runs BERT-base's recorded exits on E3's 16 V100, at every entropy."""
    records, problem = bert12_sst2("entropy"), equal_cluster()
    found = [tolerance(records, problem, entropy, effort) for entropy in ENTROPIES[effort]]
    rates = series_of({f"{each.entropy:g}": each.row for each in found})
    e3, best = (largest_ratios(rates, side) for side in ("e3", "best"))
    x_label, x = "entropy at which inputs leave", tuple(each.entropy for each in found)
    errors = {
        "unlike the full model's (%)": tuple(100 - 100 * each.outcome.agreement for each in found),
        "accuracy lost (points)": tuple(each.lost for each in found),
    }
    return StudyResult(
        comparisons=(
            Comparison("e3 / early-exit, largest", e3.over_early_exit, FIG23_PAPER),
            Comparison("best / early-exit, largest", best.over_early_exit, FIG23_PAPER),
            *(
                Comparison(f"e3 / early-exit, entropy {each.entropy:g}", times(each.row, "e3", "early-exit"))
                for each in found
            ),
            *with_flat_times(problem, sst2(entropy=found[-1].entropy), LARGEST_BATCH, effort),
        ),
        pictures=(
            Lines("BERT-base on 16 V100, batch 8", x_label, "goodput (inputs/s)", x, rates),
            Lines("Errors that the entropy allows", x_label, "% of answers, points of accuracy", x, errors),
        ),
        e3=e3,
        best=best,
        tables=(
            Table(
                f"Answers to {len(records)} inputs",
                ("entropy", "as the full model (%)", "accuracy lost (points)", "ramps off in best", "changed by that"),
                tuple(
                    (each.entropy, 100 * each.outcome.agreement, each.lost, len(each.off), each.changed)
                    for each in found
                ),
            ),
        ),
    )


FIG23_STUDY = declare(
    "fig23_error_tolerance", fig23_run, paper=Ratios(over_early_exit=FIG23_PAPER), needs=(BERT12_SST2,)
)


# Figure 24: goodput by SLO.

FIG24_SLOS_S: dict[Effort, tuple[float, ...]] = {"full": SLOS_S, "quick": (0.025, 0.05)}
OTHER_SLOS_S = (0.05, 0.1, 0.2)
LIMITS = (8, 24, 128)
"""Candidate largest batches; the last one leaves the batch to the planner."""
LOOSE_S = 0.5
"""From this SLO on only the last limit is tried; in a full run no other was significantly better."""
FIG24_PAPER = Ratios(over_stock=1.34, over_early_exit=1.63)
"""e3 over early-exit at a batch of 1, which is the largest that E3's strictest SLO allows."""


def by_limits(
    problem: PlanProblem, inputs: Workload, slos_s: Sequence[float], names: Sequence[Strategy], effort: Effort
) -> tuple[Rows, Rows]:
    """Returns the contenders under each SLO, by its label, in short runs.

    First each with the batch limit of its highest goodput, then with the batches that the planner chooses.
    """
    tuned: dict[str, Row] = {}
    planned: dict[str, Row] = {}
    for slo_s in slos_s:
        under = with_slo(facing(problem, inputs), slo_s)
        limits = LIMITS if slo_s < LOOSE_S else LIMITS[-1:]
        decisions = {
            f"{name}, batch {limit}": solve(with_batch_limit(under, limit), name) for limit in limits for name in names
        }
        tried = simulated(under, decisions, inputs, SHORT[effort])
        points = {name: [tried[f"{name}, batch {limit}"] for limit in limits] for name in names}
        words = f"{1e3 * slo_s:g} ms"
        tuned[words] = {name: max(of, key=lambda point: point.rate_per_s or 0.0) for name, of in points.items()}
        planned[words] = {name: of[-1] for name, of in points.items()}
    return tuned, planned


def fig24_run(effort: Effort) -> StudyResult:
    """Runs recorded exits on E3's cluster; full effort adds E3's circumstances, under a few of the SLOs."""
    problem, slos_s = equal_cluster(), FIG24_SLOS_S[effort]
    tuned, planned = by_limits(problem, sst2(), slos_s, COMPARED[effort], effort)
    of_cases: dict[str, Rows] = {}
    if effort == "full":
        of_e3, _ = by_limits(like_e3(problem), even_exits(problem), OTHER_SLOS_S, PAPERS, effort)
        of_cases["E3's circumstances"] = of_e3
    shown = {"recorded exits": tuned, "the planner's batches": planned, **of_cases}
    gains = {
        name: tuple(times(rows[slo], "e3", "early-exit") if slo in rows else None for slo in tuned)
        for name, rows in shown.items()
    }
    x, title = tuple(1e3 * slo_s for slo_s in slos_s), "BERT-base on 16 V100, recorded exits"
    in_words = tuple(float(slo.removesuffix(" ms")) for slo in tuned)
    return StudyResult(
        comparisons=tuple(_by_slo_comparisons(tuned, planned, of_cases)),
        pictures=(
            Lines(title, "SLO (ms)", "goodput (inputs/s)", x, series_of(tuned), log_x=True),
            Lines("e3 over early-exit", "SLO (ms)", "times the goodput", in_words, gains, log_x=True),
        ),
        e3=ratios_of(tuned, "e3"),
        best=ratios_of(tuned, "best"),
        tables=(
            plans(tuned),
            plans({f"{slo}, the planner's batch": row for slo, row in planned.items()}),
            _filling(problem),
        ),
    )


def _by_slo_comparisons(tuned: Rows, planned: Rows, of_cases: Mapping[str, Rows]) -> Iterator[Comparison]:
    e3, best, own = ratios_of(tuned, "e3"), ratios_of(tuned, "best"), ratios_of(planned, "e3")
    strict, row = next(iter(tuned.items()))
    yield Comparison("e3 / early-exit, largest", e3.over_early_exit, FIG24_PAPER.over_early_exit)
    yield Comparison("e3 / stock, largest", e3.over_stock, FIG24_PAPER.over_stock)
    yield Comparison(f"e3 / early-exit, SLO {strict}", times(row, "e3", "early-exit"))
    if "best" in row:
        yield Comparison("best / early-exit, largest", best.over_early_exit)
    yield Comparison("the planner's batches: e3 / early-exit, largest", own.over_early_exit)
    yield Comparison("the planner's batches: e3 / stock, largest", own.over_stock)
    for name, rows in of_cases.items():
        for slo, each in rows.items():
            for other, paper in (("early-exit", FIG24_PAPER.over_early_exit), ("stock", FIG24_PAPER.over_stock)):
                yield Comparison(f"{name}, SLO {slo}: e3 / {other}", times(each, "e3", other), paper)


def _filling(problem: PlanProblem) -> Table:
    """Returns the small loss of a shrinking batch on a full accelerator."""
    table = problem.latency[DEVICE]
    most = table.batches[-1]
    quarter_s, some_s, most_s = table.blocks_at(np.array([most / 4, LARGEST_BATCH, most])).sum(0)
    over = {LARGEST_BATCH: float(most_s / some_s), most / 4: float(most_s / quarter_s)}
    return facts({f"time of a batch of {most}, over one of {batch:g}": value for batch, value in over.items()})


FIG24_STUDY = declare("fig24_slo", fig24_run, paper=FIG24_PAPER, needs=(BERT12_SST2,))


# Figure 25: the gain from switching off the ramps inside splits, in short runs.

AT_ENDS, CHOSEN = "ramps at split ends", "ramps chosen"


def ramp_variants(problem: PlanProblem) -> dict[str, Decision]:
    """Returns e3 with all ramps, with those at the ends of its splits, and with those that the planner chooses.

    Each variant chooses its own splits.
    """
    return {
        "e3": solve(problem, "e3"),
        AT_ENDS: solve(problem, RAMPS_AT_SPLIT_ENDS),
        CHOSEN: solve(problem, RAMPS_CHOSEN),
    }


def fig25_run(effort: Effort) -> StudyResult:
    """Runs recorded exits on E3's cluster; full effort adds other cases at the largest batch.

    They are E3's ramps, then also its exits, then also V100 that 8 inputs do not fill; and exits of the other extreme.
    """
    problem, inputs = equal_cluster(), sst2()
    others: dict[str, Case] = {}
    if effort == "full":
        dear, unfilled, even = with_ramps_of(problem, ramp_share(problem)), like_e3(problem), even_exits(problem)
        others = {
            "dear ramps": (dear, inputs),
            "+ E3's exits": (dear, even),
            "+ flat times": (unfilled, even),
            "exits at once": (unfilled, exits_at_once(problem)),
        }
    rows = by_batch(problem, inputs, BATCHES[effort], SHORT[effort], ramp_variants)
    at_largest = {"recorded": rows[AT_LARGEST]} | {
        name: by_batch(*case, (LARGEST_BATCH,), "short", ramp_variants)[AT_LARGEST] for name, case in others.items()
    }
    by_label = {**rows, **{f"{name}, {AT_LARGEST}": at_largest[name] for name in others}}
    return StudyResult(
        comparisons=(
            *(
                Comparison(f"{name} / e3, largest", largest(times(row, name, "e3") for row in rows.values()), paper)
                for name, paper in ((AT_ENDS, RAMPS_OFF_GAIN), (CHOSEN, RAMPS_OFF_GAIN))
            ),
            *(Comparison(f"{label}: {AT_ENDS} / e3", times(row, AT_ENDS, "e3")) for label, row in by_label.items()),
            *(
                Comparison(f"{name}, {AT_LARGEST}: {CHOSEN} / e3", times(at_largest[name], CHOSEN, "e3"))
                for name in others
            ),
        ),
        pictures=(
            batch_bars("BERT-base on 16 V100, recorded exits", rows),
            Bars(
                f"Goodput over e3's with all ramps ({AT_LARGEST})",
                "each with those before it; the last with other exits",
                "times the goodput",
                tuple(name.removeprefix("exits ") for name in at_largest),
                {name: tuple(times(row, name, "e3") for row in at_largest.values()) for name in (AT_ENDS, CHOSEN)},
                {AT_ENDS: (RAMPS_OFF_GAIN,) * len(at_largest)},
            ),
        ),
        tables=(
            plans(rows),
            facts(
                {
                    "a ramp, over the block before it: the most that ramps switched off bring": first_ramp(problem),
                    f"the same for {RAMPS_OFF_GAIN:g} x, with two splits and flat times": ramp_share(problem),
                }
            ),
        ),
    )


FIG25_STUDY = declare("fig25_ramps_inside", fig25_run, needs=(BERT12_SST2,))


# Figure 26: all splits on one accelerator in turn, or each on its own accelerators, in short runs.

FIG26_SLOS_S = {"full": (0.04, 0.05, 0.075, 0.1, 0.2), "quick": (0.04,)}
IN_TURN = "e3's splits in turn"
"""E3 without model parallelism, literally: every accelerator runs all of e3's splits, a later one when its batch is
full."""
TOLD = ("batch 1", "batch 8", "SLO 40 ms", "SLO 200 ms", "E3's circumstances, SLO 100 ms")
"""Rows whose ratios are in a table; the others are only in the pictures."""


def with_and_without_pipelines(problem: PlanProblem) -> dict[str, Decision]:
    """Returns plans with model parallelism, and without it: the same splits, the best splits, one split."""
    e3 = solve(problem, "e3")
    return {
        "e3": e3,
        IN_TURN: e3 if isinstance(e3, NoPlan) else in_turn(problem, e3),
        "serial": solve(problem, "serial"),
        "early-exit": solve(problem, "early-exit"),
    }


def in_turn(problem: PlanProblem, planned: Planned) -> Planned:
    """Returns a plan's splits on every accelerator, even if the wait for full batches exceeds the SLO."""
    splits = tuple(split for stage in planned.stages for split in stage.splits)
    stages = (Stage(device=DEVICE, replicas=problem.devices[DEVICE].count, splits=splits),)
    figures = evaluate(problem, stages)
    return Planned(strategy="serial", stages=stages, figures=figures, bound=objective_value(problem, figures), gap=0.0)


def by_slo(problem: PlanProblem, inputs: Workload, slos_s: Sequence[float], effort: Effort) -> dict[str, Row]:
    """Returns a row per SLO, batches up to E3's largest."""
    limited = with_batch_limit(facing(problem, inputs), LARGEST_BATCH)
    under = {f"SLO {1e3 * slo_s:g} ms": with_slo(limited, slo_s) for slo_s in slos_s}
    return {
        label: simulated(each, with_and_without_pipelines(each), inputs, SHORT[effort]) for label, each in under.items()
    }


def fig26_run(effort: Effort) -> StudyResult:
    """Runs by batch under E3's SLO, and by SLO at E3's largest batch; full effort adds E3's circumstances."""
    problem, inputs = equal_cluster(), sst2()
    at_batch = by_batch(problem, inputs, BATCHES[effort], SHORT[effort], with_and_without_pipelines)
    under_slo = by_slo(problem, inputs, FIG26_SLOS_S[effort], effort)
    rows: dict[str, Row] = {**at_batch, **under_slo}
    if effort == "full":
        slos_s = (problem.slo.latency_s, 2 * problem.slo.latency_s)
        of_e3 = by_slo(like_e3(problem), even_exits(problem), slos_s, effort)
        rows |= {f"E3's circumstances, {label}": row for label, row in of_e3.items()}
    x, title = tuple(1e3 * slo_s for slo_s in FIG26_SLOS_S[effort]), f"BERT-base on 16 V100, {AT_LARGEST}"
    return StudyResult(
        comparisons=tuple(
            Comparison(f"e3 / {other}, {label}", times(row, "e3", other))
            for label, row in rows.items()
            for other in (IN_TURN, "serial", "early-exit")
            if label in TOLD
        ),
        pictures=(
            batch_bars("BERT-base on 16 V100, SLO 100 ms", at_batch),
            Lines(title, "SLO (ms)", "goodput (inputs/s)", x, series_of(under_slo), log_x=True),
        ),
        tables=(plans(rows),),
    )


FIG26_STUDY = declare("fig26_no_model_parallelism", fig26_run, needs=(BERT12_SST2,))
