"""PAME, figure 9: mean and tail latency of batched inputs with the exits that are found, beside the model without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.pame.cases import KINDS, Case, Judged, cases, judged, promised
from experiments.pame.models import telling_absent
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from optimizer.risk import Guarantee

DIVISIONS: Mapping[Effort, int] = {"full": 10, "quick": 2}
"""Random halves of the records, one to find exits by, one to judge them: the paper has one division."""
PAPER: Mapping[str, tuple[float, float]] = {
    "sst2": (44.8, 37.2),
    "cifar10": (41.0, 23.7),
    "lsp": (24.0, 11.8),
    "camvid": (24.1, 24.1),
}
"""Mean and tail saved (%), over the datasets of a task and three batch sizes (section 7.2)."""
PAPER_PRECISION = 99.68
GUARANTEE = Guarantee(budget=0.01, confidence=0.90)
"""Of agreement with the full model, in the place of the paper's search for thresholds."""
SIZES = ("S", "M", "L")
COLUMNS = (
    *("", "batch", "mean saved (%)", "tail saved (%)", "slower batches (%)", "precision kept (%)"),
    *("least of the divisions (%)", "exits"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task at one batch size, over all divisions."""

    name: str
    batch: int
    judged: Sequence[Judged]

    @property
    def mean_saved(self) -> float:
        return 100 * fmean(each.mean_saved for each in self.judged)

    @property
    def tail_saved(self) -> float:
        return 100 * fmean(each.tail_saved for each in self.judged)

    @property
    def precision(self) -> float:
        return 100 * fmean(each.precision for each in self.judged)

    def cells(self) -> tuple[str | float, ...]:
        """For a table."""
        slower = 100 * fmean(each.times.slower for each in self.judged)
        least = 100 * min(each.precision for each in self.judged)
        exits = fmean(len(each.found.ramps) for each in self.judged)
        return self.name, self.batch, self.mean_saved, self.tail_saved, slower, self.precision, least, exits


def rows_of(divisions: Sequence[Sequence[Case]]) -> list[Row]:
    """Every task at every of its batch sizes."""
    by_name = {case.name: [of[place] for of in divisions] for place, case in enumerate(divisions[0])}
    return [
        Row(name=name, batch=batch, judged=[judged(case, batch) for case in of])
        for name, of in by_name.items()
        for batch in of[0].kind.batches
    ]


def promised_rows(divisions: Sequence[Sequence[Case]]) -> list[Row]:
    """The same with thresholds that have a guarantee, over the divisions in which one could be given."""
    rows: list[Row] = []
    for place, case in enumerate(divisions[0]):
        for batch in case.kind.batches:
            given = [found for of in divisions if (found := promised(of[place], batch, GUARANTEE)) is not None]
            if given:
                rows.append(Row(name=f"{case.name}, {len(given)} of {len(divisions)}", batch=batch, judged=given))
    return rows


def compare(divisions: Sequence[Sequence[Case]]) -> StudyResult:
    """Of each task the mean over its batch sizes, as the paper quotes it."""
    rows, with_promise = rows_of(divisions), promised_rows(divisions)
    names = list(dict.fromkeys(row.name for row in rows))
    told: list[Comparison] = []
    for name in names:
        mine, (mean, tail) = [row for row in rows if row.name == name], PAPER[name]
        task = KINDS[name].task
        told.append(Comparison(f"{task} ({name}): mean saved (%)", fmean(row.mean_saved for row in mine), mean))
        told.append(Comparison(f"{task} ({name}): tail saved (%)", fmean(row.tail_saved for row in mine), tail))
    told.append(Comparison("precision kept (%), over all", fmean(row.precision for row in rows), PAPER_PRECISION))
    labels = tuple(f"{row.name} {SIZES[place % 3]}" for place, row in enumerate(rows))
    series = {"mean": tuple(row.mean_saved for row in rows), "tail": tuple(row.tail_saved for row in rows)}
    return StudyResult(
        comparisons=tuple(told),
        pictures=(Bars("Latency saved by exits", "task and batch size", "saved (%)", labels, series),),
        figures={
            "rows": [dict(zip(COLUMNS, row.cells(), strict=True)) for row in rows],
            "with a guarantee": [dict(zip(COLUMNS, row.cells(), strict=True)) for row in with_promise],
        },
        tables=(
            Table("By task and batch size, means of all divisions", COLUMNS, tuple(row.cells() for row in rows)),
            Table(
                "Thresholds by Learn-then-Test, budget 1 %, confidence 90 %, means of the divisions that have some",
                COLUMNS,
                tuple(row.cells() for row in with_promise),
            ),
        ),
    )


def run(effort: Effort) -> StudyResult:
    """Every task whose records are there."""
    result = compare([cases(seed=seed) for seed in range(DIVISIONS[effort])])
    return telling_absent(result, tuple(KINDS))


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
