"""What slots of a row save (TCB's figures 13 and 14): by count, and really computed on this CPU.

The memory that TCB frees early while it decodes is not counted: nothing is decoded here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from experiments.kit import Spread
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, largest, ratio
from experiments.tcb import real
from experiments.tcb.cost import Work, published_v100

LENGTH, SLOTS = real.ROW, real.SLOTS
WIDTHS = {"paper's model, 3072 wide": 3072, "BERT-base": 768, "MiniLM": 384}
ONE_BLOCK = 1
"""All blocks are alike, so one tells as much as six."""


def work(rows: int, slots: int) -> Work:
    """Of a batch of full rows."""
    return Work(rows * LENGTH, rows * slots * (LENGTH // slots) ** 2)


def by_count(width: int, slots: int) -> float:
    """Operations of a layer in one slot over those in several.

    Per token, 12 width^2 multiply-adds of linear layers (four projections, and four times as wide a middle, twice) and
    2 width per place that attention sees.
    """
    return (12 * width + 2 * LENGTH) / (12 * width + 2 * LENGTH / slots)


def study(rows: int, paper: float, effort: Effort) -> StudyResult:
    """At one batch size."""
    torch.set_num_threads(1)
    full = effort == "full"
    timed = real.Timed((real.MODELS["minilm"] if full else real.TINY) | {"num_blocks": ONE_BLOCK})
    return compare(rows, paper, measured(timed, rows if full else 1, rounds=3 if full else 1))


def measured(timed: real.Timed, rows: int, rounds: int) -> dict[int, Spread]:
    """How many times faster than in one slot, by number of slots: ratios within rounds."""
    took_ms = real.slotted_ms(timed, rows, rounds)
    return {slots: real.times_of(took_ms, f"{slots}")["1"] for slots in SLOTS}


def compare(rows: int, paper: float, computed: Mapping[int, Spread]) -> StudyResult:
    """The largest speed-ups beside the paper's."""
    v100 = published_v100()
    series = {
        "this CPU, MiniLM": tuple(computed[slots].median for slots in SLOTS),
        "V100 by its published times, BERT-base": tuple(
            ratio(v100.seconds(work(rows, 1)), v100.seconds(work(rows, slots))) for slots in SLOTS
        ),
        **{f"by count, {name}": tuple(by_count(width, slots) for slots in SLOTS) for name, width in WIDTHS.items()},
    }
    of_ours = computed[max(computed, key=lambda slots: computed[slots].median)]
    return StudyResult(
        comparisons=(
            Comparison("fastest of all numbers of slots over one slot, this CPU", of_ours.median, paper),
            *(
                Comparison(f"the same, {name}", largest(values), paper)
                for name, values in series.items()
                if name[:4] != "this"
            ),
        ),
        pictures=(
            Lines(
                f"Rows of {LENGTH} tokens in slots, batch {rows}",
                "slots in a row",
                "times as fast as one slot",
                tuple(map(float, SLOTS)),
                series,
            ),
        ),
        figures={"measured": {str(slots): tuple(each) for slots, each in computed.items()}, "series": series},
        tables=(
            Table(
                "Times as fast as one slot",
                ("slots", "this CPU (all rounds)", *list(series)[1:]),
                tuple(
                    (str(slots), computed[slots].told(), *(values[at] for values in list(series.values())[1:]))
                    for at, slots in enumerate(SLOTS)
                ),
            ),
        ),
    )
