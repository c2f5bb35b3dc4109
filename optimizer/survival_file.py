"""Survival that a problem file takes from exit records: their file, and the thresholds of its ramps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from earlyexit.errors import DataError, PlanError
from earlyexit.source_file import Source
from optimizer.problem import PlanProblem
from optimizer.problem_shape import RecordsDocument

if TYPE_CHECKING:
    from profiles.records import ExitRecords

    Recorded = tuple[ExitRecords, dict[int, float]]


def recorded_survival(
    survival: list[float] | RecordsDocument, problem: PlanProblem, source: Source, folder: Path
) -> Recorded | None:
    """The records and a threshold for every ramp of the problem; None where survival is written out.

    Raises PlanError at the line of what does not fit.
    """
    if isinstance(survival, list):
        return None
    with source.said_at(("survival", "records")):
        records = _records(survival, problem, folder)
    with source.said_at(("survival", "thresholds" if survival.calibration is None else "calibration")):
        return records, _thresholds(survival, problem, records, folder)


def recorded_alone(
    survival: list[float] | RecordsDocument, recorded: Recorded | None, source: Source, folder: Path
) -> ExitRecords | None:
    """Of records that hold only where no network is left out, those of the others; raises PlanError at their line."""
    if recorded is None or isinstance(survival, list):
        return None
    from profiles.networks import alone_of

    with source.said_at(("survival", "records")):
        try:
            return alone_of(folder / survival.records, recorded[0])
        except DataError as error:
            raise PlanError(f"survival.records: {error}") from error


def _records(document: RecordsDocument, problem: PlanProblem, folder: Path) -> ExitRecords:
    from profiles.records_table import read_records

    try:
        records = read_records(folder / document.records)
    except DataError as error:
        raise PlanError(f"survival.records: {error}") from error
    if records.num_blocks != problem.num_blocks or not set(problem.ramps) <= set(records.ramps):
        raise PlanError(
            f"survival.records: {document.records} holds {records.num_blocks} blocks and ramps {list(records.ramps)}; "
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
        return _calibrated(folder / document.calibration, problem, records)
    given = document.thresholds
    assert given is not None
    thresholds = dict(given) if isinstance(given, Mapping) else dict.fromkeys(problem.ramps, given)
    if set(thresholds) != set(problem.ramps):
        raise PlanError(
            f"survival.thresholds names ramps {sorted(thresholds)}; "
            f"allowed are one number, or one for each ramp of the problem, {list(problem.ramps)}"
        )
    return thresholds


def _calibrated(path: Path, problem: PlanProblem, records: ExitRecords) -> dict[int, float]:
    """Of a calibration, which has thresholds for every ramp that was recorded, those of the problem's ramps."""
    from optimizer.calibration_file import members_in, read_calibration_file
    from profiles.decay import decay_of

    try:
        card = read_calibration_file(path)
    except DataError as error:
        raise PlanError(f"survival.calibration: {error}") from error
    if card.policy != records.score:
        raise PlanError(f"survival.calibration: {path} is of {card.policy}, the records are of {records.score}")
    of_card, of_records = card.confidences or {}, records.confidences or {}
    unlike = [ramp for ramp in problem.ramps if of_card.get(ramp) != of_records.get(ramp)]
    if unlike:
        raise PlanError(
            f"survival.calibration: {path} is of confidence {of_card.get(unlike[0])} at ramp {unlike[0]}, the records "
            f"are of {of_records.get(unlike[0])}; take the records that were calibrated on"
        )
    if card.decay != decay_of(records):
        raise PlanError(f"survival.calibration: {path} is of decay {card.decay}, the records of {decay_of(records)}")
    models, others = members_in(card.provenance), members_in(records.provenance)
    if models and others and models != others:
        raise PlanError(f"survival.calibration: {path} is of other models than the records; take those of one chain")
    missing = sorted(set(problem.ramps) - set(card.thresholds))
    if missing:
        raise PlanError(f"survival.calibration: {path} has no thresholds for ramps {missing}")
    return {ramp: card.thresholds[ramp] for ramp in problem.ramps}
