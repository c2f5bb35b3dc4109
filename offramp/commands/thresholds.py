"""Finds thresholds with a guarantee from exit records, and tells whether a model and its exits are worth serving.

Design rows lay the path of thresholds, and test rows test it (Learn then Test). Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from earlyexit.errors import DataError
from earlyexit.tasks.base import IntArray, Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from offramp.commands.jobs import CalibrateJob, what_to_do
from offramp.commands.profile import measured_costs
from offramp.commands.progress import provenance
from optimizer.calibration_file import AMONG, CalibrationCard
from optimizer.few_ramps import few_ramps
from optimizer.plan import policy_of_score
from optimizer.risk import Guarantee, Metric
from optimizer.sequences import bounded_losses, learn_then_test_sequences, of_sequences, sequences_of
from optimizer.thresholds import design_rows, learn_then_test, split_rows
from profiles.networks import decay_of
from profiles.records import ExitOutcome, ExitRecords

Ramps = tuple[int, ...] | Literal["all", "ends"] | None
"""As `CalibrateJob.ramps`."""


def calibrate_records(records: ExitRecords, job: CalibrateJob) -> CalibrationCard:
    """Finds thresholds from exit records of inputs that ran elsewhere; the policy is that of their score.

    Raises DataError where the inputs are too few for the guarantee, PlanError for shares of no stated confidences.
    """
    check_rows(records, job)
    check_ramps(job, records.ramps)
    if job.decay is not None:
        raise DataError("a decay is in the scores already where exit records are of one: leave it out")
    if records.sequences_N is not None:
        return card_of_sequences(records, job, facts_of(job))
    policy_of_score(records.score, {}, records.confidences)  # or no input could leave by the thresholds found
    costs = measured_costs(job.latency, records)
    return Recorded(job=job, views=[records], parts=parts_of(records, job), facts=facts_of(job), costs=costs).card()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Recorded rows, and everything else that is needed to find thresholds."""

    job: CalibrateJob
    views: Sequence[ExitRecords]
    """The rows for which thresholds are found, and the same rows under other plans, for which they hold too."""
    parts: tuple[IntArray, IntArray]
    """Design rows and test rows."""
    facts: dict[str, Any]
    """How the rows were recorded, for the provenance."""
    task: Task | None = None
    labels: ValueArray | None = None
    """Right answers of all rows, in the form of the task."""
    costs: Sequence[float] | None = None
    """Costs of the blocks. None: all are equal."""
    first: int = 0
    """First block of the full model, the last network of a chain."""

    def card(self, ramps: Ramps = None, *, entry: int = 0, prune: Mapping[int, float] | None = None) -> CalibrationCard:
        """Returns thresholds of `ramps`, else of the job's, for inputs that enter at block `entry`."""
        job, own = self.job if ramps is None else self.job.model_copy(update={"ramps": ramps}), self.views[0]
        promised, *others = (promised_of(each, job) for each in self.views)
        design, tested = (promised.subset(rows) for rows in self.parts)
        seen = [each.subset(self.parts[1]) for each in others]
        found = learn_then_test(design, tested, job.guarantee, self.costs, others=seen)
        # Figures of the test rows, with all ramps active and with the worst subset.
        rows, worst = self.parts[1], found.worst_loss
        outcome = own.subset(rows).outcome(found.thresholds)
        dull = None if self.task is None or self.labels is None else constant_accuracy(self.task, self.labels[rows])
        figures = {
            **outcome_figures(outcome, self.task, job.metric),
            **({"worst_harm": worst} if job.metric == "harm" else {"worst_agreement": 1 - worst}),
            "mean_blocks": outcome.mean_blocks - entry,
            "num_blocks": outcome.num_blocks - entry,
            "work_share": work_share(outcome.survival, self.costs, first=self.first, entry=entry),
            **({} if dull is None else {"constant_accuracy": dull}),
        }
        return CalibrationCard(
            policy=own.score,
            thresholds=found.thresholds,
            confidences=None if own.confidences is None else dict(own.confidences),
            metric=job.metric,
            prune=None if prune is None else dict(prune),
            budget=job.guarantee.budget,
            confidence=job.guarantee.confidence,
            tested=figures,
            provenance=self.facts if job.guarantee.among == 1 else self.facts | {AMONG: job.guarantee.among},
        )

    def few(self, always: Sequence[int], first: int = 0) -> tuple[int, ...]:
        """Returns the few ramps from block `first` on that are worth a promise, by the design rows.

        Inputs enter at block `first`.
        """
        records = self.views[0]
        if first:
            records = records.of_ramps([ramp for ramp in records.ramps if ramp >= first])
        design, num_tested = promised_of(records, self.job).subset(self.parts[0]), len(self.parts[1])
        return few_ramps(design, self.job.guarantee, num_tested, always, first=first, block_costs=self.costs)


def outcome_figures(outcome: ExitOutcome, task: Task | None = None, metric: Metric = "agreement") -> dict[str, Any]:
    """Returns an outcome's figures as plain data, with those of the task if there are tallies for them."""
    return {
        "inputs": len(outcome.exits_N),
        "agreement": outcome.agreement,
        **({"harm": outcome.harm} if metric == "harm" else {}),
        "accuracy": outcome.accuracy,
        "full_accuracy": outcome.full_accuracy,
        "mean_blocks": outcome.mean_blocks,
        "num_blocks": outcome.num_blocks,
        "survival": list(outcome.survival),
        "exits": outcome.exit_counts,
        **({} if task is None else task_figures(outcome, task)),
    }


def task_figures(outcome: ExitOutcome, task: Task) -> dict[str, float]:
    """Returns figures of the task, such as mean IoU, and those of the full model."""
    if outcome.tallies_N is None or outcome.full_tallies_N is None:
        return {}
    early, full = (task.figures(each.sum(0)) for each in (outcome.tallies_N, outcome.full_tallies_N))
    return early | {f"full_{name}": value for name, value in full.items()}


def parts_of(data: Sized, job: CalibrateJob) -> tuple[IntArray, IntArray]:
    """Returns design rows and test rows."""
    return split_rows(len(data), design_rows(len(data), job.guarantee, job.design_share), job.seed)


def facts_of(job: CalibrateJob) -> dict[str, Any]:
    """Returns how a calibration was made, for its provenance."""
    computed_in = {} if job.dtype == "float32" else {"dtype": job.dtype}
    priced_by = {} if job.latency is None else {"latency": str(job.latency)}
    return provenance(data=job.source, seed=job.seed, design_share=job.design_share, **computed_in, **priced_by)


def promised_of(view: ExitRecords, job: CalibrateJob) -> ExitRecords:
    """Returns records with the losses and ramps of the promise; raises DataError for records without them."""
    try:
        promised = view if job.metric == "agreement" else view.of_harm()
    except DataError as error:
        raise DataError(f"{job.source or 'the data'}: {error}") from error
    return promised.of_ramps(job.taken(view.ramps))


def check_ramps(job: CalibrateJob, ramps: Sequence[int]) -> None:
    """Raises DataError for ramps that the model does not have."""
    if job.ramps == "ends":
        raise DataError("the ends are those of a chain's networks, and this is a single model: name ramps by blocks")
    unknown = sorted(set(job.ramps) - set(ramps)) if isinstance(job.ramps, tuple) else []
    if unknown:
        raise DataError(f"there are no ramps {unknown} to find thresholds for, but {list(ramps)}")


def check_rows(data: Sized, job: CalibrateJob) -> None:
    """Raises DataError for too few rows, with what to do."""
    promise = job.guarantee
    if len(data) >= job.least_rows:
        return
    said = f"harm of {job.budget:.4g} at most" if job.metric == "harm" else f"agreement of {1 - job.budget:.10g}"
    several = (
        "" if promise.among == 1 else f", of {promise.among} calibrations; ramps that are named, or `all`, have one"
    )
    raise DataError(
        f"{job.source or 'the data'}: {len(data)} rows; at least {job.least_rows} are needed to promise {said} with "
        f"confidence {promise.confidence:.4g}: {job.design_share:.0%} of the rows lay the path of thresholds, "
        f"{promise.least_inputs} rows test it{several}; {what_to_do(job, len(data), lambda each: each.least_rows)}"
    )


def card_of_sequences(records: ExitRecords, job: CalibrateJob, facts: dict[str, Any]) -> CalibrationCard:
    """Finds thresholds from records of generations, divided into design sequences and test sequences."""
    kept = records.of_ramps(job.taken(records.ramps))
    design, tested = (of_sequences(kept, part) for part in parts_of(sequences_of(kept), job))
    found = learn_then_test_sequences(design, tested, job.guarantee)
    figures = outcome_figures(replace(tested, true_losses_NE=None).outcome(found.thresholds))
    whole = float((bounded_losses(tested, found.thresholds) == 0).mean())
    sequences = {"sequences": found.num_sequences, "sequence_loss": found.mean_loss, "same_sequences": whole}
    return CalibrationCard(
        policy=records.score,
        thresholds=found.thresholds,
        decay=decay_of(records),
        metric="sequences",
        budget=job.guarantee.budget,
        confidence=job.guarantee.confidence,
        tested=figures | sequences | {"work_share": work_share(figures["survival"], None)},
        provenance=facts,
    )


LEAST_SAVED = 0.05
"""Share of the work below which exits do not pay: ramps take 1 to 3 % of the time, and probes run 2 % of the inputs to
the end (`probe_share`)."""
AS_LIKELY_AS_NOT = 0.5
"""Confidence of thresholds that only estimate the exits."""
WITHOUT_EXITS = "serve it without exits (offramp serve FOLDER --plan stock)"


def constant_accuracy(task: Task, truth_N: ValueArray) -> float | None:
    """Returns the accuracy of the best constant answer: the most frequent label, or the median number.

    None for tasks whose answers are neither.
    """
    if isinstance(task, LabelTask):
        best = np.bincount(truth_N).argmax()
    elif isinstance(task, RegressionTask):
        best = np.median(truth_N)
    else:
        return None
    return 1 - float(task.loss(np.full_like(truth_N, best), truth_N).mean())


def likely_thresholds(
    design: ExitRecords, budget: float, block_costs: Sequence[float] | None = None
) -> Mapping[int, float]:
    """Estimates the thresholds of a calibration with this budget, from the design rows alone.

    They have no guarantee. Raises DataError for too few rows.
    """
    about = Guarantee(budget=budget, confidence=AS_LIKELY_AS_NOT)
    return learn_then_test(design, design, about, block_costs).thresholds


def work_share(
    survival: Sequence[float], block_costs: Sequence[float] | None, *, first: int = 0, entry: int = 0
) -> float:
    """Returns the mean work per input, as a share of the full model's.

    `first` is the full model's first block, which is above 0 in a chain; inputs enter at block `entry`. Blocks cost
    alike without `block_costs`.
    """
    costs_N = np.ones(len(survival)) if block_costs is None else np.asarray(block_costs, dtype=np.float64)
    return float(np.dot(survival[entry:], costs_N[entry:]) / costs_N[first:].sum())


def warnings_of(
    accuracy: float | None, constant: float | None, saved: float | None, model: Mapping[str, Any] | None
) -> list[str]:
    """Returns reasons against serving the model, with what to do.

    `accuracy` is the full model's and `constant` that of the best answer that is the same for every row
    (`constant_accuracy`), `saved` is the share of the full model's work that exits save; None: not known. `model` is
    its provenance, None where it is not here.
    """
    said = []
    if accuracy is not None and constant is not None and accuracy <= constant:
        said.append(
            f"the full model answers {accuracy:.1%} of the rows right, and the same answer to all of them is "
            f"right for {constant:.1%}: {_to_learn(model or {})}"
        )
    if saved is not None and saved < LEAST_SAVED:
        said.append(f"exits save {max(0.0, saved):.1%} of the model's work: {_to_save(model)}")
    return said


def _to_learn(model: Mapping[str, Any]) -> str:
    if "cuts" in model:
        return "check the order of --labels, and --mean, --std and --bgr"
    if model.get("joint") is False:
        return "train the backbone with its ramps (train --joint)"
    return "more rows, more epochs or another backbone may help"


def _to_save(model: Mapping[str, Any] | None) -> str:
    if model is None:
        return "do not use exits, or allow a larger --budget"
    better = "train its backbone too (train --joint), or " if model.get("joint") is False else ""
    return f"{better}{WITHOUT_EXITS}"


def calibration_warnings(
    card: CalibrationCard,
    beside: Mapping[str, CalibrationCard],
    model: Mapping[str, Any] | None,
    reference: str | None,
    *,
    labelled: bool = True,
) -> list[str]:
    """Returns reasons against using a calibration, with what to do. Without labels, accuracy is unknown.

    `reference` is the name of a chain's last model, None of a single model; `beside` are the chain's other
    calibrations, by name.
    """
    tested = card.tested
    none = (
        f"no threshold keeps a budget of {card.budget:.4g} with confidence {card.confidence:.4g}: no input would leave "
        "early; a larger budget, more rows or better ramps (train --joint) may help"
    )
    said = [] if card.thresholds else [none]
    if reference is not None:
        said += _chain_warnings(card, beside.get("reference"), reference)
    saved = None if said else 1 - tested["work_share"]
    accuracy = tested["full_accuracy"] if labelled else None
    return [*said, *warnings_of(accuracy, tested.get("constant_accuracy"), saved, model)]


def _chain_warnings(card: CalibrationCard, alone: CalibrationCard | None, reference: str) -> list[str]:
    """Returns a warning if the chain takes no less work than its last model alone with its ramps."""
    tested, share = card.tested, 1.0 if alone is None else alone.tested["work_share"]
    if tested["work_share"] < share:
        return []
    of_alone = "" if alone is None else f", after {alone.tested['mean_blocks']:.2f} blocks"
    return [
        f"the chain takes {tested['work_share']:.0%} of the work of {reference}, after {tested['mean_blocks']:.2f} "
        f"blocks; {reference} alone takes {share:.0%}{of_alone}: leave the chain alone and serve {reference}"
    ]
