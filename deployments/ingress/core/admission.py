"""Whether an input that arrives now can be answered in time (E3 section 3.1 refuses what cannot). Pure.

By Little's law, an input that arrives behind n unanswered ones waits n over the service's rate, wherever they queue. So
answers are in time up to some number of unanswered inputs: the limit. The plan's predicted rate sets the first limit.
The lateness of inputs that came when the service was nearly full then steers it: every one in time raises it a little,
every late one lowers it, so that at rest one in eighty of those is late (stochastic approximation of a quantile,
Robbins and Monro 1951): a limit that keeps more of them in time refuses more inputs than it saves. The reason for the
lateness does not matter: stages that share their processors with other work, or a plan that promised too much, move
the limit as a lost replica does.

The limit counts what inputs cost: their tokens under a plan whose batches are bound by tokens, else 1 each. So a long
input pays for itself, and no input is refused for being behind a few short ones; where all are equally long, both ways
of counting decide the same.

(Clockwork, whose rule E3 takes, knows every execution's time beforehand. Early exits make that time unknown.)
"""

from __future__ import annotations

import math

from earlyexit.network.boundary import Split
from optimizer.plan import Plan

SAFETY = 0.05
"""Share of the SLO that is not counted on: for what follows the answer, and for what the last inputs did not show."""
BURST = 0.3
"""Share of the SLO that a plan's rate is not counted on for, before anything is known: a burst after quiet finds stages
that are empty one behind the other, and fills them first."""
CONTESTED = 0.5
"""An input tells of the limit if so much of it was ahead. With less ahead its lateness is not the limit's fault,
unless too many are late, and never of one that costs more than so much itself: its own length is why."""
LATE_SHARE = 0.01
"""So many late are too many, whatever was ahead of them."""
FALL = 0.02
"""Share of the limit that a late input takes away."""
DEEPEST_FALL = 0.3
"""Share that all those take away that are late within an SLO: they are of one batch, or of one disturbance, and what is
done about it is seen no sooner."""
RISE = 0.00025
"""Share of the limit that an input in time adds: at rest one late input makes up for FALL / RISE in time."""
MOST_RISE = 0.03
"""Inputs of its cost that it adds at most. As many as the limit are answered within an SLO, so this is a share of it
per SLO: where thousands are, the first late one is seen long after the limit was passed."""
LEAP = 2.0
"""What a limit is multiplied by at most, once a window, if inputs were refused while slow ones had time to spare."""
SPARE = 0.8
"""Share of the time that is counted on. An input that takes less has time to spare, and a leap goes so far that the
slow inputs have none: the slowest but for the share that may be late, since on shared processors one in a hundred is
slow at any limit."""
WINDOW = (0.25, 4.0)
"""Seconds and SLOs between leaps, at least: how slow the slow ones are, few inputs do not tell."""
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
        self._begin(plan, None)
        self.limit = self._planned
        """What all that are unanswered at once may cost; infinite while nothing is known of the service."""
        self._seen = 0.0
        self._late = 0.0
        """Of what was seen."""
        self._least = 0.0
        """What the limit falls to at most before `_fallen_s`."""
        self._fallen_s = -math.inf
        self._window_ends_s = -math.inf
        self._refused = False
        """Within the window, as are what the contested took."""
        self._took_s: list[float] = []

    def follow(self, plan: Plan, tokens_per_input: float | None = None) -> None:
        """Another plan: its limit is expected to be as far from what it says as the last one's was.

        `tokens_per_input`: of those that came; None where none did.
        """
        before, counted_tokens = self._planned, self.counts_tokens
        self._begin(plan, tokens_per_input)
        if math.isfinite(self._planned) and math.isfinite(before):
            least, most = PLANNED_SHARE
            self.limit = max(self._filling, self._planned * min(max(self.limit / before, least), most))
        elif math.isfinite(self._planned):
            self.limit = self._planned
        elif counted_tokens != self.counts_tokens:
            per_input = tokens_per_input or math.inf  # where nothing came yet, nothing is known in the other unit
            of_new_unit = per_input if self.counts_tokens or not tokens_per_input else 1 / per_input
            self.limit = max(self._filling, self.limit * of_new_unit)
        if counted_tokens != self.counts_tokens:
            self._fallen_s = -math.inf
        self._seen = self._late = 0.0
        self._took_s.clear()

    def late_s(self, cost: float, left_s: float, *, unanswered: float, now_s: float) -> float:
        """By how much a request that has `left_s` would be late, counted as refused if it would be; 0: begin it.

        `unanswered`: what is inside costs so much. An idle service begins everything, so nothing learnt can keep it
        idle, and nothing is too long for ever; nor is a request of many inputs too long for stages that wait for full
        batches, while less is inside than there is room for (`_room_of`).
        """
        self._look_back(now_s)
        share = left_s / self._slo_s
        too_many = unanswered + cost - self.limit * share
        if not unanswered or too_many <= 0 or unanswered < self._room * share:
            return 0.0
        self._refused = True
        return too_many * self._slo_s / self.limit

    def answered(self, latency_s: float, ahead: float, cost: float, now_s: float) -> None:
        """An input that went as deep as inputs go took so long; see `cost_of`."""
        self._look_back(now_s)
        self._seen += 1
        half = CONTESTED * self.limit
        is_contested, is_late = ahead >= half, latency_s >= self._counted_on_s
        if is_late and (is_contested or cost <= half):
            self._late += 1
            if is_contested or self._late > LATE_SHARE * self._seen:
                self._fall(ahead, now_s)
        elif is_contested:
            self.limit += min(RISE * self.limit, MOST_RISE * cost)
        # Under so low a limit that no such input is admitted behind this one, few inputs or none have as much ahead.
        if is_contested or (ahead + 2 * cost > self.limit and not is_late):
            self._took_s.append(latency_s)

    def given_up(self, waited_s: float, ahead: float, cost: float, now_s: float) -> None:
        """An input was given up for its deadline. One sooner than the SLO says nothing of what the SLO allows."""
        if waited_s >= self._counted_on_s:
            self.answered(waited_s, ahead, cost, now_s)

    def _begin(self, plan: Plan, tokens_per_input: float | None) -> None:
        """What the plan says: how costs are counted, and where the limit begins."""
        self.counts_tokens = any(split.tokens is not None for split in plan.splits)
        expected = plan.predicted.get("tokens_per_input") or tokens_per_input
        mean_cost = expected if self.counts_tokens else 1.0
        self._room = self._room_of(plan, mean_cost or None)
        self._filling = max(mean_cost or 1.0, self._room)
        # A plan that was written by hand may predict nothing, or a rate of zero; both leave the rate unknown.
        rate_per_s = (plan.predicted.get("rate_per_s") or math.inf) * (mean_cost or math.inf)
        self._planned = max(self._filling, (1 - BURST) * self._slo_s * rate_per_s / self._num_ingresses)

    def _room_of(self, plan: Plan, mean_cost: float | None) -> float:
        """What is let in however late it is; the limit never falls below it.

        Stages that wait for full batches need one per replica and split. With fewer inside, every input waits as long
        as it may: the service is slow because little is let in, and little is let in because it is slow.
        """
        if plan.dispatch != "deferred":
            return 0.0
        one_each = sum(
            stage.replicas * sum(_full_cost(split, mean_cost) for split in stage.splits) for stage in plan.stages
        )
        return one_each / self._num_ingresses

    def _fall(self, ahead: float, now_s: float) -> None:
        if math.isinf(self.limit):
            self.limit = max(self._filling, ahead)
        if now_s >= self._fallen_s:
            self._fallen_s = now_s + self._slo_s
            self._least = max(self._filling, self.limit * (1 - DEEPEST_FALL))
        self.limit = max(self._least, self.limit * (1 - FALL))

    def _look_back(self, now_s: float) -> None:
        """On a window that has ended: a limit that was too low by far would else rise as slowly as it is steered."""
        if now_s < self._window_ends_s:
            return
        took_s, spare_s = sorted(self._took_s), SPARE * self._counted_on_s
        if self._refused and took_s:
            slow_s = took_s[-1 - int(LATE_SHARE * len(took_s))]  # of fewer than a hundred, the slowest
            if slow_s < spare_s:
                self.limit *= min(LEAP, spare_s / slow_s) if slow_s else LEAP
        self._seen, self._late = FADE * self._seen, FADE * self._late
        self._refused, self._took_s = False, []
        seconds, slos = WINDOW
        self._window_ends_s = now_s + max(seconds, slos * self._slo_s)


def _full_cost(split: Split, mean_cost: float | None) -> float:
    """Returns the cost of a full batch: as many tokens as it may hold if the lengths of its inputs are unknown."""
    if mean_cost is None:
        return split.tokens or split.batch
    return split.budget.tokens_when_full(mean_cost)
