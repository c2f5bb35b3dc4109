"""`offramp plan` and `offramp what-if`: plans and what-ifs as tables, times in milliseconds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from earlyexit.errors import InputError
from offramp.cli.fields import takes_fields
from offramp.cli.options import AsJson, in_a_folder, integers, numbers, show

if TYPE_CHECKING:
    from offramp.commands.jobs import PlanJob, WhatIfJob
    from offramp.commands.plan import NoPlanAnswer, PlanAnswer
    from optimizer.what_if import Axis

NO_PLAN = 3
"""Exit status where the problem is sound and no plan meets it."""


@takes_fields("offramp.commands.jobs:PlanJob")
def plan(job: PlanJob, as_json: AsJson = False) -> None:
    """Find the best plan for a problem file: what runs where, at which batch, with which ramps on.

    Exit status 3: no plan meets the problem; the answer says what binds and what would do.
    """
    from offramp.commands.order import order_option
    from offramp.commands.plan import NoPlanAnswer, best_answer, serving_plan
    from optimizer.planner import solve
    from optimizer.problem_file import read_problems
    from optimizer.what_if import with_batch_limit

    order = order_option(job.order)
    in_a_folder("out", job.out)
    in_a_folder("plot", job.plot)
    if job.plot is not None:
        from offramp.cli.plan_picture import check_picture

        check_picture(job.plot)
    files = read_problems(job.problem)
    if job.batch_limit is not None:
        files = tuple(replace(file, problem=with_batch_limit(file.problem, job.batch_limit)) for file in files)
    if order is not None:
        files = tuple(replace(file, order=order) for file in files)
    file, found = best_answer(files, job.strategy, solve, compared=None if job.compared else ())
    if isinstance(found, NoPlanAnswer):
        _print(found, as_json=as_json)
        raise typer.Exit(NO_PLAN)
    if job.out is not None:
        from optimizer.plan_file import write_plan

        write_plan(serving_plan(file, found.planned, job.threshold), job.out)
    if job.plot is not None:
        from offramp.cli.plan_picture import draw_plan

        draw_plan(found.planned, job.plot)
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


@takes_fields("offramp.commands.jobs:WhatIfJob")
def what_if(job: WhatIfJob, as_json: AsJson = False) -> None:
    """Plan a problem again and again with one number changed; give exactly one of the options."""
    from offramp.cli.plan_tables import what_if_table
    from offramp.commands.plan import what_if as planned
    from offramp.commands.plan import what_if_document
    from optimizer.planner import solve
    from optimizer.problem_file import read_problem

    axis = _axis(job)
    asked = read_problem(job.problem).problem
    rows = planned(asked, axis, solve)
    if as_json:
        for value, decisions in rows:
            print(json.dumps(what_if_document(asked, axis, value, decisions)), flush=True)
        return
    show(what_if_table(asked, axis, list(rows)))


def _axis(job: WhatIfJob) -> Axis:
    from optimizer.what_if import Axis

    given = {name.replace("_", "-"): value for name, value in job if name != "problem"}
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
