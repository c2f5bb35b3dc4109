"""The form of a study, of its result, and of the result's file, which the report reads."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from earlyexit.errors import DataError, InputError
from experiments.data import data_folder
from experiments.kit import write_json
from experiments.studies.picture import Picture
from offramp.commands.output import provenance

Effort = Literal["full", "quick"]
"""Quick: the same code on fewer points or shorter runs; its figures must not be quoted."""
How = Literal["simulated", "computed", "emulated", "real"]
"""Simulated: the live engine on a simulated clock. Computed: only the cost model. Emulated: the live service, with
accelerators that take known times. Real: measured on the machine that the report names."""
LONGEST_CLAIM = 120
"""Largest number of characters of a claim in a table."""

SYSTEMS = ("Apparate", "PAME", "TCB", "Tabi")
"""Papers whose modules begin with their name; modules of E3 have no prefix."""

Series = Mapping[str, Sequence[float | None]]
"""A value per point by side; None if a side has no value."""


def ratio(one: float | None, other: float | None) -> float | None:
    """Returns one value over the other; None if either is missing or the other is 0."""
    return None if one is None or not other else one / other


def largest(values: Iterable[float | None]) -> float | None:
    """Returns the largest of the values that are not None."""
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The largest improvement of a strategy over all points, as the paper quotes it ("up to").

    Goodput over goodput, or the other's cost over its cost. None if the study has no such figure.
    """

    over_stock: float | None = None
    over_early_exit: float | None = None


def largest_ratios(series: Series, strategy: str, *, lower_is_better: bool = False) -> Ratios:
    """Returns the largest ratios of the strategy to the series `stock` and `early-exit`, point by point.

    A ratio is None if its series is missing. All are None if the strategy's series is missing.
    """

    def over(other: str) -> float | None:
        pairs = zip(series.get(strategy, ()), series.get(other, ()), strict=False)
        return largest(ratio(theirs, ours) if lower_is_better else ratio(ours, theirs) for ours, theirs in pairs)

    return Ratios(over_stock=over("stock"), over_early_exit=over("early-exit"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of ours and the paper's."""

    name: str
    """With unit, such as "e3 / early-exit, batch 8" or "planning BERT-base (s)"."""
    ours: float | None
    """None without a value, such as the rate of a plan that does not exist."""
    paper: float | None = None
    """None if the paper gives no figure."""

    def __post_init__(self) -> None:
        if not all(value is None or math.isfinite(value) for value in (self.ours, self.paper)):
            raise InputError(f"{self.name}: a figure must be finite, or None")


@dataclass(frozen=True, slots=True)
class Table:
    """Figures that have no counterpart in the paper."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


def facts(rows: Mapping[str, str | float | None]) -> Table:
    """Returns a table of single figures, by names with units."""
    return Table("Of this run", ("", ""), tuple(rows.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of one run of a study."""

    comparisons: tuple[Comparison, ...]
    """The first comparison is in the report's table if a study has no ratios."""
    pictures: tuple[Picture, ...] = ()
    e3: Ratios = Ratios()
    """Ratios of the strategy `e3`, which decides as in the paper."""
    best: Ratios = Ratios()
    """Ratios of the strategy `best`, which has Offramp's whole space."""
    tables: tuple[Table, ...] = ()
    """Further tables for readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The description of a study. Its texts are in the Markdown file next to the module."""

    name: str
    """Name of the module, such as "fig07_homogeneous"."""
    section: str
    """Section of the paper, such as "5.1.1"."""
    title: str
    """A few words, such as "BERT on 16 V100"."""
    claim: str
    """The paper's claim with its figures, in our words, for a table."""
    detail: str = ""
    """Further sentences on the claim, for the study's section."""
    paper: Ratios = Ratios()
    """The ratios that the paper quotes for E3."""
    how: How
    exits: str
    """Source of the exits, such as "recorded: BERT-base on SST-2 dev, entropy 0.4"."""
    hardware: str
    """Hardware of the paper and of this run, such as "16 V100 (TensorRT's published times), simulated on one core"."""
    minutes: float
    """Approximate minutes of a full run, on the machine of the last report."""
    quick_s: float
    """Approximate seconds of a quick run."""
    seed: int = 0
    needs: tuple[str, ...] = ()
    """Required files of OFFRAMP_DATA; without them the study is skipped."""
    makes_up_quick: bool = False
    """Whether the quick run has random inputs, and so needs no files."""
    differs: str
    """The reasons why ours differs from the paper: model, times, prices, workload."""

    def __post_init__(self) -> None:
        if len(self.claim) > LONGEST_CLAIM:
            raise InputError(f"{self.name}: a claim has at most {LONGEST_CLAIM} characters, not {len(self.claim)}")

    @property
    def system(self) -> str:
        """The system whose evaluation the study repeats, from the name."""
        return next((system for system in SYSTEMS if self.name.startswith(f"{system.lower()}_")), "E3")

    @property
    def figure(self) -> str:
        """The paper's figure, from the name: "7", "table 2"; for a study of our own its name: "v100"."""
        found = re.match(r"(?:apparate_|pame_|tcb_|tabi_)?(fig|table)0*([0-9]+[a-z]?)_", self.name)
        if found is None:
            return self.name.removeprefix("tabi_")
        return found[2] if found[1] == "fig" else f"table {found[2]}"

    @property
    def heading(self) -> str:
        """The figure as a heading: "Figure 7", "Table 2"."""
        named = self.figure.startswith("table ") or self.name.startswith("tabi_")
        return self.figure.capitalize() if named else f"Figure {self.figure}"

    @property
    def command(self) -> str:
        """The command that runs the study."""
        return f"python -m experiments.studies {self.name}"


@dataclass(frozen=True, slots=True)
class Study:
    """A figure of the paper, and the code that computes ours."""

    about: About
    run: Callable[[Effort], StudyResult]


def declare(
    module: str,
    run: Callable[[Effort], StudyResult],
    *,
    paper: Ratios = Ratios(),
    needs: tuple[str, ...] = (),
    makes_up_quick: bool = False,
) -> Study:
    """Returns the study of a module of this package, with the texts of the Markdown file next to it.

    The file begins with the texts of the report's tables, as YAML between two lines `---`. The rest has the
    differences.
    """
    name = module.rpartition(".")[2]
    text = Path(__file__).with_name(f"{name}.md").read_text(encoding="utf-8")
    head, _, differs = text.removeprefix("---\n").partition("\n---\n")
    code = {"name": name, "paper": paper, "needs": needs, "makes_up_quick": makes_up_quick}
    words = {**yaml.safe_load(head), **code, "differs": differs.strip()}
    return Study(TypeAdapter(About).validate_python(words), run)


# The result of a study as a file, which the report reads.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a study."""

    state: Literal["done", "skipped", "failed"]
    """Skipped: its data or a library is missing. Failed: it raised an exception."""
    reason: str = ""
    """The reason why there is no result."""
    result: StudyResult | None = None
    """The result, if the state is `done`."""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A study, its outcome, and its provenance."""

    about: About
    effort: Effort
    outcome: Outcome
    provenance: dict[str, Any]
    """Machine, versions and date (`offramp.commands.output`)."""
    schema_version: Literal[1] = 1

    @property
    def pictures(self) -> dict[str, Picture]:
        """Pictures by file name."""
        drawn = () if self.outcome.result is None else self.outcome.result.pictures
        if len(drawn) == 1:
            return {f"{self.about.name}.svg": drawn[0]}
        return {f"{self.about.name}-{number}.svg": picture for number, picture in enumerate(drawn, start=1)}


def perform(study: Study, effort: Effort, clock_s: Callable[[], float] = time.perf_counter) -> Record:
    """Runs a study, or returns why it cannot run; its exceptions pass through."""
    made_up, folder = effort == "quick" and study.about.makes_up_quick, data_folder()
    needs = () if made_up else study.about.needs
    if missing := [name for name in needs if folder is None or not (folder / name).exists()]:
        reason = f"{', '.join(missing)} not in OFFRAMP_DATA"
        return record_of(study.about, effort, Outcome(state="skipped", reason=reason))
    started_s = clock_s()
    result = study.run(effort)
    return record_of(study.about, effort, Outcome(state="done", result=result, took_s=clock_s() - started_s))


def record_of(about: About, effort: Effort, outcome: Outcome) -> Record:
    """Returns the outcome with the current provenance."""
    return Record(about=about, effort=effort, outcome=outcome, provenance=provenance())


def record_path(folder: Path, name: str) -> Path:
    """Returns the path of a study's result in a folder of results."""
    return folder / f"{name}.json"


def write_record(record: Record, folder: Path) -> Path:
    """Writes the record as one JSON file."""
    return write_json(record, record_path(folder, record.about.name))


def read_record(folder: Path, name: str) -> Record:
    """Reads a record; raises DataError if the file is missing or has another schema."""
    path = record_path(folder, name)
    try:
        return TypeAdapter(Record).validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        raise DataError(f"{path} is no result of this version: {error.errors()[0]['msg']}") from error
