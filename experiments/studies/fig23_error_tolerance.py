"""E3, figure 23: goodput as more errors are tolerated.

Simulated: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within 100 ms, batches of up to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.e3_case import LARGEST_BATCH
from experiments.studies.picture import Lines
from experiments.studies.side_by_side import Row, by_batch, series_of, times, with_flat_times
from experiments.studies.sides import Workload, equal_cluster, sst2
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, largest_ratios
from optimizer.problem import PlanProblem
from profiles.outcome import ExitOutcome
from profiles.records import ExitRecords

ENTROPIES = {"full": (0.3, 0.35, 0.4, 0.45, 0.5), "quick": (0.5,)}
LABEL = f"batch {LARGEST_BATCH}"
PAPER = 1.43


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Everything at one entropy."""

    entropy: float
    inputs: Workload
    row: Row
    outcome: ExitOutcome
    """Of the recorded inputs with all ramps active."""
    off: tuple[int, ...]
    """Ramps that `best` switches off."""
    changed: int
    """Recorded inputs that are answered otherwise for that."""

    @property
    def lost(self) -> float | None:
        """Points of accuracy."""
        if self.outcome.accuracy is None or self.outcome.full_accuracy is None:
            return None
        return 100 * (self.outcome.full_accuracy - self.outcome.accuracy)


def changed_answers(records: ExitRecords, off: Collection[int], entropy: float) -> int:
    """Inputs that get another answer if some ramps are off: they leave later, or not at all."""
    everywhere = dict.fromkeys(records.ramps, entropy)
    fewer = {ramp: threshold for ramp, threshold in everywhere.items() if ramp not in off}
    before_N, after_N = records.outcome(everywhere).answers_N, records.outcome(fewer).answers_N
    assert before_N is not None
    return int((before_N != after_N).sum())


def tolerance(
    records: ExitRecords, inputs: Workload, problem: PlanProblem, entropy: float, effort: Effort
) -> Tolerance:
    """All sides at one entropy."""
    row = by_batch(problem, inputs, (LARGEST_BATCH,), effort)[LABEL]
    off = tuple(ramp for ramp in records.ramps if ramp not in row["best"].ramps)
    return Tolerance(
        entropy=entropy,
        inputs=inputs,
        row=row,
        outcome=records.outcome(dict.fromkeys(records.ramps, entropy)),
        off=off,
        changed=changed_answers(records, off, entropy),
    )


def compare(
    records: ExitRecords, inputs_at: Callable[[float], Workload], problem: PlanProblem, effort: Effort
) -> StudyResult:
    """Every entropy."""
    found = [tolerance(records, inputs_at(entropy), problem, entropy, effort) for entropy in ENTROPIES[effort]]
    rates = series_of({f"{each.entropy:g}": each.row for each in found})
    e3, best = (largest_ratios(rates, side) for side in ("e3", "best"))
    return StudyResult(
        comparisons=(
            Comparison("e3 / early-exit, largest", e3.over_early_exit, PAPER),
            Comparison("best / early-exit, largest", best.over_early_exit, PAPER),
            *(
                Comparison(f"e3 / early-exit, entropy {each.entropy:g}", times(each.row, "e3", "early-exit"))
                for each in found
            ),
            *with_flat_times(problem, found[-1].inputs, LARGEST_BATCH, effort),
        ),
        pictures=_pictures(found, rates),
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


def _pictures(found: Sequence[Tolerance], rates: dict[str, tuple[float | None, ...]]) -> tuple[Lines, Lines]:
    x_label, x = "entropy at which inputs leave", tuple(each.entropy for each in found)
    errors = {
        "unlike the full model's (%)": tuple(100 - 100 * each.outcome.agreement for each in found),
        "accuracy lost (points)": tuple(each.lost for each in found),
    }
    return (
        Lines("BERT-base on 16 V100, batch 8", x_label, "goodput (inputs/s)", x, rates),
        Lines("Errors that the entropy allows", x_label, "% of answers, points of accuracy", x, errors),
    )


def run(effort: Effort) -> StudyResult:
    """BERT-base's recorded exits on E3's 16 V100."""
    return compare(bert12_sst2("entropy"), lambda entropy: sst2(entropy=entropy), equal_cluster(), effort)


STUDY = declare(__name__, run, paper=Ratios(over_early_exit=PAPER), needs=(BERT12_SST2,))
