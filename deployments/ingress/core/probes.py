"""Inputs that are observed to the model's end, wherever they were answered, for what the full model says. Pure.

*Probes* are drawn at random, and every ramp answers them: they are the ingress's unbiased view of the model. Under a
plan by which answered inputs *stay*, the active ramps show all other inputs too. Both tell whether early answers equal
the full model's. A probe that loses words at a crossing goes on both ways: without them, as other inputs do, and whole,
for what the full model says of all of it.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from deployments.ingress.core.inputs import Entry, Rules, Watch, losses_of_answers, observations_of
from earlyexit.network.wire import Numbers, Seen
from optimizer.plan import NO_RAMPS, Plan, PolicySpec
from profiles.records import Loss
from profiles.stream import Observations, StreamShape

logger = logging.getLogger(f"ray.serve.{__name__}")

H = TypeVar("H", bound=Hashable)

MOST_COMPLETE = 50_000
"""Complete inputs kept for the next report: of probes, at a share of 2 %, minutes of a few thousand inputs per second;
where all inputs stay, most of a minute of a thousand. They are asked for every few seconds."""
MOST_OPEN = 50_000
"""Inputs under way, at the very most; where stages swallow them, no more are begun until some were forgotten."""
MANY = 256
"""Complete inputs whose losses are worth computing: alone, an input takes as long for that as for all else here."""
MOST_BYTES = 1_000_000
"""Of answers of many numbers, unpacked, that complete inputs hold until then: while more of them settled, callers would
wait for the event loop (six inputs of CamVid's maps at three ramps take 5 ms of a busy core)."""
SWEEP_S = 1.0
"""How often open inputs are looked through for those that will not come back."""


class WatchedInput(Hashable, Protocol):
    """What must be known of an input that is watched; it is known by itself."""

    @property
    def arrived_s(self) -> float: ...

    @property
    def deadline_s(self) -> float: ...

    @property
    def attempt(self) -> int: ...


class ExitObservations:
    """Watched inputs, until the model's last block was seen of them and the caller has its answer.

    Its times are the caller's; `hand_over` can move them to another clock.
    """

    def __init__(
        self,
        shape: StreamShape,
        loss: Loss,
        *,
        outlive_s: float,
        most_complete: int = MOST_COMPLETE,
        most_open: int = MOST_OPEN,
    ) -> None:
        """`loss`: the task's. `outlive_s`: how long after its deadline something may still be seen of an input."""
        self._shape = shape
        self._loss = loss
        self._ramps = frozenset(shape.ramps)
        self._last = shape.num_blocks - 1
        self._outlive_s = outlive_s
        self._most_complete = most_complete
        self._most_open = most_open
        self._open: dict[Hashable, Entry] = {}
        self._probe_of: dict[Hashable, Hashable] = {}
        """Of what goes on with all words, the open probe that lost some."""
        self._ended: list[Entry] = []
        """Complete; what their answers cost is not known yet."""
        self._ended_bytes = 0
        """Of their answers of many numbers."""
        self._complete: deque[Observations] = deque()
        self._num_kept = 0
        """In these."""
        self._swept_s = 0.0
        self._total_loss = 0.0
        """Of the complete ones' answers against the full model's."""
        self.num_complete = 0
        self.num_refused = 0
        """Ended ones that contradict themselves: an exit that no plan had on, a ramp that said nothing."""
        self.num_overflown = 0
        """Complete ones that were dropped before they were asked for."""

    def can_look(self, policy: PolicySpec | None) -> bool:
        """Whether replicas that follow a policy see in the unit of this book."""
        return (policy or NO_RAMPS).name in (self._shape.score, "recorded")

    def draw(
        self, inputs: Sequence[WatchedInput], plan: Plan, share: float, rng: random.Random, now_s: float
    ) -> Watch | None:
        """What is to be seen of a departure under a plan; None for nothing. `share`: of departures, probes.

        Where there is no room inputs are as others are: answered once, and not waited for any longer.
        """
        watch: Watch = "probe"
        if not share or rng.random() >= share:
            if plan.after_answer == "stop" or not plan.ramps:
                return None
            watch = "stay"
        return watch if self.can_look(plan.policy) and self.begin(inputs, plan, watch, now_s) else None

    def begin(self, inputs: Sequence[WatchedInput], plan: Plan, watch: Watch, now_s: float) -> bool:
        """Take a departure's inputs; false, and none is taken, while too many are under way.

        Those that start again are passed over: a call that failed lost its answered ones, so they are the hard ones.
        """
        self._sweep(now_s)
        if len(self._open) + len(inputs) > self._most_open:
            return False
        stays, active = plan.after_answer == "stay", frozenset(plan.ramps)
        for each in inputs:
            if not each.attempt:
                self._open[each] = Entry(each.arrived_s, each.deadline_s, watch, stays, active)
        return True

    def goes_alone(self, watched: Hashable) -> bool:
        """Whether an input is under way, and nothing goes beside it."""
        entry = self._open.get(watched)
        return entry is not None and entry.beside is None

    def go_beside(self, watched: Hashable, whole: H) -> H:
        """An open probe loses words, and `whole` goes on with all of them: the full model's answer to that counts."""
        self._open[watched].beside = whole
        self._probe_of[whole] = watched
        return whole

    def holds(self, watched: Hashable) -> bool:
        """Whether an input is under way and not seen to the end, answered or not."""
        return watched in self._open or watched in self._probe_of

    def answered(self, watched: Hashable, exit_block: int, active_now: frozenset[int]) -> None:
        """Take note of where an input was answered, by a stage that may follow a later plan than its sender."""
        entry = self._open.get(watched)
        if entry is None or entry.exit is not None:
            return
        entry.exit = exit_block
        if exit_block != self._last and exit_block not in entry.active:
            entry.active = active_now
        if entry.has_ended(self._last):
            self._close(watched, entry)

    def see(self, seen: Iterable[tuple[Hashable, Seen]]) -> None:
        """Take note of what exits said, each of an input."""
        for seen_of, each in seen:
            watched = self._probe_of.get(seen_of, seen_of)
            entry = self._open.get(watched)
            if entry is None:
                continue
            if watched is seen_of:
                entry.said[each.block] = each
            elif each.block == self._last:
                entry.whole = each
            if each.block == self._last and entry.has_ended(self._last):
                self._close(watched, entry)

    def forget(self, inputs: Iterable[Hashable]) -> None:
        """Give inputs up that do not get to the end, or what goes beside them does not."""
        for each in inputs:
            entry = self._open.pop(self._probe_of.get(each, each), None)
            if entry is not None and entry.beside is not None:
                del self._probe_of[entry.beside]

    def stop_staying(self) -> None:
        """Give up all but the probes: inputs stay no more, and of those that did only the slow would get to the end."""
        self.forget([each for each, entry in self._open.items() if entry.watch == "stay"])

    def hand_over(self, ahead_s: float = 0.0) -> Observations | None:
        """The complete ones since the last time; None where there are none.

        `ahead_s`: by how much the receiver's clock is ahead of ours.
        """
        self._settle()
        parts, self._complete, self._num_kept = self._complete, deque(), 0
        if not parts:
            return None
        joined = Observations.join(self._shape, parts)
        return replace(joined, times_s_N=joined.times_s_N + ahead_s)

    @property
    def agreement(self) -> float | None:
        """1 - mean loss of the complete ones' answers against the full model's; None before the first."""
        self._settle()
        return 1 - self._total_loss / self.num_complete if self.num_complete else None

    def _close(self, watched: Hashable, entry: Entry) -> None:
        self.forget((watched,))
        if not self._is_whole(entry):
            self.num_refused += 1
            return
        self.num_complete += 1
        self._ended.append(entry)
        full = entry.full(self._last).value
        if isinstance(full, Numbers):
            self._ended_bytes += full.num_bytes * len(entry.said)
        if len(self._ended) >= MANY or self._ended_bytes >= MOST_BYTES:
            self._settle()

    def _is_whole(self, entry: Entry) -> bool:
        active = entry.active & self._ramps
        if entry.exit != self._last and entry.exit not in active:
            return False
        said = entry.said
        for ramp in self._ramps if entry.watch == "probe" else active:
            seen = said.get(ramp)
            if seen is None or math.isnan(seen.score):
                return False
        return True

    def _settle(self) -> None:
        """Finds what the answers of complete ones cost; the oldest that were not asked for are dropped."""
        if not self._ended:
            return
        entries, self._ended, self._ended_bytes = self._ended, [], 0
        try:
            new = observations_of(entries, self._shape, self._loss)
            loss = losses_of_answers(new)
        except Exception:  # of a task's own loss, say; the callers of these inputs get their answers all the same
            logger.exception("what was seen of %d inputs cannot be compared, and is left out", len(entries))
            self.num_refused += len(entries)
            self.num_complete -= len(entries)
            return
        self._total_loss += loss
        self._complete.append(new)
        self._num_kept += len(new)
        while (over := self._num_kept - self._most_complete) > 0:
            oldest = self._complete.popleft()
            going = min(over, len(oldest))
            if going < len(oldest):
                self._complete.appendleft(oldest.take(np.arange(going, len(oldest))))
            self._num_kept -= going
            self.num_overflown += going

    def _sweep(self, now_s: float) -> None:
        if now_s < self._swept_s + SWEEP_S:
            return
        self._swept_s = now_s
        self.forget([key for key, entry in self._open.items() if now_s > entry.deadline_s + self._outlive_s])


def book_of(rules: Rules, *, outlive_s: float) -> ExitObservations | None:
    """By an ingress's rules; None where nothing is to be seen.

    Answered inputs that run on wait in stages with their states, as others do: no more of them than are let in.
    """
    if rules.shape is None:
        return None
    most_open = int(min(MOST_OPEN, rules.max_queued))
    return ExitObservations(rules.shape, rules.loss, outlive_s=outlive_s, most_open=most_open)
