"""The result of a study as a file, which the report reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from earlyexit.errors import DataError
from experiments.data import data_folder
from experiments.studies.study import About, Effort, Study, StudyResult
from offramp.jobs.provenance import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """It ran."""

    result: StudyResult
    took_s: float
    state: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """It could not run here."""

    reason: str
    state: Literal["skipped"] = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """It broke."""

    reason: str
    state: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and when a result was made (`offramp.jobs.provenance`)."""

    created_at: datetime
    machine: str
    python: str
    versions: dict[str, str]
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A study, what came of it, and where."""

    about: About
    effort: Effort
    outcome: Done | Skipped | Failed
    provenance: Machine
    schema_version: Literal[1] = 1

    @property
    def pictures(self) -> dict[str, Any]:
        """File name -> picture."""
        drawn = self.outcome.result.pictures if isinstance(self.outcome, Done) else ()
        if len(drawn) == 1:
            return {f"{self.about.name}.svg": drawn[0]}
        return {f"{self.about.name}-{number}.svg": picture for number, picture in enumerate(drawn, start=1)}


def perform(study: Study, effort: Effort, clock_s: Callable[[], float]) -> Record:
    """Run a study, or say why it cannot run here; what it raises passes through."""
    missing = missing_data(study.needs)
    if missing:
        return record_of(study.about, effort, Skipped(reason=f"{', '.join(missing)} not in OFFRAMP_DATA"))
    started_s = clock_s()
    result = study.run(effort)
    return record_of(study.about, effort, Done(result=result, took_s=clock_s() - started_s))


def record_of(about: About, effort: Effort, outcome: Done | Skipped | Failed) -> Record:
    """The outcome with the provenance of here and now."""
    machine = TypeAdapter(Machine).validate_python(provenance())
    return Record(about=about, effort=effort, outcome=outcome, provenance=machine)


def missing_data(needs: tuple[str, ...]) -> tuple[str, ...]:
    """Those files that OFFRAMP_DATA does not hold."""
    folder = data_folder()
    return tuple(name for name in needs if folder is None or not (folder / name).exists())


def write_record(record: Record, path: Path) -> None:
    """One JSON file, in one step: a reader never sees half of it."""
    text = json.dumps(asdict(record), default=_plain, allow_nan=False, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(text + "\n", encoding="utf-8")
    half.replace(path)


def read_record(path: Path) -> Record:
    """Raises DataError where there is no such file, or one of another schema."""
    try:
        return TypeAdapter(Record).validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        raise DataError(f"{path} is no result of this version: {error.errors()[0]['msg']}") from error


def _plain(value: object) -> object:
    """Numpy's numbers and arrays, and dates, as JSON has them."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a result cannot hold {type(value).__name__}: {value!r}")
