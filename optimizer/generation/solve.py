"""Plans for text generation that keep the promises to sequences: time to the first token, concurrency, and memory.

Without these promises the planner is exact. If its plan keeps them anyway, it is the best one. If not, smaller batches
keep them. So the planner runs again for every limit of the batch size, on the space and on parts of it, and the best
plan found is taken. The gap bounds how far it may be from the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import evaluate, merit, violations
from optimizer.generation.steps import broken_promises, generation_of, running_sequences, step_table
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Decision, Found, NoPlan, Planned, if_feasible
from optimizer.search.space import Space

ExactPlanner = Callable[[PlanProblem, Space], Decision]


def solve_generation(problem: PlanProblem, space: Space, solve_exactly: ExactPlanner) -> Decision:
    """Returns the best plan found and its gap to the optimum of the relaxed problem, or why there is none.

    Raises PlanError if neither is known when time is over.
    """
    relaxed = _without_promises(problem)
    if relaxed is None:
        return NoPlan(strategy=space.strategy, binding="ttft")
    first = solve_exactly(relaxed, space)
    if isinstance(first, NoPlan):
        return _checked(problem, first, lambda other: solve_generation(other, space, solve_exactly))
    figures = evaluate(problem, first.stages)
    if not violations(problem, first.stages, figures):
        return replace(first, figures=figures)
    parts = (space, *space.contained(), *_smaller_stages(problem, space))
    limits = sorted({batch for name in device_names(problem) for batch in problem.latency[name].batches})
    decisions = [each for part in parts for each in _limited(relaxed, part, limits, solve_exactly)]
    plans = dict.fromkeys(
        variant
        for decision in (first, *decisions)
        if isinstance(decision, Planned)
        for stages in (decision.stages, *decision.candidates)
        for variant in _with_fewer_replicas(problem, stages)
    )
    kept = [plan for plan in (if_feasible(problem, stages) for stages in plans) if plan is not None]
    if not kept and space.is_over():
        raise PlanError(f"no plan was found{space.within} that keeps the promises to sequences")
    if not kept:
        broken = [promise for promise, _ in broken_promises(problem, figures.sequences)]
        return NoPlan(strategy=space.strategy, binding=broken[-1])
    best = max(kept, key=lambda plan: merit(problem, plan.figures))
    return Found(plans=(best, *kept), bound=first.bound).planned(problem, space.strategy)


def _smaller_stages(problem: PlanProblem, space: Space) -> Iterator[Space]:
    """Yields spaces with stages of fewer blocks: their weights leave more memory for keys and values."""
    if generation_of(problem).kv is not None and space.several_stages:
        num_devices = sum(supply.count for supply in problem.devices.values())
        numbers = range(2, min(num_devices, problem.num_blocks) + 1)
        for most in dict.fromkeys(math.ceil(problem.num_blocks / number) for number in numbers):
            yield replace(space, splits_per_stage=False, most_blocks=most)


def _limited(
    problem: PlanProblem, space: Space, limits: Sequence[int], solve_exactly: ExactPlanner
) -> Iterator[Decision]:
    """Yields the results for the limits of the batch size, the largest first, except for those that a result keeps."""
    largest: float = np.inf
    for limit in reversed(limits):
        if limit < largest and not space.is_over():
            try:
                decision = solve_exactly(with_batch_limit(problem, limit), space)
            except PlanError:
                if space.is_over():  # the plans found so far are kept
                    return
                raise
            yield decision
            if isinstance(decision, NoPlan):
                return
            largest = max(split.batch for stage in decision.stages for split in stage.splits)


def _checked(problem: PlanProblem, no_plan: NoPlan, solve: Callable[[PlanProblem], Decision]) -> NoPlan:
    """Returns the reason, with a rate and an SLO only if a plan of them keeps the promises to sequences too.

    It is the first token if only the tighter SLO of `_without_promises` has no plan.
    """
    rate_per_s, slo = no_plan.highest_rate_per_s, replace(problem.slo, latency_s=no_plan.nearest_slo_s or 0.0)
    if rate_per_s and isinstance(solve(problem.with_rate(rate_per_s)), NoPlan):
        no_plan = replace(no_plan, highest_rate_per_s=None)
    if no_plan.nearest_slo_s is None:
        return no_plan
    if slo.latency_s <= problem.slo.latency_s:
        return replace(no_plan, binding="ttft", nearest_slo_s=None)
    patient, relaxed = replace(problem, slo=slo), _without_promises(replace(problem, slo=slo))
    is_in_time = relaxed is not None and relaxed.slo == slo  # else the first token needs quicker steps
    return no_plan if is_in_time and isinstance(solve(patient), Planned) else replace(no_plan, nearest_slo_s=None)


def _without_promises(problem: PlanProblem) -> PlanProblem | None:
    """Returns the problem with an SLO for steps alone. Returns None if no plan can keep the time to the first token.

    A prompt takes at least its own time on the fastest device, and each of its chunks takes as long as a step.
    """
    generation, slo = generation_of(problem), problem.slo
    relaxed = replace(generation, ttft_s=None, most_running=None, kv=None)
    if generation.ttft_s is None:
        return replace(problem, generation=relaxed)
    tables = [step_table(problem, name) for name in device_names(problem) or problem.devices]
    prompt_s = float(np.min([table.prompt_s_N for table in tables], axis=0).sum())
    step_s = (generation.ttft_s * (1 - slo.slack) - prompt_s) / min(table.num_chunks for table in tables)
    if step_s <= 0:
        return None
    tighter = replace(slo, latency_s=min(slo.latency_s, step_s / (1 - slo.slack)))
    return replace(problem, generation=relaxed, slo=tighter)


def _with_fewer_replicas(problem: PlanProblem, stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """Yields a plan and, if it is one stage that needs too many sequences, the plan with only as many full replicas."""
    yield stages
    most = generation_of(problem).most_running
    if most is not None and len(stages) == 1:
        per_replica = running_sequences((replace(stages[0], replicas=1),))
        if per_replica <= most < per_replica * stages[0].replicas:
            yield (replace(stages[0], replicas=most // per_replica),)
