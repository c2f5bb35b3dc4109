"""PAME, figures 9, 12, 14 and 15: exits that its search finds, judged on inputs that it never saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.pame_cases import (
    KINDS,
    Case,
    Judged,
    cases,
    judged,
    judged_exits,
    judged_thresholds,
    promised,
    telling_absent,
)
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.picture import Bars, Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, largest
from optimizer.pame.search import Candidate, SearchOptions, find_exits
from optimizer.risk import Guarantee

# PAME, figure 9: mean and tail latency of batched inputs with the exits that are found, beside the model without.

DIVISIONS: Mapping[Effort, int] = {"full": 10, "quick": 2}
"""Random halves of the records, one to find exits by, one to judge them: the paper has one division."""
FIG09_PAPER: Mapping[str, tuple[float, float]] = {
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
FIG09_COLUMNS = (
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


def fig09_compare(divisions: Sequence[Sequence[Case]]) -> StudyResult:
    """Of each task the mean over its batch sizes, as the paper quotes it."""
    rows, with_promise = rows_of(divisions), promised_rows(divisions)
    names = list(dict.fromkeys(row.name for row in rows))
    told: list[Comparison] = []
    for name in names:
        mine, (mean, tail) = [row for row in rows if row.name == name], FIG09_PAPER[name]
        task = KINDS[name].task
        told.append(Comparison(f"{task} ({name}): mean saved (%)", fmean(row.mean_saved for row in mine), mean))
        told.append(Comparison(f"{task} ({name}): tail saved (%)", fmean(row.tail_saved for row in mine), tail))
    told.append(Comparison("precision kept (%), over all", fmean(row.precision for row in rows), PAPER_PRECISION))
    labels = tuple(f"{row.name} {SIZES[place % 3]}" for place, row in enumerate(rows))
    series = {"mean": tuple(row.mean_saved for row in rows), "tail": tuple(row.tail_saved for row in rows)}
    return StudyResult(
        comparisons=tuple(told),
        pictures=(Bars("Latency saved by exits", "task and batch size", "saved (%)", labels, series),),
        tables=(
            Table("By task and batch size, means of all divisions", FIG09_COLUMNS, tuple(row.cells() for row in rows)),
            Table(
                "Thresholds by Learn-then-Test, budget 1 %, confidence 90 %, means of the divisions that have some",
                FIG09_COLUMNS,
                tuple(row.cells() for row in with_promise),
            ),
        ),
    )


def fig09_run(effort: Effort) -> StudyResult:
    """Every task whose records are there."""
    result = fig09_compare([cases(seed=seed) for seed in range(DIVISIONS[effort])])
    return telling_absent(result, tuple(KINDS))


FIG09_STUDY = declare("pame_fig09_latency", fig09_run, needs=(BERT12_SST2,))


# PAME, figure 12: the first exit at every place, by what the search expects of it and on inputs that it never saw.

LARGE = 2
"""Of a task's three batch sizes."""
PAPER_ERROR = 5.0
"""Largest relative error of an estimate (%): "less than 5 %"."""
PAPER_PLACE = 13 / 33
"""Of the backbone's blocks, where the paper's first exit of Imagenet sits: after block 13 of 33."""
FIG12_COLUMNS = (
    *("after block", "mean expected", "mean", "error (%)"),
    *("slower expected (%)", "slower (%)", "precision kept (%)", ""),
)
NAMES: Mapping[Effort, Sequence[str]] = {"full": tuple(KINDS), "quick": ("sst2",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One candidate, its times as shares of the time without exits."""

    ramp: int
    expected: float
    found: float
    slower_expected: float
    slower: float
    precision: float
    is_chosen: bool

    @property
    def error(self) -> float:
        """Of what was expected, in percent."""
        return 100 * (self.expected / self.found - 1)

    def cells(self) -> tuple[str | float, ...]:
        """A row of a table."""
        shares = (100 * self.slower_expected, 100 * self.slower, 100 * self.precision)
        return str(self.ramp), self.expected, self.found, self.error, *shares, "chosen" if self.is_chosen else ""


def places(case: Case) -> list[Place]:
    """Every candidate whose check keeps the precision, alone."""
    found = find_exits(case.seconds, case.checks(), case.kind.batches[LARGE])
    step = found.steps[0]

    def place(each: Candidate) -> Place | None:
        if each.configured is None or each.configured.setting.threshold is None:
            return None
        alone = judged_thresholds(case, found, {each.ramp: each.configured.setting.threshold})
        return Place(
            ramp=each.ramp,
            expected=each.mean_s / step.matrix.whole_s,
            found=alone.times.mean_s / alone.times.whole_s,
            slower_expected=each.slower,
            slower=alone.times.slower,
            precision=alone.precision,
            is_chosen=step.chosen is each,
        )

    return [known for known in map(place, step.candidates) if known is not None]


def fig12_compare(found: Mapping[str, Sequence[Place]], blocks: Mapping[str, int]) -> StudyResult:
    """By task: where the first exit is, and how far estimates are off."""
    told: list[Comparison] = []
    for name, known in found.items():
        chosen = next((each.ramp for each in known if each.is_chosen), None)
        share = None if chosen is None else 100 * (chosen + 1) / blocks[name]
        told.append(Comparison(f"{name}: largest error of an estimated mean (%)", _worst(known), PAPER_ERROR))
        told.append(Comparison(f"{name}: first exit, of the blocks (%)", share, 100 * PAPER_PLACE))
    return StudyResult(
        comparisons=tuple(told),
        pictures=tuple(
            Lines(
                f"Mean answer time with one exit ({name})",
                "after block",
                "of the time without",
                tuple(float(each.ramp) for each in known),
                {
                    "expected": tuple(each.expected for each in known),
                    "on other inputs": tuple(each.found for each in known),
                },
            )
            for name, known in found.items()
            if known
        ),
        tables=tuple(
            Table(f"{name}, means over the time without exits", FIG12_COLUMNS, tuple(each.cells() for each in known))
            for name, known in found.items()
        ),
    )


def _worst(known: Sequence[Place]) -> float | None:
    return largest(abs(each.error) for each in known)


def fig12_run(effort: Effort) -> StudyResult:
    """Every task whose records are there, at its large batch; GLUE's alone with quick effort."""
    known = cases(NAMES[effort])
    blocks = {case.name: case.search.num_blocks for case in known}
    return telling_absent(fig12_compare({case.name: places(case) for case in known}, blocks), NAMES[effort])


FIG12_STUDY = declare("pame_fig12_places", fig12_run, needs=(BERT12_SST2,))


# PAME, figure 14: the share of inputs that moves on after the first exit, by how much precision must be kept.

TOLERANCES = (0.98, 0.99, 0.995)
FIG14_PAPER: Mapping[float, float | None] = {0.98: 12.6, 0.99: 21.6, 0.995: None}
"""Share that moves on (%), over all tasks; at 0.995 "more than half leave"."""
FIG14_COLUMNS = (
    "",
    "eta",
    "moves on (%)",
    "precision kept (%)",
    "least of the divisions (%)",
    "divisions with an exit",
)


def moving_on(each: Judged) -> float:
    """After the first exit; all where there is none."""
    return 100 * (each.moving[0] if each.moving else 1.0)


def fig14_compare(divisions: Sequence[Sequence[Case]]) -> StudyResult:
    """The first exit alone, every task at its large batch."""
    found = {
        (case.name, eta): [
            judged(of[place], of[place].kind.batches[LARGE], SearchOptions(kept=eta), most_exits=1) for of in divisions
        ]
        for place, case in enumerate(divisions[0])
        for eta in TOLERANCES
    }
    names = tuple(dict.fromkeys(name for name, _ in found))
    by_eta = {eta: [fmean(map(moving_on, found[name, eta])) for name in names] for eta in TOLERANCES}
    return StudyResult(
        comparisons=tuple(
            Comparison(f"moves on after the first exit (%), eta {eta}", fmean(by_eta[eta]), FIG14_PAPER[eta])
            for eta in TOLERANCES
        ),
        pictures=(
            Bars(
                "Inputs that move on after the first exit",
                "task",
                "moves on (%)",
                names,
                {f"eta {eta}": tuple(by_eta[eta]) for eta in TOLERANCES},
            ),
        ),
        tables=(Table("By task", FIG14_COLUMNS, tuple(_cells(name, eta, of) for (name, eta), of in found.items())),),
    )


def _cells(name: str, eta: float, of: Sequence[Judged]) -> tuple[str | float, ...]:
    precisions = [100 * each.precision for each in of]
    with_exit = f"{sum(bool(each.moving) for each in of)} of {len(of)}"
    return name, eta, fmean(map(moving_on, of)), fmean(precisions), min(precisions), with_exit


def fig14_run(effort: Effort) -> StudyResult:
    """Every task whose records are there."""
    result = fig14_compare([cases(seed=seed) for seed in range(DIVISIONS[effort])])
    return telling_absent(result, tuple(KINDS))


FIG14_STUDY = declare("pame_fig14_moving_on", fig14_run, needs=(BERT12_SST2,))


# PAME, figure 15: what a second exit wins, and those after it.

MOST = 5
"""Exits; searches that found fewer stay at what they have."""
PAPER_MEAN, PAPER_TAIL = 0.8, 5.0
"""What the second exit takes of mean and tail latency (%), QNLI."""
FIG15_COLUMNS = ("", "exits", "mean saved (%)", "tail saved (%)", "precision kept (%)")


def by_number(case: Case) -> list[Judged]:
    """With none, one, two and more of the exits that are found, in their order."""
    found = find_exits(case.seconds, case.checks(), case.kind.batches[LARGE])
    return [judged_exits(case, found, found.ramps[:count]) for count in range(MOST + 1)]


def fig15_compare(divisions: Sequence[Sequence[Case]]) -> StudyResult:
    """Every task at its large batch."""
    found = {case.name: [by_number(of[place]) for of in divisions] for place, case in enumerate(divisions[0])}
    saved = {name: [_saved([each[count] for each in of]) for count in range(MOST + 1)] for name, of in found.items()}
    told: list[Comparison] = []
    for name, by_count in saved.items():
        (mean_1, tail_1, _), (mean_2, tail_2, _) = by_count[1], by_count[2]
        told.append(Comparison(f"{name}: the second exit takes of the mean (%)", _less(mean_1, mean_2), PAPER_MEAN))
        told.append(Comparison(f"{name}: the second exit takes of the tail (%)", _less(tail_1, tail_2), PAPER_TAIL))
    return StudyResult(
        comparisons=tuple(told),
        pictures=(
            Lines(
                "Mean latency saved, by number of exits",
                "exits",
                "saved (%)",
                tuple(map(float, range(MOST + 1))),
                {name: tuple(mean for mean, _, _ in by_count) for name, by_count in saved.items()},
            ),
        ),
        tables=(
            Table(
                "By number of exits, means of all divisions",
                FIG15_COLUMNS,
                tuple((name, count, *row) for name, by_count in saved.items() for count, row in enumerate(by_count)),
            ),
        ),
    )


def _saved(of: Sequence[Judged]) -> tuple[float, float, float]:
    means = (fmean(each.mean_saved for each in of), fmean(each.tail_saved for each in of))
    return 100 * means[0], 100 * means[1], 100 * fmean(each.precision for each in of)


def _less(before: float, after: float) -> float:
    """By how much of itself a latency falls, from what it was saved before and after (%)."""
    return 100 * (1 - (100 - after) / (100 - before))


def fig15_run(effort: Effort) -> StudyResult:
    """Every task whose records are there."""
    result = fig15_compare([cases(seed=seed) for seed in range(DIVISIONS[effort])])
    return telling_absent(result, tuple(KINDS))


FIG15_STUDY = declare("pame_fig15_number", fig15_run, needs=(BERT12_SST2,))
