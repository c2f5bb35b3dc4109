"""How the design scales: what an ingress's work costs, measured, and clusters of up to 10,000 accelerators, simulated.

    python -m experiments.scale [--quick]

BERT-large on V100 of about E3's speed (published times x 6.5), e3 plans, SLO 100 ms, exits made up with the survival of
the problem file, Poisson arrivals at 85 % of the plan's rate. Of clusters in cells one cell is simulated: the others
are the same. Writes runs/scale.json. Minutes: 10 on one core.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.scale.clusters import LOAD, Row, Size, ingresses_for, planned_for, problem_of, simulated
from experiments.scale.ingress_cost import dispatch_costs, routing_costs
from offramp.commands.progress import provenance

ACCELERATORS = (400, 1000, 4000, 10_000)
CELL = 100
"""Accelerators of a cell."""
QUICK = (400,)
COLUMNS = (
    "accelerators",
    "cells",
    "ingresses",
    "planning s",
    "gap",
    "offered/s",
    "goodput",
    "p50 ms",
    "p99 ms",
    "fill",
)


def main() -> None:
    """Measure, simulate, print and keep."""
    parser = ArgumentParser(prog="python -m experiments.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest cluster only")
    quick = parser.parse_args().quick
    routing, dispatch = routing_costs(), dispatch_costs()
    choices = [(f"{each.replicas:,}", each.ranked_s * 1e6, each.kept_s * 1e6) for each in routing]
    show("a choice of a replica, microseconds", ("replicas", "all ranked", "kept by load (an ingress)"), choices)
    costs = [(batch, seconds * 1e6, f"{1 / seconds:,.0f}") for batch, seconds in dispatch.items()]
    title = "the dispatcher, without HTTP, tokenizer and network"
    show(title, ("inputs a call", "microseconds per input", "inputs/s a core"), costs)
    rows = []
    for size in sizes(QUICK if quick else ACCELERATORS):
        rows.append(simulated(size))
        print(f"{rows[-1].size}: {rows[-1].wall_s:.0f} s", flush=True)
    show(
        "BERT-large, V100 at E3's speed, e3 plans at 85 % of their rate",
        (*COLUMNS, "simulated in s"),
        map(_cells, rows),
    )
    document = {
        "provenance": provenance(seed=0),
        "routing": routing,
        "dispatch_s_per_input": dispatch,
        "rows": rows,
    }
    print(f"written: {keep(document, RUNS / 'scale.json')}")


def sizes(accelerators: Sequence[int]) -> list[Size]:
    """Every cluster behind one ingress (which no process could be), behind as many as it needs, and in cells."""
    found = []
    for count in accelerators:
        rate_per_s, cells = planned_for(problem_of(count)).figures.rate_per_s, count // CELL
        found += [
            Size(accelerators=count, ingresses=1, cells=1),
            Size(accelerators=count, ingresses=ingresses_for(LOAD * rate_per_s, cells=1), cells=1),
            Size(accelerators=count, ingresses=ingresses_for(LOAD * rate_per_s, cells=cells), cells=cells),
        ]
    return found


def _cells(row: Row) -> tuple[str, ...]:
    figures, size = row.figures, row.size
    return (
        f"{size.accelerators:,}",
        str(size.cells),
        str(size.ingresses),
        f"{row.plan_s:.2f}",
        f"{row.gap:.2%}",
        f"{row.rate_per_s:,.0f}",
        f"{figures.in_slo_share:.2%}",
        f"{(figures.p50_s or 0) * 1e3:.1f}",
        f"{(figures.p99_s or 0) * 1e3:.1f}",
        " ".join(f"{split.fill:.2f}" for split in figures.splits),
        f"{row.wall_s:.0f}",
    )


if __name__ == "__main__":
    main()
