"""Other thresholds while serving: an epoch of its own.

Same stages, slots and replicas, so nothing is started, tried or waited for: every ingress and every replica is told at
once. An alarm does not wait either until a change of plan is through: it is heard meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from deployments.controller.plan_executor import PlanExecutor
from deployments.controller.planning import Planning
from deployments.controller.watch import Look, Tuning
from earlyexit.clock import Clock
from earlyexit.errors import PlanError
from optimizer.live.tuning.base import Tuned
from optimizer.placement import PlacedPlan

AFTER = {"alarm": "after an alarm", "thresholds": "after new thresholds"}
"""Why it is planned anew then, by why thresholds are others."""


class Thresholds:
    """Has the keeper bring about what tuning says."""

    def __init__(self, tuning: Tuning, keeper: PlanExecutor, planning: Planning, clock: Clock) -> None:
        self._tuning = tuning
        self._keeper = keeper
        self._planning = planning
        self._clock = clock
        self._sounded = False
        """Whether an alarm came while a plan was changed, and nobody has asked yet what it calls for."""

    async def follow_tuning(self, seen: Look) -> str | None:
        """Put in force what is to be; why it should be planned anew at once, if it should.

        An alarm ends the trial of a plan, whose promise was for other thresholds; all else waits for its end, and for
        that of a change under way. Somebody's own plan with thresholds of its own keeps them; a plan that is held is
        held to its stages only.
        """
        keeper, standing = self._keeper, self._keeper.standing
        self.tell()
        said, sounded = self._tuning.said, self._sounded
        self._sounded = False
        if said is None:
            return AFTER["alarm"] if sounded and self._is_too_careful() else None
        if said is not self._tuning.alarm and (standing.trial is not None or standing.followed != standing.placed):
            return None
        was_safe = standing.thresholds is not None and self._tuning.is_safe(standing.thresholds)
        reason = "alarm" if said is self._tuning.alarm else "thresholds"
        self._tuning.said = None
        await self._go_by(said, reason, keeper.next_epoch(seen), seen)
        self.tell()
        return AFTER[reason] if was_safe or self._is_too_careful() or self._leave_elsewhere() else None

    async def sound_alarm(self, seen: Look) -> None:
        """The same while a change of plan is under way, of an alarm only; the change then goes on."""
        if self._tuning.alarm is not None:
            try:
                await self.follow_tuning(seen)
            finally:  # what it calls for is asked at the next look, when the change is through
                self._sounded = True

    def _is_too_careful(self) -> bool:
        """Whether nobody leaves, and that is more than the plan does."""
        return self._tuning.is_safe(self._planning.thresholds) and self._planning.is_overrun()

    def _leave_elsewhere(self) -> bool:
        """Whether inputs may leave, and at no ramp that the plan has on: an exit was moved."""
        thresholds = self._planning.thresholds
        on = {ramp: thresholds[ramp] for ramp in self._keeper.placed.plan.ramps if ramp in thresholds}
        return bool(on) and self._tuning.is_safe(on) and not self._tuning.is_safe(thresholds)

    def tell(self) -> None:
        """The tuner hears what answers are given by, once all ingresses follow it."""
        keeper, standing = self._keeper, self._keeper.standing
        if standing.suspended is not None or not keeper.is_tuned:
            self._tuning.pause()
        elif standing.followed is not None and keeper.goes_by_ours(standing.followed.plan):
            self._tuning.follow(self._planning.thresholds, standing.followed_s)
            self._tuning.serve(standing.followed.plan.stages[0])

    async def _go_by(self, said: Tuned, reason: str, epoch: int, seen: Look) -> None:
        keeper, standing = self._keeper, self._keeper.standing
        missing = sorted(set(self._planning.thresholds) - set(said.thresholds))
        if missing:
            raise PlanError(f"{said.words}: no threshold for ramps {missing}")
        keeper.say(reason, said.words)
        keeper.decide_by(said.thresholds)
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
