"""Probes: inputs of which every ramp and the full model say something, whoever answered them. Pure.

They are the ingress's unbiased view of the model: what ramps that are off would have said, and whether early answers
are those of the full model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from earlyexit.wire import Seen, Value, stacked
from optimizer.plan import NO_RAMPS, PolicySpec
from profiles.records import Loss
from profiles.stream import Observations, StreamShape

MOST_COMPLETE = 50_000
"""Complete probes kept for the next report: at a share of 2 %, minutes of a few thousand inputs per second."""
MOST_OPEN = 50_000
"""Probes under way; where stages swallow them, no more are begun until some were forgotten."""
SWEEP_S = 1.0
"""How often probes are looked through for those that will not come back."""


class ProbedInput(Hashable, Protocol):
    """What must be known of an input that becomes a probe; it is known by itself."""

    @property
    def arrived_s(self) -> float: ...

    @property
    def deadline_s(self) -> float: ...


@dataclass(slots=True, kw_only=True)
class Probe:
    """One probe under way, and what was seen of it so far."""

    arrived_s: float
    deadline_s: float
    active: frozenset[int]
    """The active ramps of the plan that it counts for."""
    scores: list[float]
    answers: list[Value | None]
    exit: int | None = None
    full: Value | None = None
    """The full model's answer."""

    @property
    def whole(self) -> list[Value] | None:
        """What every ramp said; None where one said nothing, or not how sure it is."""
        said = [answer for answer in self.answers if answer is not None]
        return said if len(said) == len(self.answers) and not any(map(math.isnan, self.scores)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteProbe:
    """One probe, and what its ramps' answers cost against the full model's."""

    arrived_s: float
    active: frozenset[int]
    exit: int
    scores: list[float]
    losses: list[float]


class ProbeBook:
    """Probes by their input, until the model's last block was seen of them and the caller has its answer.

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
        """`loss`: the task's. `outlive_s`: how long after its deadline something may still be seen of a probe."""
        self._shape = shape
        self._loss = loss
        self._column = {ramp: column for column, ramp in enumerate(shape.ramps)}
        self._last = shape.num_blocks - 1
        self._outlive_s = outlive_s
        self._most_complete = most_complete
        self._most_open = most_open
        self._open: dict[Hashable, Probe] = {}
        self._complete: deque[CompleteProbe] = deque()
        self._swept_s = 0.0
        self.num_complete = 0
        self.total_loss = 0.0
        """Of the complete ones' answers against the full model's."""
        self.num_refused = 0
        """Complete ones that contradict themselves: an exit that no plan had on, a ramp that said nothing."""
        self.num_overflown = 0
        """Complete ones that nobody asked for in time."""

    def can_look(self, policy: PolicySpec | None) -> bool:
        """Whether replicas that follow a policy see in the unit of these probes."""
        return (policy or NO_RAMPS).name in (self._shape.score, "recorded")

    def begin(self, inputs: Sequence[ProbedInput], active: frozenset[int], now_s: float) -> bool:
        """Take a departure's inputs as probes; false, and none is taken, while too many are under way."""
        self._sweep(now_s)
        if len(self._open) + len(inputs) > self._most_open:
            return False
        num_ramps = len(self._shape.ramps)
        for each in inputs:
            self._open[each] = Probe(
                arrived_s=each.arrived_s,
                deadline_s=each.deadline_s,
                active=active,
                scores=[math.nan] * num_ramps,
                answers=[None] * num_ramps,
            )
        return True

    def holds(self, probed: Hashable) -> bool:
        """Whether an input is a probe under way, answered or not."""
        return probed in self._open

    def answered(self, probed: Hashable, exit_block: int, active_now: frozenset[int]) -> None:
        """Take note of where a probe was answered, by a stage that may follow a later plan than its sender."""
        probe = self._open.get(probed)
        if probe is None or probe.exit is not None:
            return
        probe.exit = exit_block
        if exit_block != self._last and exit_block not in probe.active:
            probe.active = active_now
        self._close(probed, probe)

    def see(self, seen: Iterable[tuple[Hashable, Seen]]) -> None:
        """Take note of what exits said, each of an input."""
        for probed, each in seen:
            probe = self._open.get(probed)
            if probe is None:
                continue
            if each.block == self._last:
                probe.full = each.value
                self._close(probed, probe)
            elif (column := self._column.get(each.block)) is not None:
                probe.scores[column], probe.answers[column] = each.score, each.value

    def forget(self, inputs: Iterable[Hashable]) -> None:
        """Give probes up that did not get to the end."""
        for each in inputs:
            self._open.pop(each, None)

    def hand_over(self, ahead_s: float = 0.0) -> Observations | None:
        """The complete ones since the last time; None where there are none.

        `ahead_s`: by how much the receiver's clock is ahead of ours.
        """
        probes, self._complete = self._complete, deque()
        return _observations(self._shape, probes, ahead_s) if probes else None

    @property
    def agreement(self) -> float | None:
        """1 - mean loss of the complete probes' answers against the full model's; None before the first."""
        return 1 - self.total_loss / self.num_complete if self.num_complete else None

    def _close(self, probed: Hashable, probe: Probe) -> None:
        if probe.exit is None or probe.full is None:
            return
        del self._open[probed]
        answers = probe.whole
        if answers is None or (probe.exit != self._last and probe.exit not in probe.active & self._column.keys()):
            self.num_refused += 1
            return
        losses = _losses(answers, probe.full, self._loss)
        self.num_complete += 1
        self.total_loss += 0.0 if probe.exit == self._last else losses[self._column[probe.exit]]
        self._complete.append(
            CompleteProbe(
                arrived_s=probe.arrived_s, active=probe.active, exit=probe.exit, scores=probe.scores, losses=losses
            )
        )
        if len(self._complete) > self._most_complete:
            self._complete.popleft()
            self.num_overflown += 1

    def _sweep(self, now_s: float) -> None:
        if now_s < self._swept_s + SWEEP_S:
            return
        self._swept_s = now_s
        self.forget([key for key, probe in self._open.items() if now_s > probe.deadline_s + self._outlive_s])


def _losses(answers: Sequence[Value], full: Value, loss: Loss) -> list[float]:
    if not answers:
        return []
    losses: list[float] = loss(stacked(answers), stacked([full] * len(answers))).tolist()
    return losses


def _observations(shape: StreamShape, probes: Collection[CompleteProbe], ahead_s: float) -> Observations:
    count, num_ramps = len(probes), len(shape.ramps)
    active_NR = np.array([[ramp in probe.active for ramp in shape.ramps] for probe in probes], dtype=bool)
    return Observations(
        shape=shape,
        times_s_N=np.array([probe.arrived_s + ahead_s for probe in probes]),
        probe_N=np.ones(count, dtype=bool),
        stayed_N=np.zeros(count, dtype=bool),
        active_NR=active_NR.reshape(count, num_ramps),
        exits_N=np.array([probe.exit for probe in probes], dtype=np.int16),
        scores_NR=np.array([probe.scores for probe in probes], dtype=np.float32).reshape(count, num_ramps),
        losses_NR=np.array([probe.losses for probe in probes], dtype=np.float32).reshape(count, num_ramps),
    )
