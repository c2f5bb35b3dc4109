"""E3, figure 25: what it brings to switch off the ramps inside splits.

Simulated in short runs: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within 100 ms.
"""

from __future__ import annotations

from collections.abc import Mapping

from experiments.problems import RAMPS_AT_SPLIT_ENDS, RAMPS_CHOSEN
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import (
    LARGEST_BATCH,
    RAMPS_OFF_GAIN,
    even_exits,
    exits_at_once,
    first_ramp,
    like_e3,
    ramp_share,
    with_ramps_of,
)
from experiments.studies.picture import Bars
from experiments.studies.side_by_side import Row, batch_bars, by_batch, plans, times
from experiments.studies.sides import BATCHES, Workload, equal_cluster, sst2
from experiments.studies.study import Comparison, Effort, StudyResult, declare, facts, largest
from optimizer.decision import Decision
from optimizer.planner import solve
from optimizer.problem import PlanProblem

AT_ENDS, CHOSEN = "ramps at split ends", "ramps chosen"

Case = tuple[PlanProblem, Workload]


def variants(problem: PlanProblem) -> dict[str, Decision]:
    """E3 with all ramps; with those at the ends of its splits; with those that the planner chooses.

    Splits are chosen anew for each.
    """
    return {
        "e3": solve(problem, "e3"),
        AT_ENDS: solve(problem, RAMPS_AT_SPLIT_ENDS),
        CHOSEN: solve(problem, RAMPS_CHOSEN),
    }


def cases(problem: PlanProblem, inputs: Workload) -> dict[str, Case]:
    """E3's ramps, then its exits and V100 that 8 inputs do not fill; then exits of the other extreme."""
    dear, unfilled, even = with_ramps_of(problem, ramp_share(problem)), like_e3(problem), even_exits(problem)
    return {
        "dear ramps": (dear, inputs),
        "+ E3's exits": (dear, even),
        "+ flat times": (unfilled, even),
        "exits at once": (unfilled, exits_at_once(problem)),
    }


def compare(problem: PlanProblem, inputs: Workload, others: Mapping[str, Case], effort: Effort) -> StudyResult:
    """The figure on `inputs`; at the largest batch, every other case."""
    rows = by_batch(problem, inputs, BATCHES[effort], "quick", variants)
    of_cases = {name: by_batch(*case, (LARGEST_BATCH,), "quick", variants) for name, case in others.items()}
    at_largest = {name: found[f"batch {LARGEST_BATCH}"] for name, found in {"recorded": rows, **of_cases}.items()}
    by_label = {**rows, **{f"{name}, batch {LARGEST_BATCH}": at_largest[name] for name in of_cases}}
    return StudyResult(
        comparisons=(
            *(
                Comparison(f"{name} / e3, largest", largest(times(row, name, "e3") for row in rows.values()), paper)
                for name, paper in ((AT_ENDS, RAMPS_OFF_GAIN), (CHOSEN, RAMPS_OFF_GAIN))
            ),
            *(Comparison(f"{label}: {AT_ENDS} / e3", times(row, AT_ENDS, "e3")) for label, row in by_label.items()),
            *(
                Comparison(f"{name}, batch {LARGEST_BATCH}: {CHOSEN} / e3", times(at_largest[name], CHOSEN, "e3"))
                for name in of_cases
            ),
        ),
        pictures=(batch_bars("BERT-base on 16 V100, recorded exits", rows), _gains(at_largest)),
        tables=(
            plans(rows),
            facts(
                {
                    "a ramp, over the block before it: the most that ramps switched off bring": first_ramp(problem),
                    f"the same for {RAMPS_OFF_GAIN:g} x, with two splits and flat times": ramp_share(problem),
                }
            ),
        ),
    )


def _gains(at_largest: Mapping[str, Row]) -> Bars:
    return Bars(
        f"Goodput over e3's with all ramps (batch {LARGEST_BATCH})",
        "each with those before it; the last with other exits",
        "times the goodput",
        tuple(name.removeprefix("exits ") for name in at_largest),
        {name: tuple(times(row, name, "e3") for row in at_largest.values()) for name in (AT_ENDS, CHOSEN)},
        {AT_ENDS: (RAMPS_OFF_GAIN,) * len(at_largest)},
    )


def run(effort: Effort) -> StudyResult:
    """Recorded exits on E3's cluster; quick effort leaves the other cases out."""
    problem, inputs = equal_cluster(), sst2()
    return compare(problem, inputs, cases(problem, inputs) if effort == "full" else {}, effort)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
