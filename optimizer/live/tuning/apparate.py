"""Apparate's own way (section 3.2): a trigger on the last 16 answers, and a greedy search on the last window."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from optimizer.live.tuning.base import Question, Tuned, Tuner, TunerState, Why, check_followed
from optimizer.live.tuning.greedy import ThresholdGame, greedy
from optimizer.live.tuning.rows import answered_losses_N, lets_nobody_leave, records_of, whole_N
from profiles.stream import Observations

WINDOW = 16
"""Answers whose mean accuracy is held against what is allowed."""
TUNED_ON = 128
"""Inputs that thresholds are searched on, and after so many they are searched in any case. The paper says "the last
window"; on its 16 answers no loss is allowed for, and 1 in 16 is what thresholds may then lose. It moves ramps every
128 samples, and a ramp that is new begins with a threshold of 0 "until the next round of threshold tuning"."""


class ApparateTuner(Tuner):
    """The baseline: nothing is promised, and nobody is kept from leaving while it searches."""

    name = "apparate"

    def __init__(self, question: Question, tuned_on: int = TUNED_ON) -> None:
        super().__init__(question)
        self._tuned_on = tuned_on
        self._thresholds: Mapping[int, float] | None = None
        self._since_s = np.inf
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._rows: list[Observations] = []
        self._since_tuned = 0

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """See `Tuner`."""
        self._thresholds = dict(thresholds)
        self._since_s = since_s
        self._losses.clear()

    def observe(self, seen: Observations) -> Tuned | None:
        """See `Tuner`."""
        ramps = list(check_followed(self._thresholds))
        whole = seen.take(np.flatnonzero(whole_N(seen, ramps)))
        if not len(whole):
            return None
        whole = whole.take(whole.times_s_N.argsort(kind="stable"))
        self._remember(whole, ramps)
        self._since_tuned += len(whole)
        if self._triggered(whole):
            return self._tune(ramps, "alarm", f"of the last {WINDOW} answers too many were wrong")
        if self._since_tuned >= self._tuned_on:
            return self._tune(ramps, "tuned", f"after {self._since_tuned} inputs")
        return None

    @property
    def state(self) -> TunerState:
        """See `Tuner`: its evidence is the mean loss of the last answers over the budget, which triggers above 1."""
        thresholds = check_followed(self._thresholds)
        number = len(self._losses)
        mean = sum(self._losses) / number if number else None
        return TunerState(
            evidence=0.0 if mean is None else mean / self.question.guarantee.budget,
            limit=1.0,
            watched=number,
            watched_loss=mean,
            rows=sum(map(len, self._rows)),
            next_test=None,
            safe=lets_nobody_leave(self.question.score, thresholds),
        )

    def _remember(self, whole: Observations, ramps: list[int]) -> None:
        rows = Observations.join(whole.shape, [*self._rows, whole])
        rows = rows.take(np.flatnonzero(whole_N(rows, ramps)))
        self._rows = [rows.take(np.arange(max(len(rows) - self._tuned_on, 0), len(rows)))]

    def _triggered(self, whole: Observations) -> bool:
        for loss in answered_losses_N(whole.take(whole.times_s_N >= self._since_s)).tolist():
            self._losses.append(loss)
            if triggers(self._losses, self.question.guarantee.budget):
                return True
        return False

    def _tune(self, ramps: list[int], why: Why, occasion: str) -> Tuned:
        rows = self._rows[0]
        records, times = records_of(rows, ramps), self.question.times
        found = greedy(ThresholdGame(records, times, self.question.guarantee.budget))
        self._losses.clear()
        self._since_tuned = 0
        saved = times.saved(records.outcome(found.thresholds), ramps)
        words = f"{occasion}: tuned to the last {len(rows)} inputs, {saved:.1%} saved at a loss of {found.loss:.2%}"
        return Tuned(thresholds=found.thresholds, why=why, words=words, at_s=float(rows.times_s_N[-1]))


def triggers(losses: deque[float], budget: float) -> bool:
    """Whether a whole window of answers lost more than is allowed."""
    return len(losses) == losses.maxlen and sum(losses) > budget * len(losses)
