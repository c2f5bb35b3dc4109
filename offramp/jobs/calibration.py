"""`offramp calibrate`: temperatures, thresholds with a guarantee, exit records."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.codecs import find_codec
from earlyexit.dataset import LabelledRows
from earlyexit.errors import DataError, ModelFolderError
from earlyexit.policies import make_policy
from optimizer.calibration_file import CALIBRATION_FILE, CalibrationCard, read_calibration_file
from optimizer.risk import Guarantee
from optimizer.thresholds import Calibration, design_rows, divide, learn_then_test
from profiles.outcome import ExitOutcome
from profiles.records import ExitRecords
from profiles.scores import Score

if TYPE_CHECKING:
    from earlyexit.tasks.base import Task, ValueArray
    from earlyexit.train import Progress

RECORDS_FILE = "exit_records.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateJob:
    """Everything that decides what a calibration gives."""

    policy: Score | None = None
    """None: entropy where the model answers labels, else confidence; of records from elsewhere, theirs."""
    guarantee: Guarantee = field(default_factory=Guarantee)
    design_share: float = 0.25
    """Share of the inputs that lays the path of thresholds, at most; the rest tests it. A quarter costs nothing."""
    seed: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.design_share < 1:
            raise DataError(f"the design share must be between 0 and 1, not {self.design_share}")

    @property
    def least_rows(self) -> int:
        """Inputs that leave enough to test after the design part is taken; the design part gets one at least."""
        least = self.guarantee.least_inputs
        designs = ((rows, design_rows(rows, self.guarantee, self.design_share)) for rows in count(least + 1))
        return next(rows for rows, design in designs if design >= 1 and rows - design >= least)


def calibrate(
    folder: Path, data: LabelledRows, job: CalibrateJob, *, progress: Progress | None = None
) -> tuple[CalibrationCard, ExitRecords]:
    """Fit temperatures, find thresholds, and write them, with the exit records, into the model's folder.

    Raises DataError where the inputs are too few for the guarantee.
    """
    import torch

    from earlyexit.store import load_model, save_model
    from earlyexit.train import exit_outputs, no_progress
    from offramp.jobs.provenance import provenance

    _check_rows(data, job)
    model = load_model(folder)
    codec = find_codec(model.info.codec, folder)
    labels = data.targets(model.task, codec)
    encoded = data.encode(codec)
    design, tested = divide(len(data), design_rows(len(data), job.guarantee, job.design_share), job.seed)
    model.temperatures_E.fill_(1.0)
    raw = exit_outputs(model, encoded, progress=progress or no_progress)
    design_B = torch.from_numpy(design)
    for block, raw_NC in raw.items():
        model.temperatures_E[block] = model.task.fit_temperature(raw_NC[design_B], labels[design])
    outputs = {block: raw_NC / float(model.temperatures_E[block]) for block, raw_NC in raw.items()}
    facts = provenance(data=job.source, seed=job.seed, design_share=job.design_share)
    policy = _policy(model.task, job.policy)
    records = records_from_outputs(outputs, policy, model.task, labels, provenance=facts)
    card = _card(records, learn_then_test(records.subset(design), records.subset(tested), job.guarantee), job, facts)
    forget_calibration(folder)
    save_model(model, folder)
    save_calibration(card, records, folder)
    return card, records


def calibrate_records(records: ExitRecords, job: CalibrateJob) -> CalibrationCard:
    """Find thresholds by exit records of inputs that were run elsewhere; the policy is that of their score.

    Raises DataError where the inputs are too few for the guarantee.
    """
    from offramp.jobs.provenance import provenance

    _check_rows(records, job)
    num_design = design_rows(len(records), job.guarantee, job.design_share)
    design, tested = divide(len(records), num_design, job.seed)
    found = learn_then_test(records.subset(design), records.subset(tested), job.guarantee)
    return _card(records, found, job, provenance(data=job.source, seed=job.seed, design_share=job.design_share))


def save_calibration(card: CalibrationCard, records: ExitRecords, folder: Path) -> None:
    """Write both into a folder that exists."""
    records.save(folder / RECORDS_FILE)
    (folder / CALIBRATION_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _card(records: ExitRecords, found: Calibration, job: CalibrateJob, facts: dict[str, Any]) -> CalibrationCard:
    return CalibrationCard(
        policy=records.score,
        thresholds=found.thresholds,
        budget=job.guarantee.budget,
        confidence=job.guarantee.confidence,
        tested=tested_figures(found),
        provenance=facts,
    )


def _policy(task: Task, asked: Score | None) -> Score:
    """Entropy is of labels; how sure it is, every task can say."""
    from earlyexit.tasks.label import LabelTask

    labels = isinstance(task, LabelTask)
    if asked == "entropy" and not labels:
        raise DataError(f"entropy is of labels, and the model's task is {task.name}; confidence is of any task")
    return asked or ("entropy" if labels else "confidence")


def forget_calibration(folder: Path) -> None:
    """Remove thresholds and records, before the model changes: they promise nothing about another one."""
    for name in (CALIBRATION_FILE, RECORDS_FILE):
        (folder / name).unlink(missing_ok=True)


def _check_rows(data: Sized, job: CalibrateJob) -> None:
    if len(data) < job.least_rows:
        promise = job.guarantee
        raise DataError(
            f"{job.source or 'the data'}: {len(data)} rows; at least {job.least_rows} are needed to promise agreement "
            f"of {1 - promise.budget:.4g} with confidence {promise.confidence:.4g}: {job.design_share:.0%} of the rows "
            f"lay the path of thresholds, {promise.least_inputs} rows test it"
        )


def record_exits(
    folder: Path,
    data: LabelledRows,
    policy: Score,
    ids: Sequence[str] | None = None,
    *,
    progress: Progress | None = None,
) -> ExitRecords:
    """Exit records of labelled rows under a calibrated model, for evaluation."""
    from earlyexit.store import load_model
    from earlyexit.train import exit_outputs, no_progress

    model = load_model(folder)
    codec = find_codec(model.info.codec, folder)
    truth_N = data.targets(model.task, codec)
    outputs = exit_outputs(model, data.encode(codec), progress=progress or no_progress)
    return records_from_outputs(outputs, policy, model.task, truth_N, ids=ids)


def records_from_outputs(
    outputs: dict[int, Any],
    policy: Score,
    task: Task,
    truth_N: ValueArray,
    *,
    ids: Sequence[str] | None = None,
    provenance: dict[str, Any] | None = None,
) -> ExitRecords:
    """Exit records of temperature-scaled outputs (N, C) by block; the last block is the full model."""
    from earlyexit.policies.base import Opinion
    from earlyexit.policies.threshold import ThresholdPolicy

    judge = make_policy(policy, thresholds=0.0)
    assert isinstance(judge, ThresholdPolicy)
    *ramps, last = sorted(outputs)
    opinions = {block: Opinion(task, outputs[block]) for block in outputs}
    answers_NE = np.stack([opinions[block].value_B.numpy() for block in (*ramps, last)], axis=1)
    num_inputs = len(truth_N)
    return ExitRecords.of_answers(
        answers_NE,
        score=policy,
        num_blocks=last + 1,
        ramps=tuple(ramps),
        sample_ids=tuple(ids) if ids is not None else tuple(map(str, range(num_inputs))),
        scores_NR=np.stack([judge.score(opinions[ramp]).numpy() for ramp in ramps], axis=1).astype(np.float32),
        truth_N=truth_N,
        loss=task.loss,
        zero_one=task.zero_one,
        keep_answers=answers_NE.ndim == 2,  # who looks answers up by an id wants a label or a number
        provenance=provenance,
    )


def tested_figures(found: Calibration) -> dict[str, Any]:
    """What a calibration's thresholds did where they were tested, with all ramps active and with the worst subset."""
    return {**outcome_figures(found.tested), "worst_agreement": 1 - found.worst_loss}


def outcome_figures(outcome: ExitOutcome) -> dict[str, Any]:
    """An outcome's figures as plain data."""
    return {
        "inputs": len(outcome.exits_N),
        "agreement": outcome.agreement,
        "accuracy": outcome.accuracy,
        "full_accuracy": outcome.full_accuracy,
        "mean_blocks": outcome.mean_blocks,
        "num_blocks": outcome.num_blocks,
        "survival": list(outcome.survival),
        "exits": outcome.exit_counts,
    }


def read_calibration(folder: Path) -> CalibrationCard:
    """A model's calibration; raises ModelFolderError where it has none, or one of another schema."""
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        raise ModelFolderError(f"{folder} is not calibrated; run: offramp calibrate {folder} --data VALIDATION_FILE")
    try:
        return read_calibration_file(path)
    except DataError as error:
        raise ModelFolderError(str(error)) from error
