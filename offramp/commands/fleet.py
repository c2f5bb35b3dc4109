"""`offramp fleet`: divides the accelerators of a cluster among several models, and plans each model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from earlyexit.errors import InputError, PlanError, raising
from offramp.commands.options import FleetJob, check_output_file
from offramp.commands.output import make_table, milliseconds, new_folder, print_result, rate_text
from offramp.commands.plan import NO_PLAN, PlanAnswer, announce_compilation, answer_document, serving_plan, stage_table
from optimizer.cost.evaluate import best_value, evaluate
from optimizer.cost.explain import no_plan_text
from optimizer.plans.plan_file import read_plan, write_plan
from optimizer.problems.fleet import Fleet, FleetModel, read_fleet
from optimizer.problems.problem import MaximizeRate, MinimizeCost
from optimizer.search.decision import NoPlan, Planned, gap_between
from optimizer.search.fleet.solve import solve_fleet
from optimizer.search.planner import solve


def run(job: FleetJob) -> None:
    """Plans all models, writes the requested plan files, and prints the plans."""
    fleet, files = read_fleet(job.fleet)
    paths = {} if job.out is None else {name: job.out / f"{name}.yaml" for name in files}
    with nullcontext() if job.out is None else new_folder(job.out):
        _check_outputs(paths.values())
        announce_compilation()
        division = solve_fleet(fleet, time_limit_s=job.time_limit_s)
        value = abs(division.merit(fleet))
        if value == best_value(fleet.problems[0], []):  # a share of 0, or an infinite cost
            print(_why_none(fleet, division.bound, job.time_limit_s), file=sys.stderr)
            raise typer.Exit(NO_PLAN)
        gap, shares = gap_between(value, division.bound), list[float]()
        answers = {}
        for (name, file), stages in zip(files.items(), division.stages, strict=True):
            figures = evaluate(file.problem, stages)
            shares.append(figures.rate_per_s / fleet.models[name].rate_per_s)
            part = figures.usd_per_hour / (value or 1.0) if fleet.is_cost else fleet.models[name].rate_per_s
            planned = Planned(strategy="best", stages=stages, figures=figures, bound=division.bound * part, gap=gap)
            answers[name] = PlanAnswer(file=file, decision=planned, baselines={})
        for path, plan in {path: serving_plan(answers[name], job.threshold) for name, path in paths.items()}.items():
            write_plan(plan, path)
    usd_per_hour = sum(each.planned.figures.usd_per_hour for each in answers.values())
    figures_of_all = {"share": min(shares), "bound": division.bound, "gap": gap, "usd_per_hour": usd_per_hour}
    models = {name: answer_document(each) for name, each in answers.items()}
    asked = {name: model.rate_per_s for name, model in fleet.models.items()}
    document = {**figures_of_all, "asked_per_s": asked, "models": models}
    print_result(document, lambda: list(_tables(document, answers)), as_json=job.as_json)


def _why_none(fleet: Fleet, bound: float, time_limit_s: float) -> str:
    """Returns why no division that serves all models was found; `bound` is a bound on the share or the cost.

    Raises PlanError if time is over before a reason is known.
    """
    asked, share = fleet.models, 0.0
    if fleet.is_cost:
        fastest = [replace(problem, objective=MaximizeRate()) for problem in fleet.problems]
        fleet = replace(fleet, models=dict(zip(fleet.models, map(FleetModel, fastest, fleet.rate_M), strict=True)))
        highest = solve_fleet(fleet, time_limit_s=time_limit_s)
        share, bound = highest.merit(fleet), highest.bound
    can_serve = f"the devices can serve each model at {share:.4g} times its rate"
    none = f"no division was found that serves all models at their rates; {can_serve}"
    if 0 < share < 1:
        return none
    for name, (problem, _) in (asked if share else fleet.models).items():  # at low rates, batches may fill too slowly
        decision = solve(problem, time_limit_s=time_limit_s / len(asked))
        if isinstance(decision, NoPlan):
            return f"model {name!r}, even with all devices: {no_plan_text(problem, decision)}"
    if share:
        return f"{none}, at which batches fill sooner"
    if bound > 0:
        return f"no division that serves all models was found, though there may be one with a share of {bound:.4g}"
    return "no plan: each model could be served alone, but the devices are too few for all of them"


def _check_outputs(paths: Iterable[Path]) -> None:
    """Raises InputError for a file that cannot be written, or that is no plan, such as a problem file."""
    for path in paths:
        check_output_file(path, "out")
        with raising(InputError, f"--out would overwrite {path}, which is not a plan; name another folder", PlanError):
            if path.is_file():
                read_plan(path)


def _tables(document: Mapping[str, Any], answers: Mapping[str, PlanAnswer]) -> Iterator[Table]:
    """Yields a table of all models, with the share, and a table of each model's stages."""
    rows = [
        (
            name,
            rate_text(document["asked_per_s"][name]),
            rate_text(each.planned.figures.rate_per_s),
            milliseconds(each.planned.figures.latency_s),
            milliseconds(each.file.problem.slo.limit_s),
            f"{each.planned.figures.usd_per_hour:.2f}" if each.file.problem.max_usd_per_hour else "-",
        )
        for name, each in answers.items()
    ]
    within = f"within {max(document['gap'], 1e-4):.2%} of the best" if document["gap"] else "no division is better"
    served = f"Each model can be served {document['share']:.4g} times its rate"
    if isinstance(next(iter(answers.values())).file.problem.objective, MinimizeCost):
        served = f"All models are served for {document['usd_per_hour']:.2f} USD/h"
    caption = f"{served} ({within})"
    yield make_table(
        "model", "asked /s", "rate /s", "latency ms", "allowed ms", "USD/h", title="Fleet", rows=rows, caption=caption
    )
    for name, each in answers.items():
        yield stage_table(name, each.planned)
