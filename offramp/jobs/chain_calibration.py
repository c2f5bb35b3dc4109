"""`offramp calibrate` of a chain: all its networks together, an ensemble where it pays, and pruned texts besides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from earlyexit.prunable import check_prunable
from offramp.jobs.block_costs import measured_costs, parameters_by_block
from offramp.jobs.calibrated import (
    CalibrateJob,
    card_of,
    check_ramps,
    facts_of,
    forget_calibration,
    parts_of,
    promised_of,
    read_calibration,
    recorded,
    save_calibration,
)
from offramp.jobs.chain_members import members_of
from offramp.jobs.mixing import likely_thresholds, mix_where_it_pays
from offramp.jobs.pruning import FOLDER as PRUNED
from offramp.jobs.pruning import run_pruned
from offramp.jobs.recording import Outputs, chain_outputs, score_of
from optimizer.calibration_file import MEMBERS, CalibrationCard
from profiles.networks import ALONE_FILE
from profiles.records import ExitRecords

if TYPE_CHECKING:
    from earlyexit.dataset import LabelledRows
    from earlyexit.store import ModelCard
    from earlyexit.train import Progress


def calibrate_chain(
    folder: Path,
    chain: ModelCard,
    data: LabelledRows,
    job: CalibrateJob,
    outputs: Iterable[Outputs] | None,
    progress: Progress,
) -> tuple[CalibrationCard, ExitRecords]:
    """Thresholds of every ramp and of every network's end, together; the models stay as they are.

    Temperatures are those of each model's own calibration, so the models without one are refused. Where words are to be
    pruned, the chain that prunes them is calibrated besides, and that is what is given.
    """
    from earlyexit.tasks import find_task

    job = _checked(job, folder, chain)
    task = find_task(chain.task)
    labels = task.targets(data.labels)
    parts = parts_of(data, job)
    tokens_N = None
    if outputs is None:
        run, tokens_N = chain_outputs(folder, chain, data, job.dtype, progress)
        outputs = [run]
    outputs = list(outputs)
    facts = facts_of(job) | {MEMBERS: members_of(folder, chain)}
    policy = score_of(task, job.policy)
    records = recorded(outputs, policy, task, labels, design=parts[0], job=job, facts=facts)
    records = replace(records, tokens_N=tokens_N)
    costs = measured_costs(job.latency, records) or parameters_by_block(folder, chain)
    views, found = [records], None
    if job.ensemble:
        promised = promised_of(records, job)
        likely = likely_thresholds(promised.subset(parts[0]), job.guarantee.budget, costs)
        found, views = mix_where_it_pays(outputs[0][1], records, likely, chain.chain, task, labels, parts[0])
    card = card_of(views[0], parts, job, facts, task=task, block_costs=costs, others=views[1:])
    forget_calibration(folder)
    if len(views) > 1:
        records.save(folder / ALONE_FILE)
    card = card if found is None else card.with_ensemble(found.weights if found.is_on else None, found.document())
    save_calibration(card, views[0], folder)
    if job.prune is None:
        return card, views[0]
    ((rows, whole),) = outputs
    pruned = run_pruned(folder, chain, data, whole, share=job.prune, parts=parts, dtype=job.dtype, progress=progress)
    facts |= pruned.facts()
    made = [(rows, pruned.records_of(whole))]
    records = replace(
        recorded(made, policy, task, labels, design=parts[0], job=job, facts=facts),
        tokens_N=tokens_N,
        end_losses_N=pruned.end_losses_N(task, whole),
        end_true_losses_N=pruned.end_true_losses_N(task, labels),
    )
    # Plans may leave the networks out whose words would be pruned: what is promised is so of whole texts as well.
    card = card_of(records, parts, job, facts, task=task, block_costs=costs, others=views, prune=pruned.prune)
    (folder / PRUNED).mkdir(exist_ok=True)
    save_calibration(card, records, folder / PRUNED)
    return card, records


def _checked(job: CalibrateJob, folder: Path, chain: ModelCard) -> CalibrateJob:
    """The job with its ramps by their blocks; raises what the job cannot be, before anything runs."""
    for member in chain.members(folder):
        read_calibration(member)
    if job.ramps == "ends":
        job = replace(job, ramps=chain.chain.end_ramps)
    check_ramps(job, chain.ramps)
    if job.prune is not None:
        check_prunable(folder, chain.chain.end_ramps)
    return job
