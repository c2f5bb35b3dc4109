"""E3, figure 10: goodput of CALM's T5 in translation on 4 A6000, by batch size.

Computed on the cost model: decoder steps, batches always filled, keys and values of skipped layers copied as CALM does.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.studies.decoders import (
    EVERY_LAYER,
    ONE_EXIT,
    PHI_2,
    Rates,
    all_allow,
    layers_allow,
    plans_table,
    rates,
    t5,
)
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, declare

BATCHES: dict[Effort, tuple[int, ...]] = {"full": (1, 2, 4, 8), "quick": (8,)}
CUT = 2
PAPER = 2.84


def found(effort: Effort) -> list[Rates]:
    """Exits as told; such that would explain the paper's; with the vocabulary head paid for; with fills computed."""
    cases = {"one exit": t5(ONE_EXIT)}
    if effort == "full":
        cases |= {
            "exits everywhere": t5(EVERY_LAYER),
            "one exit, head paid": t5(ONE_EXIT, with_head=True),
            "one exit, fills computed": t5(ONE_EXIT, fill="compute"),
        }
    return [rates(name, problem, BATCHES[effort]) for name, problem in cases.items()]


def compare(of: Sequence[Rates]) -> StudyResult:
    """The first case has the picture."""
    first = of[0]
    largest = first.batches[-1]
    told = [
        Comparison("e3 / stock, largest", first.ratios("e3").over_stock, PAPER),
        Comparison("layers alone allow", layers_allow(ONE_EXIT, CUT), PAPER),
        Comparison("exits everywhere allow", all_allow(EVERY_LAYER), PAPER),
        Comparison(f"e3 / early-exit, batch {largest}", first.times("e3", "early-exit", largest)),
    ]
    for each in of[1:]:
        told += [
            Comparison(f"{each.case}: {side} / stock, batch {batch}", each.times(side, "stock", batch))
            for side in ("early-exit", "e3", "best")
            for batch in dict.fromkeys((each.batches[0], each.batches[-1]))
        ]
    return StudyResult(
        comparisons=tuple(told),
        pictures=(first.bars("CALM's T5: decoder steps on 4 A6000, one exit after layer 2", "tokens"),),
        e3=first.ratios("e3"),
        best=first.ratios("best"),
        figures={each.case: {side: list(values) for side, values in each.per_s.items()} for each in of},
        tables=(plans_table(of),),
    )


def run(effort: Effort) -> StudyResult:
    """All cases; quick effort: as told, at the largest batch."""
    return compare(found(effort))


STUDY = declare(__name__, run, paper=Ratios(over_stock=PAPER), needs=(PHI_2,))
