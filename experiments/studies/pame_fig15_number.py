"""PAME, figure 15: what a second exit wins, and those after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.pame.cases import KINDS, Case, Judged, cases, judged_exits
from experiments.pame.models import telling_absent
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from optimizer.pame.search import find_exits

MOST = 5
"""Exits; searches that found fewer stay at what they have."""
DIVISIONS: Mapping[Effort, int] = {"full": 10, "quick": 2}
LARGE = 2
PAPER_MEAN, PAPER_TAIL = 0.8, 5.0
"""What the second exit takes of mean and tail latency (%), QNLI."""
COLUMNS = ("", "exits", "mean saved (%)", "tail saved (%)", "precision kept (%)")


def by_number(case: Case) -> list[Judged]:
    """With none, one, two and more of the exits that are found, in their order."""
    found = find_exits(case.seconds, case.checks(), case.kind.batches[LARGE])
    return [judged_exits(case, found, found.ramps[:count]) for count in range(MOST + 1)]


def compare(divisions: Sequence[Sequence[Case]]) -> StudyResult:
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
        figures=saved,
        tables=(
            Table(
                "By number of exits, means of all divisions",
                COLUMNS,
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


def run(effort: Effort) -> StudyResult:
    """Every task whose records are there."""
    result = compare([cases(seed=seed) for seed in range(DIVISIONS[effort])])
    return telling_absent(result, tuple(KINDS))


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
