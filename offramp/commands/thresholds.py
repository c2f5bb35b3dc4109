"""Finds thresholds with a guarantee from exit records, and warns if a model or its exits are not worth serving.

Candidate thresholds are chosen with the design rows and tested with the test rows (Learn then Test). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.errors import DataError, raising
from earlyexit.tasks.base import IntArray, Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from offramp.commands.jobs import DESIGN_SHARE, CalibrateJob, few_rows_advice
from offramp.commands.output import provenance
from optimizer.calibration.calibration_file import AMONG, CalibrationCard, policy_of_records
from optimizer.calibration.thresholds import (
    Calibration,
    Guarantee,
    Metric,
    bounded_losses,
    design_rows,
    few_ramps,
    learn_then_test,
    sequences_of,
    split_rows,
)
from profiles.latency import LatencyProfile
from profiles.networks import decay_of, prune_of, weights_of
from profiles.records import ExitOutcome, ExitRecords


def measured_costs(latency: Path | None, records: ExitRecords, design: IntArray) -> list[float] | None:
    """Returns the seconds of each block at the largest batch and the length nearest to the design rows' mean length.

    Test rows must not influence the costs. Returns None without a profile. Raises DataError for one of another model.
    """
    if latency is None:
        return None
    profile = LatencyProfile.load(latency)
    if profile.num_blocks != records.num_blocks:
        raise DataError(f"{latency} has {profile.num_blocks} blocks, the model {records.num_blocks}")
    mean = 1.0 if records.tokens_N is None else float(records.tokens_N[design].mean())
    nearest = min(profile.lengths, key=lambda length: abs(length - mean))
    return list(map(float, profile.tables[nearest].block_s_NB[:, -1]))


def calibrate_records(records: ExitRecords, job: CalibrateJob) -> CalibrationCard:
    """Finds thresholds from exit records of another system, for the policy of their score.

    Raises DataError for too few inputs, and PlanError for scores that are shares without confidences.
    """
    check_rows(records if records.sequences_N is None else sequences_of(records), job)
    check_ramps(job, records.ramps)
    if job.decay is not None:
        raise DataError("--decay is not for exit records, whose scores include it already")
    if records.sequences_N is not None:
        check_job_of_tokens(job)
    policy_of_records(records, {})  # raises if the scores cannot be used
    costs = measured_costs(job.latency, records, design_and_test_rows(records, job)[0])
    return CalibrationData(job=job, views=[records], facts=calibration_facts(job), costs=costs).card()


def check_job_of_tokens(job: CalibrateJob) -> None:
    """Raises DataError for options that thresholds of generated tokens do not support."""
    if job.metric == "harm" or job.ensemble or job.prune is not None or job.latency is not None:
        raise DataError("--metric harm, --ensemble, --prune and --latency are not for models that generate tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """The exit records of rows, and everything else that is needed to find thresholds."""

    job: CalibrateJob
    views: Sequence[ExitRecords]
    """Records of the rows, and records of the same rows under other plans, for which the thresholds must hold too."""
    facts: dict[str, Any]
    """The provenance of the records."""
    task: Task | None = None
    labels: ValueArray | None = None
    """Correct answers of all rows, in the format of the task."""
    costs: Sequence[float] | None = None
    """Costs of the blocks. None: all are equal."""
    first: int = 0
    """First block of the full model, which in a chain is the last network."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Further results, which are added to those of the test."""

    @property
    def parts(self) -> tuple[IntArray, IntArray]:
        """Design rows and test rows. All tokens of a sequence are in the same part."""
        if self.views[0].sequences_N is None:
            return design_and_test_rows(self.views[0], self.job)
        sequences = sequences_of(self.views[0])
        parts = design_and_test_rows(sequences, self.job)
        design, tested = (np.concatenate([sequences[k] for k in part]) for part in parts)
        return design, tested

    @property
    def truth(self) -> tuple[Task, ValueArray]:
        """The task and the correct answers, for records of a model that does not generate."""
        assert self.task is not None
        assert self.labels is not None
        return self.task, self.labels

    def card(self, always: Sequence[int] | None = None, *, entry: int = 0) -> CalibrationCard:
        """Returns a calibration for inputs that enter at block `entry`.

        The job's ramps get thresholds. If it names none, all do or, with `always`, these and a few useful later ramps.
        """
        job, own, (design_N, tested_N) = self.job, self.views[0], self.parts
        promised = [promised_records(each, job) for each in self.views]
        if always is not None and job.ramps is None:
            behind = promised[0].of_ramps([ramp for ramp in own.ramps if ramp >= entry]).subset(design_N)
            few = few_ramps(behind, job.guarantee, len(tested_N), always, first=entry, block_costs=self.costs)
            promised = [each.of_ramps(few) for each in promised]
        design, (tested, *others) = promised[0].subset(design_N), [each.subset(tested_N) for each in promised]
        result = learn_then_test(design, tested, job.guarantee, self.costs, others=others)
        thresholds, worst = result.thresholds, result.worst_loss
        figures: dict[str, Any] = {"worst_harm": worst} if job.metric == "harm" else {"worst_agreement": 1 - worst}
        if own.sequences_N is not None:
            losses_S = bounded_losses(tested, thresholds)
            same = float((losses_S == 0).mean())
            figures = {"sequences": len(losses_S), "sequence_loss": float(losses_S.mean()), "same_sequences": same}
            own = replace(own, true_losses_NE=None)  # accuracy is of whole answers, not of tokens
        outcome = own.subset(tested_N).outcome(thresholds)
        figures = outcome_figures(outcome, self.task, job.metric) | figures
        figures |= {"mean_blocks": outcome.mean_blocks - entry, "num_blocks": outcome.num_blocks - entry}
        figures["work_share"] = work_share(outcome.survival, self.costs, first=self.first, entry=entry)
        if self.task is not None and self.labels is not None:
            constant = constant_accuracy(self.task, self.labels[tested_N])
            figures |= {} if constant is None else {"constant_accuracy": constant}
        return CalibrationCard(
            policy=own.score,
            thresholds=thresholds,
            confidences=None if own.confidences is None else dict(own.confidences),
            weights=weights_of(own),
            decay=decay_of(own),
            metric=job.metric if own.sequences_N is None else "sequences",
            prune=prune_of(own) or None,
            budget=job.budget,
            confidence=job.confidence,
            tested=figures | self.figures,
            provenance=self.facts | ({AMONG: job.num_calibrations} if job.num_calibrations > 1 else {}),
        )


def outcome_figures(outcome: ExitOutcome, task: Task | None = None, metric: Metric = "agreement") -> dict[str, Any]:
    """Returns an outcome's figures as JSON data, with those of the task, such as mean IoU, if it has any."""
    of_task: dict[str, float] = {}
    if task is not None and outcome.tallies_N is not None and outcome.full_tallies_N is not None:
        early, full = (task.figures(each.sum(0)) for each in (outcome.tallies_N, outcome.full_tallies_N))
        of_task = early | {f"full_{name}": value for name, value in full.items()}
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
        **of_task,
    }


def design_and_test_rows(data: Sized, job: CalibrateJob) -> tuple[IntArray, IntArray]:
    """Returns design rows and test rows."""
    return split_rows(len(data), design_rows(len(data), job.guarantee, DESIGN_SHARE), job.seed)


def calibration_facts(job: CalibrateJob) -> dict[str, Any]:
    """Returns the provenance of a calibration."""
    dtype = {} if job.dtype == "float32" else {"dtype": job.dtype}
    latency = {} if job.latency is None else {"latency": str(job.latency)}
    return provenance(data=job.source, seed=job.seed, **dtype, **latency)


def promised_records(view: ExitRecords, job: CalibrateJob) -> ExitRecords:
    """Returns records with the job's metric as the loss, and its ramps; raises DataError for records without labels."""
    with raising(DataError, job.source, DataError):
        records = view if job.metric == "agreement" else view.of_harm()
    named = job.ramps if isinstance(job.ramps, tuple) else records.ramps
    return records.of_ramps([ramp for ramp in records.ramps if ramp in named])


def check_ramps(job: CalibrateJob, ramps: Sequence[int]) -> None:
    """Raises DataError for ramps that the model does not have."""
    if job.ramps == "ends":
        raise DataError("--ramps ends is only for chains, and this is a single model: name ramps by blocks")
    if isinstance(job.ramps, tuple) and (unknown := sorted(set(job.ramps) - set(ramps))):
        raise DataError(f"the model has no ramps {unknown}, but {list(ramps)}")


def check_rows(data: Sized, job: CalibrateJob) -> None:
    """Raises DataError with advice if there are too few rows."""
    if len(data) >= job.min_rows:
        return
    guarantee, advice = job.guarantee, few_rows_advice(job, len(data), lambda each: each.min_rows)
    metric = f"harm of {job.budget:.4g} at most" if job.metric == "harm" else f"agreement of {1 - job.budget:.10g}"
    number = guarantee.num_calibrations
    several = f" for {number} calibrations (only one if --ramps is set)" if number > 1 else ""
    raise DataError(
        f"{job.source}: {len(data)} rows; at least {job.min_rows} are needed to promise {metric} with "
        f"confidence {guarantee.confidence:.10g}{several}: {DESIGN_SHARE:.0%} of the rows choose thresholds, and "
        f"{guarantee.least_inputs} rows test them; {advice}"
    )


LEAST_SAVED = 0.05
"""Saved share of the work below which exits do not pay: ramps take 1 to 3 % of the time, and probes run 2 % of the
inputs to the end (`probe_share`)."""


def constant_accuracy(task: Task, truth_N: ValueArray) -> float | None:
    """Returns the accuracy of the best constant answer (most frequent label, median number); None for other tasks."""
    if isinstance(task, LabelTask):
        best = np.bincount(truth_N).argmax()
    elif isinstance(task, RegressionTask):
        best = np.median(truth_N)
    else:
        return None
    return 1 - float(task.loss(np.full_like(truth_N, best), truth_N).mean())


def likely_thresholds(
    rows: ExitRecords, budget: float, block_costs: Sequence[float] | None = None
) -> Calibration | None:
    """Returns estimated thresholds for a budget and their outcome, without a guarantee; None for too few rows."""
    guarantee = Guarantee(budget=budget, confidence=0.5)  # an estimate
    return learn_then_test(rows, rows, guarantee, block_costs) if len(rows) >= guarantee.least_inputs else None


def work_share(
    survival: Sequence[float], block_costs: Sequence[float] | None, *, first: int = 0, entry: int = 0
) -> float:
    """Returns the mean work per input, as a share of the full model's.

    `first`: the full model's first block, above 0 in a chain. Inputs enter at `entry`. Blocks cost the same by default.
    """
    costs_N = np.ones(len(survival)) if block_costs is None else np.asarray(block_costs, dtype=np.float64)
    return float(np.dot(survival[entry:], costs_N[entry:]) / costs_N[first:].sum())


def warnings_of(
    accuracy: float | None, constant: float | None, saved: float | None, model: Mapping[str, Any] | None
) -> list[str]:
    """Returns reasons against serving the model, with advice.

    `accuracy`: the full model's. `constant`: `constant_accuracy`. `saved`: the share of the full model's work that
    exits save. `model`: its provenance. Each is None if it is unknown.
    """
    warnings, facts = [], model or {}
    if accuracy is not None and constant is not None and accuracy <= constant:
        advice = "more rows, more epochs or another backbone may help"
        if "cuts" in facts:
            advice = "check the order of --labels, and --mean, --std and --bgr"
        elif facts.get("joint") is False:
            advice = "train the backbone with its ramps (offramp train --joint)"
        warnings.append(
            f"the full model answers {accuracy:.1%} of the rows right, but a constant answer would be right for "
            f"{constant:.1%}: {advice}"
        )
    if saved is not None and saved < LEAST_SAVED:
        train = "train its backbone too (offramp train --joint), or " if facts.get("joint") is False else ""
        advice = f"{train}serve it without exits (offramp serve FOLDER --plan stock)"
        if model is None:
            advice = "do not use exits, or allow a larger --budget"
        warnings.append(f"exits save {max(0.0, saved):.1%} of the model's work: {advice}")
    return warnings


def calibration_warnings(
    card: CalibrationCard,
    alternatives: Mapping[str, CalibrationCard],
    model: Mapping[str, Any] | None,
    reference: str | None,
) -> list[str]:
    """Returns reasons against using a calibration, with advice.

    `alternatives`: a chain's other calibrations, by name. `model`: its provenance. `reference`: the name of a chain's
    last model, None for a single model.
    """
    tested, warnings = card.tested, list[str]()
    if not card.thresholds:
        warnings.append(
            f"no threshold keeps a budget of {card.budget:.4g} with confidence {card.confidence:.10g}, so no input "
            "would leave early; a larger budget, more rows or better ramps (offramp train --joint) may help"
        )
    if reference is not None:
        alone = alternatives.get("reference")
        share = 1.0 if alone is None else alone.tested["work_share"]
        if tested["work_share"] >= share:
            of_alone = "" if alone is None else f", after {alone.tested['mean_blocks']:.2f} blocks"
            warnings.append(
                f"the chain takes {tested['work_share']:.0%} of the work of {reference}, after "
                f"{tested['mean_blocks']:.2f} blocks; {reference} alone takes {share:.0%}{of_alone}: serve {reference} "
                "without the chain"
            )
    saved = None if warnings else 1 - tested["work_share"]
    return [*warnings, *warnings_of(tested["full_accuracy"], tested.get("constant_accuracy"), saved, model)]
