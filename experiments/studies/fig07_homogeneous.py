"""E3, figure 7: goodput of BERT-base with exits on 16 V100, by batch size; and where the difference comes from.

    OFFRAMP_DATA=... python -m experiments.studies.fig07_homogeneous [--quick]

Simulated: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within 100 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from experiments.e3_plans import ENTROPY
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, exits_at_once, like_e3, ramp_share
from experiments.studies.flat import flat
from experiments.studies.kit import Bars, Comparison, Effort, Ratios, Study, StudyResult, command, largest_ratios
from experiments.studies.savings import savings
from experiments.studies.side_by_side import (
    Row,
    Rows,
    by_batch_limit,
    document,
    out_of_order,
    series_of,
    times,
)
from experiments.studies.sides import Workload, decide, equal_cluster, sst2
from optimizer.decision import Strategy
from optimizer.problem import PlanProblem

BATCHES = {"full": (1, 2, 4, 8), "quick": (8,)}
BEYOND = 16
"""A batch that broke E3's SLO."""
CONTENDERS: dict[Effort, tuple[Strategy, ...]] = {
    "full": ("stock", "early-exit", "e3", "serial", "best"),
    "quick": ("stock", "early-exit", "e3"),
}
IN_CASES: tuple[Strategy, ...] = ("stock", "early-exit", "e3", "best")
ORDER = ("early-exit", "e3", "best")
DEVICE = "V100"
PAPER = Ratios(over_stock=1.30, over_early_exit=1.44)
PAPER_AT_ONE = 0.97
"""e3 over early-exit at batch 1 (sections 5.1.1 and 5.9)."""
PAPER_SAVED = 42.7
"""% of the latency at batch 1, figure 2."""
SEED = 0

Case = tuple[PlanProblem, Workload]


def cases(problem: PlanProblem) -> dict[str, Case]:
    """E3's circumstances, one more in each: its exits, V100 that 8 inputs do not fill, its ramps; then other exits."""
    even = even_exits(problem, seed=SEED)
    unfilled = flat(problem, LARGEST_BATCH)
    dear = like_e3(problem)
    return {
        "E3's exits": (problem, even),
        "+ flat times": (unfilled, even),
        "+ dear ramps": (dear, even),
        "exits at once": (dear, exits_at_once(problem, seed=SEED)),
    }


def compare(problem: PlanProblem, inputs: Workload, others: Mapping[str, Case], effort: Effort) -> StudyResult:
    """The figure on `inputs`; at batch 1 and 8, what is left of E3's ratios in every other case."""
    choose = partial(decide, strategies=CONTENDERS[effort])
    rows = by_batch_limit(problem, inputs, BATCHES[effort], choose, effort, seed=SEED)
    beyond = by_batch_limit(problem, inputs, (BEYOND,), choose, effort, seed=SEED) if effort == "full" else {}
    case_rows = {name: _case_rows(case) for name, case in others.items()}
    rates = series_of(rows)
    return StudyResult(
        comparisons=(
            *_comparisons(rows, ""),
            *(each for name in case_rows for each in _comparisons(case_rows[name], f"{name}: ")),
        ),
        pictures=(_goodputs({**rows, **beyond}), *_steps({"recorded": rows, **case_rows})),
        e3=largest_ratios(rates, "e3"),
        best=largest_ratios(rates, "best") if "best" in rates else Ratios(),
        figures={
            "rows": document({**rows, **beyond}),
            "cases": {name: document(each) for name, each in case_rows.items()},
        },
        notes=(*out_of_order(rows, ORDER), *_why(rows), *_of_beyond(rows, beyond), *_of_cases(problem, others)),
    )


def _case_rows(case: Case) -> dict[str, Row]:
    """In shorter simulations than the figure's own."""
    return by_batch_limit(*case, (1, LARGEST_BATCH), partial(decide, strategies=IN_CASES), "quick", seed=SEED)


def _comparisons(rows: Rows, of: str) -> tuple[Comparison, ...]:
    row, first = rows[f"batch {LARGEST_BATCH}"], rows.get("batch 1")
    found = [
        Comparison(
            name=f"{of}e3 / early-exit, batch 8", ours=times(row, "e3", "early-exit"), paper=PAPER.over_early_exit
        ),
        Comparison(name=f"{of}e3 / stock, batch 8", ours=times(row, "e3", "stock"), paper=PAPER.over_stock),
    ]
    if first is not None:
        found += [
            Comparison(name=f"{of}e3 / early-exit, batch 1", ours=times(first, "e3", "early-exit"), paper=PAPER_AT_ONE),
            Comparison(name=f"{of}best / e3, batch 8", ours=times(row, "best", "e3")),
        ]
    return tuple(found)


def _goodputs(rows: Rows) -> Bars:
    return Bars(
        title="BERT-base on 16 V100, recorded exits",
        x_label="largest batch",
        y_label="goodput (inputs/s)",
        labels=tuple(label.removeprefix("batch ") for label in rows),
        series=series_of(rows),
    )


def _steps(by_case: Mapping[str, Rows]) -> tuple[Bars, ...]:
    """What e3 gains at batch 8, from our case to E3's; no picture of one case."""
    if len(by_case) == 1:
        return ()
    row_of = [rows[f"batch {LARGEST_BATCH}"] for rows in by_case.values()]
    of_paper = {"e3 / early-exit": PAPER.over_early_exit, "e3 / stock": PAPER.over_stock}
    steps = Bars(
        title="Towards E3's circumstances, one after the other (batch 8)",
        x_label="each with those before it; the last with other exits",
        y_label="times the goodput",
        labels=tuple(name.removeprefix("exits ") for name in by_case),
        series={name: tuple(times(row, "e3", name.removeprefix("e3 / ")) for row in row_of) for name in of_paper},
        paper={name: (value,) * len(row_of) for name, value in of_paper.items()},
    )
    return (steps,)


def _why(rows: Rows) -> tuple[str, ...]:
    """What keeps e3 below early-exit at batch 1: how busy the accelerators are at their highest rate."""
    row = rows.get("batch 1")
    if row is None:
        return ()
    busy = {}
    for name in ("early-exit", "e3"):
        capacity = row[name].capacity
        if capacity is None or capacity.figures is None:
            return ()
        busy[name] = ", ".join(f"{slot.utilisation:.0%}" for slot in capacity.figures.slots)
    return (
        "At batch 1 nothing shrinks: who has left costs early-exit nothing, so both compute the same. At its highest "
        f"rate early-exit's accelerators are busy {busy['early-exit']} of the time, those of e3's stages {busy['e3']}: "
        "whole accelerators cannot share the work evenly.",
    )


def _of_beyond(rows: Rows, beyond: Rows) -> tuple[str, ...]:
    e3 = {label: row["e3"].rate_per_s for label, row in {**rows, **beyond}.items()}
    most, more = e3.get(f"batch {LARGEST_BATCH}"), e3.get(f"batch {BEYOND}")
    if not most or not more:
        return ()
    return (
        f"A batch of {BEYOND} keeps the SLO here, in E3 it does not: e3 does {more:,.0f}/s, {more / most:.2f} x its "
        f"batch of {LARGEST_BATCH}.",
    )


def _of_cases(problem: PlanProblem, others: Mapping[str, Case]) -> tuple[str, ...]:
    if not others:
        return ()
    table = problem.latency[DEVICE]
    one_s, most_s = table.blocks_at(np.array([1.0, LARGEST_BATCH])).sum(0)
    share = float(table.ramp_s_EB[0, 0] / table.block_s_NB[problem.ramps[0], 0])
    even = next(inputs for _, inputs in others.values())
    saved = savings(even.survival_N, table, problem.ramps)
    return (
        f"E3's exits: {even.words}, so half are out after block 6. At batch 1 they save {saved.latency:.1%} of the "
        f"latency; {PAPER_SAVED:g} % in E3's figure 2.",
        f"Flat times: any batch up to {LARGEST_BATCH} takes as long as {LARGEST_BATCH} inputs. TensorRT's V100 takes "
        f"{most_s / one_s:.1f} times as long for {LARGEST_BATCH} as for 1: what is left of a batch costs less there.",
        f"Dear ramps: {ramp_share(problem):.3f} of a block each, not {share:.3f}: so much the 16 % of E3's figure 25 "
        "mean, for two splits and flat times.",
    )


def run(effort: Effort) -> StudyResult:
    """Recorded exits on E3's cluster; quick effort leaves the other cases out."""
    problem = equal_cluster()
    return compare(problem, sst2(seed=SEED), cases(problem) if effort == "full" else {}, effort)


STUDY = Study(
    name="fig07_homogeneous",
    figure="7",
    section="5.1.1",
    title="BERT-base on 16 V100",
    claim="Up to 1.44 x the goodput of early-exit and 1.30 x of stock; at batch 1 up to 3 % below early-exit",
    detail="Batch 1, 2, 4 and 8, SLO 100 ms; the next batch breaks the SLO.",
    paper=PAPER,
    how="simulated",
    exits=f"recorded: BERT-base on SST-2 dev, entropy {ENTROPY:g}; made up where the case is E3's",
    hardware="16 V100 (TensorRT's published times for BERT-base, 128 tokens, x 6.5), simulated on one core",
    minutes=2,
    quick_s=5,
    seed=SEED,
    needs=(BERT12_SST2,),
    differs="Four circumstances differ: arrivals (see the head of the report), and three of which the "
    "study puts E3's, made up from the words of its paper, in place of ours one after the other. E3's exits are "
    "later: half of its inputs are out after six blocks, of the recorded ones "
    "after three; this takes away much of the larger gain over stock, and nearly all of the gain over early-exit. "
    "E3's V100 are not full at a batch of 8, TensorRT's nearly are: where time does not depend on the batch, what is "
    "left of a batch is as dear as a whole one, and the gain over early-exit comes near the paper's. E3's ramps are "
    "dearer: at the price that its figure 25 implies, the gain over stock comes near the paper's too, and early-exit "
    "falls below stock at batch 8 as it does there. A few percent remain. No one case gives all "
    "three figures: exits spread evenly come near both at batch 8 and are 16 % below early-exit at batch 1, where the "
    "planner, which charges a batch of one until the end of its split, gives the late stages too many accelerators; "
    "exits all at once after the sixth block give the 3 % at batch 1 and too little at batch 8. That E3's V100 is 6.5 "
    "times as slow as TensorRT's is an estimate; by the cost model ratios move by up to 8 % without it.",
    run=run,
)

if __name__ == "__main__":
    command(STUDY)
