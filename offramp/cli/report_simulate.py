"""What became of a simulation, as tables, times in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table

from offramp.jobs.simulating import Simulated, predicted_exits
from simulator.outcome import Figures


def simulate_tables(simulated: Simulated) -> list[Table]:
    """The plan's splits, what it does and was to do, and where inputs left."""
    return [_splits(simulated), _figures(simulated), _exits(simulated)]


def _splits(simulated: Simulated) -> Table:
    plan, figures = simulated.simulation.played.plan, simulated.figures
    table = Table(
        *("stage", "busy", "blocks", "batch", "batches", "fill", "T ms", "planned T ms"),
        title=f"Plan ({simulated.simulation.played.words})",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    ran = {(each.first, each.end): each for each in figures.splits}
    planned = {(each.split.first, each.split.end): each for each in simulated.simulation.predicted.splits}
    for index, (stage, slot) in enumerate(zip(plan.stages, figures.slots, strict=True)):
        for split in stage.splits:
            own = (f"{index}: {stage.replicas} x {stage.device}", f"{slot.utilisation:.0%}")
            key = (split.first, split.end)
            did = ("0", "-", "-")
            if key in ran:
                did = (f"{ran[key].batches}", f"{ran[key].fill:.0%}", _milliseconds(ran[key].busy_s / ran[key].batches))
            table.add_row(
                *(own if split is stage.splits[0] else ("", "")),
                f"{split.first}-{split.end - 1}",
                str(split.batch),
                *did,
                _milliseconds(planned[key].seconds),
            )
    return table


def _figures(simulated: Simulated) -> Table:
    figures = simulated.figures
    title = f"Simulated, {figures.seconds:g} s, {figures.inputs} inputs"
    table = Table("", "planned", "simulated", title=f"{title}, INTERRUPTED" if figures.interrupted else title)
    for row in _rows(simulated):
        table.add_row(*row)
    return table


def _rows(simulated: Simulated) -> Iterator[tuple[str, str, str]]:
    figures, predicted = simulated.figures, simulated.simulation.predicted
    slo_s = simulated.simulation.scenario.slo_s
    yield "offered", "", f"{figures.offered_per_s:.1f} inputs/s"
    within = f"within {_milliseconds(slo_s)} ms"
    yield "goodput", f"{predicted.rate_per_s:.1f}/s at most", f"{figures.goodput_per_s:.1f}/s {within}"
    if simulated.simulation.job.inputs_per_request > 1:
        yield "goodput, whole requests", "", f"{figures.request_goodput_per_s:.1f} inputs/s {within}"
    yield "in time", "", f"{figures.in_slo_share:.2%} of inputs"
    worst = f"{_milliseconds(predicted.latency_s)} ms at {predicted.served_per_s:.1f}/s"
    for name, latency_s in (("p50", figures.p50_s), ("p95", figures.p95_s), ("p99", figures.p99_s)):
        shown = "-" if latency_s is None else f"{_milliseconds(latency_s)} ms"
        yield f"latency {name}", worst if name == "p99" else "", shown
    if not figures.drops:
        yield "dropped", "", "none"
    for reason, number in figures.drops.items():
        yield f"dropped: {reason}", "", _of(number, figures)
    yield "utilisation", "", f"{figures.utilisation:.1%}"
    yield "cost", f"{predicted.usd_per_hour:.2f} USD/h", f"{figures.usd_per_hour:.2f} USD/h"


def _exits(simulated: Simulated) -> Table:
    figures, planned = simulated.figures, predicted_exits(simulated.simulation)
    table = Table("after block", "planned", "simulated", "answers", title="Answers by exit")
    for block in sorted({*planned, *figures.exits}):
        answers = figures.exits.get(block, 0)
        share = f"{answers / figures.answered:.2%}" if figures.answered else "-"
        table.add_row(str(block), f"{planned.get(block, 0.0):.2%}", share, str(answers))
    return table


def _of(number: int, figures: Figures) -> str:
    return f"{number} ({number / figures.inputs:.2%})" if figures.inputs else f"{number}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if math.isfinite(seconds) else "endless"
