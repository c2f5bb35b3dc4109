"""PAME's tuner (section 7.6): moves an exit later if batches become slow, and raises a threshold if precision is low.

It judges every WINDOW batches of fully observed inputs.

- If more than SLOWER of them are slower than without exits, the (first) exit moves to a later ramp: the one with the
  least mean answer time whose tail was acceptable on the same batches, at the loosest threshold that kept the precision
  on them. If no later ramp is acceptable, no input leaves early.
- Otherwise, if the precision is below 1 - budget, the threshold of the exit that lost most becomes one step stricter.

The paper leaves some points open. Here, one slow batch in a window is acceptable. Precision is agreement with the full
model if the truth is not known. Among several ramps, the tuner takes the one that PAME's search would take. After CALM
windows without a change, or after one in which no input left, it runs the search for one exit again, and the result
must be right in each of these windows. The tuner makes no promise.

Batches are formed in order of arrival. If only probes are fully observed, they are a sample, with bursts thinned out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.cost.batching import SLOWER, Batching
from optimizer.live.tuning.base import (
    NewThresholds,
    Reason,
    Tuner,
    TunerSettings,
    TunerState,
    last_observed,
    never,
)
from profiles.records import ExitOutcome, ExitRecords
from profiles.scores import SCORES, Score
from profiles.stream import Observations

TEN_CONFIDENCES = tuple(round(0.50 + 0.05 * step, 2) for step in range(10))
"""The paper has ten of them (section 6.1), among them 0.55 and 0.6 (section 7.6)."""
LONG_CONFIDENCES = (*TEN_CONFIDENCES, 0.97, 0.98, 0.99, 0.995, 0.999)
"""The five values beyond the paper's are for overconfident networks."""
GRIDS: Mapping[Score, tuple[float, ...]] = dict.fromkeys(SCORES, LONG_CONFIDENCES) | {
    "share": tuple(round(0.1 * step, 1) for step in range(1, 11)),  # of the principal values
    "entropy": (2.0, 1.5, 1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
}
"""Thresholds to try for each score, from the one at which most inputs leave to the strictest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitPlacement:
    """A possible exit, and its effect on recorded windows."""

    ramp: int
    thresholds: Mapping[int, float]
    """Its own threshold, and those of later exits that stay."""
    violated: float
    """Share of the batches that are slower than without exits, in the worst window."""
    precision: float
    """Precision relative to the model without exits, in the worst window."""
    mean_s: float
    """Mean answer time."""

    def __str__(self) -> str:
        return (
            f"ramp {self.ramp} at {self.thresholds[self.ramp]:.4g}, where {self.violated:.1%} would have been slow and "
            f"precision {self.precision:.1%}"
        )


Change = tuple[Mapping[int, float], Reason, str]
"""The new thresholds of the exits, and why."""


def best_placement(
    windows: Sequence[ExitRecords],
    batching: Batching,
    precision: float,
    ramps: Sequence[int],
    *,
    behind: Mapping[int, float] | None = None,
) -> ExitPlacement | None:
    """Returns the ramp with the least mean answer time whose tail is acceptable in all windows, or None.

    PAME chooses a first exit in this way (sections 6.2 to 6.4), with the loosest threshold that keeps the precision in
    all windows. Windows are in order of arrival, with equal lengths of at least a batch. `behind` has the thresholds of
    exits that stay if they are behind the ramp.
    """
    acceptable = []
    for ramp in ramps:
        later = {each: threshold for each, threshold in (behind or {}).items() if each > ramp}
        for threshold in GRIDS[windows[0].score]:
            thresholds = {ramp: threshold, **later}
            outcomes = [window.outcome(thresholds) for window in windows]
            worst = min(map(relative_precision, outcomes))
            if worst < precision:
                continue
            times = [batching.times(outcome.exits_N, thresholds) for outcome in outcomes]
            violated, mean_s = max(each.slower for each in times), sum(each.mean_s for each in times) / len(times)
            if violated <= SLOWER:
                acceptable.append(
                    ExitPlacement(ramp=ramp, thresholds=thresholds, violated=violated, precision=worst, mean_s=mean_s)
                )
            break
    return min(acceptable, key=lambda placement: (placement.mean_s, placement.ramp), default=None)


def next_threshold(score: Score, threshold: float) -> float | None:
    """Returns the next stricter threshold of the score's grid; None if there is none."""
    direction = SCORES[score].direction
    return next((value for value in GRIDS[score] if direction * value > direction * threshold), None)


def relative_precision(outcome: ExitOutcome) -> float:
    """Returns the accuracy relative to the full model's (section 7.2), or the agreement if the truth is not known."""
    accuracy, full_accuracy = outcome.accuracy, outcome.full_accuracy
    if accuracy is None or not full_accuracy:
        return outcome.agreement
    return accuracy / full_accuracy


WINDOW = 50
"""Batches that are judged together. One slow batch is a share of SLOWER."""
CALM = 4
"""Windows without a change after which an earlier exit, or a looser threshold, is sought."""
LEAST_GAIN = 0.02
"""Least relative gain in the mean answer time for which it is taken."""


class PameTuner(Tuner):
    """Moves one exit, or the first of several. No input leaves at other ramps."""

    name = "pame"

    def __init__(self, settings: TunerSettings) -> None:
        super().__init__(settings)
        self._batching = settings.batching
        self._precision = 1 - settings.guarantee.budget
        self._calm: list[ExitRecords] = []

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """See `Tuner`. Other thresholds begin a new window."""
        if self._thresholds != dict(thresholds):
            super().follow(thresholds, since_s)
            self._rows, self._calm = None, []

    def set_batching(self, batching: Batching) -> None:
        """See `Tuner`. Inputs that are not judged yet are judged in these batches."""
        self._batching, self._calm = batching, []  # the earlier windows have another length

    def observe(self, seen: Observations) -> NewThresholds | None:
        """See `Tuner`."""
        ramps = sorted(self._followed)
        rows = last_observed(self._rows, seen.take(seen.times_s_N >= self._since_s), ramps)
        while len(rows) >= self._window_size:
            window = rows.take(np.arange(self._window_size))
            rows = rows.take(np.arange(self._window_size, len(rows)))
            found = self._judge(window, ramps)
            if found is not None:
                self._rows, self._calm = None, []
                thresholds, why, words = found
                return NewThresholds(
                    thresholds=self._with_never(thresholds), why=why, words=words, at_s=float(window.times_s_N[-1])
                )
        self._rows = rows
        return None

    @property
    def state(self) -> TunerState:
        """See `Tuner`. The evidence is the share of slow batches or the loss, whichever is closer to its limit."""
        evidence, rows = 0.0, self._rows
        if rows is not None and len(rows):
            exits = self._exits_of(rows)
            outcome = rows.records(self._followed).outcome(exits)
            loss = float(outcome.losses_N.mean()) / self.settings.guarantee.budget
            evidence = max(self._slow_share(outcome, exits) / SLOWER, loss)
        number = 0 if rows is None else len(rows)
        return TunerState(evidence=evidence, watched=number, rows=number, next_test=self._window_size)

    @property
    def _window_size(self) -> int:
        """The number of inputs in a window."""
        return WINDOW * self._batching.size

    def _exits_of(self, seen: Observations) -> dict[int, float]:
        """Returns the thresholds of active ramps at which inputs may leave, ascending."""
        active = {ramp for column, ramp in enumerate(seen.shape.ramps) if seen.active_NR[:, column].any()}
        unreachable = SCORES[self.settings.score].never
        return {
            ramp: value for ramp, value in sorted(self._followed.items()) if value != unreachable and ramp in active
        }

    def _with_never(self, exits: Mapping[int, float]) -> dict[int, float]:
        return {**never(self.settings.score, list(self._followed)), **exits}

    def _slow_share(self, outcome: ExitOutcome, exits: Collection[int]) -> float:
        if len(outcome.exits_N) < self._batching.size:
            return 0.0
        return self._batching.times(outcome.exits_N, exits).slower

    def _judge(self, window: Observations, ramps: list[int]) -> Change | None:
        records, exits = window.records(ramps), self._exits_of(window)
        if not exits:
            return self._search([records], exits, "no input left")
        outcome = records.outcome(exits)
        slow = self._slow_share(outcome, exits)
        if slow > SLOWER:
            return self._move_later(records, exits, slow)
        precision = relative_precision(outcome)
        if precision < self._precision:
            return self._raise_threshold(outcome, exits, precision)
        self._calm.append(records)
        if len(self._calm) < CALM:
            return None
        calm, self._calm = self._calm, []
        return self._search(calm, exits, f"nothing was wrong in {len(calm)} windows")

    def _move_later(self, records: ExitRecords, exits: Mapping[int, float], slow: float) -> Change:
        first = min(exits)
        later = [ramp for ramp in records.ramps if ramp > first]
        best = best_placement([records], self._batching, self._precision, later, behind=exits)
        words = f"{slow:.1%} of the batches were slower than without exits, {SLOWER:.1%} are acceptable: "
        if best is None:
            return {}, "tuned", f"{words}no input leaves, no later exit is acceptable"
        return best.thresholds, "tuned", f"{words}the exit moves from ramp {first} to {best}"

    def _raise_threshold(self, outcome: ExitOutcome, exits: Mapping[int, float], precision: float) -> Change:
        ramp = max(exits, key=lambda ramp: outcome.losses_N[outcome.exits_N == ramp].sum())
        threshold = next_threshold(self.settings.score, exits[ramp])
        words = f"precision was {precision:.1%}, {self._precision:.1%} must be kept: "
        if threshold is None:
            others = {other: value for other, value in exits.items() if other != ramp}
            return others, "alarm", f"{words}no input leaves at ramp {ramp} any more"
        return {**exits, ramp: threshold}, "alarm", f"{words}ramp {ramp} from {exits[ramp]:.4g} to {threshold:.4g}"

    def _search(self, windows: list[ExitRecords], exits: Mapping[int, float], occasion: str) -> Change | None:
        best = best_placement(windows, self._batching, self._precision, windows[0].ramps)
        # The thresholds in force may already name this ramp, if the plan has switched it off.
        if best is None or self._with_never(best.thresholds) == self._thresholds:
            return None
        means_s = [self._batching.times(window.outcome(exits).exits_N, exits).mean_s for window in windows]
        if best.mean_s > (1 - LEAST_GAIN) * sum(means_s) / len(windows):
            return None
        return best.thresholds, "tuned", f"{occasion}: {best}"
