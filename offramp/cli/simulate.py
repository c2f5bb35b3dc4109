"""`offramp simulate`: arrivals played against a plan; printed as tables, times in milliseconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from offramp.cli.fields import takes_fields
from offramp.cli.options import AsJson, make_table, milliseconds, show
from offramp.cli.plan import NO_PLAN

if TYPE_CHECKING:
    from rich.table import Table

    from offramp.commands.jobs import SimulateJob
    from offramp.commands.simulate import Simulated
    from offramp.commands.simulate_sequences import SimulatedSequences, Simulation
    from simulator.outcome import Figures, SplitUse

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the signal's number, as shells have it."""


@takes_fields("offramp.commands.jobs:SimulateJob")
def simulate(job: SimulateJob, as_json: AsJson = False) -> None:
    """Play arrivals against a plan: goodput, latency, drops, fill, utilisation and cost.

    Exit status 3: no plan meets the problem. 130: interrupted; what was simulated by then is printed.
    """
    try:
        _simulate(job, as_json=as_json)
    except KeyboardInterrupt:
        print("interrupted before there was anything to print", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _simulate(job: SimulateJob, *, as_json: bool) -> None:
    from offramp.commands.plan import NoPlanAnswer
    from offramp.commands.progress import progress_share
    from offramp.commands.simulate import prepare, run

    simulation = prepare(job)
    if isinstance(simulation, NoPlanAnswer):
        print(simulation.message, file=sys.stderr)
        raise typer.Exit(NO_PLAN)
    if simulation.scenario.sequences is not None:
        _simulate_sequences(simulation, as_json=as_json)
        return
    with progress_share("simulate") as progress:
        simulated = run(simulation, progress)
    if simulated is None:
        raise KeyboardInterrupt
    _print(simulated, as_json=as_json)
    if simulated.figures.interrupted:
        raise typer.Exit(INTERRUPTED)


def _simulate_sequences(simulation: Simulation, *, as_json: bool) -> None:
    from offramp.commands.progress import progress_share
    from offramp.commands.simulate import simulated_sequences_document
    from offramp.commands.simulate_sequences import play_sequences

    with progress_share("simulate") as progress:
        simulated = play_sequences(simulation, progress)
    if simulated is None:
        raise KeyboardInterrupt
    if as_json:
        print(json.dumps(simulated_sequences_document(simulated)))
    else:
        show(*sequence_tables(simulated))
        for note in simulation.notes:
            print(note)
    if simulated.interrupted:
        raise typer.Exit(INTERRUPTED)


def _print(simulated: Simulated, *, as_json: bool) -> None:
    if as_json:
        from offramp.commands.simulate import simulated_document

        print(json.dumps(simulated_document(simulated)))
        return
    show(*simulate_tables(simulated))
    for note in simulated.notes:
        print(note)


def simulate_tables(simulated: Simulated) -> list[Table]:
    """The plan's splits, what it does and was to do, and where inputs left."""
    return [_splits(simulated), *_lengths(simulated), _figures(simulated), *_networks(simulated), _exits(simulated)]


def _splits(simulated: Simulated) -> Table:
    plan, figures = simulated.simulation.played.plan, simulated.figures
    table = make_table(
        *("stage", "busy", "blocks", "batch", "batches", "fill", "T ms", "planned T ms"),
        title=f"Plan ({simulated.simulation.played.words})",
        narrow=True,
    )
    ran = {(each.first, each.end): each for each in figures.splits}
    planned = {(each.split.first, each.split.end): each for each in simulated.simulation.predicted.splits}
    for index, (stage, slot) in enumerate(zip(plan.stages, figures.slots, strict=True)):
        for split in stage.splits:
            own = (f"{index}: {stage.replicas} x {stage.device}", f"{slot.utilisation:.0%}")
            key = (split.first, split.end)
            did = ("0", "-", "-")
            if key in ran:
                use = ran[key]
                did = (f"{use.batches}", f"{_fill(use):.0%}", milliseconds(use.busy_s / use.batches))
            table.add_row(
                *(own if split is stage.splits[0] else ("", "")),
                f"{split.first}-{split.end - 1}",
                str(split.batch) if split.tokens is None else f"{split.tokens} tokens",
                *did,
                milliseconds(planned[key].seconds),
            )
    return table


def sequence_tables(simulated: SimulatedSequences) -> list[Table]:
    """Sequences beside what the cost model says of them, and where tokens left."""
    figures, expected = simulated.figures, simulated.expected
    title = f"Simulated, {figures.seconds:.4g} s, {figures.sequences} sequences"
    rows = (
        ("tokens", f"{expected.tokens_per_s:.1f}/s at most", f"{figures.tokens_per_s:.1f}/s"),
        ("within both SLOs", "", f"{figures.in_slo} sequences, {figures.goodput_per_s:.2f}/s"),
        ("first token p50", "", _shown(figures.ttft_p50_s)),
        ("first token p99", f"{milliseconds(expected.ttft_s)} ms at worst", _shown(figures.ttft_p99_s)),
        ("per token p50", f"{milliseconds(expected.token_s)} ms on average", _shown(figures.tpot_p50_s)),
        ("per token p99", f"{milliseconds(expected.most_token_s)} ms at worst", _shown(figures.tpot_p99_s)),
        ("refused", "", f"{figures.refused} of {figures.sequences}"),
    )
    title = f"{title}, INTERRUPTED" if simulated.interrupted else title
    tokens = sum(simulated.exits.values())
    exits = ((str(block), str(number), f"{number / tokens:.2%}") for block, number in sorted(simulated.exits.items()))
    return [
        make_table("", "planned", "simulated", title=title, rows=rows),
        make_table("after block", "tokens", "share", title="Tokens by exit", rows=exits),
    ]


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{milliseconds(seconds)} ms"


def _fill(use: SplitUse) -> float:
    """Of the budget of tokens, where there is one."""
    by_tokens = None if use.lengths is None else use.lengths.fill
    return use.fill if by_tokens is None else by_tokens


def _lengths(simulated: Simulated) -> list[Table]:
    """What inputs of several lengths made of batches; nothing where they cost alike."""
    uses = [use for use in simulated.figures.splits if use.lengths is not None]
    if not uses:
        return []
    table = make_table("blocks", "inputs a batch", "tokens a batch", "T p50 ms", "T p99 ms", "p99/p50", title="Batches")
    for use in uses:
        lengths = use.lengths
        assert lengths is not None
        table.add_row(
            f"{use.first}-{use.end - 1}",
            f"{use.inputs / use.batches:.1f}",
            f"{lengths.tokens / use.batches:.0f}" + ("" if lengths.budget is None else f" of {lengths.budget}"),
            milliseconds(lengths.p50_s),
            milliseconds(lengths.p99_s),
            f"{lengths.spread:.2f}",
        )
    return [table]


def _figures(simulated: Simulated) -> Table:
    figures = simulated.figures
    title = f"Simulated, {figures.seconds:g} s, {figures.inputs} inputs"
    title = f"{title}, INTERRUPTED" if figures.interrupted else title
    return make_table("", "planned", "simulated", title=title, rows=_rows(simulated))


def _rows(simulated: Simulated) -> Iterator[tuple[str, str, str]]:
    figures, predicted = simulated.figures, simulated.simulation.predicted
    slo_s = simulated.simulation.scenario.slo_s
    yield "offered", "", f"{figures.offered_per_s:.1f} inputs/s"
    within = f"within {milliseconds(slo_s)} ms"
    yield "goodput", f"{predicted.rate_per_s:.1f}/s at most", f"{figures.goodput_per_s:.1f}/s {within}"
    if simulated.simulation.job.inputs_per_request > 1:
        yield "goodput, whole requests", "", f"{figures.request_goodput_per_s:.1f} inputs/s {within}"
    yield "in time", "", f"{figures.in_slo_share:.2%} of inputs"
    worst = f"{milliseconds(predicted.latency_s)} ms at {predicted.served_per_s:.1f}/s"
    for name, latency_s in (("p50", figures.p50_s), ("p95", figures.p95_s), ("p99", figures.p99_s)):
        yield f"latency {name}", worst if name == "p99" else "", _shown(latency_s)
    if not figures.drops:
        yield "dropped", "", "none"
    for reason, number in figures.drops.items():
        yield f"dropped: {reason}", "", _of(number, figures)
    yield "utilisation", "", f"{figures.utilisation:.1%}"
    yield "cost", f"{predicted.usd_per_hour:.2f} USD/h", f"{figures.usd_per_hour:.2f} USD/h"


def _networks(simulated: Simulated) -> list[Table]:
    """Of a chain, the share of what reached each network that it returned; nothing where there is one."""
    from offramp.commands.simulate import network_answers

    rows = network_answers(simulated)
    if not rows:
        return []
    table = make_table("network", "blocks", "reached by", "answers", "returned", title="Answers by network")
    for number, row in enumerate(rows):
        returned = f"{row.answers / row.reached:.2%}" if row.reached else "-"
        blocks = f"{row.first}-{row.end - 1}" + ("" if row.used else ", left out")
        table.add_row(str(number), blocks, str(row.reached), str(row.answers), returned)
    return [table]


def _exits(simulated: Simulated) -> Table:
    from offramp.commands.simulate import predicted_exits

    figures, planned = simulated.figures, predicted_exits(simulated.simulation)
    table = make_table("after block", "planned", "simulated", "answers", title="Answers by exit")
    for block in sorted({*planned, *figures.exits}):
        answers = figures.exits.get(block, 0)
        share = f"{answers / figures.answered:.2%}" if figures.answered else "-"
        table.add_row(str(block), f"{planned.get(block, 0.0):.2%}", share, str(answers))
    return table


def _of(number: int, figures: Figures) -> str:
    return f"{number} ({number / figures.inputs:.2%})" if figures.inputs else f"{number}"
