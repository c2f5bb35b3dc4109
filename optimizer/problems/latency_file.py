"""Latency entries of a problem file: written out, published, or from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cluster.devices import EMULATED
from earlyexit.data.source_file import Source
from earlyexit.errors import PlanError
from optimizer.problems.problem_shape import (
    MAX_BATCH,
    Place,
    ProfileFileDocument,
    PublishedDocument,
    TableDocument,
    read_at,
)
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile
from profiles.table import LatencyTable

LatencyEntry = TableDocument | PublishedDocument | ProfileFileDocument


def latency_table(
    at: Place, entry: LatencyEntry, num_blocks: int, ramps: tuple[int, ...], source: Source, folder: Path
) -> LatencyTable:
    """Returns the latency table of one device for these blocks and ramps; raises PlanError at the line of an error.

    `at` is the entry's path in the file, whose last part is the device.
    """
    if isinstance(entry, TableDocument):
        return _written_out(at, entry, num_blocks, len(ramps), source)
    with read_at(source, (*at, "published" if isinstance(entry, PublishedDocument) else "profile"), called=at):
        if isinstance(entry, PublishedDocument):
            profile = published_profile(entry.published, str(at[-1]).removeprefix(EMULATED))
        else:
            profile = LatencyProfile.load(folder / entry.profile)
        profile.check_fits(num_blocks, ramps)
        table = with_rows(profile.at(entry.length), profile.ramps, ramps)
        if table.batches[-1] > MAX_BATCH:
            raise PlanError(f"{_dotted(at)}: a batch size is at most {MAX_BATCH}, not {table.batches[-1]}")
        return table


def with_rows(table: LatencyTable, ramps: Sequence[int], wanted: Sequence[int]) -> LatencyTable:
    """Returns the table with only the rows of the wanted ramps. `ramps` are all ramps of the table."""
    rows = [ramps.index(ramp) for ramp in wanted]
    return replace(table, ramp_s_EB=table.ramp_s_EB[np.array(rows, dtype=np.int64)])


def _written_out(at: Place, entry: TableDocument, num_blocks: int, num_ramps: int, source: Source) -> LatencyTable:
    num_batches = len(entry.batch)
    for name, rows, num_rows in (("block_s", entry.block_s, num_blocks), ("ramp_s", entry.ramp_s, num_ramps)):
        with source.errors_at((*at, name)):
            if len(rows) != num_rows:
                unit = name.removesuffix("_s")
                raise PlanError(f"{_dotted(at)}.{name} has {len(rows)} rows; {num_rows} are needed, one per {unit}")
        for row, seconds in enumerate(rows):
            with source.errors_at((*at, name, row)):
                if len(seconds) != num_batches:
                    raise PlanError(
                        f"{_dotted(at)}.{name}.{row} has {len(seconds)} values; {num_batches} are needed, one for each "
                        f"batch size of {entry.batch}"
                    )
    with read_at(source, (*at, "batch")):
        table = LatencyTable.of_rows(entry.batch, entry.block_s, entry.ramp_s)
        return replace(table, length=entry.length, context=entry.context, context_s=entry.context_s)


def _dotted(at: Place) -> str:
    return ".".join(map(str, at))
