"""What a study is, what it gives, and its result as a file, which the report reads."""

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
from experiments.kit import keep
from experiments.studies.picture import Picture
from offramp.commands.progress import provenance

Effort = Literal["full", "quick"]
"""Quick: the same code on fewer points or shorter runs; its figures are not for quoting."""
How = Literal["simulated", "computed", "emulated", "real"]
"""Simulated: the live engine on a simulated clock. Computed: the cost model alone. Emulated: the live service, its
accelerators replaced by known times. Real: measured on the machine that the report names."""
LONGEST_CLAIM = 120
"""Characters of a claim that a table can hold."""

SYSTEMS = ("Apparate", "PAME", "TCB", "Tabi")
"""Whose figures' modules begin with the name; those of E3 have none."""

Series = Mapping[str, Sequence[float | None]]
"""By side, a value per point; None where a side has none."""


def ratio(one: float | None, other: float | None) -> float | None:
    """How many times the other the one is; None where either has no value or the other is 0."""
    return None if one is None or not other else one / other


def largest(values: Iterable[float | None]) -> float | None:
    """Of those that there are."""
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """How many times better a strategy is, at the point where it is most, as the paper quotes it ("up to").

    Goodput over goodput, or the other's cost over its cost. None where the study has no such figure.
    """

    over_stock: float | None = None
    over_early_exit: float | None = None


def largest_ratios(series: Series, strategy: str, *, lower_is_better: bool = False) -> Ratios:
    """The largest of the strategy's ratios over the series `stock` and `early-exit`, point by point.

    None where one of the two series is missing; none at all where the strategy's own is.
    """

    def over(other: str) -> float | None:
        pairs = zip(series.get(strategy, ()), series.get(other, ()), strict=False)
        return largest(ratio(theirs, ours) if lower_is_better else ratio(ours, theirs) for ours, theirs in pairs)

    return Ratios(over_stock=over("stock"), over_early_exit=over("early-exit"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of ours beside the paper's."""

    name: str
    """With its unit, where it has one: "e3 / early-exit, batch 8", "planning BERT-base (s)"."""
    ours: float | None
    """None where there is none, such as the rate of a plan that does not exist."""
    paper: float | None = None
    """None where the paper gives no figure."""

    def __post_init__(self) -> None:
        if not all(value is None or math.isfinite(value) for value in (self.ours, self.paper)):
            raise InputError(f"{self.name}: a figure must be finite, or None")


@dataclass(frozen=True, slots=True)
class Table:
    """Figures of a run that have no counterpart in the paper."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


def facts(rows: Mapping[str, str | float | None]) -> Table:
    """Single figures, by their names with units."""
    return Table("Of this run", ("", ""), tuple(rows.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What one run of a study gave."""

    comparisons: tuple[Comparison, ...]
    """The first one stands in the report's table where a study has no ratios."""
    pictures: tuple[Picture, ...] = ()
    e3: Ratios = Ratios()
    """Of the strategy `e3`, which decides as the paper says."""
    best: Ratios = Ratios()
    """Of the strategy `best`, which has Offramp's whole space."""
    tables: tuple[Table, ...] = ()
    """What a reader wants of it, beside the comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a study says of itself before it runs; its words are in the Markdown file beside its module."""

    name: str
    """Of its module: "fig07_homogeneous"."""
    section: str
    """Of the paper: "5.1.1"."""
    title: str
    """In a few words: "BERT on 16 V100"."""
    claim: str
    """The paper's, with its figures, in our words, for a table."""
    detail: str = ""
    """More of the claim, for the study's own section."""
    paper: Ratios = Ratios()
    """What the paper quotes for E3."""
    how: How
    exits: str
    """What decides which inputs leave: "recorded: BERT-base on SST-2 dev, entropy 0.4"."""
    hardware: str
    """What it stands for and what it runs on: "16 V100 (TensorRT's published times), simulated on one core"."""
    minutes: float
    """About how long it takes in full, on the machine of the last report."""
    quick_s: float
    """The same with quick effort, in seconds."""
    seed: int = 0
    needs: tuple[str, ...] = ()
    """Files under OFFRAMP_DATA without which it is skipped."""
    makes_up_quick: bool = False
    """Whether its inputs are made up with quick effort, which then needs no files."""
    differs: str
    """Why ours differs from the paper: model, times, prices, workload; several sentences."""

    def __post_init__(self) -> None:
        if len(self.claim) > LONGEST_CLAIM:
            raise InputError(f"{self.name}: a claim has at most {LONGEST_CLAIM} characters, not {len(self.claim)}")

    @property
    def system(self) -> str:
        """Whose evaluation it is of, from the name."""
        return next((system for system in SYSTEMS if self.name.startswith(f"{system.lower()}_")), "E3")

    @property
    def figure(self) -> str:
        """Of the paper, from the name: "7", "table 2"; of a study of our own its name: "v100"."""
        found = re.match(r"(?:apparate_|pame_|tcb_|tabi_)?(fig|table)0*([0-9]+[a-z]?)_", self.name)
        if found is None:
            return self.name.removeprefix("tabi_")
        return found[2] if found[1] == "fig" else f"table {found[2]}"

    @property
    def heading(self) -> str:
        """The same where a line begins: "Figure 7", "Table 2"."""
        named = self.figure.startswith("table ") or self.name.startswith("tabi_")
        return self.figure.capitalize() if named else f"Figure {self.figure}"

    @property
    def command(self) -> str:
        """What a person runs to get it."""
        return f"python -m experiments.studies {self.name}"


@dataclass(frozen=True, slots=True)
class Study:
    """A figure of the paper, and the code that gives ours."""

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
    """The study of a module of this package, with the words of the Markdown file beside it.

    The file begins with what the report's tables show, as YAML between two lines `---`; the rest says why ours differs.
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
