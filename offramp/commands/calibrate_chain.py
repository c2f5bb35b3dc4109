"""`offramp calibrate` of a chain: its networks together, an ensemble where it pays, pruned texts; the last alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from earlyexit.errors import DataError
from earlyexit.network.chain import Chain
from earlyexit.network.chain_card import check_prunable
from offramp.commands.calibrated import (
    card_of,
    check_ramps,
    check_rows,
    facts_of,
    forget_calibration,
    members_of,
    parts_of,
    promised_of,
    read_calibration,
    recorded,
    save_calibration,
)
from offramp.commands.jobs import CalibrateJob
from offramp.commands.profile import measured_costs, parameters_by_block
from offramp.commands.pruning import PrunedRun, run_pruned
from offramp.commands.recording import Ensemble, Outputs, chain_outputs, find_ensemble, records_of_ensemble, score_of
from offramp.commands.worth import likely_thresholds
from optimizer.calibration_file import MEMBERS, PRUNED, REFERENCE, CalibrationCard
from optimizer.few_ramps import few_ramps
from profiles.networks import ALONE_FILE, subsets
from profiles.records import ExitRecords

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.data.rows import LabelledRows
    from earlyexit.network.store import ModelCard
    from earlyexit.tasks.base import IntArray, Task, ValueArray
    from earlyexit.training.ramps import Progress


def mix_where_it_pays(
    outputs: Mapping[int, Tensor],
    alone: ExitRecords,
    likely: Mapping[int, float],
    chain: Chain,
    task: Task,
    labels: ValueArray,
    design: IntArray,
) -> tuple[Ensemble, list[ExitRecords]]:
    """An ensemble, and records as every choice of networks gives them, all networks first; `alone` where it is off.

    Its weights and its gain are found on the design part alone, so that what is promised is tested on rows that chose
    nothing. Rerouted are inputs that no exit up to an end is sure of by the `likely` thresholds. Raises DataError for
    scores that are shares.
    """
    if alone.score == "share":
        raise DataError("an ensemble's exits leave by entropy or confidence, not by share")
    sure_NR = alone.sure_NR(likely)
    until = [np.array(alone.ramps) <= end for end in chain.end_ramps]
    goes_on_NE = np.stack([~sure_NR[:, columns].any(1) for columns in until], axis=1)
    found = find_ensemble(outputs, chain, labels, goes_on_NE, design)
    if not found.is_on:
        return found, [alone]
    views = sorted(subsets(chain), key=len, reverse=True)
    return found, [records_of_ensemble(outputs, alone, chain, task, labels, found.weights, used) for used in views]


Ramps = tuple[int, ...] | Literal["all", "ends"] | None
"""As of a job."""
OWN = ""
"""The chain's own calibration, which no folder is named for."""


def calibrate_chain(
    folder: Path,
    chain: ModelCard,
    data: LabelledRows,
    job: CalibrateJob,
    outputs: Iterable[Outputs] | None,
    progress: Progress,
) -> tuple[CalibrationCard, ExitRecords]:
    """Thresholds of the networks' ends and of ramps, together; the models stay as they are.

    Where the job names no ramps: of the ends and of those few that are worth it (`few_ramps`), and in a calibration
    beside that, of the same outputs, of a few of the last network's. Plans pick one of all calibrations that are made,
    so these keep the confidence together. Temperatures are those of each model's own calibration, so the
    models without one are refused. Where words are to be pruned, the chain that prunes them is calibrated besides, and
    that is what is given.
    """
    from earlyexit.tasks import find_task

    job = _checked(job, folder, chain)
    check_rows(data, job)
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
    given = _Given(chain=chain.chain, job=job, task=task, labels=labels, parts=parts, costs=costs)
    views, found = [records], None
    if job.ensemble:
        promised = promised_of(records, job)
        likely = likely_thresholds(promised.subset(parts[0]), job.guarantee.budget, costs)
        found, views = mix_where_it_pays(outputs[0][1], records, likely, chain.chain, task, labels, parts[0])
    cards = {
        name: given.card(views, ramps, facts, entry=given.chain.starts[-1] if name == REFERENCE else 0)
        for name, ramps in given.ramps_by_name(views[0]).items()
    }
    if found is not None:
        weights = found.weights if found.is_on else None
        cards = {name: card.with_ensemble(weights, found.document()) for name, card in cards.items()}
    forget_calibration(folder)
    if len(views) > 1:
        records.save(folder / ALONE_FILE)
    for name, card in cards.items():
        save_calibration(card, None if name else views[0], folder / name)
    if job.prune is None:
        return cards[OWN], views[0]
    pruned = run_pruned(
        folder, chain, data, outputs[0][1], share=job.prune, parts=parts, dtype=job.dtype, progress=progress
    )
    return _calibrate_pruned(given, folder, pruned, outputs[0], records)


def _calibrate_pruned(
    given: _Given, folder: Path, pruned: PrunedRun, run: Outputs, whole: ExitRecords
) -> tuple[CalibrationCard, ExitRecords]:
    """Of what later networks say to pruned texts, and of `whole` ones, of which `run` are the outputs.

    For plans may leave the networks out whose words would be pruned: what is promised is so of either.
    """
    (rows, outputs), task = run, given.task
    facts = dict(whole.provenance or {}) | pruned.facts()
    made = [(rows, pruned.records_of(outputs))]
    records = replace(
        recorded(made, whole.score, task, given.labels, design=given.parts[0], job=given.job, facts=facts),
        tokens_N=whole.tokens_N,
        end_losses_N=pruned.end_losses_N(task, outputs),
        end_true_losses_N=pruned.end_true_losses_N(task, given.labels),
    )
    ramps = given.job.ramps if given.job.ramps is not None else given.few(records, given.chain.end_ramps)
    card = given.card([records, whole], ramps, facts, prune=pruned.prune)
    save_calibration(card, records, folder / PRUNED)
    return card, records


def _checked(job: CalibrateJob, folder: Path, chain: ModelCard) -> CalibrateJob:
    """The job with its ramps by their blocks, and all calibrations counted; raises what the job cannot be."""
    for member in chain.members(folder):
        read_calibration(member)
    if job.ramps == "ends":
        job = job.model_copy(update={"ramps": chain.chain.end_ramps})
    check_ramps(job, chain.ramps)
    if job.prune is not None:
        check_prunable(folder, chain.chain.end_ramps)
    among = len(_names(job, chain.chain)) + (job.prune is not None)
    return job.model_copy(update={"among": among})


def _names(job: CalibrateJob, chain: Chain) -> tuple[str, ...]:
    """Of the calibrations of whole texts; known before anything is run, so that all of them can be counted."""
    several = job.ramps is None and chain.ramps_of(len(chain.lengths) - 1)
    return (OWN, REFERENCE) if several else (OWN,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What all calibrations of a chain have in common."""

    chain: Chain
    job: CalibrateJob
    task: Task
    labels: ValueArray
    parts: tuple[IntArray, IntArray]
    costs: Sequence[float] | None
    """Of every block."""

    def card(
        self,
        views: Sequence[ExitRecords],
        ramps: Ramps,
        facts: dict[str, Any],
        prune: Mapping[int, float] | None = None,
        entry: int = 0,
    ) -> CalibrationCard:
        """Thresholds of these ramps, by inputs as the first of the views has them, promised of all.

        Inputs enter at block `entry`.
        """
        return card_of(
            views[0],
            self.parts,
            self.job.model_copy(update={"ramps": ramps}),
            facts,
            task=self.task,
            labels=self.labels,
            block_costs=self.costs,
            others=views[1:],
            prune=prune,
            first=self.chain.starts[-1],
            entry=entry,
        )

    def ramps_by_name(self, records: ExitRecords) -> dict[str, Ramps]:
        """Which ramps each calibration of whole texts is of."""
        if self.job.ramps is not None:
            return {OWN: self.job.ramps}
        by_name: dict[str, Ramps] = {OWN: self.few(records, self.chain.end_ramps)}
        if REFERENCE in _names(self.job, self.chain):
            last = self.chain.starts[-1]
            ramps = [ramp for ramp in self.chain.ramps if ramp >= last]
            by_name[REFERENCE] = self.few(records.of_ramps(ramps), (), first=last)
        return by_name

    def few(self, records: ExitRecords, always: Sequence[int], first: int = 0) -> tuple[int, ...]:
        """By the rows that lay the path, which test nothing; inputs enter at block `first`."""
        design_rows, tested_rows = self.parts
        design = promised_of(records, self.job).subset(design_rows)
        return few_ramps(design, self.job.guarantee, len(tested_rows), always, first=first, block_costs=self.costs)
