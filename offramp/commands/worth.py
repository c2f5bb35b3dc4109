"""Tells whether a model and its exits are worth serving, and what to do if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError
from offramp.commands.jobs import CalibrateJob
from optimizer.calibration_file import CalibrationCard
from optimizer.risk import Guarantee
from optimizer.thresholds import learn_then_test
from profiles.records import ExitRecords

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.network.model import EarlyExitModel
    from earlyexit.tasks.base import Task, ValueArray

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
    from earlyexit.tasks.label import LabelTask
    from earlyexit.tasks.regression import RegressionTask

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


def warnings_on(
    outputs: Mapping[int, Tensor],
    task: Task,
    truth_N: ValueArray,
    model: Mapping[str, Any],
    *,
    block_costs: Sequence[float] | None,
) -> list[str]:
    """Returns reasons against serving a trained model, from its outputs (N, C) by block, with what to do.

    The saving of exits is estimated with thresholds that these rows choose.
    """
    from offramp.commands.recording import records_from_outputs, score_of

    if not len(truth_N):
        return []
    if any(bool(each.isnan().any()) for each in outputs.values()):
        return ["the model's outputs are not numbers: its training diverged; train again with a lower --learning-rate"]
    if task.large:
        return []
    records = records_from_outputs(outputs, score_of(task, None), task, truth_N)
    try:
        outcome = records.outcome(likely_thresholds(records, CalibrateJob().budget, block_costs))
    except DataError:  # too few rows to estimate anything
        saved = None
    else:
        saved = 1 - work_share(outcome.survival, block_costs)
    return warnings_of(records.outcome({}).full_accuracy, constant_accuracy(task, truth_N), saved, model)


def outputs_of_features(model: EarlyExitModel, features: Mapping[int, Tensor], batch: int = 256) -> dict[int, Tensor]:
    """Returns every exit's outputs (N, C) by block, computed from what `exit_features` returns."""
    import torch

    with torch.inference_mode():
        return {
            block: torch.cat(
                [model.exit_head(block).classify(part.to(model.device)).cpu() for part in torch.split(of_block, batch)]
            )
            for block, of_block in features.items()
        }


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
