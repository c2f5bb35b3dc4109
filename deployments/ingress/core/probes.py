"""Observations of inputs that run to the model's end, whichever exit answers them. Pure.

*Probes* are drawn at random, and every ramp evaluates them, so they are an unbiased sample of the stream. Under a plan
with `after_answer: stay`, the active ramps also evaluate all other inputs. Both show whether early answers equal the
full model's. If words of a probe are pruned at a crossing, an unpruned copy runs too, whose answer is the reference.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from deployments.ingress.core.inputs import CALL_GRACE_S, UNPRUNED, Inputs, PendingInput
from earlyexit.network.boundary import Answer, PackedArray, stack_values
from optimizer.plans.plan import NO_RAMPS, Plan, PolicySpec
from profiles.records import Loss
from profiles.stream import Observations, SmallArray, StreamShape

logger = logging.getLogger(f"ray.serve.{__name__}")

MOST_COMPLETE = 50_000
"""The largest number of complete inputs that are kept for the next report. Reports follow every few seconds."""
MOST_OPEN = 50_000
"""The largest number of open inputs. Above it no more are observed, until lost inputs have been forgotten."""
LOSS_BATCH = 256
"""The number of complete inputs whose losses are computed together. Computing each loss alone would be much slower."""
MOST_BYTES = 1_000_000
"""Losses are also computed once the complete inputs hold this many bytes of packed arrays, because a larger batch would
block the event loop for too long."""
SWEEP_S = 1.0
"""The time between two searches for open inputs that will not come back."""

Watch = Literal["probe", "stay", "unpruned"]
"""What is observed of an input. `probe`: every ramp and the full model; `stay`: the active ramps and the full model;
`unpruned`: the full model, for the unpruned copy of a probe."""


@dataclass(slots=True)
class Observation:
    """The observations of one input so far."""

    inputs: list[PendingInput]
    """The input, then its unpruned copy if its words were pruned. Empty once it is no longer open."""
    arrived_s: float
    watch: Watch
    stays: bool
    """Whether the plan has `after_answer: stay`. Probes run to the end under any plan."""
    active: frozenset[int]
    """The active ramps of the plan for which the observation counts."""
    exit: int | None = None
    """The block after which the input was answered; None before that."""
    results: dict[int, Answer] = field(default_factory=dict)
    """The results of exits, by block. The full model's result is the last block's, or `reference`."""
    reference: Answer | None = None
    """The full model's result for the unpruned copy."""

    def has_ended(self, last: int) -> bool:
        """Whether the input was answered and all results are complete. `last`: the model's last block."""
        is_complete = last in self.results and (len(self.inputs) == 1 or self.reference is not None)
        return self.exit is not None and is_complete

    def full(self, last: int) -> Answer:
        """Returns the result of the full model."""
        return self.results[last] if self.reference is None else self.reference


def observations_of(entries: Sequence[Observation], shape: StreamShape, loss: Loss) -> Observations:
    """Joins complete observations into arrays, and computes the losses of early answers."""
    active = [ramp in entry.active for entry in entries for ramp in shape.ramps]
    active_NR = np.array(active, dtype=bool).reshape(len(entries), len(shape.ramps))
    probe_N = np.array([entry.watch == "probe" for entry in entries], dtype=bool)
    seen_NR = active_NR | probe_N[:, None]
    scores_NR, losses_NR = np.full((2, *seen_NR.shape), np.nan, dtype=np.float32)
    if seen_NR.any():
        rows, columns = (each.tolist() for each in np.nonzero(seen_NR))
        results = [entries[row].results[shape.ramps[column]] for row, column in zip(rows, columns, strict=True)]
        scores_NR[seen_NR] = [result.score for result in results]
        full = stack_values([entry.full(shape.num_blocks - 1).value for entry in entries])  # unpacked once
        losses_NR[seen_NR] = loss(stack_values([result.value for result in results]), full[rows])
    return Observations(
        shape=shape,
        times_s_N=np.array([entry.arrived_s for entry in entries]),
        probe_N=probe_N,
        stayed_N=np.array([entry.stays for entry in entries], dtype=bool),
        active_NR=active_NR,
        exits_N=np.array([entry.exit for entry in entries], dtype=np.int16),
        scores_NR=scores_NR,
        losses_NR=losses_NR,
        end_losses_N=_end_losses_N(entries, shape.num_blocks - 1, loss),
    )


def _end_losses_N(entries: Sequence[Observation], last: int, loss: Loss) -> SmallArray | None:
    """Returns the losses of pruned texts' last answers against those of the unpruned copies; NaN for other inputs."""
    rows = [row for row, entry in enumerate(entries) if entry.reference is not None]
    if not rows:
        return None
    losses_N = np.full(len(entries), np.nan, dtype=np.float32)
    pruned = stack_values([entries[row].results[last].value for row in rows])
    losses_N[rows] = loss(pruned, stack_values([entries[row].full(last).value for row in rows]))
    return losses_N


class ExitObservations:
    """Watched inputs, until the model's last block was observed and the caller has its answer.

    Its times are the caller's; `take_completed` can move them to another clock.
    """

    def __init__(self, shape: StreamShape | None, loss: Loss, most_open: int = MOST_OPEN) -> None:
        """`shape`: what is observed; None: nothing. `loss`: the task's loss."""
        self._shape = shape
        self._loss = loss
        self._ramps = frozenset(() if shape is None else shape.ramps)
        self._last = 0 if shape is None else shape.num_blocks - 1
        self._most_open = most_open
        self.open: dict[PendingInput, Observation] = {}
        """The observation of each input, answered or not, that is still to be observed, and of each unpruned copy."""
        self._ended: list[Observation] = []
        """Complete inputs whose losses are not computed yet."""
        self._ended_bytes = 0
        """The size of their packed arrays."""
        self._complete: deque[Observations] = deque()
        """Complete inputs with their losses, for the next report."""
        self._swept_s = 0.0
        self._total_loss = 0.0
        """The sum of the losses of all complete inputs so far."""
        self.num_complete = 0

    def can_observe(self, policy: PolicySpec | None) -> bool:
        """Whether replicas under a policy report scores in the unit of these observations."""
        return self._shape is not None and (policy or NO_RAMPS).name in (self._shape.score, "recorded")

    def draw(self, inputs: Inputs, plan: Plan, share: float, rng: random.Random, now_s: float) -> Watch | None:
        """Decides what is observed of a new call's inputs; None: nothing. `share`: the share of probes among calls.

        Returns None if too many observations are open.
        """
        if self._shape is None:
            return "stay" if plan.after_answer == "stay" else None
        if share and rng.random() < share:
            watch: Watch = "probe"
        elif plan.after_answer == "stay" and plan.ramps:
            watch = "stay"
        else:
            return None
        is_begun = self.can_observe(plan.policy) and self.begin(inputs, plan, watch, now_s)
        return watch if is_begun else None

    def begin(self, inputs: Inputs, plan: Plan, watch: Watch, now_s: float) -> bool:
        """Starts to observe a call's inputs; returns False, and observes none, if too many are open.

        Retried inputs are skipped because they are biased: the easy inputs of the failed call were answered earlier.
        """
        if now_s >= self._swept_s + SWEEP_S:
            self._swept_s = now_s
            self.forget([each for each in self.open if now_s > each.deadline_s + CALL_GRACE_S])
        if len(self.open) + len(inputs) > self._most_open:
            return False
        stays, active = plan.after_answer == "stay", frozenset(plan.ramps)
        for each in inputs:
            if not each.attempt:
                self.open[each] = Observation([each], each.arrived_s, watch, stays, active)
        return True

    def copy_unpruned(self, watched: PendingInput) -> PendingInput | None:
        """Returns the unpruned copy of an open probe; None if it is not open, or has a copy already.

        The full model's answer to the copy is the reference.
        """
        entry = self.open.get(watched)
        if entry is None or len(entry.inputs) > 1:
            return None
        copy = replace(watched, tokens=watched.cost)
        copy.chain, copy.attempt, copy.settled = watched.chain, UNPRUNED, True  # no caller waits for its answer
        entry.inputs.append(copy)
        self.open[copy] = entry
        return copy

    def answered(self, watched: PendingInput, exit_block: int, active_now: frozenset[int]) -> None:
        """Records the exit of an answer. `active_now`: the active ramps of the current plan.

        The stage may follow a later plan than the one under which the input was sent.
        """
        entry = self.open.get(watched)
        if entry is None or entry.exit is not None or entry.inputs[0] is not watched:
            return
        entry.exit = exit_block
        if exit_block != self._last and exit_block not in entry.active:
            entry.active = active_now
        if entry.has_ended(self._last):
            self._close(entry)

    def observe(self, seen: Iterable[tuple[PendingInput, Answer]]) -> None:
        """Records the results of exits."""
        for pending, result in seen:
            entry = self.open.get(pending)
            if entry is None:
                continue
            if entry.inputs[0] is pending:
                entry.results[result.exit] = result
            elif result.exit == self._last:
                entry.reference = result
            if result.exit == self._last and entry.has_ended(self._last):
                self._close(entry)

    def forget(self, inputs: Iterable[PendingInput]) -> None:
        """Stops observing inputs that will not reach the end, or whose unpruned copy will not."""
        for each in inputs:
            entry = self.open.get(each)
            while entry is not None and entry.inputs:
                del self.open[entry.inputs.pop()]

    def stop_staying(self) -> None:
        """Stops observing inputs that stayed. Under a plan without staying, only the slow ones would reach the end."""
        self.forget([each for each, entry in self.open.items() if entry.watch == "stay"])

    def take_completed(self, ahead_s: float = 0.0) -> Observations | None:
        """Removes and returns the inputs completed since the last call; None if there are none.

        `ahead_s`: by how much the receiver's clock is ahead of the caller's.
        """
        self._compute_losses()
        parts, self._complete = self._complete, deque()
        if not parts:
            return None
        assert self._shape is not None, "something was observed"
        joined = Observations.join(self._shape, parts)
        return replace(joined, times_s_N=joined.times_s_N + ahead_s)

    @property
    def agreement(self) -> float | None:
        """1 - mean loss of all complete inputs' answers against the full model's; None before the first."""
        self._compute_losses()
        return 1 - self._total_loss / self.num_complete if self.num_complete else None

    def _close(self, entry: Observation) -> None:
        self.forget(entry.inputs[:1])
        if not self._is_consistent(entry):
            return
        self.num_complete += 1
        self._ended.append(entry)
        full = entry.full(self._last).value
        if isinstance(full, PackedArray):
            self._ended_bytes += full.num_bytes * len(entry.results)
        if len(self._ended) >= LOSS_BATCH or self._ended_bytes >= MOST_BYTES:
            self._compute_losses()

    def _is_consistent(self, entry: Observation) -> bool:
        """Whether the exit was active and every ramp that should have evaluated the input has a score."""
        active = entry.active & self._ramps
        if entry.exit != self._last and entry.exit not in active:
            return False
        results = [entry.results.get(ramp) for ramp in (self._ramps if entry.watch == "probe" else active)]
        return all(result is not None and not math.isnan(result.score) for result in results)

    def _compute_losses(self) -> None:
        """Computes the losses of complete inputs. If too many are kept for the report, the oldest are dropped."""
        if not self._ended or self._shape is None:
            return
        entries, self._ended, self._ended_bytes = self._ended, [], 0
        try:
            new = observations_of(entries, self._shape, self._loss)
            left_NE = new.exits_N[:, None] == np.array([*self._shape.ramps, self._last])
            loss = float(new.losses_NE[left_NE].sum(dtype=np.float64))
        except Exception:  # a user-defined loss may fail; the callers of these inputs get their answers anyway
            logger.exception("the losses of %d observed inputs could not be computed; they are dropped", len(entries))
            self.num_complete -= len(entries)
            return
        self._total_loss += loss
        self._complete.append(new)
        while (excess := sum(map(len, self._complete)) - MOST_COMPLETE) > 0:
            oldest = self._complete.popleft()
            if excess < len(oldest):
                self._complete.appendleft(oldest.take(np.arange(excess, len(oldest))))
