"""Recorded inputs in a problem file: exit records with thresholds, or batches with a bit mask of ramps per input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.data.source_file import Source
from earlyexit.errors import PlanError
from optimizer.calibration.calibration_file import (
    CALIBRATION_FILE,
    beside_of,
    check_policy,
    members_in,
    read_calibration_file,
    records_of,
)
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_shape import BatchesDocument, RecordsDocument, read_at
from profiles.networks import alone_of
from profiles.records import ExitRecords, RecordedBatches
from profiles.records_table import read_records
from profiles.scores import BoolArray, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The exit records from which survival is computed."""

    records: ExitRecords
    thresholds: Mapping[int, float]
    """Thresholds of all ramps of the problem."""
    alone: ExitRecords | None = None
    """Records of the same inputs for plans that leave networks out, if `records` are valid only for all networks.

    For an ensemble, they are without mixing; for pruned texts, they are of the whole texts.
    """
    calibration: Path | None = None
    """The calibration's file, if the problem file names a model's folder."""


def recorded_survival(
    survival: list[float] | RecordsDocument, problem: PlanProblem, source: Source, folder: Path
) -> Recorded | None:
    """Returns the records that a problem file names, or None if survival is written out.

    Raises PlanError at the line of an error.
    """
    if isinstance(survival, list):
        return None
    with read_at(source, ("survival", "records")):
        if survival.records is None:
            raise PlanError("survival: neither of records and folder are given; one of them is needed")
        records = _records(survival.records, problem, folder)
    with read_at(source, ("survival", "thresholds" if survival.calibration is None else "calibration")):
        thresholds = _thresholds(survival, problem, records, folder)
    with read_at(source, ("survival", "records")):
        alone = alone_of(folder / survival.records, records)
    calibration = None if survival.folder is None or survival.calibration is None else Path(survival.calibration)
    return Recorded(records=records, thresholds=thresholds, alone=alone, calibration=calibration)


def by_calibration(source: Source, folder: Path) -> Iterator[Source]:
    """Yields the file once for each calibration in the folder that `survival` names; unchanged if it names no folder.

    Raises PlanError if `survival` has further fields.
    """
    document = source.document
    survival = document.get("survival") if isinstance(document, Mapping) else None
    named = survival.get("folder") if isinstance(survival, Mapping) else None
    if not isinstance(document, Mapping) or not isinstance(survival, Mapping) or not isinstance(named, str):
        yield source
        return
    with source.errors_at(("survival",)):
        others = sorted(set(survival) - {"folder"})
        if others:
            raise PlanError(f"survival: the folder has its own {' and '.join(others)}; leave out one of the two")
    model = folder / named
    for each in (None, *beside_of(model)):
        files = {"records": records_of(model, each), "calibration": (each or model) / CALIBRATION_FILE}
        paths = {name: str(path.resolve()) for name, path in files.items()}
        yield replace(source, document={**document, "survival": {"folder": named, **paths}})


def with_thresholds_of(problem: PlanProblem, thresholds: Mapping[int, float]) -> PlanProblem:
    """Returns the problem without the ramps that have no threshold."""
    if set(thresholds) == set(problem.ramps):
        return problem
    rows = [row for row, ramp in enumerate(problem.ramps) if ramp in thresholds]
    latency = {name: replace(table, ramp_s_EB=table.ramp_s_EB[rows]) for name, table in problem.latency.items()}
    return replace(problem, ramps=tuple(problem.ramps[row] for row in rows), latency=latency)


def _records(file: str, problem: PlanProblem, folder: Path) -> ExitRecords:
    records = read_records(folder / file)
    if records.num_blocks != problem.num_blocks or not set(problem.ramps) <= set(records.ramps):
        raise PlanError(
            f"survival.records: {file} holds {records.num_blocks} blocks and ramps {list(records.ramps)}; "
            f"the problem has {problem.num_blocks} blocks and ramps {list(problem.ramps)}"
        )
    return records


def _thresholds(
    document: RecordsDocument, problem: PlanProblem, records: ExitRecords, folder: Path
) -> dict[int, float]:
    if (document.thresholds is None) == (document.calibration is None):
        found = "neither" if document.thresholds is None else "both"
        raise PlanError(f"survival: {found} of thresholds and calibration are given; one of them is needed")
    if document.calibration is not None:
        path, name = folder / document.calibration, str(document.records)
        return _calibrated(path, problem, records, name, allow_missing=document.folder is not None)
    assert document.thresholds is not None
    if not isinstance(document.thresholds, Mapping):
        return dict.fromkeys(problem.ramps, document.thresholds)
    thresholds = dict(document.thresholds)
    if set(thresholds) != set(problem.ramps):
        raise PlanError(
            f"survival.thresholds names ramps {sorted(thresholds)}; "
            f"allowed are one number, or one for each ramp of the problem, {list(problem.ramps)}"
        )
    return thresholds


def _calibrated(
    path: Path, problem: PlanProblem, records: ExitRecords, name: str, *, allow_missing: bool
) -> dict[int, float]:
    """Returns a calibration's thresholds of the problem's ramps. `name` is the name of the records in messages."""
    card = read_calibration_file(path)
    check_policy(card.policy_spec(), str(path), records, name, problem.ramps)
    models, others = members_in(card.provenance), members_in(records.provenance)
    if models and others and models != others:
        raise PlanError(f"survival.calibration: {path} is of other models than the records; use those of one chain")
    missing = sorted(set(problem.ramps) - set(card.thresholds))
    if missing and not allow_missing:
        raise PlanError(f"survival.calibration: {path} has no thresholds for ramps {missing}")
    return {ramp: card.thresholds[ramp] for ramp in problem.ramps if ramp in card.thresholds}


ROUNDING = 0.005
"""Allowed difference of survival, which may be written with two decimals."""


def recorded_document(batches: RecordedBatches) -> dict[str, Any]:
    """Returns plain data that `batches_of` reads."""
    document: dict[str, Any] = {"size": batches.size, "sure": _masks(batches.sure_NR)}
    if batches.zero_one:
        return {**document, "lost": _masks(batches.losses_NR > 0)}
    rows = zip(batches.losses_NR, batches.sure_NR, strict=True)
    return {**document, "losses": [losses_R[sure_R].tolist() for losses_R, sure_R in rows]}


def batches_of(document: BatchesDocument, num_blocks: int, ramps: tuple[int, ...]) -> RecordedBatches:
    """Returns the batches of a document; raises PlanError or DataError if they do not fit the ramps or each other."""
    sure_NR = _bits(document.sure, len(ramps), "sure")
    return RecordedBatches(
        num_blocks=num_blocks,
        ramps=ramps,
        sure_NR=sure_NR,
        losses_NR=_losses(document, sure_NR),
        size=document.size,
        zero_one=document.losses is None,
    )


def check_survival(batches: RecordedBatches, survival_N: Sequence[float]) -> None:
    """Raises PlanError, with the first block, if survival is not the mean of the batches."""
    exits_N = batches.exits_N(batches.ramps)
    for block, share in enumerate(survival_N):
        recorded = float((exits_N >= block).mean())
        if abs(recorded - share) > ROUNDING:
            raise PlanError(f"batches: {recorded:.3g} of their inputs reach block {block}; survival says {share:.3g}")


def with_recorded_batches(problem: PlanProblem, records: ExitRecords, thresholds: Mapping[int, float]) -> PlanProblem:
    """Returns the problem with recorded batches, as large as the largest batch that can be planned."""
    largest = max(table.batches[-1] for table in problem.latency.values())
    size = min(largest, len(records))
    return replace(problem, batches=RecordedBatches.of_records(records, thresholds, size, problem.ramps))


def _losses(document: BatchesDocument, sure_NR: BoolArray) -> FloatArray:
    if (document.lost is None) == (document.losses is None):
        found = "neither" if document.lost is None else "both"
        raise PlanError(f"batches: {found} of lost and losses are given; one of them is needed")
    rows: Sequence[object] = document.lost if document.lost is not None else document.losses or ()
    if len(rows) != len(sure_NR):
        raise PlanError(f"batches: {len(rows)} inputs have losses, {len(sure_NR)} are recorded")
    if document.lost is not None:
        return _bits(document.lost, sure_NR.shape[1], "lost").astype(np.float64)
    losses_NR = np.zeros(sure_NR.shape)
    for row, (costs, sure_R) in enumerate(zip(document.losses or (), sure_NR, strict=True)):
        if len(costs) != sure_R.sum():
            raise PlanError(f"batches: input {row} has {len(costs)} losses; {sure_R.sum()} ramps let it leave")
        losses_NR[row, sure_R] = costs
    return losses_NR


def _masks(bits_NR: BoolArray) -> list[int]:
    """Returns one bit mask per row, whose bit i is column i. They are Python integers: there may be over 64 ramps."""
    return [sum(1 << int(column) for column in np.flatnonzero(bits_R)) for bits_R in bits_NR]


def _bits(masks: Sequence[int], num_ramps: int, name: str) -> BoolArray:
    beyond = [row for row, mask in enumerate(masks) if mask >> num_ramps]
    if beyond:
        raise PlanError(
            f"batches.{name}.{beyond[0]} is {masks[beyond[0]]}; with {num_ramps} ramps at most {(1 << num_ramps) - 1}"
        )
    rows = [[bool(mask >> column & 1) for column in range(num_ramps)] for mask in masks]
    return np.array(rows, dtype=bool).reshape(len(masks), num_ramps)
