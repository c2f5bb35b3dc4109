"""The latency of one device of a problem file: a table, a published profile, or a profile's file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from earlyexit.errors import DataError, PlanError
from earlyexit.source_file import Source
from optimizer.problem import PlanProblem
from optimizer.problem_shape import MAX_BATCH, ProfileFileDocument, PublishedDocument, TableDocument
from profiles.table import FloatArray, LatencyTable


def latency_table(
    device: str,
    entry: TableDocument | PublishedDocument | ProfileFileDocument,
    problem: PlanProblem,
    source: Source,
    folder: Path,
) -> LatencyTable:
    """Seconds of one device, for the problem's blocks and ramps; raises PlanError at the line of what does not fit."""
    if isinstance(entry, TableDocument):
        return _written_out(device, entry, problem, source)
    if isinstance(entry, PublishedDocument):
        with source.said_at(("latency", device, "published")):
            return _published(device, entry, problem)
    with source.said_at(("latency", device, "profile")):
        return _from_file(device, entry, problem, folder)


def _written_out(device: str, entry: TableDocument, problem: PlanProblem, source: Source) -> LatencyTable:
    num_batches = len(entry.batch)
    wanted = (("block_s", entry.block_s, problem.num_blocks), ("ramp_s", entry.ramp_s, len(problem.ramps)))
    for name, rows, num_rows in wanted:
        at = ("latency", device, name)
        with source.said_at(at):
            if len(rows) != num_rows:
                each = name.removesuffix("_s")
                raise PlanError(f"{'.'.join(at)} has {len(rows)} rows; {num_rows} are needed, one per {each}")
        for row, seconds in enumerate(rows):
            with source.said_at((*at, row)):
                if len(seconds) != num_batches:
                    raise PlanError(
                        f"{'.'.join(at)}.{row} has {len(seconds)} values; {num_batches} are needed, one for each batch "
                        f"size of {entry.batch}"
                    )
    with source.said_at(("latency", device, "batch")):
        try:
            return LatencyTable(
                batches=tuple(entry.batch),
                block_s_NB=_array(entry.block_s, num_batches),
                ramp_s_EB=_array(entry.ramp_s, num_batches),
            )
        except DataError as error:
            raise PlanError(f"latency.{device}.batch: {error}") from error


def _published(device: str, entry: PublishedDocument, problem: PlanProblem) -> LatencyTable:
    from profiles.catalogue import published_profile

    try:
        profile = published_profile(entry.published, device)
        profile.check_fits(None, problem.num_blocks, problem.ramps)
        return profile.at(entry.length)
    except DataError as error:
        raise PlanError(f"latency.{device}: {error}") from error


def _from_file(device: str, entry: ProfileFileDocument, problem: PlanProblem, folder: Path) -> LatencyTable:
    from profiles.latency import LatencyProfile

    try:
        profile = LatencyProfile.load(folder / entry.profile)
        profile.check_fits(None, problem.num_blocks, problem.ramps)
        table = profile.at(entry.length)
    except DataError as error:
        raise PlanError(f"latency.{device}: {error}") from error
    if table.batches[-1] > MAX_BATCH:
        raise PlanError(f"latency.{device}: a batch size is at most {MAX_BATCH}, not {table.batches[-1]}")
    return table


def _array(rows: list[list[float]], num_batches: int) -> FloatArray:
    return np.array(rows, dtype=np.float64).reshape(len(rows), num_batches)  # no rows at all still have a width
