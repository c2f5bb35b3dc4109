"""The commands around the planner: parses, calls, prints. Registered on the app of `offramp.cli.app`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError
from offramp.cli.options import (
    BACKENDS,
    DTYPES,
    STRATEGY_NAMES,
    AsJson,
    Backend,
    Dtype,
    ModelFolder,
    ProblemFilePath,
    Seed,
    above_zero,
    choice,
    completes,
    from_zero,
    in_a_folder,
    integers,
    numbers,
)

if TYPE_CHECKING:
    from offramp.jobs.planning import NoPlanAnswer, PlanAnswer
    from optimizer.what_if import Axis

NO_PLAN = 3
"""Exit status where the problem is sound and no plan meets it."""

commands = typer.Typer()


@commands.command()
def profile(
    model: ModelFolder,
    out: Annotated[Path, typer.Option(help="Latency profile to write, .json: what a plan problem names.")],
    device: Annotated[str, typer.Option(help="cpu, cuda, or the accelerator type that cuda is here.")] = "cpu",
    backend: Backend = "torch",
    dtype: Dtype = "float32",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8,16",
    lengths: Annotated[
        str | None, typer.Option(help="Tokens per input; default: 16,32,64, or 1 where inputs have none.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU replica.")] = 1,
    seed: Seed = 0,
    jsonl: Annotated[Path | None, typer.Option(help="Every measured point, one JSON line each.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the seconds of every block and ramp of a model on this machine."""
    from offramp.jobs.profiling import ProfileJob, profile_figures, profile_model, write_points
    from offramp.jobs.progress import progress_bars

    in_a_folder("out", out)
    in_a_folder("jsonl", jsonl)
    if jsonl is not None and jsonl.resolve() == out.resolve():
        raise InputError(f"--out and --jsonl are both {out}; two files are needed")
    job = ProfileJob(
        device=device,
        backend=choice("backend", backend, BACKENDS),
        dtype=choice("dtype", dtype, DTYPES),
        batches=integers("batches", batches),
        lengths=None if lengths is None else integers("lengths", lengths),
        repeats=repeats,
        threads=threads,
        seed=seed,
    )
    with progress_bars() as progress:
        measured, points = profile_model(model, job, progress=progress)
    measured.save(out)
    if jsonl is not None:
        write_points(points, jsonl)
    _print_profile(profile_figures(measured), out, as_json=as_json)


@commands.command()
def forecast(
    series: Annotated[
        Path,
        typer.Argument(help="Past windows, oldest first: .json, or .csv with columns inputs, 0, 1, ..."),
    ],
    coverage: Annotated[float, typer.Option(help="Chance that a level lies in its interval.")] = 0.8,
    window_s: Annotated[
        float | None, typer.Option(callback=above_zero, help="Length of a window; given, the rate is forecast too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast the next window's survival at every block, with intervals."""
    from offramp.jobs.forecasting import forecast_document, rate_document, read_series, window_rates
    from profiles.forecast import forecast_survival
    from profiles.rates import forecast_rate

    history = read_series(series)
    found = forecast_document(forecast_survival(history, coverage=coverage))
    if window_s is not None:
        rates_W = window_rates(history, window_s)
        found["rate"] = rate_document(forecast_rate(rates_W, coverage=coverage, window_s=window_s))
    _print_forecast(found, as_json=as_json)


@commands.command()
def plan(
    problem: ProblemFilePath,
    strategy: Annotated[
        str, typer.Option(help="best, or a part of it: stock, early-exit, e3, serial.", **completes(STRATEGY_NAMES))
    ] = "best",
    batch_limit: Annotated[int | None, typer.Option(min=1, help="Largest batch size that a plan may use.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the plan: .svg, .png or .pdf.")] = None,
    out: Annotated[Path | None, typer.Option(help="Plan file for `offramp serve --plan`.")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(callback=from_zero, help="For --out: leave at this entropy, in nats, at every active ramp."),
    ] = None,
    compared: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Plan the other strategies too, and compare.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for a problem file: what runs where, at which batch, with which ramps on.

    Exit status 3: no plan meets the problem; the answer says what binds and what would do.
    """
    from offramp.jobs.planning import NoPlanAnswer, answer, serving_plan
    from optimizer.decision import STRATEGIES
    from optimizer.planner import solve
    from optimizer.problem_file import read_problem
    from optimizer.what_if import with_batch_limit

    if threshold is not None and out is None:
        raise InputError("--threshold: only a plan that is written with --out needs one")
    in_a_folder("out", out)
    in_a_folder("plot", plot)
    wanted = choice("strategy", strategy, STRATEGIES)
    if plot is not None:
        from offramp.cli.plan_picture import check_picture

        check_picture(plot)
    file = read_problem(problem)
    if batch_limit is not None:
        file = replace(file, problem=with_batch_limit(file.problem, batch_limit))
    found = answer(file, wanted, solve, compared=STRATEGIES if compared else ())
    if isinstance(found, NoPlanAnswer):
        _print_no_plan(found, as_json=as_json)
        raise typer.Exit(NO_PLAN)
    if out is not None:
        from optimizer.plan_file import write_plan

        write_plan(serving_plan(file, found.planned, threshold), out)
    if plot is not None:
        from offramp.cli.plan_picture import draw_plan

        draw_plan(found.planned, plot)
    _print_plan(found, as_json=as_json)


@commands.command(name="what-if")
def what_if(
    problem: ProblemFilePath,
    slo_ms: Annotated[str | None, typer.Option(help="SLOs in ms, like 25,50,100.")] = None,
    batch_limit: Annotated[str | None, typer.Option(help="Largest batch sizes, like 1,2,4,8.")] = None,
    budget: Annotated[str | None, typer.Option(help="Budgets in USD per hour, like 10,20.")] = None,
    count: Annotated[str | None, typer.Option(help="Numbers of one device, like V100=4,8,16.")] = None,
    rate: Annotated[str | None, typer.Option(help="Rates per second at the least cost, like 1000,2000.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a problem again and again with one number changed; give exactly one of the options."""
    from offramp.jobs.planning import what_if as planned
    from offramp.jobs.planning import what_if_document
    from optimizer.planner import solve
    from optimizer.problem_file import read_problem

    axis = _axis(slo_ms=slo_ms, batch_limit=batch_limit, budget=budget, count=count, rate=rate)
    asked = read_problem(problem).problem
    rows = planned(asked, axis, solve)
    if as_json:
        for value, decisions in rows:
            print(json.dumps(what_if_document(axis, value, decisions)), flush=True)
        return
    from rich.console import Console

    from offramp.cli.report_plan import what_if_table

    Console().print(what_if_table(asked, axis, list(rows)))


def _axis(
    *, slo_ms: str | None, batch_limit: str | None, budget: str | None, count: str | None, rate: str | None
) -> Axis:
    from optimizer.what_if import Axis

    given = {"slo-ms": slo_ms, "batch-limit": batch_limit, "budget": budget, "count": count, "rate": rate}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        options = ", ".join(f"--{name}" for name in named or given)
        raise InputError(f"give exactly one of the options that change a number, not {len(named)}: {options}")
    [(name, value)] = named.items()
    match name:
        case "slo-ms":
            return Axis(name="slo_s", values=tuple(each / 1000 for each in numbers(name, value)))
        case "batch-limit":
            return Axis(name="batch_limit", values=integers(name, value))
        case "budget":
            return Axis(name="usd_per_hour", values=numbers(name, value, zero=True))
        case "rate":
            return Axis(name="rate_per_s", values=numbers(name, value))
        case _:
            device, _, counts = value.partition("=")
            if not device or not counts:
                raise InputError(f"--count {value!r}; a device and its numbers are needed, like V100=4,8,16")
            return Axis(name="count", values=integers("count", counts), device=device)


def _print_profile(figures: dict[str, Any], out: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    from rich.console import Console

    from offramp.cli.report_profile import noise_text, profile_table

    Console().print(profile_table(figures))
    print(noise_text(figures))
    print(f"latency profile: {out}")


def _print_forecast(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console

    from offramp.cli.report_forecast import forecast_table, rate_text

    Console().print(forecast_table(found))
    if "rate" in found:
        print(rate_text(found["rate"], found["coverage"]))


def _print_plan(found: PlanAnswer, *, as_json: bool) -> None:
    from offramp.jobs.planning import answer_document

    if as_json:
        print(json.dumps(answer_document(found)))
        return
    from rich.console import Console

    from offramp.cli.report_plan import plan_tables

    Console().print(*plan_tables(found))


def _print_no_plan(found: NoPlanAnswer, *, as_json: bool) -> None:
    from offramp.jobs.planning import answer_document

    if as_json:
        print(json.dumps(answer_document(found)))
        return
    from rich.console import Console

    from offramp.cli.report_plan import no_plan_tables

    print(found.message, file=sys.stderr)
    Console().print(*no_plan_tables(found))
