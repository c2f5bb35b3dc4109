"""What the fields of problem files and service files may hold beside plain values.

Latencies and lengths are written out, published, or in other files. Recorded inputs are exit records with thresholds,
or batches with the losses of each input.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, Tag, ValidationInfo

from cluster.devices import EMULATED
from earlyexit.data.strict import StrictDocument, checked
from earlyexit.errors import DataError, InputError, within
from optimizer.calibration.calibration_file import (
    CALIBRATION_FILE,
    beside_of,
    check_policy,
    members_in,
    read_calibration_file,
    records_of,
)
from optimizer.plans.plan import RampKey
from optimizer.problems.problem import PlanProblem, forms
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile
from profiles.lengths import Lengths, read_lengths
from profiles.networks import alone_of
from profiles.records import ExitRecords, RecordedBatches
from profiles.records_table import read_records
from profiles.table import MAX_BATCH, LatencyTable


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


FileThresholds = Annotated[
    Annotated[float, Tag("<one>")] | Annotated[dict[RampKey, float], Tag("<mapping>")],
    forms("one number, or a mapping with a number for each ramp"),
]


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

    @property
    def stayers_length_N(self) -> tuple[float, ...] | None:
        """Mean length of the inputs that reach each block, relative to all inputs; None if it is not recorded."""
        tokens_N = self.records.tokens_N
        if tokens_N is None:
            return None
        exits_N, mean = self.records.outcome(self.thresholds).exits_N, float(tokens_N.mean())
        reaching = [tokens_N[exits_N >= block] for block in range(self.records.num_blocks)]
        return tuple(float(each.mean()) / mean if len(each) else 0.0 for each in reaching)

    def batches(self, problem: PlanProblem) -> RecordedBatches:
        """Returns the inputs in batches that are as large as the largest batch that can be planned."""
        size = min(max(table.batches[-1] for table in problem.latency.values()), len(self.records))
        return RecordedBatches.of_records(self.records, self.thresholds, size, problem.ramps)


class RecordsDocument(StrictDocument):
    """Survival that is computed from exit records."""

    records: str | None = None
    """The records' file, relative to the problem's folder."""
    thresholds: FileThresholds | None = None
    """One for all ramps, or one per ramp, in the unit of the records' score."""
    folder: str | None = None
    """Instead of both: the folder of a model, or of a calibration. Plans are made for each calibration in it, with its
    ramps."""

    def by_calibration(self, base: Path) -> list[RecordsDocument]:
        """Returns one document for each calibration of the folder, the model's own first; without a folder, this one.

        `base`: the folder of the file, to which its paths are relative. Raises InputError for fields beside the folder.
        """
        if self.folder is None:
            return [self]
        others = sorted(self.model_fields_set - {"folder"})
        if others:
            raise InputError(f"the folder has its own {' and '.join(others)}; leave out one of the two")
        model = Path(os.path.realpath(base / self.folder))
        return [RecordsDocument(folder=str(each)) for each in (model, *beside_of(model))]

    def recorded(self, num_blocks: int, ramps: Sequence[int], base: Path) -> Recorded:
        """Returns the records and thresholds of a model; raises InputError with the path of the wrong value."""
        if self.folder is not None:
            path = records_of(base / self.folder)
        elif self.records is not None:
            path = base / self.records
        else:
            raise InputError("neither of records and folder are given; one of them is needed")
        with within("records"):
            records = read_records(path)
            if records.num_blocks != num_blocks or not set(ramps) <= set(records.ramps):
                raise InputError(
                    f"{self.records or path} holds {records.num_blocks} blocks and ramps {list(records.ramps)}; "
                    f"the problem has {num_blocks} blocks and ramps {list(ramps)}"
                )
            alone = alone_of(path, records)
        if self.folder is None:
            return Recorded(records=records, thresholds=self._thresholds(ramps), alone=alone)
        calibration = base / self.folder / CALIBRATION_FILE
        with within("folder"):
            thresholds = _calibrated(calibration, records, path, ramps)
        return Recorded(records=records, thresholds=thresholds, alone=alone, calibration=calibration)

    def _thresholds(self, ramps: Sequence[int]) -> dict[int, float]:
        if self.thresholds is None:
            raise InputError("records need thresholds")
        if not isinstance(self.thresholds, Mapping):
            return dict.fromkeys(ramps, self.thresholds)
        if set(self.thresholds) != set(ramps):
            allowed = f"allowed are one number, or one for each ramp of the problem, {list(ramps)}"
            raise InputError(f"names ramps {sorted(self.thresholds)}; {allowed}", at=("thresholds",))
        return dict(self.thresholds)


def _calibrated(path: Path, records: ExitRecords, name: Path, ramps: Sequence[int]) -> dict[int, float]:
    """Returns the thresholds of a calibration with the records `name`, for those of the ramps that have any."""
    card = read_calibration_file(path)
    check_policy(card.policy_spec(), str(path), records, str(name), ramps)
    models, others = members_in(card.provenance, path), members_in(records.provenance, name)
    if models and others and models != others:
        raise InputError(f"{path} is of other models than the records; use those of one chain")
    return {ramp: card.thresholds[ramp] for ramp in ramps if ramp in card.thresholds}


FileSurvival = Annotated[
    Annotated[list[float], Tag("<list>")] | Annotated[RecordsDocument, Tag("<mapping>")],
    forms("a list of shares, one per block, or a mapping with records, thresholds and folder"),
]
ROUNDING = 0.005
"""Allowed difference of survival, which may be written with two decimals."""


class BatchesDocument(StrictDocument):
    """Recorded inputs, in order of arrival, which form batches."""

    size: int = Field(ge=1, le=MAX_BATCH)
    """Inputs per batch."""
    losses: list[list[float | None]] = Field(min_length=1)
    """Per input: the loss at each of the problem's ramps, null at ramps where it does not leave."""

    @classmethod
    def of(cls, batches: RecordedBatches) -> BatchesDocument:
        """Returns the document of recorded batches."""
        losses_NR = batches.losses_NR.astype(object)
        losses_NR[~batches.sure_NR] = None
        return cls(size=batches.size, losses=losses_NR.tolist())

    def batches(self, num_blocks: int, ramps: tuple[int, ...], survival_N: Sequence[float]) -> RecordedBatches:
        """Returns the batches; raises InputError if they do not fit the ramps or the survival."""
        for row, losses in enumerate(self.losses):
            if len(losses) != len(ramps):
                raise InputError(f"{len(losses)} losses; {len(ramps)} are needed, one per ramp", at=("losses", row))
        losses_NR = np.array(self.losses, dtype=np.float64).reshape(len(self.losses), len(ramps))
        sure_NR = ~np.isnan(losses_NR)
        batches = RecordedBatches(
            num_blocks=num_blocks, ramps=ramps, sure_NR=sure_NR, losses_NR=np.nan_to_num(losses_NR), size=self.size
        )
        for block, (share, recorded) in enumerate(zip(survival_N, batches.survival(ramps), strict=True)):
            if abs(recorded - share) > ROUNDING:
                raise InputError(f"{recorded:.3g} of their inputs reach block {block}; survival says {share:.3g}")
        return batches
