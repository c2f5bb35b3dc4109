"""Latency profiles: seconds of every block and ramp of a model on an accelerator, by batch size and input length.

E3's planner uses such profiles with one input length (section 3.2). These may have several input lengths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from earlyexit.data.source_file import Source, StrictDocument, read_source
from earlyexit.errors import DataError
from profiles.table import LatencyTable, check_ramps

SCHEMA = 1
ProfileKind = Literal["measured", "published", "derived"]
Name = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencyProfile:
    """Measured or published seconds of one model on one accelerator. Raises DataError for contradictory values.

    Seconds need not grow with the batch size.
    """

    model: str
    num_blocks: int
    ramps: tuple[int, ...]
    """All ramps of the model, active or not. Ramp r is after block r."""
    device: str
    """Accelerator type, a name of `cluster.devices`."""
    backend: str
    """The software that ran the model: torch, onnx, TensorRT, ..."""
    dtype: str
    kind: ProfileKind
    """`derived` profiles are computed from another accelerator's; see `provenance`."""
    tables: Mapping[int, LatencyTable]
    """Tables by ascending input length: tokens, or the side of an image in pixels."""
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not all((self.model, self.device, self.backend, self.dtype)):
            raise DataError("a latency profile needs model, device, backend and dtype")
        check_ramps(self.ramps, self.num_blocks)
        lengths = list(self.tables)
        if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise DataError(f"the lengths of a latency profile must ascend from at least 1, not {lengths}")
        for length, table in self.tables.items():
            rows = len(table.block_s_NB), len(table.ramp_s_EB)
            if rows != (self.num_blocks, len(self.ramps)):
                raise DataError(
                    f"length {length} has {rows[0]} rows of block_s and {rows[1]} of ramp_s; "
                    f"the model has {self.num_blocks} blocks and {len(self.ramps)} ramps"
                )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Measured input lengths, ascending."""
        return tuple(self.tables)

    def at(self, length: int) -> LatencyTable:
        """Returns the table of an input length, if necessary interpolated linearly between two measured lengths.

        Interpolated tables have the batch sizes that both lengths have. Raises DataError outside the measured lengths.
        """
        if length in self.tables:
            return replace(self.tables[length], length=length)
        shortest, longest = self.lengths[0], self.lengths[-1]
        if not shortest < length < longest:
            raise DataError(
                f"{self.model} on {self.device}: not measured for {length} tokens (or pixels a side); "
                f"measured are {shortest} to {longest}"
            )
        below = max(measured for measured in self.lengths if measured < length)
        above = min(measured for measured in self.lengths if measured > length)
        return _between(self.tables[below], self.tables[above], (length - below) / (above - below), length)

    def check_fits(self, num_blocks: int, ramps: Collection[int]) -> None:
        """Raise DataError unless the profile has this number of blocks and all of these ramps."""
        if num_blocks != self.num_blocks or not set(ramps) <= set(self.ramps):
            raise DataError(
                f"the latency profile of {self.model!r} has {self.num_blocks} blocks and ramps {list(self.ramps)}; "
                f"{num_blocks} blocks and ramps {list(ramps)} are needed"
            )

    def save(self, path: Path) -> None:
        """Write the profile to a JSON file with one line per block and ramp."""
        path.write_text(_text(self), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LatencyProfile:
        """Returns the profile in a file; raises DataError with file, line, mistake and what is allowed."""
        source = read_source(path, DataError, hint=f"; `offramp profile MODEL --out {path}` measures one")
        document = source.parse(ProfileDocument, called="the latency profile")
        with source.errors_at(("ramps",)):
            check_ramps(tuple(document.ramps), document.num_blocks)
        tables = {
            table.length: _table(source, index, document.num_blocks, len(document.ramps), table)
            for index, table in enumerate(document.tables)
        }
        with source.errors_at(("tables",)):
            if len(tables) != len(document.tables):
                raise DataError("two tables have the same length; only one per length is allowed")
            values = {field.name: getattr(document, field.name) for field in fields(cls)}
            return cls(**values | {"ramps": tuple(document.ramps), "tables": tables})


class TableDocument(StrictDocument):
    """Seconds at one input length."""

    length: int = Field(ge=1)
    batch: list[int] = Field(min_length=1)
    block_s: list[list[Seconds]]
    ramp_s: list[list[Seconds]]
    context: int | None = Field(default=None, ge=1)
    """For decode steps: tokens that precede the step in each sequence."""
    context_s: Seconds = 0.0


class ProfileDocument(StrictDocument):
    """The JSON file of a latency profile."""

    schema_version: Literal[1]
    kind: ProfileKind
    model: Name
    num_blocks: int = Field(ge=1)
    ramps: list[int]
    device: Name
    backend: Name
    dtype: Name
    tables: list[TableDocument] = Field(min_length=1)
    provenance: dict[str, Any]


def _table(source: Source, index: int, num_blocks: int, num_ramps: int, document: TableDocument) -> LatencyTable:
    at = ("tables", index)
    for name, rows, wanted in (("block_s", document.block_s, num_blocks), ("ramp_s", document.ramp_s, num_ramps)):
        with source.errors_at((*at, name)):
            if len(rows) != wanted:
                raise DataError(f"{name} has {len(rows)} rows; needed: {wanted}, one per {name.removesuffix('_s')}")
        for row, seconds in enumerate(rows):
            with source.errors_at((*at, name, row)):
                if len(seconds) != len(document.batch):
                    raise DataError(f"{len(seconds)} values; needed: {len(document.batch)}, one per batch size")
    with source.errors_at((*at, "batch")):
        table = LatencyTable.of_rows(document.batch, document.block_s, document.ramp_s)
        return replace(table, context=document.context, context_s=document.context_s)


def _between(below: LatencyTable, above: LatencyTable, share: float, length: int) -> LatencyTable:
    """Returns the interpolation at `share`, from 0 (`below`) to 1 (`above`), for the batch sizes that both have."""
    batches = tuple(batch for batch in below.batches if batch in above.batches)
    if not batches:
        raise DataError(
            f"the nearest lengths have no batch size in common: {list(below.batches)} and {list(above.batches)}"
        )
    low, high = ([table.batches.index(batch) for batch in batches] for table in (below, above))
    return LatencyTable(
        batches=batches,
        block_s_NB=(1 - share) * below.block_s_NB[:, low] + share * above.block_s_NB[:, high],
        ramp_s_EB=(1 - share) * below.ramp_s_EB[:, low] + share * above.ramp_s_EB[:, high],
        length=length,
    )


NUMBERS = re.compile(r'\[\n([^\[\]{}"]*)\]')
"""Matches a list of numbers in indented JSON."""


def _text(profile: LatencyProfile) -> str:
    """Returns indented JSON in which a list of numbers, such as the seconds of a block, is on one line."""
    tables = [
        {
            "length": length,
            "batch": table.batches,
            "block_s": table.block_s_NB.tolist(),
            "ramp_s": table.ramp_s_EB.tolist(),
            **({} if table.context is None else {"context": table.context, "context_s": table.context_s}),
        }
        for length, table in profile.tables.items()
    ]
    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    document = {"schema_version": SCHEMA, **values, "provenance": dict(profile.provenance), "tables": tables}
    indented = json.dumps(document, indent=2, allow_nan=False)
    return NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", indented) + "\n"
