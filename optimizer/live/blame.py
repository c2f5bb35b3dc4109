"""Plans that did not keep their promise, and are not chosen again for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.plan import Stage
from optimizer.problem import PlanProblem

CLEAR_SHARE = 0.1
"""Of inputs that reach a block: a forecast that differs by more is of another stream."""
CLEAR_FACTOR = 1.2
"""Of the rate asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """A plan that was rolled back, and what for."""

    stages: tuple[Stage, ...]
    problem: PlanProblem
    until: int
    """The first period in which it may be chosen again."""


@dataclass(frozen=True, slots=True)
class Blamed:
    """Plans not to be chosen again for a while; pure: every change is a new value."""

    blames: tuple[Blame, ...] = ()

    def add(self, stages: Sequence[Stage], problem: PlanProblem, *, period: int, periods: int) -> Blamed:
        """Blame a plan until so many periods after the present one."""
        new = Blame(stages=tuple(stages), problem=problem, until=period + periods)
        return Blamed((*(blame for blame in self.blames if blame.stages != new.stages), new))

    def at(self, period: int) -> Blamed:
        """Without those whose time is over."""
        return Blamed(tuple(blame for blame in self.blames if blame.until > period))

    def holds(self, stages: Sequence[Stage], problem: PlanProblem) -> bool:
        """Whether the plan is blamed for a problem that is not clearly another."""
        return any(
            blame.stages == tuple(stages) and not clearly_another(blame.problem, problem) for blame in self.blames
        )


def clearly_another(one: PlanProblem, other: PlanProblem) -> bool:
    """Whether two problems differ enough for a plan that failed under one to be tried under the other."""
    if one.num_blocks != other.num_blocks or one.ramps != other.ramps or one.slo != other.slo:
        return True
    if {name: supply.count for name, supply in one.devices.items()} != {
        name: supply.count for name, supply in other.devices.items()
    }:
        return True
    apart = max(abs(here - there) for here, there in zip(one.survival_N, other.survival_N, strict=True))
    return apart > CLEAR_SHARE or _rates_differ(one, other)


def _rates_differ(one: PlanProblem, other: PlanProblem) -> bool:
    if one.asked_per_s is not None and other.asked_per_s is not None and type(one.objective) is type(other.objective):
        low, high = sorted((one.asked_per_s, other.asked_per_s))
        return high > low * CLEAR_FACTOR
    return type(one.objective) is not type(other.objective)
