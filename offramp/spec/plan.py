"""A service's plan problem and its first plan, in the file's seconds, and the problem in wall-clock seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster.inventory import lacking
from earlyexit.errors import InputError
from offramp.commands.plan import NoPlanAnswer, Solve, answer
from offramp.spec.model import ServiceParts, bytes_per_sample, slowed, with_rows
from optimizer.batches_file import with_recorded_batches
from optimizer.evaluate import promised
from optimizer.lengths_file import lengths_of, stayers_length_N
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan
from optimizer.plan_file import ModelShape, order_of, read_plan
from optimizer.problem import Link, MinimizeCost, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.problem_file import ProblemFile, objective_of
from optimizer.tokens import in_tokens
from optimizer.what_if import with_batch_limit
from profiles.networks import survival_of

CROSSING_S = 0.0005
"""Of a chain, until survivors are on their way to the next network: 0.46 ms is the median of four texts, on two busy
cores (`experiments.costs.crossings@654e280`). By a clock, also where accelerators are emulated on a slower one."""


def service_problem(parts: ServiceParts) -> PlanProblem:
    """Returns the problem for the planner, in the file's seconds."""
    _check_generating(parts)
    document, card, thresholds = parts.document, parts.card, parts.exits.thresholds
    ramps, link, budget = tuple(thresholds), parts.inventory.link, document.planner.budget
    with parts.source.said_at(("planner", "objective")):
        objective = objective_of(document.planner.objective, "planner.objective")
    devices, by_price = parts.inventory.devices, isinstance(objective, MinimizeCost) or budget is not None
    unpriced = [name for name in parts.inventory.counts if devices[name].usd_per_hour is None]
    with parts.source.said_at(("cluster", "devices", *unpriced[:1])):
        if by_price and unpriced:
            raise InputError(f"plans are made by cost, and {', '.join(unpriced)} has no usd_per_hour")
    with parts.source.said_at(("model",)):
        problem = PlanProblem(
            num_blocks=card.num_blocks,
            ramps=ramps,
            survival_N=parts.exits.records.outcome(thresholds).survival,
            latency={name: with_rows(table, card.ramps, ramps) for name, table in parts.tables.items()},
            devices={
                name: Supply(count=count, usd_per_hour=devices[name].usd_per_hour or 0.0)
                for name, count in parts.inventory.counts.items()
            },
            link=Link(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, delay_s=link.delay_s),
            bytes_per_sample_N=bytes_per_sample(document.model, card),
            slo=Slo(latency_s=document.slo.latency_s, slack=document.slo.slack),
            objective=objective,
            budget_usd_per_hour=None if budget is None else budget.usd_per_hour,
            networks=card.chain.networks,
            survival_of=None
            if card.chain.is_one
            else survival_of(parts.exits.records, thresholds, card.chain, parts.exits.alone),
            crossing_s=0.0 if card.chain.is_one else CROSSING_S / parts.inventory.time_scale,
            crossing_tokens=parts.exits.kept,
        )
    problem = _with_lengths(problem, parts)
    if document.planner.strategy == "pame":
        problem = with_recorded_batches(problem, parts.exits.records, thresholds)
    limit = document.planner.batch_limit
    with parts.source.said_at(("planner", "batch_limit")):
        return problem if limit is None else with_batch_limit(problem, limit)


def _check_generating(parts: ServiceParts) -> None:
    """Raises InputError for options that are not planned for models that generate."""
    if not parts.card.generates:
        return
    planner, why = parts.document.planner, "of a model that generates, whose inputs are steps of sequences"
    with parts.source.said_at(("lengths",)):
        if parts.document.lengths is not None:
            raise InputError(f"lengths are not {why}: `generation` in a problem file has those of prompts and answers")
    with parts.source.said_at(("planner", "objective")):
        if isinstance(objective_of(planner.objective, "planner.objective"), MinimizeLatency):
            raise InputError(f"least latency is not planned {why}; the highest rate, or the least cost, is")
    with parts.source.said_at(("planner", "strategy")):
        if planner.strategy in ("apparate", "pame"):
            raise InputError(f"strategy {planner.strategy} is not {why}: they are planned for early answers alone")


def _with_lengths(problem: PlanProblem, parts: ServiceParts) -> PlanProblem:
    """Returns the problem with the file's lengths, if any; raises InputError for impossible lengths."""
    document, card, exits = parts.document, parts.card, parts.exits
    if document.lengths is None:
        return problem
    with parts.source.said_at(("planner", "strategy")):
        if document.planner.strategy == "pame":
            raise InputError("strategy pame plans by recorded batches, counted in inputs; leave lengths out")
    with parts.source.said_at(("lengths",)):
        if not card.has_tokens:
            raise InputError("lengths: the model's inputs have no tokens; leave lengths out")
    lengths = lengths_of(document.lengths, parts.source, parts.base)
    with parts.source.said_at(("lengths",)):
        longest = lengths.mean if lengths.longest is None else lengths.longest
        if longest > card.max_length:
            raise InputError(f"lengths: an input of {longest:g} tokens; the model takes at most {card.max_length}")
        longer_N = stayers_length_N(exits.records, exits.thresholds)
        problem = replace(problem, lengths=lengths, stayers_length_N=longer_N)
        in_tokens(problem)  # whether batches that hold such inputs were measured
    return problem


def first_plan(parts: ServiceParts, problem: PlanProblem, solve: Solve) -> Plan:
    """Returns the first plan: the file's, or the best one.

    Its order of inputs, and its dispatch, are those that every later plan takes over.
    """
    planner = parts.document.planner
    given = None if planner.plan is None else _given_plan(parts, parts.base / planner.plan)
    plan = given or _solved(parts, problem, solve)
    if planner.dispatch is not None:
        plan = replace(plan, dispatch=planner.dispatch)
    if planner.order is None:
        return plan
    with parts.source.said_at(("planner", "order")):
        return replace(plan, order=order_of(planner.order))


def _solved(parts: ServiceParts, problem: PlanProblem, solve: Solve) -> Plan:
    exits = parts.exits
    file = ProblemFile(problem=problem, records=exits.records, alone=exits.alone, thresholds=exits.thresholds)
    found = answer(file, parts.document.planner.strategy, solve, compared=())
    if isinstance(found, NoPlanAnswer):
        with parts.source.said_at(("slo",)):
            raise InputError(found.message)
    figures, scale = found.planned.figures, parts.inventory.time_scale
    on_clock = replace(
        figures,
        rate_per_s=figures.rate_per_s / scale,
        latency_s=figures.latency_s * scale,
        mean_latency_s=figures.mean_latency_s * scale,
    )
    predicted = promised(problem, on_clock)
    return Plan(
        stages=found.planned.stages,
        shares=figures.shares,
        policy=exits.policy,
        predicted=predicted,
        networks=problem.networks,
        prune=exits.prune,
    )


def _given_plan(parts: ServiceParts, path: Path) -> Plan:
    card = parts.card
    plan = read_plan(path, ModelShape.of(card))
    policy = plan.policy or parts.exits.policy
    with parts.source.said_at(("planner", "plan")):
        missing = lacking(PlacedPlan(plan=plan).occupied, parts.inventory)
        if missing:
            listed = ", ".join(f"{count} {name}" for name, count in missing.items())
            raise InputError(f"{path} needs {listed} more than the cluster has")
        unknown = sorted(set(plan.ramps) - set(parts.exits.thresholds)) if parts.document.planner.control else []
        if unknown:
            raise InputError(
                f"{path} has ramps {unknown}; the controller has thresholds for {[*parts.exits.thresholds]}"
            )
        if parts.exits.policy.name == "recorded" and policy.name != "recorded":
            raise InputError(
                f"{path} leaves by {policy.name}; emulated accelerators answer from exit records: recorded"
            )
    return replace(plan, policy=policy)


def stretched(problem: PlanProblem, scale: float) -> PlanProblem:
    """Returns the problem with every second stretched to `scale` seconds, as an emulated cluster runs by the clock."""
    if problem.asked_per_s is not None:
        problem = problem.with_rate(problem.asked_per_s / scale)
    return replace(
        problem,
        latency={name: slowed(table, scale) for name, table in problem.latency.items()},
        link=Link(
            bandwidth_bytes_per_s=problem.link.bandwidth_bytes_per_s / scale, delay_s=problem.link.delay_s * scale
        ),
        slo=replace(problem.slo, latency_s=problem.slo.latency_s * scale),
        crossing_s=problem.crossing_s * scale,
    )
