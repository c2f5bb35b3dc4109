"""Latency profiles: seconds of every block and ramp of a model on an accelerator, by batch size and input length.

E3's planner uses such profiles with one input length (section 3.2). These may have several input lengths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from earlyexit.data.source_file import read_source
from earlyexit.data.strict import FromFile, checked
from earlyexit.errors import DataError, within
from profiles.table import LatencyTable, check_ramps

ProfileKind = Literal["measured", "published", "derived"]
Name = Annotated[str, Field(min_length=1)]


def _by_length(tables: list[LatencyTable], _: object) -> dict[int | None, LatencyTable]:
    lengths = [table.length for table in tables]
    if None in lengths:
        raise DataError("length: Field required", at=(lengths.index(None),))
    if len(set(lengths)) < len(lengths):
        raise DataError("two tables have the same length; only one per length is allowed")
    return dict(zip(lengths, tables, strict=True))


if TYPE_CHECKING:
    FileTables = Mapping[int, LatencyTable]
else:
    FileTables = Annotated[list[LatencyTable], Field(min_length=1), checked(_by_length)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencyProfile(FromFile):
    """Measured or published seconds of one model on one accelerator. Raises DataError for contradictory values.

    Seconds need not grow with the batch size.
    """

    schema_version: Literal[1] = 1
    model: Name
    num_blocks: Annotated[int, Field(ge=1)]
    ramps: Annotated[tuple[int, ...], Field(strict=False)]
    """All ramps of the model, active or not. Ramp r is after block r."""
    device: Name
    """Accelerator type, a name of `cluster.devices`."""
    backend: Name
    """The software that ran the model: torch, onnx, TensorRT, ..."""
    dtype: Name
    kind: ProfileKind
    """`derived` profiles are computed from another accelerator's; see `provenance`."""
    tables: FileTables
    """Tables by ascending input length: tokens, or the side of an image in pixels."""
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not all((self.model, self.device, self.backend, self.dtype)):
            raise DataError("a latency profile needs model, device, backend and dtype")
        with within("ramps"):
            check_ramps(self.ramps, self.num_blocks)
        lengths = list(self.tables)
        if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1:
            message = f"the lengths of a latency profile must ascend from at least 1, not {lengths}"
            raise DataError(message, at=("tables",))
        for index, table in enumerate(self.tables.values()):
            with within("tables", index):
                table.check_rows(self.num_blocks, len(self.ramps))

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
        """Raises DataError unless the profile has this number of blocks and all of these ramps."""
        if num_blocks != self.num_blocks or not set(ramps) <= set(self.ramps):
            raise DataError(
                f"the latency profile of {self.model!r} has {self.num_blocks} blocks and ramps {list(self.ramps)}; "
                f"{num_blocks} blocks and ramps {list(ramps)} are needed"
            )

    def save(self, path: Path) -> None:
        """Writes the profile to a JSON file with one line per block and ramp."""
        path.write_text(_text(self), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LatencyProfile:
        """Returns the profile in a file; raises DataError with file, line, mistake and what is allowed."""
        source = read_source(path, DataError, hint=f"; `offramp profile MODEL --out {path}` measures one")
        return source.parse(cls, called="the latency profile")


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
    tables = [{"length": length} | table.document() | {"length": length} for length, table in profile.tables.items()]
    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    document = {**values, "provenance": dict(profile.provenance), "tables": tables}
    indented = json.dumps(document, indent=2, allow_nan=False)
    return NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", indented) + "\n"
