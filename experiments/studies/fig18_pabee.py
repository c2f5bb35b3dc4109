"""E3, figure 18: PABEE, whose exits depend on each other.

Simulated: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within 100 ms. `early-exit` is PABEE itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.e3_case import LARGEST_BATCH
from experiments.studies.side_by_side import (
    Row,
    Rows,
    batch_bars,
    by_batch,
    plans,
    ratios_of,
    times,
    with_flat_times,
)
from experiments.studies.sides import BATCHES, NUM_ROWS, SEED, Workload, decide, equal_cluster, savings, workload
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, ratio
from optimizer.decision import Decision
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.space import Space
from profiles.records import ExitRecords
from simulator.inputs import NOWHERE, patient

AGREEMENT = 0.98
"""At least, as with DeeBERT's rule at entropy 0.4: "less than 2 % error" (E3 section 5)."""
PABEE_PATIENCE = 6
"""PABEE's own default."""
ALL_RAMPS = Space(ramps="all")
"""Every plan that leaves all ramps active. Exits that depend on each other must all be asked (E3 section 3.4)."""
DEVICE = "V100"
PAPER = 1.55


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What a patience does to recorded inputs."""

    patience: int
    agreement: float
    """Share answered as the full model does."""
    accuracy: float | None
    """Share answered right, where that is known."""


def outcome(records: ExitRecords, patience: int) -> Patience:
    """Its answers, all ramps active."""
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


def least_patience(records: ExitRecords, agreement: float) -> int:
    """The least that keeps this share of the full model's answers; raises DataError where none does."""
    for patience in range(1, len(records.ramps)):
        if outcome(records, patience).agreement >= agreement:
            return patience
    raise DataError(f"no patience below {len(records.ramps)} keeps {agreement:.0%} of the answers")


def patient_inputs(records: ExitRecords, patience: int, problem: PlanProblem) -> Workload:
    """Recorded inputs in random order that leave by PABEE's rule."""
    rows_N = np.random.default_rng(SEED).integers(len(records), size=NUM_ROWS)
    words = f"recorded: BERT-base on SST-2 dev, patience {patience}"
    return workload(words, patient(records, patience), rows_N, problem)


def decide_with_all_ramps(problem: PlanProblem) -> Mapping[str, Decision]:
    """Every side's decision, none of which switches a ramp off."""
    return {**decide(problem, ("stock", "early-exit", "e3")), "best": solve(problem, ALL_RAMPS)}


def compare(records: ExitRecords, problem: PlanProblem, effort: Effort) -> StudyResult:
    """The patience that keeps the answers at all batch sizes; PABEE's default at the largest, with full effort."""
    chosen = outcome(records, least_patience(records, AGREEMENT))
    inputs = patient_inputs(records, chosen.patience, problem)
    usual = patient_inputs(records, PABEE_PATIENCE, problem)
    found = by_batch(problem, inputs, BATCHES[effort], effort, decide_with_all_ramps)
    other: Rows = {}
    if effort == "full":
        other = by_batch(problem, usual, (LARGEST_BATCH,), effort, decide_with_all_ramps)
    e3, best = (ratios_of(found, side) for side in ("e3", "best"))
    smallest = next(iter(found))
    return StudyResult(
        comparisons=(
            Comparison("e3 / PABEE, largest", e3.over_early_exit, PAPER),
            Comparison("best / PABEE, largest", best.over_early_exit, PAPER),
            Comparison(f"e3 / PABEE, {smallest}", times(found[smallest], "e3", "early-exit")),
            Comparison("e3 / stock, largest", e3.over_stock),
            Comparison("best / stock, largest", best.over_stock),
            Comparison("full batches throughout / PABEE, batch 8", _most(problem, inputs, list(found.values())[-1])),
            *with_flat_times(problem, inputs, LARGEST_BATCH, effort, decide_with_all_ramps),
            *(
                Comparison(f"patience {PABEE_PATIENCE}, {label}: e3 / PABEE", times(row, "e3", "early-exit"), PAPER)
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
                (_cells(chosen, inputs), _cells(outcome(records, PABEE_PATIENCE), usual)),
            ),
            plans(found),
        ),
    )


def _most(problem: PlanProblem, inputs: Workload, row: Row) -> float | None:
    """What batches that are always full would give at the largest batch, over what PABEE gives."""
    allowed = savings(inputs.survival_N, problem.latency[DEVICE], problem.ramps, LARGEST_BATCH).most_times
    return ratio(allowed, times(row, "early-exit", "stock"))


def _cells(found: Patience, inputs: Workload) -> tuple[float | None, ...]:
    """Inputs that leave at once do so as soon as the rule lets any, one block after the patience."""
    right = None if found.accuracy is None else 100 * found.accuracy
    at_once = 1 - min(inputs.survival_N[: found.patience + 2])
    return found.patience, 100 * found.agreement, right, 100 * at_once, sum(inputs.survival_N)


def run(effort: Effort) -> StudyResult:
    """BERT-base's recorded answers on E3's 16 V100."""
    return compare(bert12_sst2("entropy"), equal_cluster(), effort)


STUDY = declare(__name__, run, paper=Ratios(over_early_exit=PAPER), needs=(BERT12_SST2,))
