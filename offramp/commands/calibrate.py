"""`offramp calibrate`: temperatures, thresholds with a guarantee, exit records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from earlyexit.codecs import find_codec
from earlyexit.data.rows import LabelledRows
from earlyexit.errors import DataError
from earlyexit.tasks.token import TokenTask
from offramp.commands.calibrate_chain import calibrate_chain
from offramp.commands.calibrated import (
    card_of,
    check_ramps,
    check_rows,
    facts_of,
    fitted_exits,
    forget_calibration,
    outcome_figures,
    parts_of,
    read_calibration,
    recorded,
    save_calibration,
)
from offramp.commands.jobs import CalibrateJob
from offramp.commands.profile import measured_costs
from offramp.commands.recording import (
    Outputs,
    batches_of_outputs,
    score_of,
    tokens_of,
)
from optimizer.calibration_file import RECORDS_FILE, CalibrationCard
from optimizer.plan import policy_of_score
from profiles.records import ExitRecords

if TYPE_CHECKING:
    from earlyexit.network.model import EarlyExitModel
    from earlyexit.tasks.base import IntArray, ValueArray
    from earlyexit.training.ramps import Progress

__all__ = [
    "RECORDS_FILE",
    "calibrate",
    "calibrate_records",
    "forget_calibration",
    "outcome_figures",
    "read_calibration",
    "save_calibration",
]


def calibrate(
    folder: Path,
    data: LabelledRows,
    job: CalibrateJob,
    *,
    outputs: Iterable[Outputs] | None = None,
    progress: Progress | None = None,
) -> tuple[CalibrationCard, ExitRecords]:
    """Fit temperatures, find thresholds, and write them, with the exit records, into the model's folder.

    `outputs` are the model's of these rows, without temperatures, where they are known already.
    Raises DataError where the inputs are too few for the guarantee.
    """
    import torch

    from earlyexit.network.store import load_model, read_card, save_model
    from earlyexit.training.ramps import no_progress

    check_rows(data, job)
    chain = read_card(folder)
    if chain.task["name"] == TokenTask.name:
        from offramp.commands.calibrate_tokens import calibrate_tokens

        return calibrate_tokens(folder, data, job, progress or no_progress)
    if job.decay is not None:
        raise DataError(f"thresholds fall along answers of tokens, and {chain.name} answers none: leave decay out")
    if not chain.chain.is_one:
        return calibrate_chain(folder, chain, data, job, outputs, progress or no_progress)
    if job.prune is not None:
        raise DataError(f"words are pruned where inputs go on to another network, and {chain.name} is a single one")
    if job.ensemble:
        raise DataError(f"{folder} is a single network: an ensemble is of a chain's")
    check_ramps(job, chain.ramps)
    model = load_model(folder)
    codec = find_codec(model.info.codec, folder)
    labels = data.targets(model.task, codec)
    encoded = data.encode(codec)
    parts = parts_of(data, job)
    policy = score_of(model.task, job.policy)
    if outputs is None:
        computing = model if job.dtype == "float32" else load_model(folder, dtype=getattr(torch, job.dtype))
        computing.temperatures_E.fill_(1.0)
        outputs = batches_of_outputs(computing, encoded, progress or no_progress)
    outputs = _scaled(model, outputs, labels, parts[0])
    facts = facts_of(job)
    records = recorded(outputs, policy, model.task, labels, design=parts[0], job=job, facts=facts)
    records = replace(records, tokens_N=tokens_of(model, encoded))
    costs = measured_costs(job.latency, records)
    card = card_of(records, parts, job, facts, task=model.task, labels=labels, block_costs=costs)
    forget_calibration(folder)
    save_model(model, folder)
    save_calibration(card, records, folder)
    return card, records


def _scaled(model: EarlyExitModel, parts: Iterable[Outputs], labels: ValueArray, design: IntArray) -> Iterable[Outputs]:
    """Outputs at temperature 1, by temperatures fitted on the design part; where outputs are large they stay 1.

    The last exit of an injected model keeps 1: its scores are the foreign model's own.
    """
    import torch

    model.temperatures_E.fill_(1.0)
    if model.task.large:
        return parts
    ((rows, raw),) = parts
    design_B = torch.from_numpy(design)
    for block in fitted_exits(raw, model.info.provenance):
        raw_NC = raw[block]
        model.temperatures_E[block] = model.task.fit_temperature(raw_NC[design_B], labels[design])
    return [(rows, {block: raw_NC / float(model.temperatures_E[block]) for block, raw_NC in raw.items()})]


def calibrate_records(records: ExitRecords, job: CalibrateJob) -> CalibrationCard:
    """Find thresholds by exit records of inputs that were run elsewhere; the policy is that of their score.

    Raises DataError where the inputs are too few for the guarantee, PlanError for shares of no stated confidences.
    """
    check_rows(records, job)
    check_ramps(job, records.ramps)
    if job.decay is not None:
        raise DataError("a decay is in the scores already where exit records are of one: leave it out")
    if records.sequences_N is not None:
        from offramp.commands.calibrate_tokens import card_of_sequences

        return card_of_sequences(records, job, facts_of(job))
    policy_of_score(records.score, {}, records.confidences)  # or no input could leave by the thresholds found
    return card_of(
        records, parts_of(records, job), job, facts_of(job), block_costs=measured_costs(job.latency, records)
    )
