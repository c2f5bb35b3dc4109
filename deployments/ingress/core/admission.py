"""Whether an input that arrives now can be answered in time (E3 section 3.1 refuses what cannot). Pure.

By Little's law, who arrives behind n unanswered inputs waits n over the service's rate, wherever they queue. So there
is a number of inputs inside up to which answers are in time: the limit. The plan says where it begins. Then it is
steered by what it is for, the lateness of those that came when the service was about as full as it may be: up a little
with every one in time, down with every late one, so that at rest one in a few hundred is late (stochastic approximation
of a quantile, Robbins and Monro 1951). Nothing is assumed of why they are late: stages that share their processors with
other work, or a plan that promised too much, move the limit like a lost replica does.

(Clockwork, whose rule E3 takes, knows every execution's time beforehand. Where inputs leave early nobody does.)
"""

from __future__ import annotations

import math

from optimizer.plan import Plan

SAFETY = 0.1
"""Share of the SLO that is not counted on: for what follows the answer, and for what the last inputs did not show."""
BURST = 0.3
"""Share of the SLO that a plan's rate is not counted on for, before anything is known: a burst after quiet finds stages
that are empty one behind the other, and fills them first."""
CONTESTED = 0.5
"""An input tells of the limit if so much of it was ahead. With less ahead its lateness is not the limit's fault,
unless too many are late."""
LATE_SHARE = 0.01
"""So many late are too many, whatever was ahead of them."""
FALL = 0.05
"""Share of the limit that a late input takes away."""
DEEPEST_FALL = 0.3
"""Share that all those take away that are late within an SLO: they are of one batch, or of one disturbance, and what is
done about it is seen no sooner."""
RISE = 0.00025
"""Share of the limit that an input in time adds: at rest one late input makes up for FALL / RISE in time."""
MOST_RISE = 0.03
"""Inputs that it adds at most. As many as the limit are answered within an SLO, so this is a share of it per SLO: where
thousands are, the first late one is seen long after the limit was passed."""
LEAP = 2.0
"""What a limit is multiplied by at most, once a window, if inputs were refused while the slowest had time to spare."""
SPARE = 0.8
"""Of the time that is counted on: who takes less has time to spare, and a leap goes so far that the slowest has not."""
WINDOW = (0.25, 4.0)
"""Seconds and SLOs between leaps, at least: how slow the slowest is, few inputs do not tell."""
FADE = 0.75
"""What is left of the counts of late inputs, from one window to the next."""
PLANNED_SHARE = (1 / 16, 4.0)
"""Bounds of what another plan's limit begins at, over what it says: beyond, the two have nothing in common."""


class Admission:
    """What one ingress may have inside; times are the caller's, and never go back."""

    def __init__(self, plan: Plan, *, slo_s: float, num_ingresses: int) -> None:
        """Of what the plan predicts, where it does, each ingress has its part."""
        self._slo_s = slo_s
        self._num_ingresses = num_ingresses
        self._counted_on_s = (1 - SAFETY) * slo_s
        self._filling = self._filling_of(plan)
        self._planned = self._limit = self._planned_limit(plan)
        self._seen = 0.0
        self._late = 0.0
        """Of what was seen."""
        self._least = 0.0
        """What the limit falls to at most before `_fallen_s`."""
        self._fallen_s = -math.inf
        self._window_ends_s = -math.inf
        self._refused = False
        """Within the window, as are the slowest of the contested."""
        self._slowest_s = 0.0

    @property
    def limit(self) -> float:
        """Inputs that may be unanswered at once; infinite while nothing is known of the service."""
        return self._limit

    def follow(self, plan: Plan) -> None:
        """Another plan: its limit is expected to be as far from what it says as the last one's was."""
        self._filling = self._filling_of(plan)
        planned = self._planned_limit(plan)
        if math.isfinite(planned) and math.isfinite(self._planned):
            least, most = PLANNED_SHARE
            self._limit = max(self._filling, planned * min(max(self._limit / self._planned, least), most))
        elif math.isfinite(planned):
            self._limit = planned
        self._planned = planned
        self._seen = self._late = self._slowest_s = 0.0

    def late_s(self, num_inputs: int, left_s: float, *, unanswered: int, now_s: float) -> float:
        """By how much a request that has `left_s` would be late, counted as refused if it would be; 0: begin it.

        An idle service begins everything, so nothing learnt can keep it idle.
        """
        self._look_back(now_s)
        too_many = unanswered + num_inputs - self._limit * left_s / self._slo_s
        if not unanswered or too_many <= 0:
            return 0.0
        self._refused = True
        return too_many * self._slo_s / self._limit

    def answered(self, latency_s: float, ahead: int, now_s: float) -> None:
        """An input that went as deep as inputs go took so long; `ahead` were unanswered when it arrived."""
        self._look_back(now_s)
        self._seen += 1
        is_contested = ahead >= CONTESTED * self._limit
        if latency_s >= self._counted_on_s:
            self._late += 1
            if is_contested or self._late > LATE_SHARE * self._seen:
                self._fall(ahead, now_s)
        elif is_contested:
            self._limit += min(RISE * self._limit, MOST_RISE)
        if is_contested:
            self._slowest_s = max(self._slowest_s, latency_s)

    def given_up(self, waited_s: float, ahead: int, now_s: float) -> None:
        """An input was given up for its deadline. One sooner than the SLO says nothing of what the SLO allows."""
        if waited_s >= self._counted_on_s:
            self.answered(waited_s, ahead, now_s)

    def _planned_limit(self, plan: Plan) -> float:
        # A plan that somebody wrote by hand may predict nothing, or a rate of zero: that is not known either.
        rate_per_s = plan.predicted.get("rate_per_s") or math.inf
        return max(self._filling, (1 - BURST) * self._slo_s * rate_per_s / self._num_ingresses)

    def _filling_of(self, plan: Plan) -> float:
        """What the limit never falls below.

        Stages that wait for full batches need one per replica. With fewer inside all wait as long as they may, so that
        the service is slow because little is let in, and little is let in because it is slow.
        """
        if plan.dispatch != "deferred":
            return 1.0
        one_each = sum(stage.replicas * max(split.batch for split in stage.splits) for stage in plan.stages)
        return max(1.0, one_each / self._num_ingresses)

    def _fall(self, ahead: int, now_s: float) -> None:
        if math.isinf(self._limit):
            self._limit = max(self._filling, ahead)
        if now_s >= self._fallen_s:
            self._fallen_s = now_s + self._slo_s
            self._least = max(self._filling, self._limit * (1 - DEEPEST_FALL))
        self._limit = max(self._least, self._limit * (1 - FALL))

    def _look_back(self, now_s: float) -> None:
        """On a window that has ended: a limit that was too low by far would else rise as slowly as it is steered."""
        if now_s < self._window_ends_s:
            return
        if self._refused and 0 < self._slowest_s < SPARE * self._counted_on_s:
            self._limit *= min(LEAP, SPARE * self._counted_on_s / self._slowest_s)
        self._seen, self._late = FADE * self._seen, FADE * self._late
        self._refused, self._slowest_s = False, 0.0
        seconds, slos = WINDOW
        self._window_ends_s = now_s + max(seconds, slos * self._slo_s)
