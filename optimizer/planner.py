"""From a plan problem to the best plan of a strategy's space, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from optimizer.decision import Binding, Decision, NoPlan, Planned, Strategy, gap_between
from optimizer.evaluate import TOLERANCE, merit, sought
from optimizer.exact import MOST_LABELS, Answer, ExactSearch, Found
from optimizer.moves import build_graph, device_names, ends_of
from optimizer.problem import ANY_LATENCY_S, MaximizeRate, MinimizeCost, PlanProblem
from optimizer.scale.solve import is_too_big, solve_at_scale
from optimizer.space import SPACES, Space

# How exactly the nearest SLO is told.
SLO_RESOLUTION = 1e-3


def solve(problem: PlanProblem, strategy: Strategy = "best") -> Decision:
    """The best plan of a strategy's space, proven so or with a gap, or what keeps it from having one.

    Raises PlanError where no plan is found and none is ruled out.
    """
    return solve_in(problem, SPACES[strategy], strategy)


def solve_in(problem: PlanProblem, space: Space, strategy: Strategy, *, most_labels: int = MOST_LABELS) -> Decision:
    """The same for a space of one's own, under the name of the strategy that it is a variant of.

    Beyond `most_labels` the exact search gives up (each takes 64 bytes), and its bound is kept.
    """
    if is_too_big(problem, space):
        return _at_scale(problem, space, strategy)
    answer, met = _best(problem, space, most_labels=most_labels)
    if answer.found is None:
        return _why_none(problem, space, strategy) if answer.proven else _at_scale(problem, space, strategy)
    found = answer.found
    planned = Planned(
        strategy=strategy,
        stages=found.chain,
        figures=found.figures,
        bound=answer.bound,
        gap=0.0,
        candidates=tuple(dict.fromkeys(each.chain for each in reversed(met) if each.chain != found.chain)),
    )
    return planned if answer.proven else _together(problem, planned, _at_scale(problem, space, strategy))


def _at_scale(problem: PlanProblem, space: Space, strategy: Strategy) -> Decision:
    """A good plan and a bound; plans of a single split are few, so the best of them is known."""
    decision = solve_at_scale(problem, space, strategy)
    found = _best(problem, replace(space, splits_per_stage=False, several_stages=False))[0].found
    if found is None or isinstance(decision, NoPlan):
        return decision
    if merit(problem, found.figures) <= merit(problem, decision.figures):
        return decision
    gap = gap_between(sought(problem, found.figures), decision.bound)
    return replace(decision, stages=found.chain, figures=found.figures, gap=gap)


def _together(problem: PlanProblem, given_up: Planned, at_scale: Decision) -> Planned:
    """The better of two plans, and the tighter of two bounds."""
    assert isinstance(at_scale, Planned), "there is a plan, so none is ruled out"
    better, other = sorted((given_up, at_scale), key=lambda each: merit(problem, each.figures), reverse=True)
    tighter = max if isinstance(problem.objective, MinimizeCost) else min
    bound = tighter(given_up.bound, at_scale.bound)
    gap = gap_between(sought(problem, better.figures), bound)
    return replace(better, bound=bound, gap=gap, candidates=(*better.candidates, other.stages, *other.candidates))


def _best(
    problem: PlanProblem, space: Space, *, any_plan: bool = False, most_labels: int = MOST_LABELS
) -> tuple[Answer, list[Found]]:
    """The best plan of all searches with what they prove together, and the good plans met on the way."""
    cheapest = isinstance(problem.objective, MinimizeCost)
    best: Found | None = None
    open_bounds: list[float] = []
    met: list[Found] = []
    for search in _searches(problem, space, most_labels):
        answer = _asked(search, problem, any_plan=any_plan)
        met.extend(search.met)
        if not answer.proven:
            open_bounds.append(answer.bound)
        if answer.found is not None and (
            best is None or merit(problem, answer.found.figures) > merit(problem, best.figures)
        ):
            best = answer.found
    value = sought(problem, best.figures) if best else math.inf if cheapest else 0.0
    better = [bound for bound in open_bounds if (bound < value if cheapest else bound > value)]
    bound = (min if cheapest else max)(better, default=value)
    return Answer(found=best, bound=bound, proven=not better), met


def _asked(search: ExactSearch, problem: PlanProblem, *, any_plan: bool) -> Answer:
    """One search; where it gives up without a plan, one of the plans with one split per stage."""
    ask = partial(_ask, problem=problem, any_plan=any_plan)
    answer = ask(search)
    if answer.found is None and not answer.proven and search.may_split:
        return replace(answer, found=ask(replace(search, may_split=False)).found)
    return answer


def _ask(search: ExactSearch, problem: PlanProblem, *, any_plan: bool) -> Answer:
    if isinstance(problem.objective, MinimizeCost):
        return search.least_cost(problem.objective.rate_per_s)
    return search.highest_rate(any_plan=any_plan)


def _searches(problem: PlanProblem, space: Space, most_labels: int) -> Iterator[ExactSearch]:
    """One, or one per device where a plan has one stage, or one per batch size where all splits share it."""
    stocked = {name: problem.devices[name] for name in device_names(problem) if _can_pay(problem, name)}
    parts = [stocked] if space.several_stages else [{name: supply} for name, supply in stocked.items()]
    for devices in parts:
        if not devices:
            continue
        part = replace(problem, devices=devices)
        nodes = None if space.splits_per_stage or space.several_stages else ends_of(problem)
        graph = build_graph(part, space.ramps, every_batch=space.one_batch, nodes=nodes)
        for batch in sorted(set(graph.moves.batch_M.tolist())) if space.one_batch else [None]:
            yield ExactSearch(
                graph=graph if batch is None else graph.with_batch(batch),
                may_split=space.splits_per_stage,
                may_hop=space.several_stages,
                most_labels=most_labels,
            )


def _can_pay(problem: PlanProblem, name: str) -> bool:
    """Whether the budget pays for one device of that type."""
    budget = problem.budget_usd_per_hour
    return budget is None or problem.devices[name].usd_per_hour <= budget * (1 + TOLERANCE)


def _why_none(problem: PlanProblem, space: Space, strategy: Strategy) -> NoPlan:
    nearest_slo_s = _nearest_slo_s(problem, space)
    highest_rate_per_s = None
    if isinstance(problem.objective, MinimizeCost):
        fastest = _best(replace(problem, objective=MaximizeRate()), space)[0].found
        highest_rate_per_s = fastest.figures.rate_per_s if fastest else None
    binding: Binding = "latency"
    if nearest_slo_s is None:
        unpaid = replace(problem, budget_usd_per_hour=None, slo=replace(problem.slo, latency_s=ANY_LATENCY_S))
        binding = "budget" if _any_plan(unpaid, space) else "devices"
    return NoPlan(
        strategy=strategy, binding=binding, nearest_slo_s=nearest_slo_s, highest_rate_per_s=highest_rate_per_s
    )


def _nearest_slo_s(problem: PlanProblem, space: Space) -> float | None:
    """The least SLO latency with a plan, not below it and at most a thousandth above; None for none at any latency."""

    def enough_s(latency_s: float) -> float | None:
        """What a plan under this SLO needs of it; None where there is none."""
        found = _any_plan(replace(problem, slo=replace(problem.slo, latency_s=latency_s)), space)
        return None if found is None else min(latency_s, found.figures.latency_s / (1 - problem.slo.slack))

    above = enough_s(ANY_LATENCY_S)
    if above is None:
        return None
    below = problem.slo.latency_s
    while above > below * (1 + SLO_RESOLUTION):
        middle = (below * above) ** 0.5
        enough = enough_s(middle)
        below, above = (middle, above) if enough is None else (below, enough)
    return above


def _any_plan(problem: PlanProblem, space: Space) -> Found | None:
    return _best(problem, space, any_plan=True)[0].found
