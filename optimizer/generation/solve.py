"""Plans of steps whose sequences have to find room, and get their first tokens in time.

Without these promises the planner is exact. A plan of it that keeps them is best. Where it does not, they are kept by
smaller batches: the planner is asked again at every limit of the batch, for its own space and for the parts of it, and
the best of all plans that it has met is taken; how far that may be from the best the gap says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from optimizer.decision import Binding, Decision, FeasiblePlan, NoPlan, Planned, Strategy
from optimizer.evaluate import evaluate, merit, step_figures, violations
from optimizer.generation.figures import broken_promises, running_sequences
from optimizer.generation.steps import demand_of, num_chunks, step_table
from optimizer.plan import Stage
from optimizer.problem import PlanProblem, device_names
from optimizer.space import SPACES, Space

Exactly = Callable[[PlanProblem, Space], Decision]
PARTS: Mapping[Strategy, tuple[Strategy, ...]] = {
    "best": ("stock", "early-exit", "serial"),
    "serial": ("stock", "early-exit"),
    "e3": ("early-exit",),
}
"""Of a space: where full batches behind ramps need more sequences than there are, plans of fewer splits."""


def solve_generation(problem: PlanProblem, space: Space, exactly: Exactly) -> Decision:
    """The best plan that is met, with its gap to what is possible without sequences' promises, or why there is none."""
    easier = _without_promises(problem)
    if easier is None:
        return NoPlan(strategy=space.strategy, binding="ttft")
    first = exactly(easier, space)
    if isinstance(first, NoPlan):
        return _by_first_token(problem, first)
    figures = evaluate(problem, first.stages)
    if not violations(problem, first.stages, figures):
        return first
    met = [first]
    for limit in sorted({batch for name in device_names(problem) for batch in problem.latency[name].batches}):
        for part in (space, *(SPACES[name] for name in PARTS.get(space.strategy, ()))):
            decision = exactly(_limited(easier, limit), part)
            met += [decision] if isinstance(decision, Planned) else []
    plans = dict.fromkeys(
        fewer for each in met for stages in (each.stages, *each.candidates) for fewer in _fewer(problem, stages)
    )
    kept = [(stages, each) for stages in plans if not violations(problem, stages, each := evaluate(problem, stages))]
    if not kept:
        return NoPlan(strategy=space.strategy, binding=_binding(problem, first))
    stages, best = max(kept, key=lambda each: merit(problem, each[1]))
    found = FeasiblePlan(stages=stages, figures=best)
    return found.planned(problem, space.strategy, first.bound, (each for each, _ in kept))


def _by_first_token(problem: PlanProblem, none: NoPlan) -> NoPlan:
    """What the tighter SLO of `_without_promises` has no plan for, said of the first token where that is why."""
    nearest_s = none.nearest_slo_s
    if none.binding != "latency" or nearest_s is None or nearest_s > problem.slo.latency_s:
        return none
    return replace(none, binding="ttft", nearest_slo_s=None)


def _without_promises(problem: PlanProblem) -> PlanProblem | None:
    """The problem with no more promised than that steps are in time; None where the first token is not, by any plan.

    A prompt takes at least what it takes alone on the quickest device, and each of its chunks as long as a step.
    """
    generation, slo = demand_of(problem), problem.slo
    easier = replace(generation, ttft_s=None, most_running=None, kv=None)
    if generation.ttft_s is None:
        return replace(problem, generation=easier)
    names = device_names(problem) or tuple(problem.devices)
    alone_s = float(np.min([step_table(problem, name).prompt_s_N for name in names], axis=0).sum())
    chunks = min(num_chunks(problem, name) for name in names)
    left_s = (generation.ttft_s * (1 - slo.slack) - alone_s) / chunks
    if left_s <= 0:
        return None
    tighter = replace(slo, latency_s=min(slo.latency_s, left_s / (1 - slo.slack)))
    return replace(problem, generation=easier, slo=tighter)


def _limited(problem: PlanProblem, limit: int) -> PlanProblem:
    """With smaller batches; what is measured of larger ones is still known, for they hold skipped tokens as well."""
    generation = demand_of(problem)
    return replace(problem, generation=replace(generation, batch_limit=min(limit, generation.batch_limit)))


def _fewer(problem: PlanProblem, stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """A plan, and where it is one stage that needs too many sequences, as many replicas as they are enough for."""
    yield stages
    most = demand_of(problem).most_running
    if most is not None and len(stages) == 1:
        per_replica = running_sequences((replace(stages[0], replicas=1),))
        if per_replica <= most < per_replica * stages[0].replicas:
            yield (replace(stages[0], replicas=most // per_replica),)


def _binding(problem: PlanProblem, first: Planned) -> Binding:
    """Which promise the best plan without them does not keep, of several the last."""
    broken = broken_promises(problem, first.stages, **step_figures(evaluate(problem, first.stages)))
    return [kind for kind, _ in broken][-1]
