"""Why a plan is as good as it is and no better, and why there is none: what binds, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from optimizer.decision import Decision, NoPlan, Planned, Strategy
from optimizer.evaluate import Evaluation, milliseconds, objective_value
from optimizer.generation.steps import demand_of
from optimizer.networks import subproblem_of, survival_with
from optimizer.plan import Stage, chains_of
from optimizer.problem import MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, nested_shares

AT_ITS_LIMIT = 0.02
"""A latency this close to what is allowed is said to bind: batch sizes come in steps, so few plans reach the limit."""
SAME_RATE = 1e-6

BottleneckKind = Literal["stage", "hop", "latency", "devices", "budget", "ramps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """One thing that keeps a plan from being better."""

    kind: BottleneckKind
    text: str
    """With its numbers."""
    stage_index: int | None = None
    """Of a stage or of the hop after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a strategy reaches on the same problem."""

    strategy: Strategy
    decision: Decision
    times_better: float | None
    """How many times better `best` is: its rate over this one's, or this one's cost or mean answer time over its. None
    without a plan of both, and where either costs nothing."""


def answered_by(problem: PlanProblem, stages: Sequence[Stage]) -> dict[int, float]:
    """Returns the share of inputs that get their answer in each network that the plan uses; of one network: nothing."""
    if not problem.networks:
        return {}
    used = subproblem_of(problem, stages).used
    ramps = [ramp for stage in stages for split in stage.splits for ramp in split.ramps]
    unanswered_N = nested_shares(survival_with(problem, used), ramps)
    starts = (0, *problem.networks)
    enters = [unanswered_N[starts[network]] for network in used]
    return {network: share - on for network, (share, on) in zip(used, pairwise((*enters, 0.0)), strict=True)}


def bottlenecks(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> Iterator[Bottleneck]:
    """The stages and hops that set the rate or the cost, and every promise that is used up."""
    match problem.objective:
        case MaximizeRate():
            yield from _slowest(figures, _rates(problem, stages, figures))
            yield from _budget(problem, stages, figures)
        case MinimizeCost():
            yield from _needed(stages, figures, _rates(problem, stages, figures))
        case MinimizeLatency():
            yield from _full(figures)
            yield from _budget(problem, stages, figures)
            yield from _ramps(problem, figures)
    limit_s = problem.slo.limit_s
    if figures.latency_s >= limit_s * (1 - AT_ITS_LIMIT):
        text = f"the latency of {milliseconds(figures.latency_s)} is at its limit of {milliseconds(limit_s)}"
        yield Bottleneck(kind="latency", text=text)
    for device, supply in problem.devices.items():
        if supply.count and sum(stage.replicas for stage in stages if stage.device == device) == supply.count:
            yield Bottleneck(kind="devices", text=f"all {supply.count} {device} are used")


def _rates(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> list[float]:
    """By stage, what is served of the rate by its chain."""
    chains = chains_of(stages, problem.num_blocks) if len(figures.shares) > 1 else [tuple(stages)]
    return [share * figures.served_per_s for share, chain in zip(figures.shares, chains, strict=True) for _ in chain]


def _slowest(figures: Evaluation, rates: Sequence[float]) -> Iterator[Bottleneck]:
    """Where a rate is sought: the stages and hops that do no more than their chain."""
    for index, (each, rate_per_s) in enumerate(zip(figures.stages, rates, strict=True)):
        most = rate_per_s * (1 + SAME_RATE)
        if each.rate_per_s <= most:
            text = f"stage {index} does at most {each.rate_per_s:.6g}/s"
            yield Bottleneck(kind="stage", text=text, stage_index=index)
        if each.hop_rate_per_s <= most:
            text = f"the hop after stage {index} does at most {each.hop_rate_per_s:.6g}/s"
            yield Bottleneck(kind="hop", text=text, stage_index=index)


def _needed(stages: Sequence[Stage], figures: Evaluation, rates: Sequence[float]) -> Iterator[Bottleneck]:
    """Where a cost is sought: the stages that, hop included, would do too little with one replica less."""
    for index, (stage, each, asked) in enumerate(zip(stages, figures.stages, rates, strict=True)):
        rate_per_s = min(each.rate_per_s, each.hop_rate_per_s) * (stage.replicas - 1) / stage.replicas
        if rate_per_s < asked:
            text = f"stage {index} would do {rate_per_s:.6g}/s with one replica less; {asked:.6g}/s are asked for"
            yield Bottleneck(kind="stage", text=text, stage_index=index)


def _full(figures: Evaluation) -> Iterator[Bottleneck]:
    """Where early answers are sought: the stages that could hardly do more, so that batches cannot be smaller."""
    asked = figures.served_per_s
    for index, each in enumerate(figures.stages):
        if each.rate_per_s < asked * (1 + AT_ITS_LIMIT):
            text = f"stage {index} does at most {each.rate_per_s:.6g}/s, {asked:.6g}/s are asked for"
            yield Bottleneck(kind="stage", text=text, stage_index=index)


def _ramps(problem: PlanProblem, figures: Evaluation) -> Iterator[Bottleneck]:
    """Whether one more ramp, at the mean of those that are active, would take too long."""
    num_active = sum(len(each.split.ramps) for each in figures.splits)
    if problem.ramp_budget is None or num_active == len(problem.ramps):
        return
    if figures.ramp_overhead * (num_active + 1) > problem.ramp_budget * max(num_active, 1):
        text = f"ramps take {figures.ramp_overhead:.3%} of the blocks' time, {problem.ramp_budget:.3%} are allowed"
        yield Bottleneck(kind="ramps", text=text)


def _budget(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> Iterator[Bottleneck]:
    """Whether a further replica of any free device would cost too much."""
    if problem.budget_usd_per_hour is None:
        return
    used = {device: sum(stage.replicas for stage in stages if stage.device == device) for device in problem.devices}
    prices = [supply.usd_per_hour for device, supply in problem.devices.items() if used[device] < supply.count]
    if prices and figures.usd_per_hour + min(prices) > problem.budget_usd_per_hour:
        left = problem.budget_usd_per_hour - figures.usd_per_hour
        text = (
            f"of the budget of {problem.budget_usd_per_hour:.2f} USD/h, {left:.2f} are left: less than one more device"
        )
        yield Bottleneck(kind="budget", text=text)


def compare(problem: PlanProblem, decisions: Mapping[Strategy, Decision]) -> tuple[Comparison, ...]:
    """Every strategy beside `best`, in the order given."""
    best = decisions.get("best")
    return tuple(
        Comparison(strategy=strategy, decision=decision, times_better=_times_better(problem, best, decision))
        for strategy, decision in decisions.items()
        if strategy != "best"
    )


def _times_better(problem: PlanProblem, best: Decision | None, other: Decision) -> float | None:
    if not isinstance(best, Planned) or not isinstance(other, Planned):
        return None
    above, below = objective_value(problem, other.figures), objective_value(problem, best.figures)
    if isinstance(problem.objective, MaximizeRate):
        above, below = below, above
    return above / below if above > 0 and below > 0 else None


def no_plan_text(problem: PlanProblem, decision: NoPlan) -> str:
    """Which promise cannot be kept, and what would do."""
    would_do = []
    if decision.nearest_slo_s is not None:
        would_do.append(f"the nearest SLO that would do is {milliseconds(decision.nearest_slo_s)}")
    if decision.highest_rate_per_s is not None:
        would_do.append(f"the highest rate that would do is {decision.highest_rate_per_s:.6g}/s")
    if decision.more is not None:
        would_do.append(f"the rate needs at least {decision.more[1]} more {decision.more[0]}")
    return "; ".join([f"no plan: {_binding(problem, decision)}", *(would_do or ["no other SLO or rate would do"])])


def _binding(problem: PlanProblem, decision: NoPlan) -> str:
    slo = problem.slo
    match decision.binding:
        case "latency":
            slack = f" ({milliseconds(slo.limit_s)} after {slo.slack * 100:.4g} % slack)" if slo.slack else ""
            return f"the SLO of {milliseconds(slo.latency_s)}{slack} binds"
        case "devices":
            there = ", ".join(f"{supply.count} {device}" for device, supply in problem.devices.items())
            return f"the devices ({there}) are too few{_for_rate(problem)}"
        case "budget":
            return f"the budget of {problem.budget_usd_per_hour or 0:.2f} USD/h is too small{_for_rate(problem)}"
        case "ttft":
            return f"the TTFT of {milliseconds(demand_of(problem).ttft_s or 0)} binds"
        case "sequences":
            return f"{demand_of(problem).most_running} sequences at a time are too few for any measured batches"
        case "memory":
            return "the memory of the accelerators is too small for keys and values"
        case "ramps":
            return f"the ramp budget of {problem.ramp_budget or 0:.3%} of the blocks' time is too small"


def _for_rate(problem: PlanProblem) -> str:
    return "" if problem.required_per_s is None else f" for {problem.required_per_s:.6g}/s"
