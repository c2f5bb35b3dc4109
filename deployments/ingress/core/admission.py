"""Admission control: refuses inputs that would be late (E3 section 3.1). Pure.

By Little's law, an input that arrives behind n unanswered inputs waits n / rate, wherever they queue. So answers are in
time as long as the number of unanswered inputs stays below a limit. The first limit follows from the plan's predicted
rate. The limit is then adjusted by the latencies of inputs that arrived when the service was nearly full: an answer in
time raises it a little, and a late answer lowers it. In equilibrium, one in eighty of these inputs is late (stochastic
approximation of a quantile, Robbins and Monro 1951). The limit reacts to any cause of a long queue: a lost replica,
shared processors, or a plan that predicted too much. It does not fall while few inputs are late and fewer refused, nor
while inputs that arrive when there is room are in time. A lower limit would then refuse more inputs than it saves.

The limit is in units of cost: the tokens of an input if the plan's batches are limited by tokens, and 1 otherwise. So
the length of an input counts, both for itself and for inputs behind it. (E3 uses Clockwork's rule, which needs to know
all execution times in advance. With early exits they are unknown.)
"""

from __future__ import annotations

import math

from earlyexit.network.boundary import Split
from optimizer.plans.plan import Plan

SAFETY = 0.05
"""Share of the SLO that is kept in reserve for sending the answer and for sudden changes."""
BURST = 0.3
"""Share of the SLO that the first limit reserves, because a burst after an idle time fills one stage after another."""
CONTESTED = 0.5
"""An input is *contested* if the cost ahead of it was at least this share of the limit. An uncontested input whose own
cost is more than this share does not lower the limit if it is late, because its own length is the cause."""
FALL = 0.02
"""Share of the limit by which a late input lowers it."""
MOST_LOST = 0.08
"""The largest share of inputs that may be late or refused without a fall, if more are late than refused."""
HAD_ROOM = 0.25
"""The limit does not fall for this share of the SLO after an answer in time to an uncontested input. If others are late
then, an SLO that is hardly longer than a batch is the cause, and not the queue."""
DEEPEST_FALL = 0.3
"""The largest share by which the limit falls within one SLO. Inputs that are late together usually have one cause, and
the effect of a lower limit shows after one SLO at the earliest."""
RISE = 0.00025
"""Share of the limit by which an input in time raises it. In equilibrium, FALL / RISE of them balance a late one."""
MOST_RISE = 0.03
"""The largest rise per input in time, in units of its cost. About `limit` inputs are answered per SLO, so this bounds
the rise per SLO. Large limits must rise slowly, because late inputs show long after the limit was too high."""
LEAP = 2.0
"""The largest factor by which the limit rises at the end of a window in which inputs were refused needlessly."""
SPARE = 0.8
"""Inputs that take less than this share of the usable time have time to spare. A leap raises the limit until the slow
inputs have none."""
SLOWEST = 0.01
"""The share of the inputs that is left out of this, because on shared processors some are slow at any limit."""
WINDOW = (0.25, 4.0)
"""The shortest window between leaps, in seconds and in SLOs. Fewer inputs do not show how slow the slow ones are."""
FADE = 0.75
"""The factor by which the sums of late and refused inputs shrink from one window to the next."""
PLANNED_SHARE = (1 / 16, 4.0)
"""Bounds of the ratio of the limit to the planned limit that a new plan takes over from the previous plan."""


class Admission:
    """The admission control of one ingress. All times are from the caller's clock, which must never go back."""

    def __init__(self, plan: Plan, *, slo_s: float, num_ingresses: int) -> None:
        """Starts with an equal share of the rate that the plan predicts, if it predicts one.

        `slo_s`: infinite without an SLO. Then nothing is ever late.
        """
        self.is_on = slo_s < math.inf
        self._slo_s = slo_s
        self._num_ingresses = num_ingresses
        self._usable_s = (1 - SAFETY) * slo_s
        self._begin(plan, None)
        self.limit = self._planned
        """The largest cost of all unanswered inputs; infinite while nothing is known about the service."""

    def follow(self, plan: Plan, tokens_per_input: float | None = None) -> None:
        """Switches to another plan. The ratio of the limit to the planned limit is taken over.

        `tokens_per_input`: the mean of the inputs so far; None before the first.
        """
        before, counted_tokens = self._planned, self.counts_tokens
        self._begin(plan, tokens_per_input)
        if math.isfinite(self._planned) and math.isfinite(before):
            lowest, highest = PLANNED_SHARE
            self.limit = max(self._floor, self._planned * min(max(self.limit / before, lowest), highest))
        elif math.isfinite(self._planned):
            self.limit = self._planned
        elif counted_tokens != self.counts_tokens:
            if not tokens_per_input:  # without inputs, the limit is unknown in the new unit
                factor = math.inf
            else:
                factor = tokens_per_input if self.counts_tokens else 1 / tokens_per_input
            self.limit = max(self._floor, self.limit * factor)

    def late_s(self, cost: float, left_s: float, *, unanswered: float, now_s: float) -> float:
        """Returns by how many seconds a request with a deadline in `left_s` would be late; 0: it is admitted.

        `unanswered`: the cost of all unanswered inputs. An idle service admits every request, so that a wrong limit
        cannot keep it idle. Stages with deferred dispatch also admit requests until their batches can fill
        (`_batch_room`). A late request counts as refused here, even if another chain then takes it.
        """
        if not self.is_on or math.isinf(self.limit):
            return 0.0
        self._end_window(now_s)
        share = left_s / self._slo_s
        excess = unanswered + cost - self.limit * share
        if not unanswered or excess <= 0 or unanswered < self._room * share:
            return 0.0
        self._has_refused = True
        self._refused += cost
        return excess * self._slo_s / self.limit

    def answered(self, latency_s: float, ahead: float, cost: float, now_s: float) -> None:
        """Adjusts the limit by the latency of an input that left in the last split; see `Chain.cost_of`."""
        self._end_window(now_s)
        self._answered += cost
        contested_cost = CONTESTED * self.limit
        is_contested, is_late = ahead >= contested_cost, latency_s >= self._usable_s
        if not is_contested and not is_late:
            self._had_room_s = now_s
        if is_late and (is_contested or cost <= contested_cost):
            self._late += cost
            lost, offered = self._late + self._refused, self._answered + self._refused
            is_full = now_s - self._had_room_s >= HAD_ROOM * self._slo_s or math.isinf(self.limit)
            if is_full and (lost > MOST_LOST * offered or self._refused >= self._late):
                self._fall(ahead, now_s)
        elif is_contested:
            self.limit += min(RISE * self.limit, MOST_RISE * cost)
        # If the limit is so low that no second input fits behind this one, hardly any input is ever contested.
        if is_contested or (ahead + 2 * cost > self.limit and not is_late):
            self._took_s.append(latency_s)

    def given_up(self, waited_s: float, ahead: float, cost: float, now_s: float) -> None:
        """Adjusts the limit by an input that missed its deadline. Deadlines shorter than the SLO are ignored."""
        if waited_s >= self._usable_s:
            self.answered(waited_s, ahead, cost, now_s)

    def _begin(self, plan: Plan, tokens_per_input: float | None) -> None:
        """Computes the unit of cost, the planned limit and the lowest limit of a plan, and begins its first window."""
        self.counts_tokens = self.is_on and any(split.tokens is not None for split in plan.splits)
        expected = plan.predicted.get("tokens_per_input") or tokens_per_input
        mean_cost = expected if self.counts_tokens else 1.0
        self._room = self._batch_room(plan, mean_cost or None)
        self._floor = max(mean_cost or 1.0, self._room)
        # A hand-written plan may predict nothing, or a rate of zero. Both leave the rate unknown.
        rate_per_s = (plan.predicted.get("rate_per_s") or math.inf) * (mean_cost or math.inf)
        self._planned = max(self._floor, (1 - BURST) * self._slo_s * rate_per_s / self._num_ingresses)
        # A window of two plans would end while the queues of the second fill, and latencies are still short.
        self._answered = self._late = self._refused = 0.0
        """The cost of answered inputs, of those that were late, and of refused ones. These sums fade."""
        self._lowest = 0.0
        """The limit does not fall below this before `_fall_ends_s`."""
        self._fall_ends_s = self._window_ends_s = self._had_room_s = -math.inf
        self._has_refused = False
        """Whether a request was refused in this window."""
        self._took_s: list[float] = []
        """The latencies of contested inputs in this window."""

    def _batch_room(self, plan: Plan, mean_cost: float | None) -> float:
        """Returns the cost of one full batch per replica and split under deferred dispatch, else 0.

        This much is always admitted. With fewer inputs, batches would not fill and every input would wait as long as
        it may. The resulting latencies would then lower the limit further.
        """
        if plan.dispatch != "deferred":
            return 0.0
        cost = sum(stage.replicas * sum(_full_cost(each, mean_cost) for each in stage.splits) for stage in plan.stages)
        return cost / self._num_ingresses

    def _fall(self, ahead: float, now_s: float) -> None:
        if math.isinf(self.limit):
            self.limit = max(self._floor, ahead)
        if now_s >= self._fall_ends_s:
            self._fall_ends_s = now_s + self._slo_s
            self._lowest = max(self._floor, self.limit * (1 - DEEPEST_FALL))
        self.limit = max(self._lowest, self.limit * (1 - FALL))

    def _end_window(self, now_s: float) -> None:
        """At the end of a window, raises a limit that was far too low. Single answers would raise it too slowly."""
        if now_s < self._window_ends_s:
            return
        took_s, spare_s = sorted(self._took_s), SPARE * self._usable_s
        if self._has_refused and took_s:
            slow_s = took_s[-1 - int(SLOWEST * len(took_s))]  # the slowest, if there are fewer than a hundred
            if slow_s < spare_s:
                self.limit *= min(LEAP, spare_s / slow_s) if slow_s else LEAP
        self._answered, self._late, self._refused = FADE * self._answered, FADE * self._late, FADE * self._refused
        self._has_refused, self._took_s = False, []
        seconds, slos = WINDOW
        self._window_ends_s = now_s + max(seconds, slos * self._slo_s)


def _full_cost(split: Split, mean_cost: float | None) -> float:
    """Returns the cost of a full batch. If the mean length is unknown, it is the largest number of tokens."""
    if mean_cost is None:
        return split.tokens or split.batch
    return split.budget.tokens_when_full(mean_cost)
