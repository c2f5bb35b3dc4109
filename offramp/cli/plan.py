"""`offramp plan` and `offramp what-if`: plans and what-ifs as tables, times in milliseconds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from earlyexit.errors import InputError
from offramp.cli.options import (
    STRATEGY_NAMES,
    AsJson,
    OrderOf,
    ProblemFilePath,
    choice,
    completes,
    from_zero,
    in_a_folder,
    integers,
    numbers,
    show,
)

if TYPE_CHECKING:
    from offramp.commands.plan import NoPlanAnswer, PlanAnswer
    from optimizer.what_if import Axis

NO_PLAN = 3
"""Exit status where the problem is sound and no plan meets it."""


def plan(
    problem: ProblemFilePath,
    strategy: Annotated[
        str,
        typer.Option(
            help=f"{STRATEGY_NAMES[0]}, or a part of it: {', '.join(STRATEGY_NAMES[1:])}.", **completes(STRATEGY_NAMES)
        ),
    ] = "best",
    batch_limit: Annotated[int | None, typer.Option(min=1, help="Largest batch size that a plan may use.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the plan: .svg, .png or .pdf.")] = None,
    out: Annotated[Path | None, typer.Option(help="Plan file for `offramp serve --plan`.")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(callback=from_zero, help="For --out: leave at this entropy, in nats, at every active ramp."),
    ] = None,
    order: OrderOf = None,
    compared: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Plan the other strategies too, and compare.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for a problem file: what runs where, at which batch, with which ramps on.

    Exit status 3: no plan meets the problem; the answer says what binds and what would do.
    """
    from offramp.commands.plan import NoPlanAnswer, best_answer, order_option, serving_plan
    from optimizer.planner import solve
    from optimizer.problem_file import read_problems
    from optimizer.what_if import with_batch_limit

    if threshold is not None and out is None:
        raise InputError("--threshold: only a plan that is written with --out needs one")
    wanted_order = order_option(order)
    if wanted_order is not None and out is None:
        raise InputError("--order: only a plan that is written with --out has one")
    in_a_folder("out", out)
    in_a_folder("plot", plot)
    wanted = choice("strategy", strategy, STRATEGY_NAMES)
    if plot is not None:
        from offramp.cli.plan_picture import check_picture

        check_picture(plot)
    files = read_problems(problem)
    if batch_limit is not None:
        files = tuple(replace(file, problem=with_batch_limit(file.problem, batch_limit)) for file in files)
    if wanted_order is not None:
        files = tuple(replace(file, order=wanted_order) for file in files)
    file, found = best_answer(files, wanted, solve, compared=None if compared else ())
    if isinstance(found, NoPlanAnswer):
        _print(found, as_json=as_json)
        raise typer.Exit(NO_PLAN)
    if out is not None:
        from optimizer.plan_file import write_plan

        write_plan(serving_plan(file, found.planned, threshold), out)
    if plot is not None:
        from offramp.cli.plan_picture import draw_plan

        draw_plan(found.planned, plot)
    _print(found, as_json=as_json)


def _print(found: PlanAnswer | NoPlanAnswer, *, as_json: bool) -> None:
    from offramp.cli.plan_tables import no_plan_tables, plan_tables
    from offramp.commands.plan import NoPlanAnswer, answer_document

    if as_json:
        print(json.dumps(answer_document(found)))
    elif isinstance(found, NoPlanAnswer):
        print(found.message, file=sys.stderr)
        show(*no_plan_tables(found))
    else:
        show(*plan_tables(found))


def what_if(
    problem: ProblemFilePath,
    slo_ms: Annotated[str | None, typer.Option(help="SLOs in ms, like 25,50,100.")] = None,
    batch_limit: Annotated[str | None, typer.Option(help="Largest batch sizes, like 1,2,4,8.")] = None,
    budget: Annotated[str | None, typer.Option(help="Budgets in USD per hour, like 10,20.")] = None,
    count: Annotated[str | None, typer.Option(help="Numbers of one device, like V100=4,8,16.")] = None,
    rate: Annotated[
        str | None, typer.Option(help="Rates per second, like 1000,2000; at the least cost where none is asked for.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a problem again and again with one number changed; give exactly one of the options."""
    from offramp.cli.plan_tables import what_if_table
    from offramp.commands.plan import what_if as planned
    from offramp.commands.plan import what_if_document
    from optimizer.planner import solve
    from optimizer.problem_file import read_problem

    axis = _axis(slo_ms=slo_ms, batch_limit=batch_limit, budget=budget, count=count, rate=rate)
    asked = read_problem(problem).problem
    rows = planned(asked, axis, solve)
    if as_json:
        for value, decisions in rows:
            print(json.dumps(what_if_document(asked, axis, value, decisions)), flush=True)
        return
    show(what_if_table(asked, axis, list(rows)))


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
