"""Explains results of the planner as text: the bottlenecks of a plan, and the reason why no plan exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from itertools import pairwise
from typing import Literal

from optimizer.cost.evaluate import TOLERANCE, Evaluation, milliseconds, objective_value
from optimizer.generation.steps import generation_of
from optimizer.plans.plan import Stage, chains_of, replicas_of
from optimizer.problems.networks import subproblem_of, survival_with
from optimizer.problems.problem import MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, nested_shares
from optimizer.search.decision import NoPlan, Planned

AT_ITS_LIMIT = 0.02
"""A latency this close to its limit is reported as a bottleneck. Batch sizes are discrete, so few plans reach it."""
SAME_RATE = 1e-6

BottleneckKind = Literal["ingress", "stage", "hop", "latency", "devices", "budget", "ramps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """A limit that keeps a plan from being better."""

    kind: BottleneckKind
    text: str
    """A sentence with the numbers."""
    stage_index: int | None = None
    """The stage, or the stage before the hop."""


def answered_by(problem: PlanProblem, stages: Sequence[Stage]) -> dict[int, float]:
    """Returns, per used network, the share of inputs that it answers. Empty if the problem has a single network."""
    if not problem.networks:
        return {}
    used = subproblem_of(problem, stages).used
    ramps = [ramp for stage in stages for split in stage.splits for ramp in split.ramps]
    unanswered_N = nested_shares(survival_with(problem, used), ramps)
    starts = (0, *problem.networks)
    entering = [unanswered_N[starts[network]] for network in used]
    return {network: share - rest for network, (share, rest) in zip(used, pairwise((*entering, 0.0)), strict=True)}


def bottlenecks(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> Iterator[Bottleneck]:
    """Yields the stages and hops that determine the rate or the cost, and the limits that are reached."""
    ingress = problem.ingress
    if ingress is not None and isinstance(problem.objective, MaximizeRate) and figures.rate_per_s == ingress.most_per_s:
        yield Bottleneck(kind="ingress", text=f"{ingress.words}: a higher rate needs more ingress.replicas")
    yield from _slow_stages(problem, stages, figures)
    if not isinstance(problem.objective, MinimizeCost):
        yield from _budget_limit(problem, stages, figures)
    yield from _ramp_limit(problem, figures)
    limit_s = problem.slo.limit_s
    if figures.latency_s >= limit_s * (1 - AT_ITS_LIMIT):
        text = f"the latency of {milliseconds(figures.latency_s)} is at its limit of {milliseconds(limit_s)}"
        yield Bottleneck(kind="latency", text=text)
    for device, supply in problem.devices.items():
        if supply.count and replicas_of(stages)[device] == supply.count:
            yield Bottleneck(kind="devices", text=f"all {supply.count} {device} are used")


def _slow_stages(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> Iterator[Bottleneck]:
    """Yields the stages and hops that limit the rate of their chain.

    If the cost is minimized, these are the stages that, hop included, need all of their replicas. If the latency is
    minimized, they are the stages that are nearly saturated and could not have smaller batches.
    """
    chains = chains_of(stages)
    rates = [share * figures.served_per_s for share, chain in zip(figures.shares, chains, strict=True) for _ in chain]
    for index, (stage, each, rate_per_s) in enumerate(zip(stages, figures.stages, rates, strict=True)):
        fewer_per_s = min(each.rate_per_s, each.hop_rate_per_s) * (stage.replicas - 1) / stage.replicas
        required, text = f"{rate_per_s:.6g}/s are required", f"stage {index} serves at most {each.rate_per_s:.6g}/s"
        match problem.objective:
            case MaximizeRate():
                is_slow = each.rate_per_s <= rate_per_s * (1 + SAME_RATE)
            case MinimizeCost():
                is_slow = fewer_per_s < rate_per_s
                text = f"stage {index} would serve {fewer_per_s:.6g}/s with one replica less, and {required}"
            case MinimizeLatency():
                is_slow, text = each.rate_per_s < rate_per_s * (1 + AT_ITS_LIMIT), f"{text}, {required}"
        if is_slow:
            yield Bottleneck(kind="stage", text=text, stage_index=index)
        if isinstance(problem.objective, MaximizeRate) and each.hop_rate_per_s <= rate_per_s * (1 + SAME_RATE):
            text = f"the hop after stage {index} carries at most {each.hop_rate_per_s:.6g}/s"
            if (sharing := problem.devices[stage.device].per_node) > 1:
                text += f"; {sharing} accelerators of a node share its network card"
            yield Bottleneck(kind="hop", text=text, stage_index=index)


def _ramp_limit(problem: PlanProblem, figures: Evaluation) -> Iterator[Bottleneck]:
    """Yields the ramp budget if one more ramp, with the mean time of the active ramps, would exceed it."""
    num_active = sum(len(each.split.ramps) for each in figures.splits)
    if problem.ramp_budget is None or num_active == len(problem.ramps):
        return
    if figures.ramp_overhead * (num_active + 1) > problem.ramp_budget * max(num_active, 1):
        text = f"ramps take {figures.ramp_overhead:.3%} of the blocks' time, and {problem.ramp_budget:.3%} are allowed"
        yield Bottleneck(kind="ramps", text=text)


def _budget_limit(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> Iterator[Bottleneck]:
    """Yields the budget if one more replica on any free device would exceed it."""
    budget = problem.budget_usd_per_hour
    if budget is None:
        return
    used = replicas_of(stages)
    prices = [supply.usd_per_hour for device, supply in problem.devices.items() if used[device] < supply.count]
    if prices and figures.usd_per_hour + min(prices) > budget:
        left = budget - figures.usd_per_hour
        text = f"of the budget of {budget:.2f} USD/h, {left:.2f} are left: less than one more device"
        yield Bottleneck(kind="budget", text=text)


def times_better(problem: PlanProblem, best: object, other: object) -> float | None:
    """Returns the factor by which `best` has the higher rate, or the lower cost or mean answer time.

    Returns None if either is no plan or costs nothing.
    """
    if not isinstance(best, Planned) or not isinstance(other, Planned):
        return None
    larger, smaller = objective_value(problem, other.figures), objective_value(problem, best.figures)
    if isinstance(problem.objective, MaximizeRate):
        larger, smaller = smaller, larger
    return larger / smaller if larger > 0 and smaller > 0 else None


def no_plan_text(problem: PlanProblem, decision: NoPlan) -> str:
    """Returns which limit cannot be kept, and which values of the limits can."""
    remedies = []
    if decision.nearest_slo_s is not None:
        nearest_ms = _rounded(decision.nearest_slo_s * 1e3 * (1 - TOLERANCE / 2), 4, ROUND_CEILING)
        remedies.append(f"the tightest SLO with a plan is {nearest_ms} ms")
    if decision.highest_rate_per_s is not None:
        highest = _rounded(decision.highest_rate_per_s * (1 + TOLERANCE / 2), 6, ROUND_FLOOR)
        remedies.append(f"the highest rate with a plan is {highest}/s")
    if decision.more is not None:
        remedies.append(f"the rate needs at least {decision.more[1]} more {decision.more[0]}")
    unproven = problem.generation or problem.ramp_budget or decision.binding == "ingress"
    others = [] if unproven else ["no other SLO or rate has a plan"]
    return "; ".join([f"no plan: {_binding_text(problem, decision)}", *(remedies or others)])


def _rounded(number: float, digits: int, rounding: str) -> str:
    """Returns a number with few digits, rounded in the direction in which the limit that it names has a plan."""
    return f"{float(Context(prec=digits, rounding=rounding).create_decimal(number)):.{digits}g}"


def _binding_text(problem: PlanProblem, decision: NoPlan) -> str:
    slo, ingress, rate_per_s = problem.slo, problem.ingress, problem.required_per_s or 0.0
    match decision.binding:
        case "ingress":
            assert ingress is not None, "only a limited ingress binds"
            return f"{ingress.words}, and {rate_per_s:.6g}/s need {ingress.needed(rate_per_s)} ingress.replicas"
        case "latency":
            slack = f" ({milliseconds(slo.limit_s)} after {slo.slack * 100:.4g} % slack)" if slo.slack else ""
            return f"the SLO of {milliseconds(slo.latency_s)}{slack} binds"
        case "devices":
            available = ", ".join(f"{supply.count} {device}" for device, supply in problem.devices.items())
            return f"the devices ({available}) are too few{_for_rate(problem)}"
        case "budget":
            return f"the budget of {problem.budget_usd_per_hour or 0:.2f} USD/h is too small{_for_rate(problem)}"
        case "ttft":
            return f"the TTFT of {milliseconds(generation_of(problem).ttft_s or 0)} binds"
        case "sequences":
            return f"{generation_of(problem).most_running} sequences at a time are too few{_for_rate(problem)}"
        case "memory":
            return f"the memory of the accelerators is too small for keys and values{_for_rate(problem)}"
        case "ramps":
            return f"the ramp budget of {problem.ramp_budget or 0:.3%} of the blocks' time is too small"


def _for_rate(problem: PlanProblem) -> str:
    return "" if problem.required_per_s is None else f" for {problem.required_per_s:.6g}/s"
