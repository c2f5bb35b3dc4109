"""How the design scales: what an ingress's work costs, measured, and clusters of up to 10,000 accelerators, simulated.

    python -m experiments.scale [--quick]

BERT-large on V100 of about E3's speed (published times x 6.5), e3 plans, SLO 100 ms, exits made up with the survival of
the problem file, Poisson arrivals at 85 % of the plan's rate. Of clusters in cells one cell is simulated: the others
are the same. Writes runs/scale.json. Minutes: 10 on one core.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from experiments.data import RUNS
from experiments.scale.clusters import LOAD, Row, Size, ingresses_for, problem_of, simulated
from experiments.scale.ingress_cost import RoutingCost, dispatch_costs, routing_costs
from offramp.jobs.provenance import provenance
from optimizer.decision import Planned
from optimizer.planner import solve

ACCELERATORS = (400, 1000, 4000, 10_000)
CELL = 100
"""Accelerators of a cell."""
QUICK = (400,)


def main() -> None:
    """Measure, simulate, print and keep."""
    parser = ArgumentParser(prog="python -m experiments.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest cluster only")
    quick = parser.parse_args().quick
    routing, dispatch = routing_costs(), dispatch_costs()
    _print_costs(routing, dispatch)
    rows = []
    for size in sizes(QUICK if quick else ACCELERATORS):
        rows.append(simulated(size))
        print(f"{rows[-1].size}: {rows[-1].wall_s:.0f} s", flush=True)
    Console(width=160).print(_table(rows))
    RUNS.mkdir(exist_ok=True)
    path = RUNS / "scale.json"
    document = {
        "provenance": provenance(seed=0),
        "routing": [asdict(each) for each in routing],
        "dispatch_s_per_input": dispatch,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"written: {path}")


def sizes(accelerators: Sequence[int]) -> list[Size]:
    """Every cluster behind one ingress (which no process could be), behind as many as it needs, and in cells."""
    found = []
    for count in accelerators:
        planned = solve(problem_of(count), "e3")
        assert isinstance(planned, Planned), planned
        rate_per_s, cells = planned.figures.rate_per_s, count // CELL
        found += [
            Size(accelerators=count, ingresses=1, cells=1),
            Size(accelerators=count, ingresses=ingresses_for(LOAD * rate_per_s, cells=1), cells=1),
            Size(accelerators=count, ingresses=ingresses_for(LOAD * rate_per_s, cells=cells), cells=cells),
        ]
    return found


def _print_costs(routing: Sequence[RoutingCost], dispatch: dict[int, float]) -> None:
    print("a choice of a replica, microseconds: all ranked, kept by load (an ingress)")
    for each in routing:
        print(f"  {each.replicas:>6} replicas {each.ranked_s * 1e6:>9.1f} {each.kept_s * 1e6:>8.1f}")
    print("the dispatcher, microseconds per input, without HTTP, tokenizer and network")
    for batch, seconds in dispatch.items():
        print(f"  {batch:>3} inputs a call {seconds * 1e6:>8.1f}   ({1 / seconds:,.0f} inputs/s a core)")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="BERT-large, V100 at E3's speed, e3 plans at 85 % of their rate")
    for name in (
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
        "simulated in s",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        figures, size = row.figures, row.size
        table.add_row(
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
    return table


if __name__ == "__main__":
    main()
