"""`offramp simulate`: simulates a plan under load, and prints the result as JSON or as tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import typer
from rich.table import Table

from offramp.commands.options import SimulateJob
from offramp.commands.output import make_table, milliseconds, print_result
from offramp.commands.plan import NO_PLAN, NoPlanAnswer
from offramp.commands.progress import progress_share, provenance
from offramp.commands.simulation import Simulation, plan_source, policy_of, prepare
from offramp.load.sustained import percentile
from optimizer.evaluate import step_figures
from optimizer.generation.figures import SequenceFigures, sequence_figures
from optimizer.networks import survival_with
from optimizer.plan_file import plan_document
from optimizer.problem import nested_shares
from simulator.outcome import DROPS, Figures, Outcome
from simulator.scenario import Scenario
from simulator.simulate import PlayedSequences, Progress, generate, simulate

SCHEMA_VERSION = 1


def run_simulation(
    simulation: Simulation, progress: Progress | None = None
) -> tuple[dict[str, Any], tuple[Table, ...]] | None:
    """Runs a simulation; returns the result as JSON data and as tables.

    After an interrupt (Ctrl-C), returns the result so far, or None during the warm-up.
    """
    if simulation.scenario.sequences is not None:
        played = generate(simulation.scenario, progress=progress)
        return _simulated_sequences(simulation, played) if played.said_K.any() else None
    outcome = simulate(simulation.scenario, progress=progress)
    figures = partial_figures(outcome) if outcome.interrupted else outcome.figures()
    return None if figures is None else _simulated(simulation, figures)


def _simulated(simulation: Simulation, figures: Figures) -> tuple[dict[str, Any], tuple[Table, ...]]:
    networks, capacity_per_s = _network_answers(simulation, figures), simulation.predicted.rate_per_s
    title = f"Simulated, {figures.seconds:g} s, {figures.inputs} inputs"
    simulated = {
        **figures.document(),
        "in_slo_share": figures.in_slo_share,
        "utilisation": figures.utilisation,
        **({"networks": networks} if networks else {}),
    }
    tables = (
        _splits_table(simulation, figures),
        *_lengths_table(figures),
        make_table(
            *("", "planned", "simulated"),
            title=f"{title}, INTERRUPTED" if figures.interrupted else title,
            rows=_rows(simulation, figures),
        ),
        *_networks_table(networks),
        _exits_table(simulation, figures),
    )
    overload = (
        f"the load of {figures.offered_per_s:.1f} inputs/s exceeds the plan's {capacity_per_s:.1f}/s: some inputs are "
        "dropped or late"
    )
    notes = (overload,) if figures.offered_per_s > capacity_per_s else ()
    return _document(simulation, {"simulated": simulated}, *notes, interrupted=figures.interrupted), tables


def _simulated_sequences(simulation: Simulation, played: PlayedSequences) -> tuple[dict[str, Any], tuple[Table, ...]]:
    scenario = simulation.scenario
    expected = sequence_figures(scenario.problem, scenario.plan.stages, **step_figures(simulation.predicted))
    figures, exits = _sequence_figures(scenario, played), dict(played.exits)
    exits_document = {str(block): tokens for block, tokens in exits.items()}
    results = {"predicted_sequences": asdict(expected), "simulated": figures | {"exits": exits_document}}
    tables = _sequence_tables(expected, figures, exits, interrupted=played.interrupted)
    return _document(simulation, results, interrupted=played.interrupted), tables


def _sequence_figures(scenario: Scenario, played: PlayedSequences) -> dict[str, Any]:
    """Returns figures of the sequences that arrived after the warm-up. Unknown times are None."""
    lengths, generation = scenario.sequences, scenario.problem.generation
    assert lengths is not None
    assert generation is not None
    counted_K = scenario.arrivals_s >= scenario.warm_up_s
    whole_K = counted_K & (played.said_K == np.resize(lengths.answer_K, len(counted_K)))
    ttft_slo_s = math.inf if generation.ttft_s is None else generation.ttft_s
    # The time per token of a sequence with a single token is NaN.
    in_slo_K = whole_K & (played.ttft_s_K <= ttft_slo_s) & ~(played.tpot_s_K > scenario.problem.slo.latency_s)
    seconds = played.ended_s - scenario.warm_up_s  # until the last token of all sequences
    times_K = {"ttft": played.ttft_s_K[counted_K], "tpot": played.tpot_s_K[counted_K]}
    return {
        "sequences": int(counted_K.sum()),
        "whole": int(whole_K.sum()),
        "in_slo": int(in_slo_K.sum()),
        "refused": int((counted_K & (played.said_K == 0)).sum()),
        "seconds": seconds,
        "tokens_per_s": float(played.said_K[counted_K].sum()) / seconds,
        "goodput_per_s": float(in_slo_K.sum()) / seconds,
        **{f"{name}_p{share}_s": percentile(of_K, share) for name, of_K in times_K.items() for share in (50, 99)},
    }


def partial_figures(outcome: Outcome) -> Figures | None:
    """Returns figures of an interrupted simulation, until the last request with a known outcome; None without any.

    Earlier requests without an outcome count as unanswered, and later ones are left out.
    """
    known_N = np.flatnonzero((outcome.exit_N >= 0) | (outcome.drop_N != DROPS.index("unanswered")))
    if not len(known_N):
        return None
    until_s = float(outcome.arrived_s_R[known_N[-1] // outcome.inputs_per_request])
    if until_s <= outcome.warm_up_s:
        return None
    figures = outcome.figures_between(outcome.warm_up_s, until_s)
    share = until_s / outcome.ended_s  # replicas are constant, because the plan is
    slots = tuple(
        replace(each, replica_s=each.replica_s * share, utilisation=min(1.0, each.utilisation / share))
        for each in figures.slots
    )
    return replace(figures, slots=slots)


def _document(simulation: Simulation, results: Mapping[str, Any], *notes: str, interrupted: bool) -> dict[str, Any]:
    """Returns job and results as JSON data. Equal jobs give equal bytes on the same machine and commit."""
    job, scenario, predicted = simulation.job, simulation.scenario, simulation.predicted
    plan = plan_document(scenario.plan) | ({} if policy_of(scenario.plan) is not None else {"policy": None})
    return {
        "schema_version": SCHEMA_VERSION,
        "interrupted": interrupted,
        "problem": str(job.problem),
        "plan": {"from": plan_source(job), **plan},
        "arrivals": {
            "spec": job.arrivals,
            "requests": len(scenario.arrivals_s),
            "inputs_per_request": job.inputs_per_request,
            "duration_s": job.duration_s,
            "warm_up_s": job.warm_up_s,
        },
        "inputs": dict(simulation.inputs),
        "slo_s": scenario.problem.slo.latency_s,
        "admission": job.admission,
        "ingresses": job.num_ingresses,
        "seed": job.seed,
        "predicted": {
            "rate_per_s": predicted.rate_per_s,
            "latency_s": predicted.latency_s if math.isfinite(predicted.latency_s) else None,
            "usd_per_hour": predicted.usd_per_hour,
            "exits": predicted_exits(simulation),
            "splits": [
                {"first": each.split.first, "end": each.split.end, "seconds": each.seconds} for each in predicted.splits
            ],
        },
        **results,
        "notes": [*simulation.notes, *notes],
        "provenance": {name: value for name, value in provenance().items() if name != "created_at"},
    }


def predicted_exits(simulation: Simulation) -> dict[int, float]:
    """Returns the share of inputs that leave after each active ramp and the last block, by the problem's survival."""
    problem, plan = simulation.scenario.problem, simulation.scenario.plan
    reach_N = nested_shares(survival_with(problem, plan.used), plan.ramps)
    last = problem.num_blocks - 1
    return {**{ramp: reach_N[ramp] - reach_N[ramp + 1] for ramp in plan.ramps}, last: reach_N[last]}


def _network_answers(simulation: Simulation, figures: Figures) -> list[dict[str, Any]]:
    """Returns for each network of a chain how many answered inputs reached it, and how many it answered.

    `used`: whether the plan uses it. Empty for a single network.
    """
    plan, exits = simulation.scenario.plan, figures.exits
    return [
        {
            "first": first,
            "end": end,
            "used": number in plan.used,
            "reached": sum(count for block, count in exits.items() if block >= first) if number in plan.used else 0,
            "answers": sum(count for block, count in exits.items() if first <= block < end),
        }
        for number, (first, end) in enumerate(pairwise((0, *plan.networks)))
    ]


INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the signal's number, as in shells."""


def run(job: SimulateJob) -> None:
    """Simulates, and prints the result, or after an interrupt the result so far."""
    result = None
    try:
        simulation = prepare(job)
        if isinstance(simulation, NoPlanAnswer):
            print(simulation.message, file=sys.stderr)
            raise typer.Exit(NO_PLAN)
        with progress_share("simulate") as progress:
            result = run_simulation(simulation, progress)
    except KeyboardInterrupt:
        pass  # interrupted before the simulation
    if result is None:
        print("interrupted before there was a result", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    document, tables = result
    print_result(document, lambda: tables, document["notes"], as_json=job.as_json)
    if document["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def _splits_table(simulation: Simulation, figures: Figures) -> Table:
    table = make_table(
        *("stage", "busy", "blocks", "batch", "batches", "fill", "T ms", "planned T ms"),
        title=f"Plan ({plan_source(simulation.job)})",
        narrow=True,
    )
    ran = {(each.first, each.end): each for each in figures.splits}
    planned = {(each.split.first, each.split.end): each for each in simulation.predicted.splits}
    for index, (stage, slot) in enumerate(zip(simulation.scenario.plan.stages, figures.slots, strict=True)):
        for split in stage.splits:
            stage_cells = (f"{index}: {stage.replicas} x {stage.device}", f"{slot.utilisation:.0%}")
            key = (split.first, split.end)
            batch_cells = ("0", "-", "-")
            if key in ran:
                use = ran[key]
                token_fill = None if use.lengths is None else use.lengths.fill
                fill = use.fill if token_fill is None else token_fill  # of the token budget, if there is one
                batch_cells = (f"{use.batches}", f"{fill:.0%}", milliseconds(use.busy_s / use.batches))
            table.add_row(
                *(stage_cells if split is stage.splits[0] else ("", "")),
                f"{split.first}-{split.end - 1}",
                str(split.batch) if split.tokens is None else f"{split.tokens} tokens",
                *batch_cells,
                milliseconds(planned[key].seconds),
            )
    return table


def _sequence_tables(
    expected: SequenceFigures, figures: Mapping[str, Any], exits: Mapping[int, int], *, interrupted: bool
) -> tuple[Table, ...]:
    """Returns a table of figures of sequences, planned and simulated, and a table of tokens by exit."""
    sequences = figures["sequences"]
    title = f"Simulated, {figures['seconds']:.4g} s, {sequences} sequences" + (", INTERRUPTED" if interrupted else "")
    rows = (
        ("tokens", f"{expected.tokens_per_s:.1f}/s at most", f"{figures['tokens_per_s']:.1f}/s"),
        ("within both SLOs", "", f"{figures['in_slo']} sequences, {figures['goodput_per_s']:.2f}/s"),
        ("first token p50", "", _shown(figures["ttft_p50_s"])),
        ("first token p99", f"{milliseconds(expected.ttft_s)} ms at worst", _shown(figures["ttft_p99_s"])),
        ("per token p50", f"{milliseconds(expected.token_s)} ms on average", _shown(figures["tpot_p50_s"])),
        ("per token p99", f"{milliseconds(expected.most_token_s)} ms at worst", _shown(figures["tpot_p99_s"])),
        ("refused", "", f"{figures['refused']} of {sequences}"),
    )
    tokens = sum(exits.values())
    by_exit = ((str(block), str(number), f"{number / tokens:.2%}") for block, number in sorted(exits.items()))
    return (
        make_table("", "planned", "simulated", title=title, rows=rows),
        make_table("after block", "tokens", "share", title="Tokens by exit", rows=by_exit),
    )


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{milliseconds(seconds)} ms"


def _lengths_table(figures: Figures) -> list[Table]:
    """Returns a table of batches if inputs have different lengths."""
    uses = [use for use in figures.splits if use.lengths is not None]
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


def _rows(simulation: Simulation, figures: Figures) -> Iterator[tuple[str, str, str]]:
    predicted, slo_s = simulation.predicted, simulation.scenario.slo_s
    yield "offered", "", f"{figures.offered_per_s:.1f} inputs/s"
    within = f"within {milliseconds(slo_s)} ms"
    yield "goodput", f"{predicted.rate_per_s:.1f}/s at most", f"{figures.goodput_per_s:.1f}/s {within}"
    if simulation.job.inputs_per_request > 1:
        yield "goodput, whole requests", "", f"{figures.request_goodput_per_s:.1f} inputs/s {within}"
    yield "in time", "", f"{figures.in_slo_share:.2%} of inputs"
    worst = f"{milliseconds(predicted.latency_s)} ms at {predicted.served_per_s:.1f}/s"
    for name, latency_s in (("p50", figures.p50_s), ("p95", figures.p95_s), ("p99", figures.p99_s)):
        yield f"latency {name}", worst if name == "p99" else "", _shown(latency_s)
    if not figures.drops:
        yield "dropped", "", "none"
    for reason, number in figures.drops.items():
        yield f"dropped: {reason}", "", f"{number} ({number / figures.inputs:.2%})" if figures.inputs else f"{number}"
    yield "utilisation", "", f"{figures.utilisation:.1%}"
    yield "cost", f"{predicted.usd_per_hour:.2f} USD/h", f"{figures.usd_per_hour:.2f} USD/h"


def _networks_table(networks: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Returns a table of the answers of each network, if there are several."""
    rows = (
        (
            str(number),
            f"{each['first']}-{each['end'] - 1}" + ("" if each["used"] else ", left out"),
            str(each["reached"]),
            str(each["answers"]),
            f"{each['answers'] / each['reached']:.2%}" if each["reached"] else "-",
        )
        for number, each in enumerate(networks)
    )
    names = ("network", "blocks", "reached by", "answers", "returned")
    return [make_table(*names, title="Answers by network", rows=rows)] if networks else []


def _exits_table(simulation: Simulation, figures: Figures) -> Table:
    planned = predicted_exits(simulation)
    table = make_table("after block", "planned", "simulated", "answers", title="Answers by exit")
    for block in sorted({*planned, *figures.exits}):
        answers = figures.exits.get(block, 0)
        share = f"{answers / figures.answered:.2%}" if figures.answered else "-"
        table.add_row(str(block), f"{planned.get(block, 0.0):.2%}", share, str(answers))
    return table
