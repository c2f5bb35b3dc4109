"""Decides whether a new plan is worth the change and, after a trial, whether to roll it back.

E3 plans every two minutes (section 4) and names no threshold for a change. But the best plan fluctuates with the
forecast, and replicas serve nothing while they start, so a change to a plan that is hardly better does harm. A plan
that is nearly as good and starts fewer replicas is then preferred.

E3 drops inputs that it cannot serve in time (section 3.1), and it trusts its plan. Here, dropped inputs and late
answers count against the plan that caused them. If it keeps less of its promise than the plan before, the controller
rolls back and avoids the plan for a while.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import evaluate, objective_value, violations
from optimizer.live.reaction import LEAST_INPUTS
from optimizer.plans.plan import Stage, replicas_of
from optimizer.problems.problem import MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem, Reach
from optimizer.search.decision import Planned

GAIN_PHRASES: dict[type[Objective], tuple[str, str]] = {
    MaximizeRate: ("give {:.1%} more", "give {:.1%} less"),
    MinimizeCost: ("save {:.1%}", "cost {:.1%} more"),
    MinimizeLatency: ("answer {:.1%} sooner", "answer {:.1%} later"),
}
"""Phrases for a gain and for a loss, by objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCost:
    """The cost of the replicas that a change starts: they serve nothing for `start_s` of the next `period_s`."""

    running: Mapping[str, int]
    """Replicas that a plan can use at once, by accelerator type. It starts those that it needs beyond them."""
    start_s: float
    period_s: float

    def num_started(self, stages: Sequence[Stage]) -> int:
        """Returns the number of replicas that a change to a plan starts."""
        return (replicas_of(stages) - Counter(self.running)).total()

    def share(self, stages: Sequence[Stage]) -> float:
        """Returns the cost of a change to a plan: the share of the plan's service in the period that is lost."""
        return min(1.0, self.num_started(stages) / replicas_of(stages).total() * self.start_s / self.period_s)

    def words(self, stages: Sequence[Stage]) -> str:
        """Describes the cost of a change to a plan."""
        started = f"{self.num_started(stages)} of {replicas_of(stages).total()} replicas"
        return f"starting {started} costs {self.share(stages):.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to change the plan, and why."""

    change: bool
    words: str


def best_after_starts(
    problem: PlanProblem, found: Planned, start_cost: StartCost, reach: Reach | None = None
) -> tuple[tuple[Stage, ...], str]:
    """Returns the plan with the best objective after the cost of its starts, and a text that compares another with it.

    Candidates that start fewer replicas than the best plan are compared with it, if they keep all promises. Their gains
    are relative to the best plan, and mostly losses. The text is empty if there is no such candidate.
    """
    best, most = found.stages, start_cost.num_started(found.stages)
    fewer = [each for each in found.candidates if start_cost.num_started(each) < most]
    possible = [each for each in fewer if not violations(problem, each, evaluate(problem, each, reach))]
    if not possible:
        return best, ""

    def net_gain(stages: Sequence[Stage]) -> float:
        return _compared(problem, best, stages, reach)[0] - start_cost.share(stages)

    chosen, second, *_ = sorted([best, *possible], key=net_gain, reverse=True)
    other = second if chosen == best else best
    words = _compared(problem, chosen, other, reach)[1]
    return chosen, f"; compared with the chosen plan, another one would {words}, and {start_cost.words(other)}"


def weigh(
    problem: PlanProblem,
    current: Sequence[Stage] | None,
    new: Sequence[Stage],
    *,
    start_cost: StartCost,
    least_gain: float,
    reach: Reach | None = None,
    shares: Sequence[float] = (),
) -> Verdict:
    """Decides for a change if the gain exceeds its cost plus `least_gain`, or if the current plan breaks a promise.

    `current`: None if there is no plan. `shares`: the shares of its chains; the new plan has the default shares.
    `problem` is the forecast for which the new plan was made. If the rate is maximized, the gain is in the plan's
    highest rate, even if demand is lower: the reserve absorbs bursts.
    """
    if current is None:
        return Verdict(change=True, words="takes the plan: there is none yet")
    if tuple(current) == tuple(new) and len(shares) < 2:
        return Verdict(change=False, words="keeps the plan: it is still the best")
    gain, gain_words, broken = _compared(problem, current, new, reach, shares)
    if broken:
        return Verdict(change=True, words=f"changes the plan: the current one breaks a promise: {'; '.join(broken)}")
    change = gain > start_cost.share(new) + least_gain
    words = (
        f"{'changes' if change else 'keeps'} the plan: the new one would {gain_words}, "
        f"{start_cost.words(new)}, and {least_gain:.1%} is the least gain"
    )
    return Verdict(change=change, words=words)


def _compared(
    problem: PlanProblem,
    current: Sequence[Stage],
    new: Sequence[Stage],
    reach: Reach | None,
    shares: Sequence[float] = (),
) -> tuple[float, str, tuple[str, ...]]:
    """Returns the gain by the same forecast, its text, and the current plan's broken promises if the new breaks none.

    The gain is relative to the current plan: a higher rate, a lower cost, or a shorter answer time. If the current plan
    is too slow and the new one breaks promises too, the gain is in the rate, of which the required one is enough.
    """
    new_figures = evaluate(problem, new, reach)
    try:
        current_figures = evaluate(problem, current, reach, shares=shares)
    except PlanError as error:
        return 0.0, "", (f"it does not fit the cluster: {error}",)
    # The slack covers errors of the forecast: only a new plan must leave it unused (E3, section 3.1).
    broken = tuple(violations(replace(problem, slo=replace(problem.slo, slack=0.0)), current, current_figures))
    is_new_feasible = not violations(problem, new, new_figures)
    required_per_s = problem.required_per_s or math.inf
    current_per_s, new_per_s = (min(required_per_s, each.rate_per_s) for each in (current_figures, new_figures))
    kind: type[Objective] = type(problem.objective)
    current_value = objective_value(problem, current_figures)
    gain = 1 - objective_value(problem, new_figures) / current_value if current_value else 0.0
    if kind is MaximizeRate or (current_per_s < new_per_s and not is_new_feasible):
        gain, kind = new_per_s / current_per_s - 1, MaximizeRate
    more, less = GAIN_PHRASES[kind]
    return gain, less.format(-gain) if gain < 0 else more.format(gain), broken if is_new_feasible else ()


class Delivered(Protocol):
    """What an application delivered over a period, which is longer than 0 s."""

    @property
    def seconds(self) -> float: ...
    @property
    def arrived(self) -> int: ...
    @property
    def in_slo(self) -> int: ...
    @property
    def settled(self) -> int:
        """Inputs that were answered, refused or abandoned."""


def kept_share(served: Delivered, predicted_rps: float) -> float:
    """Returns the achieved share of the expected goodput, which is the lower of predicted rate and offered load.

    Below the predicted rate, only dropped and late inputs count as missing, not those in flight.
    """
    if served.arrived > predicted_rps * served.seconds:
        return served.in_slo / served.seconds / predicted_rps
    return served.in_slo / served.settled if served.settled else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A new plan in force, and the one before it."""

    epoch: int
    predicted_rps: float
    """The new plan's rate by its forecast, above 0."""
    before_kept: float
    """The share that the plan before kept recently."""
    before_predicted_rps: float


def judge(
    trial: Trial,
    served: Delivered,
    *,
    margin: float,
    settle_s: float,
    patience_s: float,
) -> Verdict | None:
    """Judges a plan by what was `served` since the switch: a change rolls it back. Returns None while it is too early.

    It is too early before `settle_s` and, with few inputs, before `patience_s`. Arrivals count, not answers, so that a
    plan that answers nothing is judged too. The plan is rolled back if more than `margin` of the expected goodput is
    missing, and if the plan before kept more of its own promise and would deliver more of the current load.
    """
    has_few = served.arrived < LEAST_INPUTS
    if served.seconds < settle_s or (has_few and served.seconds < patience_s):
        return None
    if has_few:
        words = f"only {served.arrived} inputs arrived in {served.seconds:.0f} s, too few to judge"
        return Verdict(change=False, words=f"keeps plan {trial.epoch}: {words}")
    offered_rps, goodput_rps = served.arrived / served.seconds, served.in_slo / served.seconds
    kept, expected_rps = kept_share(served, trial.predicted_rps), min(offered_rps, trial.predicted_rps)
    promise = (
        f"plan {trial.epoch} gives {goodput_rps:.4g}/s in time, {kept:.1%} of what was expected ({expected_rps:.4g}/s)"
    )
    if kept >= 1 - margin:
        return Verdict(change=False, words=f"keeps the plan: {promise}")
    before_rps = trial.before_kept * min(offered_rps, trial.before_predicted_rps)
    is_worse = trial.before_kept > kept and before_rps > kept * expected_rps
    before = f"the one before kept {trial.before_kept:.1%} of its own and would give {before_rps:.4g}/s"
    return Verdict(change=is_worse, words=f"{'rolls back' if is_worse else 'keeps the plan'}: {promise}; {before}")
