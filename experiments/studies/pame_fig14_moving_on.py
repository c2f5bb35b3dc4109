"""PAME, figure 14: the share of inputs that moves on after the first exit, by how much precision must be kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.pame.cases import KINDS, Case, Judged, cases, judged
from experiments.pame.models import telling_absent
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from optimizer.pame.search import SearchOptions

TOLERANCES = (0.98, 0.99, 0.995)
PAPER: Mapping[float, float | None] = {0.98: 12.6, 0.99: 21.6, 0.995: None}
"""Share that moves on (%), over all tasks; at 0.995 "more than half leave"."""
DIVISIONS: Mapping[Effort, int] = {"full": 10, "quick": 2}
LARGE = 2
COLUMNS = ("", "eta", "moves on (%)", "precision kept (%)", "least of the divisions (%)", "divisions with an exit")


def moving_on(each: Judged) -> float:
    """After the first exit; all where there is none."""
    return 100 * (each.moving[0] if each.moving else 1.0)


def compare(divisions: Sequence[Sequence[Case]]) -> StudyResult:
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
            Comparison(f"moves on after the first exit (%), eta {eta}", fmean(by_eta[eta]), PAPER[eta])
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
        figures={f"{name} {eta}": [moving_on(each) for each in of] for (name, eta), of in found.items()},
        tables=(Table("By task", COLUMNS, tuple(_cells(name, eta, of) for (name, eta), of in found.items())),),
    )


def _cells(name: str, eta: float, of: Sequence[Judged]) -> tuple[str | float, ...]:
    precisions = [100 * each.precision for each in of]
    with_exit = f"{sum(bool(each.moving) for each in of)} of {len(of)}"
    return name, eta, fmean(map(moving_on, of)), fmean(precisions), min(precisions), with_exit


def run(effort: Effort) -> StudyResult:
    """Every task whose records are there."""
    result = compare([cases(seed=seed) for seed in range(DIVISIONS[effort])])
    return telling_absent(result, tuple(KINDS))


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
