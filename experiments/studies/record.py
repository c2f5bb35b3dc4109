"""The result of a study as a file, which the report reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from earlyexit.errors import DataError
from experiments.data import data_folder
from experiments.kit import keep
from experiments.studies.picture import Picture
from experiments.studies.study import About, Effort, Study, StudyResult
from offramp.commands.progress import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a study."""

    state: Literal["done", "skipped", "failed"]
    """Skipped: it could not run here. Failed: it broke."""
    reason: str = ""
    """Why it gave no result."""
    result: StudyResult | None = None
    """Where it is done."""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A study, what came of it, and where."""

    about: About
    effort: Effort
    outcome: Outcome
    provenance: dict[str, Any]
    """Where and when it was made (`offramp.commands.progress`)."""
    schema_version: Literal[1] = 1

    @property
    def pictures(self) -> dict[str, Picture]:
        """File name -> picture."""
        drawn = () if self.outcome.result is None else self.outcome.result.pictures
        if len(drawn) == 1:
            return {f"{self.about.name}.svg": drawn[0]}
        return {f"{self.about.name}-{number}.svg": picture for number, picture in enumerate(drawn, start=1)}


def perform(study: Study, effort: Effort, clock_s: Callable[[], float] = time.perf_counter) -> Record:
    """Run a study, or say why it cannot run here; what it raises passes through."""
    made_up = effort == "quick" and study.about.makes_up_quick
    missing = () if made_up else missing_data(study.about.needs)
    if missing:
        reason = f"{', '.join(missing)} not in OFFRAMP_DATA"
        return record_of(study.about, effort, Outcome(state="skipped", reason=reason))
    started_s = clock_s()
    result = study.run(effort)
    return record_of(study.about, effort, Outcome(state="done", result=result, took_s=clock_s() - started_s))


def record_of(about: About, effort: Effort, outcome: Outcome) -> Record:
    """The outcome with the provenance of here and now."""
    return Record(about=about, effort=effort, outcome=outcome, provenance=provenance())


def missing_data(needs: tuple[str, ...]) -> tuple[str, ...]:
    """Those files that OFFRAMP_DATA does not hold."""
    folder = data_folder()
    return tuple(name for name in needs if folder is None or not (folder / name).exists())


def record_path(folder: Path, name: str) -> Path:
    """The result of a study in a folder of results."""
    return folder / f"{name}.json"


def write_record(record: Record, folder: Path) -> Path:
    """One JSON file."""
    return keep(record, record_path(folder, record.about.name))


def read_record(folder: Path, name: str) -> Record:
    """Raises DataError where there is no such file, or one of another schema."""
    path = record_path(folder, name)
    try:
        return TypeAdapter(Record).validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        raise DataError(f"{path} is no result of this version: {error.errors()[0]['msg']}") from error
