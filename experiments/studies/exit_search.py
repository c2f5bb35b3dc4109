"""PAME, figures 9, 12, 14 and 15: exits that its search finds, evaluated on inputs that the search did not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from experiments.pame_cases import (
    KINDS,
    Case,
    Evaluation,
    cases,
    evaluate,
    evaluate_guaranteed,
    evaluate_thresholds,
    with_missing_models,
)
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.picture import Bars, Lines
from experiments.studies.study import Comparison, Effort, Study, StudyResult, Table, declare, largest
from optimizer.calibration.thresholds import Guarantee
from optimizer.search.pame import Candidate, exits_of

DIVISIONS: Mapping[Effort, int] = {"full": 10, "quick": 2}
"""Random divisions of the records in halves, one for the search and one to evaluate; the paper has one division."""
LARGE = 2
"""Index of the largest of a task's three batch sizes."""
Divisions = Mapping[str, Sequence[Case]]
"""Every division of a task's records, by task."""


def _study(name: str, compare: Callable[[Divisions], StudyResult]) -> Study:
    """Returns a study of every task whose records exist."""

    def run(effort: Effort) -> StudyResult:
        divisions = [cases(seed=seed) for seed in range(DIVISIONS[effort])]
        by_name = {case.name: [of[place] for of in divisions] for place, case in enumerate(divisions[0])}
        return with_missing_models(compare(by_name), tuple(KINDS))

    return declare(name, run, needs=(BERT12_SST2,))


def mean_percent(of: Sequence[Evaluation], name: str) -> float:
    """Returns the mean of a share over divisions, in percent."""
    return 100 * fmean(getattr(each, name) for each in of)


# PAME, figure 9: mean and tail latency of batched inputs with the found exits, relative to the model without exits.

FIG09_PAPER: Mapping[str, tuple[float, float]] = {
    "sst2": (44.8, 37.2),
    "cifar10": (41.0, 23.7),
    "lsp": (24.0, 11.8),
    "camvid": (24.1, 24.1),
}
"""Saved mean and tail latency (%), over the datasets of a task and three batch sizes (section 7.2)."""
PAPER_PRECISION = 99.68
GUARANTEE = Guarantee(budget=0.01, confidence=0.90)
"""A guarantee of agreement with the full model, used in place of the paper's search for thresholds."""
FIG09_COLUMNS = (
    *("", "batch", "mean saved (%)", "tail saved (%)", "slower batches (%)", "precision kept (%)"),
    *("least of the divisions (%)", "exits"),
)


class Row(NamedTuple):
    """One task at one batch size, over all divisions."""

    name: str
    batch: int
    evaluate: Sequence[Evaluation]

    def percent(self, name: str) -> float:
        return mean_percent(self.evaluate, name)

    def cells(self) -> tuple[str | float, ...]:
        """Returns the cells of a table row."""
        slower = 100 * fmean(each.times.slower for each in self.evaluate)
        least = 100 * min(each.precision for each in self.evaluate)
        exits = fmean(len(each.exits) for each in self.evaluate)
        saved = (self.percent("mean_saved"), self.percent("tail_saved"))
        return self.name, self.batch, *saved, slower, self.percent("precision"), least, exits


def promised_rows(divisions: Divisions) -> list[Row]:
    """Returns rows with guaranteed thresholds, over the divisions in which a guarantee is possible."""
    rows: list[Row] = []
    for name, of in divisions.items():
        for batch in of[0].kind.batches:
            given = [found for case in of if (found := evaluate_guaranteed(case, batch, GUARANTEE)) is not None]
            if given:
                rows.append(Row(f"{name}, {len(given)} of {len(of)}", batch, given))
    return rows


def fig09_compare(divisions: Divisions) -> StudyResult:
    """Returns the mean over the batch sizes of each task, as in the paper."""
    rows = [
        Row(name, batch, [evaluate(case, batch) for case in of])
        for name, of in divisions.items()
        for batch in of[0].kind.batches
    ]
    comparisons = []
    for name in divisions:
        mine, task = [row for row in rows if row.name == name], KINDS[name].task
        for words, paper in zip(("mean", "tail"), FIG09_PAPER[name], strict=True):
            ours = fmean(row.percent(f"{words}_saved") for row in mine)
            comparisons.append(Comparison(f"{task} ({name}): {words} saved (%)", ours, paper))
    kept = fmean(row.percent("precision") for row in rows)
    labels = tuple(f"{row.name} {'SML'[place % 3]}" for place, row in enumerate(rows))
    series = {words: tuple(row.percent(f"{words}_saved") for row in rows) for words in ("mean", "tail")}
    tables = {
        "By task and batch size, means of all divisions": rows,
        "Thresholds by Learn-then-Test, budget 1 %, confidence 90 %, means of the divisions that have some": (
            promised_rows(divisions)
        ),
    }
    return StudyResult(
        comparisons=(*comparisons, Comparison("precision kept (%), over all", kept, PAPER_PRECISION)),
        pictures=(Bars("Latency saved by exits", "task and batch size", "saved (%)", labels, series),),
        tables=tuple(Table(title, FIG09_COLUMNS, tuple(row.cells() for row in of)) for title, of in tables.items()),
    )


FIG09_STUDY = _study("pame_fig09_latency", fig09_compare)


# PAME, figure 12: the first exit at every place, as estimated by the search and on unseen inputs.

PAPER_ERROR = 5.0
"""Largest relative error of an estimate (%): "less than 5 %"."""
PAPER_PLACE = 13 / 33
"""Place of the paper's first exit of Imagenet: after block 13 of the backbone's 33."""
FIG12_COLUMNS = (
    *("after block", "mean expected", "mean", "error (%)"),
    *("slower expected (%)", "slower (%)", "precision kept (%)", ""),
)
NAMES: Mapping[Effort, Sequence[str]] = {"full": tuple(KINDS), "quick": ("sst2",)}


class Place(NamedTuple):
    """One candidate; its times are shares of the time without exits."""

    ramp: int
    expected: float
    found: float
    error: float
    """Relative error of the estimate in percent."""
    slower_expected: float
    slower: float
    precision: float
    chosen: str


def places(case: Case) -> list[Place]:
    """Returns every candidate alone whose check keeps the precision."""
    found, search = case.found(case.kind.batches[LARGE])
    step = found[0]

    def place(each: Candidate) -> Place | None:
        if each.ramp not in search.alone:
            return None
        alone = evaluate_thresholds(case, found, {each.ramp: search.alone[each.ramp]})
        expected, mean = each.mean_s / step.batching.whole_s, alone.times.mean_s / alone.times.whole_s
        shares = (100 * each.slower, 100 * alone.times.slower, 100 * alone.precision)
        chosen = "chosen" if step.chosen is each else ""
        return Place(each.ramp, expected, mean, 100 * (expected / mean - 1), *shares, chosen)

    return [known for known in map(place, step.candidates) if known is not None]


def fig12_run(effort: Effort) -> StudyResult:
    """Runs every task whose records exist, at its large batch; with quick effort only GLUE."""
    known = {case.name: (case, places(case)) for case in cases(NAMES[effort])}
    comparisons = []
    for name, (case, found) in known.items():
        chosen = next((each.ramp for each in found if each.chosen), None)
        share = None if chosen is None else 100 * (chosen + 1) / case.search.num_blocks
        worst = largest(abs(each.error) for each in found)
        comparisons.append(Comparison(f"{name}: largest error of an estimated mean (%)", worst, PAPER_ERROR))
        comparisons.append(Comparison(f"{name}: first exit, of the blocks (%)", share, 100 * PAPER_PLACE))
    result = StudyResult(
        comparisons=tuple(comparisons),
        pictures=tuple(
            Lines(
                f"Mean answer time with one exit ({name})",
                "after block",
                "of the time without",
                tuple(float(each.ramp) for each in found),
                {
                    "expected": tuple(each.expected for each in found),
                    "on other inputs": tuple(each.found for each in found),
                },
            )
            for name, (_, found) in known.items()
            if found
        ),
        tables=tuple(
            Table(
                f"{name}, means over the time without exits",
                FIG12_COLUMNS,
                tuple((str(each.ramp), *each[1:]) for each in found),
            )
            for name, (_, found) in known.items()
        ),
    )
    return with_missing_models(result, NAMES[effort])


FIG12_STUDY = declare("pame_fig12_places", fig12_run, needs=(BERT12_SST2,))


# PAME, figure 14: the share of inputs that continue after the first exit, by the precision that must be kept.

FIG14_PAPER: Mapping[float, float | None] = {0.98: 12.6, 0.99: 21.6, 0.995: None}
"""Share that continues (%), over all tasks; at 0.995 "more than half leave"."""
FIG14_COLUMNS = (
    *("", "eta", "moves on (%)", "precision kept (%)"),
    *("least of the divisions (%)", "divisions with an exit"),
)


def moving_on(of: Sequence[Evaluation]) -> float:
    """Returns the share that continues after the first exit, over divisions; 1 without an exit."""
    return fmean(100 * (each.moving[0] if each.moving else 1.0) for each in of)


def fig14_compare(divisions: Divisions) -> StudyResult:
    """Returns the figures of the first exit alone, every task at its large batch."""
    found = {
        (name, eta): [evaluate(case, case.kind.batches[LARGE], eta, most_exits=1) for case in of]
        for name, of in divisions.items()
        for eta in FIG14_PAPER
    }
    by_eta = {eta: [moving_on(found[name, eta]) for name in divisions] for eta in FIG14_PAPER}
    series = {f"eta {eta}": tuple(values) for eta, values in by_eta.items()}
    title = "Inputs that move on after the first exit"
    return StudyResult(
        comparisons=tuple(
            Comparison(f"moves on after the first exit (%), eta {eta}", fmean(by_eta[eta]), paper)
            for eta, paper in FIG14_PAPER.items()
        ),
        pictures=(Bars(title, "task", "moves on (%)", tuple(divisions), series),),
        tables=(Table("By task", FIG14_COLUMNS, tuple(_cells(*key, of) for key, of in found.items())),),
    )


def _cells(name: str, eta: float, of: Sequence[Evaluation]) -> tuple[str | float, ...]:
    precisions = [100 * each.precision for each in of]
    with_exit = f"{sum(bool(each.moving) for each in of)} of {len(of)}"
    return name, eta, moving_on(of), fmean(precisions), min(precisions), with_exit


FIG14_STUDY = _study("pame_fig14_moving_on", fig14_compare)


# PAME, figure 15: the gain from a second exit and from later ones.

MOST = 5
"""Largest number of exits; a search that found fewer keeps its number."""
SAVED = ("mean_saved", "tail_saved", "precision")
PAPER_TAKES = {"mean": 0.8, "tail": 5.0}
"""Time that the second exit takes of mean and tail latency (%), QNLI."""


def by_number(case: Case) -> list[Evaluation]:
    """Returns the figures with none, one, two and more of the found exits, in their order."""
    found, search = case.found(case.kind.batches[LARGE])
    exits = [(ramp, search.thresholds[ramp]) for ramp in exits_of(found)]
    return [evaluate_thresholds(case, found, dict(exits[:count])) for count in range(MOST + 1)]


def fig15_compare(divisions: Divisions) -> StudyResult:
    """Returns the figures of every task at its large batch."""
    saved = {}
    for name, of in divisions.items():
        by_count = zip(*map(by_number, of), strict=True)
        saved[name] = [[mean_percent(each, figure) for figure in SAVED] for each in by_count]
    return StudyResult(
        comparisons=tuple(
            Comparison(
                f"{name}: the second exit takes of the {words} (%)",
                100 * (1 - (100 - by_count[2][at]) / (100 - by_count[1][at])),
                paper,
            )
            for name, by_count in saved.items()
            for at, (words, paper) in enumerate(PAPER_TAKES.items())
        ),
        pictures=(
            Lines(
                "Mean latency saved, by number of exits",
                "exits",
                "saved (%)",
                tuple(map(float, range(MOST + 1))),
                {name: tuple(row[0] for row in by_count) for name, by_count in saved.items()},
            ),
        ),
        tables=(
            Table(
                "By number of exits, means of all divisions",
                ("", "exits", "mean saved (%)", "tail saved (%)", "precision kept (%)"),
                tuple((name, count, *row) for name, by_count in saved.items() for count, row in enumerate(by_count)),
            ),
        ),
    )


FIG15_STUDY = _study("pame_fig15_number", fig15_compare)
