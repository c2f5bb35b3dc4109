"""Whether a new plan is worth its change.

E3 plans every two minutes (section 4) and takes what it finds. Forecasts waver, so the best plan does too; but replicas
that move serve nothing while they start, so that a plan which is hardly better is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from earlyexit.errors import PlanError
from optimizer.decision import Planned
from optimizer.evaluate import evaluate, objective_value, violations
from optimizer.plan import Stage
from optimizer.problem import MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem, Reach

GAIN_WORDS: dict[type[Objective], tuple[str, str]] = {
    MaximizeRate: ("give {:.1%} more", "give {:.1%} less"),
    MinimizeCost: ("save {:.1%}", "cost {:.1%} more"),
    MinimizeLatency: ("answer {:.1%} sooner", "answer {:.1%} later"),
}
"""A gain and a loss in words, by what is sought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Whether the plan is changed, and why."""

    change: bool
    words: str
    same: bool = False
    """Whether the new plan is the present one."""


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
) -> Weighed:
    """Change if the new plan gains more than the change costs and `least_gain` on top, or the old one breaks a promise.

    `current`: the present plan; None: there is none. `problem` is the forecast that the new plan was made for. `moved`
    replicas move or start, and miss `start_s` of the `period_s` that the new plan is expected to hold: that share of a
    period's service is what the change costs. Where the rate is sought, the rate that the plan could do is weighed,
    even where less is asked for: what is in hand takes bursts.
    """
    if current is None:
        return Weighed(change=True, words="takes the plan: there is none yet")
    if tuple(current) == new.stages:
        return Weighed(change=False, words="keeps the plan: it is still the best", same=True)
    gain, broken = _compared(problem, current, new.stages, reach)
    if broken:
        return Weighed(change=True, words=f"changes the plan: the present one breaks a promise: {'; '.join(broken)}")
    replicas = sum(stage.replicas for stage in new.stages)
    cost = min(1.0, moved / replicas * start_s / period_s)
    change = gain > cost + least_gain
    more, less = GAIN_WORDS[type(problem.objective)]
    words = (
        f"{'changes' if change else 'keeps'} the plan: the new one would "
        f"{less.format(-gain) if gain < 0 else more.format(gain)}, moving {moved} of {replicas} replicas costs "
        f"{cost:.1%}, and {least_gain:.1%} is the least gain"
    )
    return Weighed(change=change, words=words)


def _compared(
    problem: PlanProblem, current: Sequence[Stage], new: Sequence[Stage], reach: Reach | None
) -> tuple[float, tuple[str, ...]]:
    """The gain, both plans by the same forecast, and promises that the present plan breaks and the new one does not.

    The gain is the share of rate that the new plan gives more, or of the present cost or answer time that it saves.
    """
    ahead = evaluate(problem, new, reach)
    try:
        now = evaluate(problem, current, reach)
    except PlanError as error:
        return 0.0, (f"it does not fit what there is: {error}",)
    # The slack is there for forecasts that err: a plan in force may use it, only a new one must leave it (E3 3.1).
    broken = tuple(violations(replace(problem, slo=replace(problem.slo, slack=0.0)), current, now))
    kept = not violations(problem, new, ahead)
    present = objective_value(problem, now)
    if isinstance(problem.objective, MaximizeRate):
        gain = ahead.rate_per_s / now.rate_per_s - 1
    else:
        gain = 1 - objective_value(problem, ahead) / present if present else 0.0
    return gain, broken if kept else ()
