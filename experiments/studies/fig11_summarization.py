"""E3, figure 11: goodput of CALM's T5 in summarization, whose answers have several lengths.

Computed: what figure 10's plans do, times what stock's batches lose where none of their places is taken again before
all of a batch have ended.
"""

from __future__ import annotations

from experiments.studies.decoders import ONE_EXIT, PHI_2, layers_allow, longest_over_mean, plans_table, rates, t5
from experiments.studies.fig10_translation import BATCHES, CUT
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, declare

PAPER = 3.8


def run(effort: Effort) -> StudyResult:
    """With continuous batching on both sides, and with static batches of stock alone."""
    found = rates("one exit", t5(ONE_EXIT), BATCHES[effort])
    lost = {batch: longest_over_mean(batch) for batch in found.batches}
    over = [found.times("e3", "stock", batch) or 0.0 for batch in found.batches]
    over_static = [times * lost[batch] for batch, times in zip(found.batches, over, strict=True)]
    static = tuple(rate / lost[batch] for rate, batch in zip(found.per_s["stock"], found.batches, strict=True))
    bound = layers_allow(ONE_EXIT, CUT)
    return StudyResult(
        comparisons=(
            Comparison("e3 / stock, both continuous, largest", max(over), PAPER),
            Comparison("layers alone allow", bound, PAPER),
            *(
                Comparison(f"e3 / stock with static batches of {batch}", times, PAPER)
                for batch, times in zip(found.batches, over_static, strict=True)
            ),
            Comparison("longest over mean answer that 3.8 x needs beside the bound", PAPER / bound),
        ),
        pictures=(
            Bars(
                "CALM's T5 in summarization: decoder steps on 4 A6000",
                "largest batch",
                "rate (tokens/s)",
                tuple(map(str, found.batches)),
                {**found.per_s, "stock, static": static},
            ),
        ),
        e3=found.ratios("e3"),
        best=found.ratios("best"),
        figures={
            "rates": {side: list(values) for side, values in found.per_s.items()},
            "longest_over_mean": list(lost.values()),
        },
        tables=(plans_table([found]),),
    )


STUDY = declare(__name__, run, paper=Ratios(over_stock=PAPER), needs=(PHI_2,))
