"""E3, figure 9: goodput of a distilled BERT with exits on 16 V100.

Simulated: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within 100 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.data import require_data
from experiments.problems import ENTROPY
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.distilbert_exits import DISTILBERT_IMDB, ImdbRun, read_imdb_runs
from experiments.studies.distilled import distilled_cluster, every_second_ramp, imdb
from experiments.studies.e3_case import LARGEST_BATCH
from experiments.studies.side_by_side import batch_bars, by_batch, document_by_side, ratios_of, with_flat_times
from experiments.studies.sides import BATCHES, Savings, Workload, savings
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare
from optimizer.problem import PlanProblem

DEVICE = "V100"
PAPER = 1.67


def most_exits(runs: Sequence[ImdbRun]) -> ImdbRun:
    """Of Apparate's plain runs the one in which most inputs leave; it saves about what E3's figure 2 says."""
    return min((run for run in runs if run.is_plain), key=lambda run: run.survival_N[-1])


def compare(problem: PlanProblem, inputs: Workload, stand_in: Workload, effort: Effort) -> StudyResult:
    """Both workloads: the first at all batch sizes, the stand-in at the largest and only with full effort."""
    found = by_batch(problem, inputs, BATCHES[effort], effort)
    other = by_batch(problem, stand_in, (LARGEST_BATCH,), effort) if effort == "full" else {}
    e3, best, their_e3, their_best = (ratios_of(rows, side) for rows in (found, other) for side in ("e3", "best"))
    bars = [batch_bars("DistilBERT with its own recorded exits (IMDB)", found)]
    of_stand_in: list[Comparison] = []
    if other:
        bars.append(batch_bars("DistilBERT with every second of BERT's recorded exits", other))
        of_stand_in = [
            Comparison("stand-in, batch 8: e3 / stock", their_e3.over_stock, PAPER),
            Comparison("stand-in, batch 8: best / stock", their_best.over_stock, PAPER),
            Comparison("stand-in, batch 8: e3 / early-exit", their_e3.over_early_exit),
        ]
    return StudyResult(
        comparisons=(
            Comparison("e3 / stock, largest", e3.over_stock, PAPER),
            Comparison("best / stock, largest", best.over_stock, PAPER),
            Comparison("e3 / early-exit, largest", e3.over_early_exit),
            Comparison("full batches throughout / stock, batch 8", _saved(problem, inputs).most_times),
            *with_flat_times(problem, inputs, LARGEST_BATCH, effort),
            *of_stand_in,
        ),
        pictures=tuple(bars),
        e3=e3,
        best=best,
        figures={
            "imdb": document_by_side(inputs, found),
            "stand-in": [document_by_side(stand_in, other)] if other else [],
        },
        tables=(
            Table(
                "What exits allow, all ramps active",
                ("", "compute saved (%)", "latency saved (%)", "full batches throughout / stock"),
                tuple(_allowed(each.words, _saved(problem, each)) for each in (inputs, stand_in)),
            ),
        ),
    )


def _saved(problem: PlanProblem, inputs: Workload) -> Savings:
    return savings(inputs.survival_N, problem.latency[DEVICE], problem.ramps, LARGEST_BATCH)


def _allowed(words: str, saved: Savings) -> tuple[str, float, float, float]:
    return words, 100 * saved.compute, 100 * saved.latency, saved.most_times


def run(effort: Effort) -> StudyResult:
    """The distilled model's own exits on IMDB, and the stand-in on SST-2."""
    own = imdb(most_exits(read_imdb_runs(require_data(DISTILBERT_IMDB))))
    return compare(distilled_cluster(), own, every_second_ramp(ENTROPY), effort)


STUDY = declare(__name__, run, paper=Ratios(over_stock=PAPER), needs=(DISTILBERT_IMDB, BERT12_SST2))
