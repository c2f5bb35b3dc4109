"""E3, figures 7 and 8: goodput by largest batch, and where the difference to the paper comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from experiments.problems import PROBLEMS
from experiments.recorded_exits import BERT12_SST2
from experiments.served_streams import VISION_RAMP
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, exits_at_once, first_ramp, flat, like_e3, ramp_share
from experiments.studies.load_changes import NEEDS, of_kind
from experiments.studies.load_changes import recorded as recorded_images
from experiments.studies.picture import Bars
from experiments.studies.side_by_side import Rows, batch_bars, by_batch, plans, ratios_of, times
from experiments.studies.sides import BATCHES, NUM_ROWS, SEED, Workload, decide, equal_cluster, savings, sst2, workload
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, facts
from optimizer.decision import Strategy
from optimizer.live.best_ramps import of_ramps
from optimizer.problem import PlanProblem
from optimizer.problem_file import read_problem
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.inputs import recorded

# E3, figure 7: goodput of BERT-base with exits on 16 V100, by batch size; and where the difference comes from.

BEYOND = 16
"""A batch that broke E3's SLO."""
CONTENDERS: dict[Effort, tuple[Strategy, ...]] = {
    "full": ("stock", "early-exit", "e3", "serial", "best"),
    "quick": ("stock", "early-exit", "e3"),
}
FIG07_IN_CASES: tuple[Strategy, ...] = ("stock", "early-exit", "e3", "best")
DEVICE = "V100"
FIG07_PAPER = Ratios(over_stock=1.30, over_early_exit=1.44)
PAPER_AT_ONE = 0.97
"""e3 over early-exit at batch 1 (sections 5.1.1 and 5.9)."""

Case = tuple[PlanProblem, Workload]


def fig07_cases(problem: PlanProblem) -> dict[str, Case]:
    """E3's circumstances, one more in each: its exits, V100 that 8 inputs do not fill, its ramps; then other exits."""
    even, dear = even_exits(problem), like_e3(problem)
    return {
        "E3's exits": (problem, even),
        "+ flat times": (flat(problem, LARGEST_BATCH), even),
        "+ dear ramps": (dear, even),
        "exits at once": (dear, exits_at_once(problem)),
    }


def fig07_compare(problem: PlanProblem, inputs: Workload, others: Mapping[str, Case], effort: Effort) -> StudyResult:
    """The figure on `inputs`; at batch 1 and 8, what is left of E3's ratios in every other case.

    Those are simulated for a shorter time than the figure's own.
    """
    choose = partial(decide, strategies=CONTENDERS[effort])
    rows = by_batch(problem, inputs, BATCHES[effort], effort, choose)
    beyond = by_batch(problem, inputs, (BEYOND,), effort, choose) if effort == "full" else {}
    in_cases = partial(decide, strategies=FIG07_IN_CASES)
    of_cases = {name: by_batch(*case, (1, LARGEST_BATCH), "quick", in_cases) for name, case in others.items()}
    told = {"": rows, **{f"{name}: ": each for name, each in of_cases.items()}}
    return StudyResult(
        comparisons=tuple(each for of, found in told.items() for each in _comparisons(found, of, FIG07_PAPER)),
        pictures=(
            batch_bars("BERT-base on 16 V100, recorded exits", {**rows, **beyond}),
            *([_steps({"recorded": rows, **of_cases})] if of_cases else []),
        ),
        e3=ratios_of(rows, "e3"),
        best=ratios_of(rows, "best"),
        tables=(plans({**rows, **beyond}), *([_of_cases(problem, others["E3's exits"][1])] if others else [])),
    )


def _comparisons(rows: Rows, of: str, paper: Ratios) -> tuple[Comparison, ...]:
    row, first = rows[f"batch {LARGEST_BATCH}"], rows.get("batch 1")
    found = [
        Comparison(f"{of}e3 / early-exit, batch 8", times(row, "e3", "early-exit"), paper.over_early_exit),
        Comparison(f"{of}e3 / stock, batch 8", times(row, "e3", "stock"), paper.over_stock),
    ]
    if first is not None:
        found.append(Comparison(f"{of}e3 / early-exit, batch 1", times(first, "e3", "early-exit"), PAPER_AT_ONE))
    if "best" in row:
        found.append(Comparison(f"{of}best / e3, batch 8", times(row, "best", "e3")))
    return tuple(found)


def _steps(by_case: Mapping[str, Rows]) -> Bars:
    """What e3 gains at batch 8, from our case to E3's."""
    at_largest = [rows[f"batch {LARGEST_BATCH}"] for rows in by_case.values()]
    paper = {"early-exit": FIG07_PAPER.over_early_exit, "stock": FIG07_PAPER.over_stock}
    return Bars(
        "Towards E3's circumstances, one after the other (batch 8)",
        "each with those before it; the last with other exits",
        "times the goodput",
        tuple(name.removeprefix("exits ") for name in by_case),
        {f"e3 / {other}": tuple(times(row, "e3", other) for row in at_largest) for other in paper},
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


def fig07_run(effort: Effort) -> StudyResult:
    """Recorded exits on E3's cluster; quick effort leaves the other cases out."""
    problem = equal_cluster()
    return fig07_compare(problem, sst2(), fig07_cases(problem) if effort == "full" else {}, effort)


FIG07_STUDY = declare("fig07_homogeneous", fig07_run, paper=FIG07_PAPER, needs=(BERT12_SST2,))


# ResNet-50 on E3's 16 V100, and where inputs leave it: as recorded of CIFAR's ResNet-32, at equal depths.

MOST_LOST = 0.02
"""Of answers that differ from the full model's: E3's exits lose less (section 5)."""
STEP = 0.01
"""Between the thresholds that are tried."""


def vision_cluster(ramps: Sequence[int]) -> PlanProblem:
    """E3's 16 V100 for a ResNet-50 with these ramps, each at the price of BranchyNet's (Apparate, table 2)."""
    problem = read_problem(PROBLEMS / "resnet50_16_v100.yaml").problem
    latency = {device: _with_ramps(table, len(ramps)) for device, table in problem.latency.items()}
    return replace(problem, ramps=tuple(ramps), latency=latency)


def _with_ramps(table: LatencyTable, number: int) -> LatencyTable:
    ramp_s_B = VISION_RAMP * table.block_s_NB.sum(0)
    return replace(table, ramp_s_EB=np.tile(ramp_s_B, (number, 1)))


def place_in(num_blocks: int, ramp: int, of_blocks: int) -> int:
    """The ramp of a model of `num_blocks` blocks that stands nearest to where one of another model does."""
    return round((ramp + 1) / of_blocks * num_blocks) - 1


def places_of(records: ExitRecords, num_blocks: int) -> tuple[int, ...]:
    """Where the recorded ramps stand in such a model."""
    return tuple(place_in(num_blocks, ramp, records.num_blocks) for ramp in records.ramps)


def one_threshold(records: ExitRecords, most_lost: float = MOST_LOST) -> float:
    """The lowest confidence, the same for all ramps, that loses at most so much on these inputs."""
    tried: list[float] = np.arange(0.5, 1 + STEP / 2, STEP).round(2).tolist()
    return next(at for at in tried if records.outcome(dict.fromkeys(records.ramps, at)).losses_N.mean() <= most_lost)


def cifar(records: ExitRecords, problem: PlanProblem, words: str) -> Workload:
    """Inputs that leave where the recorded ones do."""
    threshold = one_threshold(records)
    sure = recorded(records, dict.fromkeys(records.ramps, threshold))
    decisions = replace(sure, ramps=places_of(records, problem.num_blocks))
    rows_N = np.random.default_rng(SEED).integers(len(records), size=NUM_ROWS)
    return workload(f"recorded: {words}, confidence {threshold:g}", decisions, rows_N, problem)


# E3, figure 8: goodput of a ResNet with exits on 16 V100, by batch size; and where the difference comes from.

BRANCHY_NET = (0, 4)
"""Its ResNet-110 has exits after the 2nd and the 37th layer: in a ResNet-32, after the first block and at a third."""
FIG08_PAPER = Ratios(over_stock=1.58, over_early_exit=1.74)
FIG08_IN_CASES: tuple[Strategy, ...] = ("stock", "early-exit", "e3")


def fig08_cases(inputs: Case) -> dict[str, Case]:
    """BranchyNet's places; then exits as E3's figure 3 may mean them, and V100 that 8 inputs do not fill."""
    problem, _ = inputs
    clear = of_kind(recorded_images(), "clear")
    branchy = of_ramps(clear, BRANCHY_NET)
    two = vision_cluster(places_of(branchy, problem.num_blocks))
    return {
        "BranchyNet's places": (two, cifar(branchy, two, "ResNet-32 on CIFAR-10, two ramps")),
        "E3's exits": (problem, even_exits(problem)),
        "exits at once": (problem, exits_at_once(problem)),
        "exits at once, flat times": (flat(problem, LARGEST_BATCH), exits_at_once(problem)),
    }


def fig08_compare(case: Case, others: Mapping[str, Case], effort: Effort) -> StudyResult:
    """The figure, and what is left of E3's ratios in the other cases, which are simulated for a shorter time."""
    problem, inputs = case
    rows = by_batch(problem, inputs, BATCHES[effort], effort)
    in_cases = partial(decide, strategies=FIG08_IN_CASES)
    of_cases = {name: by_batch(*each, (1, LARGEST_BATCH), "quick", in_cases) for name, each in others.items()}
    told = {"": rows, **{f"{name}: ": each for name, each in of_cases.items()}}
    return StudyResult(
        comparisons=tuple(each for of, found in told.items() for each in _comparisons(found, of, FIG08_PAPER)),
        pictures=(batch_bars("ResNet-50 on 16 V100, recorded exits", rows),),
        e3=ratios_of(rows, "e3"),
        best=ratios_of(rows, "best"),
        tables=(plans(rows), _allowed({"recorded": case, **others})),
    )


def _allowed(of: Mapping[str, Case]) -> Table:
    saved = {
        name: savings(inputs.survival_N, problem.latency[DEVICE], problem.ramps, LARGEST_BATCH)
        for name, (problem, inputs) in of.items()
    }
    return Table(
        "What exits allow, all ramps active",
        ("", "compute saved (%)", "latency saved (%)", "full batches throughout / stock"),
        tuple((name, 100 * each.compute, 100 * each.latency, each.most_times) for name, each in saved.items()),
    )


def fig08_run(effort: Effort) -> StudyResult:
    """Recorded exits after every block; quick effort leaves the other cases out."""
    clear = of_kind(recorded_images(), "clear")
    problem = vision_cluster(places_of(clear, 16))
    case = problem, cifar(clear, problem, "ResNet-32 on CIFAR-10, a ramp after every block")
    return fig08_compare(case, fig08_cases(case) if effort == "full" else {}, effort)


FIG08_STUDY = declare("fig08_vision", fig08_run, paper=FIG08_PAPER, needs=NEEDS)
