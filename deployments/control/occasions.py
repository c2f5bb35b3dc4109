"""When the controller plans: at the end of a period, and out of turn when the stream left its forecast."""

from __future__ import annotations

from deployments.control.knowledge import LEAST_PROBES, Knowledge, worth
from deployments.control.look import rate_left, survival_left
from deployments.control.outlook import Outlook
from deployments.control.plan_keeper import PlanKeeper
from deployments.control.planning import Ground, Planning
from deployments.control.watch import Look
from deployments.settings import ControlSettings

SETTLE_LOOKS = 4
"""A new plan is not judged, and a new forecast not called wrong, before so many looks."""


class Occasions:
    """Holds what was planned by against what is seen."""

    def __init__(self, settings: ControlSettings, knowledge: Knowledge, keeper: PlanKeeper, planning: Planning) -> None:
        self._settings = settings
        self._knowledge = knowledge
        self._keeper = keeper
        self._planning = planning

    def reason(self, seen: Look) -> str | None:
        """Why it is to be planned now; None: it is not."""
        ground = self._planning.ground
        if ground is None and self._keeper.is_restored:
            return "restart"  # without a forecast nothing could leave it
        if ground is not None and ground.outlook.at_s <= self._knowledge.changed_s <= seen.at_s:
            return self._after_change(seen)
        if self.is_period_over(seen):
            return "period"
        settled_s = self._keeper.standing.planned_s + SETTLE_LOOKS * self._settings.watch_s
        if ground is None or seen.at_s < settled_s:
            return None
        if self._reacts(ground, seen):
            changed = self._knowledge.changed_s >= ground.outlook.at_s  # or only the rate did
            return self._after_change(seen) if changed else "reaction"
        return "first probes" if self._learnt(ground.outlook, seen) else None

    def _after_change(self, seen: Look) -> str | None:
        """Without probes since the stream changed it could only be planned by what was expected before anything."""
        enough = self._num_probes(seen) >= LEAST_PROBES
        return "reaction" if enough or seen.at_s >= self._knowledge.changed_s + self._settings.period_s else None

    def is_period_over(self, seen: Look) -> bool:
        """Periods are the windows of forecasts: it is planned when one is whole, or when the clock was set back."""
        period_s = self._settings.period_s
        return seen.at_s // period_s != self._keeper.standing.planned_s // period_s

    def _reacts(self, ground: Ground, seen: Look) -> bool:
        """Where the stream left its forecast, what was before is left out from now on."""
        standing = self._keeper.standing
        counted = self._knowledge.counts(max(standing.followed_s, ground.outlook.at_s))
        looks, plan = self._settings.period_s / self._settings.watch_s, standing.placed.plan
        exits = None
        if ground.outlook.num_probes:  # without any nothing could be learnt of it
            exits = survival_left(ground.outlook, plan, counted, ground.reach, looks=looks)
        rate = rate_left(ground.outlook, counted, standing.sized_for_rps, looks=looks)
        if exits is None and rate is None:
            return False
        if exits is not None:
            self._keeper.say("reaction", exits.words)
            self._knowledge.changed_s = exits.since_s
        if rate is not None:
            self._keeper.say("reaction", rate.words)
            self._knowledge.rate_changed_s = rate.since_s
        self._keeper.become(changed_s=self._knowledge.changed_s, rate_changed_s=self._knowledge.rate_changed_s)
        return True

    def _learnt(self, outlook: Outlook, seen: Look) -> bool:
        """After a start, or a change of the stream, its first probes are now enough to plan by."""
        if outlook.num_probes >= LEAST_PROBES:
            return False
        return self._num_probes(seen) >= LEAST_PROBES

    def _num_probes(self, seen: Look) -> int:
        """What was seen since the stream changed is worth as many."""
        return worth(self._knowledge.observed(self._knowledge.changed_s, seen.at_s))
