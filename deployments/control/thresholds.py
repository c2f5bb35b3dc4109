"""Other thresholds while serving: an epoch of its own.

Same stages, slots and replicas, so nothing is started, tried or waited for: every ingress and every replica is told at
once. An alarm does not wait either until a change of plan is through: it is heard meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from deployments.control.plan_keeper import PlanKeeper
from deployments.control.planning import Planning
from deployments.control.tuning import Tuning
from deployments.control.watch import Look
from earlyexit.clock import Clock
from earlyexit.errors import PlanError
from optimizer.live.tuning.base import Tuned
from optimizer.placement import PlacedPlan


class Thresholds:
    """Has the keeper bring about what tuning says."""

    def __init__(self, tuning: Tuning, keeper: PlanKeeper, planning: Planning, clock: Clock) -> None:
        self._tuning = tuning
        self._keeper = keeper
        self._planning = planning
        self._clock = clock

    async def follow_tuning(self, seen: Look) -> str | None:
        """Put in force what is to be; why it should be planned anew at once, if it should.

        An alarm ends the trial of a plan, whose promise was for other thresholds; all else waits for its end, and for
        that of a change under way. Somebody's own plan with thresholds of its own keeps them; a plan that is held is
        held to its stages only.
        """
        keeper, standing = self._keeper, self._keeper.standing
        self.tell()
        said = self._tuning.said
        if said is None:
            return None
        if said is not self._tuning.alarm and (standing.trial is not None or standing.followed != standing.placed):
            return None
        was_safe = standing.thresholds is not None and self._tuning.is_safe(standing.thresholds)
        reason = "alarm" if said is self._tuning.alarm else "thresholds"
        self._tuning.said = None
        await self._go_by(said, reason, keeper.next_epoch(seen), seen)
        self.tell()
        is_safe = self._tuning.is_safe(said.thresholds)
        return reason if was_safe or (is_safe and self._planning.is_overrun()) else None

    async def sound_alarm(self, seen: Look) -> None:
        """The same while a change of plan is under way, of an alarm only; the change then goes on."""
        if self._tuning.alarm is not None:
            await self.follow_tuning(seen)

    def tell(self) -> None:
        """The tuner hears what answers are given by, once all ingresses follow it."""
        keeper, standing = self._keeper, self._keeper.standing
        if standing.suspended is not None or not keeper.is_tuned:
            self._tuning.pause()
        elif standing.followed is not None and keeper.goes_by_ours(standing.followed.plan):
            self._tuning.follow(self._planning.thresholds, standing.followed_s)

    async def _go_by(self, said: Tuned, reason: str, epoch: int, seen: Look) -> None:
        keeper, standing = self._keeper, self._keeper.standing
        missing = sorted(set(self._planning.thresholds) - set(said.thresholds))
        if missing:
            raise PlanError(f"{said.words}: no threshold for ramps {missing}")
        keeper.say(reason, said.words)
        keeper.become(thresholds=dict(said.thresholds))
        self._planning.decide_by(said.thresholds, self._clock.now_s())
        followed = standing.followed
        if followed == standing.placed:
            await self._planning.go_on_with(self._decided(standing.placed, epoch), reason, said.words, seen)
        else:
            before = None if followed is None else self._decided(followed, epoch)
            await keeper.decide_meanwhile(before, self._decided(standing.placed, epoch + 1), reason, said.words)

    def _decided(self, placed: PlacedPlan, epoch: int) -> PlacedPlan:
        plan = replace(self._keeper.decided(placed.plan), epoch=epoch, predicted={})
        return replace(placed, plan=self._planning.completed(plan))
