"""What slots of a row save (TCB's figures 13 and 14): by count, and really computed on this CPU.

A row of L tokens in z slots costs attention what z inputs of L / z tokens cost, so that is what is run. The mask inside
a slot is not, nor is the memory that TCB frees early while it decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from experiments.kit import Spread, spread
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, largest, ratio
from experiments.tcb import real
from experiments.tcb.cost import Work, published_v100
from experiments.turns import in_turns

LENGTH = 400
"""Tokens of a row."""
SLOTS = (1, 2, 4, 5, 8, 10, 20)
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
    sizes = (real.MINILM if full else real.TINY) | {"num_blocks": ONE_BLOCK, "max_length": LENGTH}
    return compare(rows, paper, measured(sizes, rows if full else 1, rounds=3 if full else 1))


def measured(sizes: dict[str, int], rows: int, rounds: int) -> dict[int, Spread]:
    """How many times faster than in one slot, by number of slots: ratios within rounds."""
    of = real.model(sizes)
    sides = {f"{slots}": partial(real.timed, of, [[LENGTH // slots] * (rows * slots)]) for slots in SLOTS}
    found = {int(name): figures["s"] for name, figures in in_turns(sides, rounds).items()}
    ratios = {
        slots: spread(one / more for one, more in zip(found[1], took_s, strict=True)) for slots, took_s in found.items()
    }
    return {slots: each for slots, each in ratios.items() if each is not None}


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
