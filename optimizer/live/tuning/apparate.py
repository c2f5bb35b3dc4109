"""Apparate's own way (section 3.2): a trigger on the last 16 answers, and a greedy search on the last window.

Thresholds are on an exit's *error*, from 0 (no input leaves) to 1: 1 - p for a confidence p; for an entropy, its share
of the largest that the window shows. Thresholds fit the window that they were found on; nothing is promised for other
inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.base import (
    Question,
    Tuned,
    Tuner,
    TunerState,
    Why,
    answered_losses_N,
    no_input_leaves,
    whole_N,
)
from profiles.records import ExitRecords
from profiles.scores import SCORES
from profiles.stream import Observations

STEP = 0.1
LEAST_STEP = 0.01
ROUNDING = 1e-9
"""Sums of losses, and of steps, this far apart are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundThresholds:
    """What a search found."""

    errors: tuple[float, ...]
    """Per ramp of the records, the threshold on its error."""
    thresholds: Mapping[int, float]
    """The same in the unit of the records' score."""
    loss: float
    """Mean loss of the window's answers."""
    earlier_s: float
    """Seconds that they come earlier than the answers of the full model with these ramps, on average."""


class ThresholdGame:
    """What any thresholds on errors would have done on a window, all ramps of the records active."""

    def __init__(self, records: ExitRecords, times: ExitTimes, budget: float) -> None:
        """`budget`: the largest mean loss on the window, in [0, 1)."""
        if not 0 < budget < 1:
            raise DataError(f"the budget must be between 0 and 1, not {budget}")
        self.records = records
        self.budget = budget
        self.looked_at = 0
        """Threshold vectors that were tried."""
        self._scores_NR = records.sureness_NR
        self._highest = max(float(records.scores_NR.max(initial=0.0)), 1e-6)  # of no use to confidences
        released_s = times.released_s(records.ramps)
        exits = [*records.ramps, records.num_blocks - 1]
        self._earlier_E = released_s[-1] - released_s[exits]
        self._losses_NE = np.column_stack([records.losses_NR, np.zeros(len(records))])
        self._rows = np.arange(len(records))

    def threshold(self, error: float) -> float:
        """Returns a threshold in the unit of the records' score; at an error of 0 no input leaves."""
        kind = SCORES[self.records.score]
        if error <= 0:
            return kind.never
        return 1 - error if kind.larger_is_surer else error * self._highest

    def play(self, errors: Sequence[float]) -> tuple[float, float]:
        """Mean loss, and mean seconds that answers come earlier than the full model's with these ramps."""
        self.looked_at += 1
        direction = SCORES[self.records.score].direction
        limits_R = np.array([self.threshold(error) * direction for error in errors], dtype=np.float32)
        # A column after the ramps stands for the end, where all leave.
        sure_NE = np.ones(self._losses_NE.shape, dtype=bool)
        np.greater_equal(self._scores_NR, limits_R, out=sure_NE[:, :-1])
        column_N = sure_NE.argmax(1)
        loss = float(self._losses_NE[self._rows, column_N].sum()) / len(self._rows)
        return loss, float(self._earlier_E[column_N].sum()) / len(self._rows)

    def allows(self, loss: float) -> bool:
        """Whether it is within the budget."""
        return loss <= self.budget + ROUNDING


def greedy(game: ThresholdGame) -> FoundThresholds:
    """Algorithm 1: round by round the step of one ramp that saves most per loss.

    A ramp's step doubles when it is chosen and halves when it would break the budget, down to LEAST_STEP; it ends
    when no ramp's threshold can be raised by its least step. A step that changes nothing is taken where no other
    saves: on the way to errors that inputs have.
    """
    errors = [0.0] * len(game.records.ramps)
    steps = [STEP] * len(errors)
    here = game.play(errors)
    while True:
        there = {ramp: game.play(raised(errors, ramp, steps[ramp])) for ramp in range(len(errors)) if errors[ramp] < 1}
        allowed = [ramp for ramp, (loss, _) in there.items() if game.allows(loss)]
        if not allowed and all(steps[ramp] <= LEAST_STEP for ramp in there):
            thresholds = {ramp: game.threshold(error) for ramp, error in zip(game.records.ramps, errors, strict=True)}
            return FoundThresholds(errors=tuple(errors), thresholds=thresholds, loss=here[0], earlier_s=here[1])
        for ramp in set(there).difference(allowed):
            steps[ramp] = max(steps[ramp] / 2, LEAST_STEP)
        if allowed:
            chosen = max(allowed, key=lambda ramp: worth(here, there[ramp]))
            errors, here = raised(errors, chosen, steps[chosen]), there[chosen]
            steps[chosen] *= 2


def raised(errors: Sequence[float], ramp: int, step: float) -> list[float]:
    """One ramp's error by a step, to 1 at most."""
    return [min(error + step, 1.0) if index == ramp else error for index, error in enumerate(errors)]


def worth(here: tuple[float, float], there: tuple[float, float]) -> tuple[float, float]:
    """Of a step, larger is better: seconds earlier per loss; without loss, before all others, the seconds."""
    lost, earlier_s = there[0] - here[0], there[1] - here[1]
    if earlier_s <= 0:
        return -np.inf, earlier_s
    return (np.inf, earlier_s) if lost <= ROUNDING else (earlier_s / lost, earlier_s)


WINDOW = 16
"""Answers whose mean accuracy is held against what is allowed."""
TUNED_ON = 128
"""Inputs that thresholds are searched on, and after so many they are searched in any case. The paper says "the last
window"; on its 16 answers no loss is allowed for, and 1 in 16 is what thresholds may then lose. It moves ramps every
128 samples, and a ramp that is new begins with a threshold of 0 "until the next round of threshold tuning"."""


class ApparateTuner(Tuner):
    """The baseline: nothing is promised, and inputs leave while it searches."""

    name = "apparate"

    def __init__(self, question: Question) -> None:
        super().__init__(question)
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
        ramps = list(self._followed)
        whole = seen.take(np.flatnonzero(whole_N(seen, ramps)))
        if not len(whole):
            return None
        whole = whole.take(whole.times_s_N.argsort(kind="stable"))
        self._remember(whole, ramps)
        self._since_tuned += len(whole)
        if self._triggered(whole):
            return self._tune(ramps, "alarm", f"of the last {WINDOW} answers too many were wrong")
        if self._since_tuned >= TUNED_ON:
            return self._tune(ramps, "tuned", f"after {self._since_tuned} inputs")
        return None

    @property
    def state(self) -> TunerState:
        """See `Tuner`: its evidence is the mean loss of the last answers over the budget, which triggers above 1."""
        number = len(self._losses)
        mean = sum(self._losses) / number if number else None
        return TunerState(
            evidence=0.0 if mean is None else mean / self.question.guarantee.budget,
            limit=1.0,
            watched=number,
            watched_loss=mean,
            rows=sum(map(len, self._rows)),
            next_test=None,
            safe=no_input_leaves(self.question.score, self._followed),
        )

    def _remember(self, whole: Observations, ramps: list[int]) -> None:
        rows = Observations.join(whole.shape, [*self._rows, whole])
        rows = rows.take(np.flatnonzero(whole_N(rows, ramps)))
        self._rows = [rows.take(np.arange(max(len(rows) - TUNED_ON, 0), len(rows)))]

    def _triggered(self, whole: Observations) -> bool:
        for loss in answered_losses_N(whole.take(whole.times_s_N >= self._since_s)).tolist():
            self._losses.append(loss)
            if triggers(self._losses, self.question.guarantee.budget):
                return True
        return False

    def _tune(self, ramps: list[int], why: Why, occasion: str) -> Tuned:
        rows = self._rows[0]
        records, times = rows.records(ramps), self.question.times
        found = greedy(ThresholdGame(records, times, self.question.guarantee.budget))
        self._losses.clear()
        self._since_tuned = 0
        saved = times.saved(records.outcome(found.thresholds), ramps)
        words = f"{occasion}: tuned to the last {len(rows)} inputs, {saved:.1%} saved at a loss of {found.loss:.2%}"
        return Tuned(thresholds=found.thresholds, why=why, words=words, at_s=float(rows.times_s_N[-1]))


def triggers(losses: deque[float], budget: float) -> bool:
    """Whether a whole window of answers lost more than is allowed."""
    return len(losses) == losses.maxlen and sum(losses) > budget * len(losses)
