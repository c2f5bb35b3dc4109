"""E3, figure 8: goodput of a ResNet with exits on 16 V100, by batch size; and where the difference comes from.

Simulated: 16 V100, Poisson arrivals, 99 % of inputs within 100 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from experiments.pame.load_changes import NEEDS, of_kind, recorded
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, exits_at_once, flat
from experiments.studies.fig07_homogeneous import Case
from experiments.studies.side_by_side import Rows, batch_bars, by_batch, document, plans, ratios_of, times
from experiments.studies.sides import BATCHES, decide, savings
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare
from experiments.studies.vision import cifar, places_of, vision_cluster
from optimizer.decision import Strategy
from optimizer.live.best_ramps import of_ramps

BRANCHY_NET = (0, 4)
"""Its ResNet-110 has exits after the 2nd and the 37th layer: in a ResNet-32, after the first block and at a third."""
DEVICE = "V100"
PAPER = Ratios(over_stock=1.58, over_early_exit=1.74)
PAPER_AT_ONE = 0.97
"""e3 over early-exit at batch 1 (sections 5.1.1 and 5.9)."""
IN_CASES: tuple[Strategy, ...] = ("stock", "early-exit", "e3")


def cases(inputs: Case) -> dict[str, Case]:
    """BranchyNet's places; then exits as E3's figure 3 may mean them, and V100 that 8 inputs do not fill."""
    problem, _ = inputs
    clear = of_kind(recorded(), "clear")
    branchy = of_ramps(clear, BRANCHY_NET)
    two = vision_cluster(places_of(branchy, problem.num_blocks))
    return {
        "BranchyNet's places": (two, cifar(branchy, two, "ResNet-32 on CIFAR-10, two ramps")),
        "E3's exits": (problem, even_exits(problem)),
        "exits at once": (problem, exits_at_once(problem)),
        "exits at once, flat times": (flat(problem, LARGEST_BATCH), exits_at_once(problem)),
    }


def compare(case: Case, others: Mapping[str, Case], effort: Effort) -> StudyResult:
    """The figure, and what is left of E3's ratios in the other cases, which are simulated for a shorter time."""
    problem, inputs = case
    rows = by_batch(problem, inputs, BATCHES[effort], effort)
    in_cases = partial(decide, strategies=IN_CASES)
    of_cases = {name: by_batch(*each, (1, LARGEST_BATCH), "quick", in_cases) for name, each in others.items()}
    told = {"": rows, **{f"{name}: ": each for name, each in of_cases.items()}}
    return StudyResult(
        comparisons=tuple(each for of, found in told.items() for each in _comparisons(found, of)),
        pictures=(batch_bars("ResNet-50 on 16 V100, recorded exits", rows),),
        e3=ratios_of(rows, "e3"),
        best=ratios_of(rows, "best"),
        figures={"rows": document(rows), "cases": {name: document(each) for name, each in of_cases.items()}},
        tables=(plans(rows), _allowed({"recorded": case, **others})),
    )


def _comparisons(rows: Rows, of: str) -> tuple[Comparison, ...]:
    row, first = rows[f"batch {LARGEST_BATCH}"], rows.get("batch 1")
    found = [
        Comparison(f"{of}e3 / early-exit, batch 8", times(row, "e3", "early-exit"), PAPER.over_early_exit),
        Comparison(f"{of}e3 / stock, batch 8", times(row, "e3", "stock"), PAPER.over_stock),
    ]
    if first is not None:
        found.append(Comparison(f"{of}e3 / early-exit, batch 1", times(first, "e3", "early-exit"), PAPER_AT_ONE))
    if "best" in row:
        found.append(Comparison(f"{of}best / e3, batch 8", times(row, "best", "e3")))
    return tuple(found)


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


def run(effort: Effort) -> StudyResult:
    """Recorded exits after every block; quick effort leaves the other cases out."""
    clear = of_kind(recorded(), "clear")
    problem = vision_cluster(places_of(clear, 16))
    case = problem, cifar(clear, problem, "ResNet-32 on CIFAR-10, a ramp after every block")
    return compare(case, cases(case) if effort == "full" else {}, effort)


STUDY = declare(__name__, run, paper=PAPER, needs=NEEDS)
