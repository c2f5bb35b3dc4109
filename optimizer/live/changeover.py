"""A change from one plan to the next: the numbers of replicas, and the trial of the new plan.

A replica can host any stage of its accelerator type, so a change only needs enough replicas of each type. Types that
need more replicas grow before the switch. Types that need fewer shrink after the earlier plan has drained. So neither
plan lacks replicas while it is in force.

The trial decides whether the new plan keeps its promise. If not, the controller rolls back and avoids the plan for a
while. E3 drops inputs that it cannot serve in time (section 3.1), and it trusts its plan. Here, dropped inputs and late
answers count against the plan that caused them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from optimizer.live.hysteresis import Verdict
from optimizer.plans.plan import PlacedPlan


def num_started(before: PlacedPlan, after: PlacedPlan) -> int:
    """Returns the number of replicas that a change starts."""
    return sum(max(0, needed - before.occupied.get(device, 0)) for device, needed in after.occupied.items())


def due_requests(
    needed: Mapping[str, int],
    running: Mapping[str, int],
    requested: Mapping[str, int],
    *,
    at_once: int | None = None,
    may_shrink: bool,
) -> dict[str, int]:
    """Returns the numbers of replicas to request now, by accelerator type, so that a plan gets those that it needs.

    `requested`: the last requested numbers; a type without one is requested. `at_once`: how many replicas of a type may
    start together, because they take processor time from replicas that serve; None: all. It lowers no requested number,
    because starting replicas would stop. `may_shrink`: whether surplus replicas may stop.
    """
    numbers = {}
    for device in sorted({*needed, *running}):
        now, wanted, last = running.get(device, 0), needed.get(device, 0), requested.get(device)
        number = min(wanted, max(last or 0, now + (at_once or wanted)))
        if (now or wanted) and (now <= wanted or may_shrink) and number != last:
            numbers[device] = number
    return numbers


LEAST_INPUTS = 100
"""With fewer inputs, the standard error of a share may exceed 5 %."""


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
        """Inputs that were answered, rejected or abandoned."""


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
    before_kept: float | None = None
    """The share that the plan before kept recently. None if there was none, or if nothing was measured."""
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
    if trial.before_kept is None:
        return Verdict(change=False, words=f"keeps the plan: {promise}; none was measured before it")
    before_rps = trial.before_kept * min(offered_rps, trial.before_predicted_rps)
    is_worse = trial.before_kept > kept and before_rps > kept * expected_rps
    before = f"the one before kept {trial.before_kept:.1%} of its own and would give {before_rps:.4g}/s"
    return Verdict(change=is_worse, words=f"{'rolls back' if is_worse else 'keeps the plan'}: {promise}; {before}")
