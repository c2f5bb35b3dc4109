"""What the coming window is expected to be, for every set of networks that a plan may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from optimizer.networks import Used, choices, ramps_of
from optimizer.problem import PlanProblem

if TYPE_CHECKING:
    from profiles.forecast import RateForecast, SurvivalForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One forecast of survival, rate and lengths."""

    at_s: float
    """When this was said."""
    survival: SurvivalForecast
    """Of the level beneath: what endless inputs would show. Where only few probes were seen its middle leans to what
    was expected before anything was, and its intervals hold both."""
    num_probes: int
    """What is behind it is worth as many; see `worth`."""
    how: str
    rate: RateForecast | None = None
    """None where nothing was counted yet."""
    survival_of: Mapping[Used, SurvivalForecast] = field(default_factory=dict)
    """Of a chain, by the networks that are used, where some are left out: with the ramps of these alone."""

    def of(self, used: Used) -> SurvivalForecast:
        """Under plans that use these networks."""
        return self.survival_of.get(used, self.survival)

    def expected(self, problem: PlanProblem) -> PlanProblem:
        """The problem with the survival that is expected."""
        of_others = {used: forecast.next_survival for used, forecast in self.survival_of.items()}
        return replace(problem, survival_N=self.survival.next_survival, survival_of=of_others or None)


def fewer_networks(problem: PlanProblem) -> Iterable[Used]:
    """The sets of networks that leave some out and still have ramps: of the others nobody needs to be told anything."""
    every = tuple(range(len(problem.networks)))
    return [used for used in choices(problem) if used != every and ramps_of(problem, used)] if every else []
