"""E3, figure 12: goodput of an early-exit Llama 3.1 8B that answers BoolQ in one token, by batch size.

Computed on the cost model: prompts as inputs, for no sequence goes on behind its first token.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.studies.decoders import LLAMA_2, LLAMA_EXITS, Rates, layers_allow, llama, plans_table, rates
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, declare

BATCHES: dict[Effort, tuple[int, ...]] = {"full": (1, 2, 4, 8, 16), "quick": (8,)}
CUT = 25
PAPER = 1.48


def compare(of: Sequence[Rates]) -> StudyResult:
    """The first case has the picture."""
    first = of[0]
    return StudyResult(
        comparisons=(
            Comparison("e3 / stock, largest", first.ratios("e3").over_stock, PAPER),
            Comparison("layers alone allow", layers_allow(LLAMA_EXITS, CUT), PAPER),
            *(
                Comparison(f"{each.case}: {side} / stock, batch {batch}", each.times(side, "stock", batch))
                for each in of
                for side in ("early-exit", "e3", "best")
                for batch in dict.fromkeys((each.batches[0], each.batches[-1]))
            ),
        ),
        pictures=(first.bars("Llama 3.1 8B, one token per prompt, on 4 A6000", "prompts"),),
        e3=first.ratios("e3"),
        best=first.ratios("best"),
        figures={each.case: {side: list(values) for side, values in each.per_s.items()} for each in of},
        tables=(plans_table(of),),
    )


def run(effort: Effort) -> StudyResult:
    """With the vocabulary head in ramps and at the end; full effort: without it too."""
    cases = {"head paid": llama()} | ({"no head": llama(with_head=False)} if effort == "full" else {})
    return compare([rates(name, problem, BATCHES[effort]) for name, problem in cases.items()])


STUDY = declare(__name__, run, paper=Ratios(over_stock=PAPER), needs=(LLAMA_2,))
