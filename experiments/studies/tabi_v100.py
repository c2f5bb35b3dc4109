"""Tabi's shares and pruning in the planner, on published V100 latencies: 6 layers of 768 before a BERT-large.

Computed by the cost model. The paper serves one query at a time; here batches are filled, up to 16.
"""

from __future__ import annotations

from experiments.cascades.problems import chain_problem, layers_of
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from optimizer.decision import Planned
from optimizer.networks import part_of
from optimizer.planner import solve
from optimizer.problem import PlanProblem

RETURNED = {"SST-2": 0.698, "MNLI": 0.494}
"""Section 7.3.2: what the small model answers."""
PRUNED = {"SST-2": 0.142, "MNLI": 0.136}
"""Table 3: words cut before the large one."""
BATCH, SMALL, LARGE = 16, 6, 24


def problem(task: str, *, pruned: bool = True) -> PlanProblem:
    """One V100; the large network alone is a plan of it as well."""
    left = 1 - RETURNED[task]
    both = (1.0,) * SMALL + (left,) * LARGE
    return chain_problem(
        [layers_of("bert-base", SMALL), layers_of("bert-large", LARGE)],
        {(0, 1): both, (1,): (1.0,) * (SMALL + LARGE)},
        most=BATCH,
        crossing_tokens=(1.0, 1 - PRUNED[task]) if pruned else (),
    )


def run(effort: Effort) -> StudyResult:
    """Both tasks, with and without pruning, beside the large network alone."""
    del effort  # it takes no time
    comparisons, rows, figures = [], [], {}
    for task in RETURNED:
        alone, whole, pruned = (
            _planned(problem(task), "stock"),
            _planned(problem(task, pruned=False)),
            _planned(problem(task)),
        )
        rates = [each.figures.rate_per_s for each in (alone, whole, pruned)]
        comparisons.append(Comparison(f"{task}: cascade / BERT-large alone, batch {BATCH}", rates[2] / rates[0]))
        rows += [
            (task, name, rate, rate / rates[0], each.figures.latency_s * 1000, str(list(_used(task, each))))
            for name, rate, each in zip(
                ("BERT-large alone", "cascade", "cascade, words pruned"), rates, (alone, whole, pruned), strict=True
            )
        ]
        figures[task] = {"alone_per_s": rates[0], "cascade_per_s": rates[1], "pruned_per_s": rates[2]}
    columns = ("task", "plan", "inputs/s", "times alone", "worst case (ms)", "networks")
    return StudyResult(
        comparisons=tuple(comparisons), figures=figures, tables=(Table("One V100", columns, tuple(rows)),)
    )


def _planned(asked: PlanProblem, strategy: str = "best") -> Planned:
    decision = solve(asked, "stock" if strategy == "stock" else "best")
    assert isinstance(decision, Planned), "an SLO of a second has plans"
    return decision


def _used(task: str, planned: Planned) -> tuple[int, ...]:
    return part_of(problem(task), planned.stages).used


STUDY = declare(__name__, run)
