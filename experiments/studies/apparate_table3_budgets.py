"""Apparate, table 3 and figure 18: what a larger budget of ramps, or of answers that differ, is worth.

Replayed on records; Apparate's own tuner and mover, and Offramp's guarantee with planned ramps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from experiments.apparate.cases import BUDGET, RAMP_BUDGET, Case, cases
from experiments.apparate.recording import NEEDS, Kind
from experiments.apparate.strategies import Budgets, with_moved_ramps, with_planned_ramps
from experiments.apparate.times import Answered
from experiments.studies.served_streams import bars, document, mean, run_sides, table
from experiments.studies.study import Effort, StudyResult, declare

RAMP_BUDGETS = (RAMP_BUDGET, 0.05, 0.10)
LOSS_BUDGETS = (BUDGET, 0.02, 0.05)
PAPER: Mapping[Kind, tuple[float, ...]] = {"vision": (48.9, 49.6, 50.4), "text": (18.5, 22.2, 24.9)}
"""Median saved (%) by ramp budget, of ResNet-50 and GPT-2."""
OWN, OURS = "Apparate", "Offramp"


def sides() -> dict[str, Callable[[Case], Answered]]:
    """Apparate's way at every budget; Offramp's at every loss: with ramps for 10 % there are 16,384 sets to look at."""

    def side(serve: Callable[[Case, Budgets], Answered], budgets: Budgets) -> Callable[[Case], Answered]:
        return lambda case: serve(case, budgets)

    own = {label(OWN, budgets): side(_own, budgets) for budgets in budgets_of(OWN)}
    return own | {label(OURS, budgets): side(_ours, budgets) for budgets in budgets_of(OURS)}


def budgets_of(who: str) -> list[Budgets]:
    """First one is larger, then the other."""
    by_ramps = [Budgets(ramps=ramps) for ramps in (RAMP_BUDGETS if who == OWN else RAMP_BUDGETS[:1])]
    return by_ramps + [Budgets(loss=loss) for loss in LOSS_BUDGETS[1:]]


def label(who: str, budgets: Budgets) -> str:
    """Of a side."""
    return f"{who}, {in_words(budgets)}"


def in_words(budgets: Budgets) -> str:
    """Such as "2 % of ramps, 1 % lost"."""
    return f"{100 * budgets.ramps:g} % of ramps, {100 * budgets.loss:g} % lost"


def _own(case: Case, budgets: Budgets) -> Answered:
    return with_moved_ramps(case, "apparate", budgets).answered


def _ours(case: Case, budgets: Budgets) -> Answered:
    return with_planned_ramps(case, "guarantee", budgets).answered


def compare(streams: Sequence[Case]) -> StudyResult:
    """Median savings by ramp budget beside the paper's, then by what may be lost."""
    found = run_sides(streams, sides())
    return StudyResult(
        comparisons=tuple(
            mean(found, kind, label(who, budgets), figure, _paper(kind, who, figure, index))
            for who in (OWN, OURS)
            for kind in PAPER
            for figure in ("median saved (%)", "mean saved (%)", "agreement (%)")
            for index, budgets in enumerate(budgets_of(who))
        ),
        pictures=(bars("By budgets", found, "median saved (%)"),),
        figures={"streams": document(found)},
        tables=(table(found),),
    )


def _paper(kind: Kind, who: str, figure: str, index: int) -> float | None:
    return PAPER[kind][index] if who == OWN and figure == "median saved (%)" and index < len(RAMP_BUDGETS) else None


def run(effort: Effort) -> StudyResult:
    """The recorded streams; two made-up ones with quick effort."""
    return compare(cases(effort))


STUDY = declare(__name__, run, needs=NEEDS, makes_up_quick=True)
