"""E3, figure 7: goodput of BERT-base with exits on 16 V100, by batch size; and where the difference comes from.

Simulated: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within 100 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import (
    LARGEST_BATCH,
    even_exits,
    exits_at_once,
    first_ramp,
    flat,
    like_e3,
    ramp_share,
)
from experiments.studies.picture import Bars
from experiments.studies.side_by_side import (
    Rows,
    batch_bars,
    by_batch,
    document,
    plans,
    ratios_of,
    times,
)
from experiments.studies.sides import BATCHES, Workload, decide, equal_cluster, savings, sst2
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, facts
from optimizer.decision import Strategy
from optimizer.problem import PlanProblem

BEYOND = 16
"""A batch that broke E3's SLO."""
CONTENDERS: dict[Effort, tuple[Strategy, ...]] = {
    "full": ("stock", "early-exit", "e3", "serial", "best"),
    "quick": ("stock", "early-exit", "e3"),
}
IN_CASES: tuple[Strategy, ...] = ("stock", "early-exit", "e3", "best")
DEVICE = "V100"
PAPER = Ratios(over_stock=1.30, over_early_exit=1.44)
PAPER_AT_ONE = 0.97
"""e3 over early-exit at batch 1 (sections 5.1.1 and 5.9)."""

Case = tuple[PlanProblem, Workload]


def cases(problem: PlanProblem) -> dict[str, Case]:
    """E3's circumstances, one more in each: its exits, V100 that 8 inputs do not fill, its ramps; then other exits."""
    even, dear = even_exits(problem), like_e3(problem)
    return {
        "E3's exits": (problem, even),
        "+ flat times": (flat(problem, LARGEST_BATCH), even),
        "+ dear ramps": (dear, even),
        "exits at once": (dear, exits_at_once(problem)),
    }


def compare(problem: PlanProblem, inputs: Workload, others: Mapping[str, Case], effort: Effort) -> StudyResult:
    """The figure on `inputs`; at batch 1 and 8, what is left of E3's ratios in every other case.

    Those are simulated for a shorter time than the figure's own.
    """
    choose = partial(decide, strategies=CONTENDERS[effort])
    rows = by_batch(problem, inputs, BATCHES[effort], effort, choose)
    beyond = by_batch(problem, inputs, (BEYOND,), effort, choose) if effort == "full" else {}
    in_cases = partial(decide, strategies=IN_CASES)
    of_cases = {name: by_batch(*case, (1, LARGEST_BATCH), "quick", in_cases) for name, case in others.items()}
    told = {"": rows, **{f"{name}: ": each for name, each in of_cases.items()}}
    return StudyResult(
        comparisons=tuple(each for of, found in told.items() for each in _comparisons(found, of)),
        pictures=(
            batch_bars("BERT-base on 16 V100, recorded exits", {**rows, **beyond}),
            *([_steps({"recorded": rows, **of_cases})] if of_cases else []),
        ),
        e3=ratios_of(rows, "e3"),
        best=ratios_of(rows, "best"),
        figures={
            "rows": document({**rows, **beyond}),
            "cases": {name: document(each) for name, each in of_cases.items()},
        },
        tables=(plans({**rows, **beyond}), *([_of_cases(problem, others["E3's exits"][1])] if others else [])),
    )


def _comparisons(rows: Rows, of: str) -> tuple[Comparison, ...]:
    row, first = rows[f"batch {LARGEST_BATCH}"], rows.get("batch 1")
    found = [
        Comparison(f"{of}e3 / early-exit, batch 8", times(row, "e3", "early-exit"), PAPER.over_early_exit),
        Comparison(f"{of}e3 / stock, batch 8", times(row, "e3", "stock"), PAPER.over_stock),
    ]
    if first is not None:
        found += [
            Comparison(f"{of}e3 / early-exit, batch 1", times(first, "e3", "early-exit"), PAPER_AT_ONE),
            Comparison(f"{of}best / e3, batch 8", times(row, "best", "e3")),
        ]
    return tuple(found)


def _steps(by_case: Mapping[str, Rows]) -> Bars:
    """What e3 gains at batch 8, from our case to E3's."""
    at_largest = [rows[f"batch {LARGEST_BATCH}"] for rows in by_case.values()]
    paper = {"early-exit": PAPER.over_early_exit, "stock": PAPER.over_stock}
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


def run(effort: Effort) -> StudyResult:
    """Recorded exits on E3's cluster; quick effort leaves the other cases out."""
    problem = equal_cluster()
    return compare(problem, sst2(), cases(problem) if effort == "full" else {}, effort)


STUDY = declare(__name__, run, paper=PAPER, needs=(BERT12_SST2,))
