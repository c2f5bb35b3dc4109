"""Whether a new plan is worth its change.

E3 plans every two minutes (section 4) and takes what it finds. Forecasts waver, so the best plan does too; but replicas
that move serve nothing while they start, so that a plan which is hardly better is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from earlyexit.errors import PlanError
from optimizer.decision import Planned
from optimizer.evaluate import evaluate, sought, violations
from optimizer.plan import Stage
from optimizer.problem import MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem, Reach

Gain = Literal["rate", "cost", "time"]
GAINS: dict[type[Objective], Gain] = {MaximizeRate: "rate", MinimizeCost: "cost", MinimizeLatency: "time"}
GAIN_WORDS: dict[Gain, tuple[str, str]] = {
    "rate": ("give {:.1%} more", "give {:.1%} less"),
    "cost": ("save {:.1%}", "cost {:.1%} more"),
    "time": ("answer {:.1%} sooner", "answer {:.1%} later"),
}
"""Of a gain, and of a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Change the plan or keep it, with the figures that decide."""

    change: bool
    gain: float
    """Share of rate that the new plan gives more, or of the present cost or mean answer time that it saves, both plans
    by the same forecast."""
    cost: float
    """Share of a period's service that the change costs."""
    least_gain: float
    moved: int
    """Replicas that move or start."""
    replicas: int
    """All of the new plan."""
    of: Gain
    """What the gain is."""
    broken: tuple[str, ...] = ()
    """Promises that the present plan breaks under the forecast, and the new one does not."""
    same: bool = False
    """Whether the new plan is the present one."""
    first: bool = False
    """Whether there is no present plan."""

    @property
    def words(self) -> str:
        if self.first:
            return "takes the plan: there is none yet"
        if self.same:
            return "keeps the plan: it is still the best"
        if self.broken:
            return f"changes the plan: the present one breaks a promise: {'; '.join(self.broken)}"
        more, less = GAIN_WORDS[self.of]
        gains = less.format(-self.gain) if self.gain < 0 else more.format(self.gain)
        verb = "changes" if self.change else "keeps"
        return (
            f"{verb} the plan: the new one would {gains}, moving {self.moved} of {self.replicas} replicas "
            f"costs {self.cost:.1%}, and {self.least_gain:.1%} is the least gain"
        )


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

    `problem` is the forecast that the new plan was made for; `moved` replicas miss `start_s` of the `period_s` that the
    new plan is expected to hold. Where the rate is sought, the rate that the plan could do is weighed, even where less
    is asked for: what is in hand takes bursts.
    """
    replicas = sum(stage.replicas for stage in new.stages)
    cost = min(1.0, moved / replicas * start_s / period_s)
    same = current is not None and tuple(current) == new.stages
    gain, broken = (0.0, ()) if current is None or same else _compared(problem, current, new.stages, reach)
    change = current is None or (not same and (bool(broken) or gain > cost + least_gain))
    return Weighed(
        change=change,
        gain=gain,
        cost=cost,
        least_gain=least_gain,
        moved=moved,
        replicas=replicas,
        of=GAINS[type(problem.objective)],
        broken=broken,
        same=same,
        first=current is None,
    )


def _compared(
    problem: PlanProblem, current: Sequence[Stage], new: Sequence[Stage], reach: Reach | None
) -> tuple[float, tuple[str, ...]]:
    """The gain, and what the present plan breaks although the new one would not."""
    ahead = evaluate(problem, new, reach)
    try:
        now = evaluate(problem, current, reach)
    except PlanError as error:
        return 0.0, (f"it does not fit what there is: {error}",)
    # The slack is there for forecasts that err: a plan in force may use it, only a new one must leave it (E3 3.1).
    broken = tuple(violations(replace(problem, slo=replace(problem.slo, slack=0.0)), current, now))
    kept = not violations(problem, new, ahead)
    present = sought(problem, now)
    if isinstance(problem.objective, MaximizeRate):
        gain = ahead.rate_per_s / now.rate_per_s - 1
    else:
        gain = 1 - sought(problem, ahead) / present if present else 0.0
    return gain, broken if kept else ()
