"""Apparate's tuner (section 3.2): a trigger on the last 16 answers, and a greedy search on the last window.

Thresholds apply to an exit's *error*, from 0 (no input leaves) to 1: 1 - p for a confidence p, or an entropy's share of
the largest one in the window. Thresholds fit the window on which they were found, without a promise for other inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from optimizer.cost.batching import Batching
from optimizer.live.tuning.base import (
    NewThresholds,
    Reason,
    Tuner,
    TunerSettings,
    TunerState,
    answered_losses_N,
    last_observed,
)
from profiles.records import ExitRecords
from profiles.scores import SCORES
from profiles.stream import Observations

STEP = 0.1
LEAST_STEP = 0.01
ROUNDING = 1e-9
"""Difference below which two sums of losses are equal."""


class WindowReplay:
    """Replays a window under any thresholds on errors, with all ramps of the records active."""

    def __init__(self, records: ExitRecords, batching: Batching, budget: float) -> None:
        """`budget` is the largest mean loss on the window, between 0 and 1."""
        self.records = replace(records, end_losses_N=None)  # thresholds do not change losses of the end
        self._most_loss = budget + ROUNDING
        self._highest = max(float(records.scores_NR.max(initial=0.0)), 1e-6)  # used for entropies only
        released_s_N = batching.released_s_N(records.ramps)
        self._earlier_s_N = released_s_N[-1] - released_s_N

    def thresholds(self, errors: Sequence[float]) -> dict[int, float]:
        """Returns the thresholds by ramp, in the unit of the records' score. At an error of 0 no input leaves."""
        score = SCORES[self.records.score]

        def threshold(error: float) -> float:
            if error <= 0:
                return score.never
            return 1 - error if score.larger_is_surer else error * self._highest

        return dict(zip(self.records.ramps, map(threshold, errors), strict=True))

    def evaluate(self, errors: Sequence[float]) -> tuple[float, float]:
        """Returns the mean loss, and the mean seconds by which answers come earlier than at the end of this model."""
        outcome = self.records.outcome(self.thresholds(errors))
        return float(outcome.losses_N.mean()), float(self._earlier_s_N[outcome.exits_N].mean())

    def allows(self, loss: float) -> bool:
        """Returns whether a mean loss is within the budget."""
        return loss <= self._most_loss


def greedy(window: WindowReplay) -> list[float]:
    """Runs algorithm 1. Returns the thresholds on the errors of the window's ramps.

    In each round it raises the threshold of the ramp that saves most time per loss. A ramp's step doubles when it is
    chosen, and it halves when it would break the budget, down to LEAST_STEP. The search ends when no threshold can be
    raised by its least step. If no step saves time, one without effect is taken, because the errors of inputs may begin
    further on.
    """
    errors = [0.0] * len(window.records.ramps)
    steps = [STEP] * len(errors)
    current = window.evaluate(errors)
    while True:
        open_ramps = [ramp for ramp in range(len(errors)) if errors[ramp] < 1]
        trials = {ramp: window.evaluate(with_step(errors, ramp, steps[ramp])) for ramp in open_ramps}
        allowed = [ramp for ramp, (loss, _) in trials.items() if window.allows(loss)]
        if not allowed and all(steps[ramp] <= LEAST_STEP for ramp in open_ramps):
            return errors
        for ramp in set(trials).difference(allowed):
            steps[ramp] = max(steps[ramp] / 2, LEAST_STEP)
        if allowed:
            chosen = max(allowed, key=lambda ramp: step_value(current, trials[ramp]))
            errors, current = with_step(errors, chosen, steps[chosen]), trials[chosen]
            steps[chosen] *= 2


def with_step(errors: Sequence[float], ramp: int, step: float) -> list[float]:
    """Returns the errors with one of them raised by a step, to 1 at most."""
    return [min(error + step, 1.0) if index == ramp else error for index, error in enumerate(errors)]


def step_value(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    """Returns the value of a step: seconds saved per loss. Steps without loss come first, by seconds saved."""
    added_loss, earlier_s = after[0] - before[0], after[1] - before[1]
    if earlier_s <= 0:
        return -np.inf, earlier_s
    return (np.inf, earlier_s) if added_loss <= ROUNDING else (earlier_s / added_loss, earlier_s)


WINDOW = 16
"""Answers whose mean accuracy the trigger checks."""
TUNED_ON = 128
"""Inputs on which thresholds are searched, and new inputs after which a search always runs. The paper says "the last
window", but 16 answers resolve losses of 1/16 only. It moves ramps every 128 samples, and a new ramp has a threshold of
0 until "the next round of threshold tuning"."""


class ApparateTuner(Tuner):
    """Apparate's tuner as a baseline. It makes no promise, and inputs leave early while it searches."""

    name = "apparate"

    def __init__(self, settings: TunerSettings) -> None:
        super().__init__(settings)
        self._losses: list[float] = []
        """Losses of the last WINDOW answers under the thresholds in force."""
        self._since_tuned = 0

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """See `Tuner`."""
        super().follow(thresholds, since_s)
        self._losses = []

    def observe(self, seen: Observations) -> NewThresholds | None:
        """See `Tuner`."""
        observed = last_observed(None, seen, list(self._followed))
        if not len(observed):
            return None
        self._rows = last_observed(self._rows, observed, list(self._followed), most=TUNED_ON)
        self._since_tuned += len(observed)
        if self._triggered(observed):
            return self._tune(self._rows, "alarm", f"too many of the last {WINDOW} answers were wrong")
        if self._since_tuned >= TUNED_ON:
            return self._tune(self._rows, "tuned", f"after {self._since_tuned} inputs")
        return None

    @property
    def state(self) -> TunerState:
        """See `Tuner`. The evidence is the mean loss of the last answers divided by the budget."""
        num_losses, num_rows = len(self._losses), 0 if self._rows is None else len(self._rows)
        evidence = sum(self._losses) / max(1, num_losses) / self.settings.guarantee.budget
        return TunerState(evidence=evidence, watched=num_losses, rows=num_rows, next_test=None)

    def _triggered(self, observed: Observations) -> bool:
        """Returns whether a window of WINDOW answers, the last of which is new, lost more than the budget allows."""
        losses = self._losses + answered_losses_N(observed.take(observed.times_s_N >= self._since_s)).tolist()
        self._losses = losses[-WINDOW:]
        windows = (losses[end - WINDOW : end] for end in range(WINDOW, len(losses) + 1))
        return any(sum(window) > self.settings.guarantee.budget * WINDOW for window in windows)

    def _tune(self, rows: Observations, why: Reason, occasion: str) -> NewThresholds | None:
        """Searches thresholds; returns None if they are in force already."""
        records, batching = rows.records(list(self._followed)), self.settings.batching
        window = WindowReplay(records, batching, self.settings.guarantee.budget)
        errors = greedy(window)
        thresholds, (loss, _) = window.thresholds(errors), window.evaluate(errors)
        self._losses, self._since_tuned = [], 0
        if thresholds == self._thresholds:
            return None
        saved = batching.saved(records.outcome(thresholds), records.ramps)
        words = f"{occasion}: tuned to the last {len(rows)} inputs, {saved:.1%} saved at a loss of {loss:.2%}"
        return NewThresholds(thresholds=thresholds, why=why, words=words, at_s=float(rows.times_s_N[-1]))
