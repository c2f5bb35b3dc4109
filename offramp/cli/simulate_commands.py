"""The command of the simulator: parses, calls, prints. Registered on the app of `offramp.cli.app`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from earlyexit.errors import InputError
from offramp.cli.options import STRATEGY_NAMES, AsJson, ProblemFilePath, Seed, choice, completes
from offramp.cli.plan_commands import NO_PLAN

if TYPE_CHECKING:
    from offramp.jobs.simulating import Simulated, SimulateJob

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the signal's number, as shells have it."""
MOST_INGRESSES = 1000

commands = typer.Typer()


@commands.command()
def simulate(
    problem: ProblemFilePath,
    arrivals: Annotated[
        str, typer.Option(help="poisson:9000, uniform:, gamma:9000,cv=2, mmpp:1000,peak=5000,..., or trace:FILE.")
    ],
    plan: Annotated[
        Path | None, typer.Option(help="Plan file, or what `offramp plan --json` printed; default: the planner's.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Of the planner's plan: best, stock, early-exit, e3, serial; default: best.",
            **completes(STRATEGY_NAMES),
        ),
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds in which requests arrive.")] = 60.0,
    warm_up: Annotated[float, typer.Option(help="Seconds of them, from the start, that are not counted.")] = 1.0,
    records: Annotated[
        Path | None,
        typer.Option(help="Exit records, .npz, .csv or .tsv; default: inputs that leave as the survival says."),
    ] = None,
    thresholds: Annotated[
        str | None,
        typer.Option(
            help="With records: leave at this score, at 0=0.4,3=0.2 by ramp, or by a calibration.json; "
            "default: the plan's policy."
        ),
    ] = None,
    inputs_per_request: Annotated[int, typer.Option(min=1)] = 1,
    ingresses: Annotated[int, typer.Option(min=1, max=MOST_INGRESSES)] = 1,
    admission: Annotated[
        bool, typer.Option("--admission/--no-admission", help="Refuse at once what would be late.")
    ] = True,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Play arrivals against a plan: goodput, latency, drops, fill, utilisation and cost.

    Exit status 3: no plan meets the problem. 130: interrupted; what was simulated by then is printed.
    """
    if plan is not None and strategy is not None:
        raise InputError("--plan and --strategy exclude each other: a file's plan is not the planner's")
    from offramp.jobs.simulated_plan import thresholds_option
    from offramp.jobs.simulating import SimulateJob
    from optimizer.decision import STRATEGIES

    job = SimulateJob(
        problem=problem,
        plan=plan,
        strategy=choice("strategy", strategy or "best", STRATEGIES),
        arrivals=arrivals,
        duration_s=duration,
        warm_up_s=warm_up,
        records=records,
        thresholds=None if thresholds is None else thresholds_option(thresholds),
        inputs_per_request=inputs_per_request,
        num_ingresses=ingresses,
        admission=admission,
        seed=seed,
    )
    try:
        _simulate(job, as_json=as_json)
    except KeyboardInterrupt:
        print("interrupted before there was anything to print", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _simulate(job: SimulateJob, *, as_json: bool) -> None:
    from offramp.jobs.planning import NoPlanAnswer
    from offramp.jobs.simulating import prepare, run

    simulation = prepare(job)
    if isinstance(simulation, NoPlanAnswer):
        print(simulation.message, file=sys.stderr)
        raise typer.Exit(NO_PLAN)
    with _bar() as progress:
        simulated = run(simulation, progress)
    if simulated is None:
        raise KeyboardInterrupt
    _print(simulated, as_json=as_json)
    if simulated.figures.interrupted:
        raise typer.Exit(INTERRUPTED)


def _print(simulated: Simulated, *, as_json: bool) -> None:
    if as_json:
        from offramp.jobs.simulating import simulated_document

        print(json.dumps(simulated_document(simulated)))
        return
    from rich.console import Console

    from offramp.cli.report_simulate import simulate_tables

    Console().print(*simulate_tables(simulated))
    for note in simulated.notes:
        print(note)


@contextmanager
def _bar() -> Iterator[Callable[[float], None]]:
    """Takes the share that is done; draws on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("simulate", total=1.0)
        yield lambda share: bars.update(task, completed=share)
