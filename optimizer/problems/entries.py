"""Latencies and lengths in problem files and service files: written out, published, or from other files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Discriminator, Field, Tag, ValidationInfo

from cluster.devices import EMULATED
from earlyexit.data.strict import StrictDocument, checked
from earlyexit.errors import DataError, within
from optimizer.plans.plan import RampKey
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile
from profiles.lengths import Lengths, read_lengths
from profiles.records import ExitRecords
from profiles.table import LatencyTable


# Tags are in angle brackets because pydantic puts them into the paths of errors, where they could be read as fields.
def form_tag(value: Any) -> str | None:
    """Returns the tag of the union member that parses this value, or None if no union has such a member."""
    for kind, tag in ((Mapping, "<mapping>"), (list, "<list>"), (str, "<file>")):
        if isinstance(value, kind):
            return tag
    return "<one>" if isinstance(value, int | float) and not isinstance(value, bool) else None


def forms(allowed: str, tag_of: Callable[[Any], str | None] = form_tag) -> Discriminator:
    """Returns a discriminator that selects a union's member by tag. `allowed` describes the members in messages."""
    return Discriminator(tag_of, custom_error_type="form", custom_error_message=f"Input should be {allowed}")


class PublishedDocument(StrictDocument):
    """Latencies that a paper published: a model of the catalogue, at one input length."""

    published: str
    length: int = Field(ge=1)


class ProfileFileDocument(StrictDocument):
    """Latencies from a profile, at one input length."""

    profile: str
    """The profile's file, relative to the problem's folder."""
    length: int = Field(default=1, ge=1)
    """Tokens of an input; 1 if inputs have no tokens."""


def _latency_tag(entry: Any) -> str | None:
    """Returns the tag of a latency entry, by the field that only that form has."""
    if isinstance(entry, LatencyTable):
        return "<table>"
    if not isinstance(entry, Mapping):
        return None
    return next((f"<{kind}>" for kind in ("published", "profile") if kind in entry), "<table>")


LatencyEntry = Annotated[
    Annotated[LatencyTable, Tag("<table>")]
    | Annotated[PublishedDocument, Tag("<published>")]
    | Annotated[ProfileFileDocument, Tag("<profile>")],
    forms(
        "a mapping with batch, block_s, ramp_s, length, context and context_s, or with published and length, or with "
        "profile and length",
        _latency_tag,
    ),
]
Latencies = Annotated[dict[str, LatencyEntry], Field(min_length=1)]
"""By accelerator type."""


def latency_tables(
    entries: Mapping[str, LatencyEntry], num_blocks: int, ramps: Sequence[int], folder: Path
) -> dict[str, LatencyTable]:
    """Returns the tables of a model with these blocks and ramps, by accelerator type.

    Raises InputError, with the path of the wrong value. Profiles are in files relative to `folder`.
    """
    tables = {}
    for device, entry in entries.items():
        with within(device):
            tables[device] = _table(device, entry, num_blocks, ramps, folder)
            tables[device].check_rows(num_blocks, len(ramps))
    return tables


def _table(device: str, entry: LatencyEntry, num_blocks: int, ramps: Sequence[int], folder: Path) -> LatencyTable:
    if isinstance(entry, LatencyTable):
        return entry
    if isinstance(entry, PublishedDocument):
        profile = published_profile(entry.published, device.removeprefix(EMULATED))
    else:
        profile = LatencyProfile.load(folder / entry.profile)
    profile.check_fits(num_blocks, ramps)
    return with_rows(profile.at(entry.length), profile.ramps, ramps)


def with_rows(table: LatencyTable, ramps: Sequence[int], wanted: Sequence[int]) -> LatencyTable:
    """Returns the table with only the rows of the wanted ramps. `ramps` are all ramps of the table."""
    rows = [ramps.index(ramp) for ramp in wanted]
    return replace(table, ramp_s_EB=table.ramp_s_EB[np.array(rows, dtype=np.int64)])


NumBytes = Annotated[float, Field(ge=0, le=1e18)]
FileBytes = Annotated[
    Annotated[NumBytes, Tag("<one>")] | Annotated[list[NumBytes], Tag("<list>")],
    forms("one number, or a list of numbers, one per block"),
]


def _lengths(value: float | list[float] | dict[int, float] | str, info: ValidationInfo) -> Lengths:
    if isinstance(value, str):
        return Lengths.of(tokens_of(Path(info.context or "", value)))
    if isinstance(value, list):
        return Lengths.of(value)
    return Lengths.weighted(value) if isinstance(value, dict) else Lengths(mean=value)


if TYPE_CHECKING:
    FileLengths = Lengths
else:
    FileLengths = Annotated[
        Annotated[float, Tag("<one>")]
        | Annotated[list[float], Tag("<list>")]
        | Annotated[dict[RampKey, float], Tag("<mapping>")]
        | Annotated[str, Tag("<file>")],
        forms(
            "a mean, a list of lengths, a mapping from length to share, or a file of lengths or of exit records that "
            "know them"
        ),
        checked(_lengths),
    ]
"""Lengths of inputs, in tokens. The context of the validation is the folder of the file."""


def lengths_document(lengths: Lengths) -> float | dict[int, float]:
    """Returns plain data from which the same lengths are read."""
    return lengths.mean if lengths.shares is None else dict(lengths.shares)


def tokens_of(path: Path) -> npt.NDArray[np.int64]:
    """Returns the tokens of each input from a file of lengths or of exit records; raises DataError."""
    if path.suffix != ".npz":
        return read_lengths(path)
    tokens_N = ExitRecords.load(path).tokens_N
    if tokens_N is None:
        raise DataError(f"{path}: these exit records do not hold the lengths of their inputs")
    return tokens_N
