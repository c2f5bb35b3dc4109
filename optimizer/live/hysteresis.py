"""Decides whether a new plan is worth the change.

E3 plans every two minutes (section 4) and always changes to the new plan. But the best plan fluctuates with the
forecast, and replicas serve nothing while they start, so a change to a plan that is hardly better does harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import evaluate, objective_value, violations
from optimizer.plans.plan import Stage
from optimizer.problems.problem import MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem, Reach
from optimizer.search.decision import Planned

GAIN_PHRASES: dict[type[Objective], tuple[str, str]] = {
    MaximizeRate: ("give {:.1%} more", "give {:.1%} less"),
    MinimizeCost: ("save {:.1%}", "cost {:.1%} more"),
    MinimizeLatency: ("answer {:.1%} sooner", "answer {:.1%} later"),
}
"""Phrases for a gain and for a loss, by objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to change the plan, and why."""

    change: bool
    words: str


def weigh(
    problem: PlanProblem,
    current: Sequence[Stage] | None,
    new: Planned,
    *,
    moved: int,
    start_s: float,
    period_s: float,
    least_gain: float,
    reach: Reach | None = None,
) -> Verdict:
    """Decides for a change if the gain exceeds its cost plus `least_gain`, or if the current plan breaks a promise.

    `current` is None if there is no plan. `problem` is the forecast for which the new plan was made. The change costs
    the service of `moved` replicas, which move or start, for `start_s` of the `period_s` that the new plan is expected
    to last. If the rate is maximized, the gain is in the plan's highest rate, even if demand is lower: the reserve
    absorbs bursts.
    """
    if current is None:
        return Verdict(change=True, words="takes the plan: there is none yet")
    if tuple(current) == new.stages:
        return Verdict(change=False, words="keeps the plan: it is still the best")
    gain, broken = _compared(problem, current, new.stages, reach)
    if broken:
        return Verdict(change=True, words=f"changes the plan: the current one breaks a promise: {'; '.join(broken)}")
    replicas = sum(stage.replicas for stage in new.stages)
    cost = min(1.0, moved / replicas * start_s / period_s)
    change = gain > cost + least_gain
    more, less = GAIN_PHRASES[type(problem.objective)]
    words = (
        f"{'changes' if change else 'keeps'} the plan: the new one would "
        f"{less.format(-gain) if gain < 0 else more.format(gain)}, moving {moved} of {replicas} replicas costs "
        f"{cost:.1%}, and {least_gain:.1%} is the least gain"
    )
    return Verdict(change=change, words=words)


def _compared(
    problem: PlanProblem, current: Sequence[Stage], new: Sequence[Stage], reach: Reach | None
) -> tuple[float, tuple[str, ...]]:
    """Returns the gain by the same forecast, and the promises that the current plan breaks if the new one breaks none.

    The gain is relative to the current plan: a higher rate, a lower cost, or a shorter answer time.
    """
    new_figures = evaluate(problem, new, reach)
    try:
        current_figures = evaluate(problem, current, reach)
    except PlanError as error:
        return 0.0, (f"it does not fit the cluster: {error}",)
    # The slack covers errors of the forecast: only a new plan must leave it unused (E3, section 3.1).
    broken = tuple(violations(replace(problem, slo=replace(problem.slo, slack=0.0)), current, current_figures))
    is_new_feasible = not violations(problem, new, new_figures)
    current_value = objective_value(problem, current_figures)
    if isinstance(problem.objective, MaximizeRate):
        gain = new_figures.rate_per_s / current_figures.rate_per_s - 1
    else:
        gain = 1 - objective_value(problem, new_figures) / current_value if current_value else 0.0
    return gain, broken if is_new_feasible else ()
