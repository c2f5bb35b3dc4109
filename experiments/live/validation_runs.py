"""A live run as it is kept: what was asked when, of which plan, and what came of it, so that it can be compared again.

Times are wall-clock seconds after the run's start, the emulated ones stretched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from earlyexit.errors import DataError
from earlyexit.source_file import Source, StrictDocument
from experiments.data import RUNS
from experiments.live.load import INPUTS_PER_REQUEST, Driven, Phase
from experiments.live.meter import Usage
from experiments.live.scenario import EMULATED
from offramp.client.protocol import Prediction
from offramp.load.report import RequestRecord
from optimizer.plan import Plan
from profiles.records import ExitRecords, IntArray

FOLDER = RUNS / "live" / "validation"
IDLE = "idle"
"""The load's name where one request was asked at a time."""


class SplitDocument(StrictDocument):
    """What a split did in the whole run, on all replicas together."""

    first: int
    end: int
    batches: int
    inputs: int
    fill: float
    """Inputs as a share of what the batches could have held."""
    busy_s: float
    dropped: int


class Run(StrictDocument):
    """One plan under one load; lists have one entry per request, in the order of the schedule."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    emulated: Literal[True] = True
    what: str = EMULATED
    plan_name: str
    load: str
    """Share of the predicted rate that was offered, or `idle`."""
    time_scale: float = Field(gt=0)
    slo_s: float = Field(gt=0)
    warm_s: float = Field(ge=0)
    """Figures leave this much at the start out."""
    seconds: float = Field(gt=0)
    """Of the schedule."""
    problem: dict[str, Any]
    """The plan problem, as the service's planner would have it: in wall-clock seconds."""
    plan: dict[str, Any]
    records_sha256: str
    """Of the exit records that the rows are of."""
    rows: list[list[int]]
    scheduled_s: list[float]
    sent_s: list[float]
    done_s: list[float]
    errors: list[str | None]
    """None for a request that was answered."""
    exits: list[list[int]]
    """Per input of an answered request, the block it left after; none for others."""
    splits: list[SplitDocument]
    usage: dict[str, float]
    """Of the machine: see `Usage`."""
    provenance: dict[str, Any]

    @model_validator(mode="after")
    def _fits(self) -> Run:
        columns = (self.rows, self.scheduled_s, self.sent_s, self.done_s, self.errors, self.exits)
        if len({len(column) for column in columns}) != 1:
            raise ValueError("rows, scheduled_s, sent_s, done_s, errors and exits need one entry per request each")
        if any(len(rows) != INPUTS_PER_REQUEST for rows in self.rows):
            raise ValueError(f"every request asks {INPUTS_PER_REQUEST} rows")
        return self

    @property
    def name(self) -> str:
        return f"{self.plan_name}-{self.load}"

    def driven(self) -> Driven:
        """The run as the figures of live runs are taken from; labels are not kept, so they are empty."""
        keys = tuple(str(row) for rows in self.rows for row in rows)
        records = tuple(self._record(index) for index in range(len(self.rows)))
        return Driven(
            phases=(Phase(name=self.name, seconds=self.seconds, keys=keys, rate_per_s=len(keys) / self.seconds),),
            slo_s=self.slo_s,
            keys=keys,
            records=records,
            num_sent=len(records),
            usage=Usage(**self.usage),
        )

    def _record(self, index: int) -> RequestRecord:
        return RequestRecord(
            request_id=str(index),
            input_indices=tuple(range(index * INPUTS_PER_REQUEST, (index + 1) * INPUTS_PER_REQUEST)),
            scheduled_s=self.scheduled_s[index],
            sent_s=self.sent_s[index],
            done_s=self.done_s[index],
            num_attempts=1,
            predictions=tuple(
                Prediction(label="", score=0.0, exit=left, request_id=str(index)) for left in self.exits[index]
            ),
            error=self.errors[index],
        )


def keep_run(run: Run, folder: Path = FOLDER) -> Path:
    """Write it under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.name}.json"
    path.write_text(json.dumps(run.model_dump()) + "\n", encoding="utf-8")
    return path


def read_run(path: Path) -> Run:
    """What `keep_run` wrote; raises DataError for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a kept run: {error}") from error
    return Source(document=document, where=str(path), raises=DataError).parse(Run, called="the run")


def digest(records: ExitRecords) -> str:
    """By which a run knows its exit records again."""
    parts = (records.scores_NR, records.answers())
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def exits_of(records: ExitRecords, plan: Plan) -> IntArray:
    """Per record, the block that it leaves after under the plan."""
    return records.outcome(active_thresholds(plan)).exits_N


def active_thresholds(plan: Plan) -> dict[int, float]:
    """Of the ramps that are on."""
    given = None if plan.policy is None else plan.policy.thresholds
    assert isinstance(given, Mapping) or not plan.ramps, "emulated plans have a threshold per ramp"
    return {ramp: given[ramp] for ramp in plan.ramps} if isinstance(given, Mapping) else {}


def stages_left(plan: Plan, exits_N: IntArray) -> IntArray:
    """The stage that each input leaves in; of stages with several networks, each with its own part."""
    ends = {stage.end for stage in plan.stages} | {end for end in plan.networks if end > plan.entry}
    return np.searchsorted(np.array(sorted(ends)), exits_N, side="right")
