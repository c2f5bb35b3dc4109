"""How a stream is served: which ramps, who sets their thresholds, and what of it changes on the way.

Nobody leaves at first (Apparate section 3.1): what fits the beginning may not fit what comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiments.apparate.cases import BUDGET, RAMP_BUDGET, Case
from experiments.apparate.replay import Replay, replay
from experiments.tuning.replay import TunedThresholds, after, observed
from optimizer.live.best_ramps import best_ramps, greedily
from optimizer.live.ramp_mover import PERIOD as MOVES_EVERY
from optimizer.live.ramp_mover import move, spread_out
from optimizer.live.tuning.base import Question, Tuner
from optimizer.live.tuning.rows import never, records_of
from optimizer.live.tuning.tuners import make_tuner
from optimizer.risk import Guarantee
from profiles.stream import Observations

TunerName = Literal["guarantee", "apparate"]
PROBE_SHARE = 0.05
"""Batches that run all ramps, where ramps are planned."""
PERIOD = 1000
"""Inputs between two plans."""
WINDOW = 600
"""Inputs of which all ramps were seen that a plan rests on, the last ones."""
CONFIDENCE = 0.9
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What may be lost, and what ramps may add to the worst case."""

    loss: float = BUDGET
    ramps: float = RAMP_BUDGET

    @property
    def guarantee(self) -> Guarantee:
        """The loss, with confidence."""
        return Guarantee(budget=self.loss, confidence=CONFIDENCE)


class PlannedRamps(TunedThresholds):
    """Ramps are chosen every period by the last inputs of which all were seen; new ones let nobody out at first."""

    def __init__(self, tuner: Tuner, thresholds: Mapping[int, float], known: Observations, budgets: Budgets) -> None:
        """`known`: inputs from before, all ramps of which were seen."""
        super().__init__(tuner, thresholds)
        self._known = known
        self._budgets = budgets
        self._next_s = float(PERIOD)

    def told(self, seen: Observations) -> None:
        """Plan where a period is over."""
        super().told(seen)
        probes = seen.take(seen.probe_N)
        if len(probes):
            joined = Observations.join(seen.shape, [self._known, probes])
            self._known = joined.take(np.arange(max(0, len(joined) - WINDOW), len(joined)))
        if after(seen) >= self._next_s:
            self._next_s += PERIOD
            self._plan(after(seen))

    def _plan(self, since_s: float) -> None:
        question = self._tuner.question
        records = records_of(self._known, self._known.shape.ramps)
        found = best_ramps(
            records, question.times, self._budgets.ramps, greedily(question.times, self._budgets.loss)
        ).ramps
        if set(found) != set(self.thresholds):
            kept = {ramp: value for ramp, value in self.thresholds.items() if ramp in found}
            self.set(never(question.score, found) | kept, since_s)


class MovedRamps(TunedThresholds):
    """Apparate's mover: a round every 128 inputs, by those since the last one, of which the active ramps were seen."""

    def __init__(self, tuner: Tuner, thresholds: Mapping[int, float], budgets: Budgets) -> None:
        super().__init__(tuner, thresholds)
        self._budgets = budgets
        self._window: list[Observations] = []

    def told(self, seen: Observations) -> None:
        """Move where a round is over."""
        ramps = set(self.thresholds)
        super().told(seen)
        self._window.append(seen)
        if sum(map(len, self._window)) < MOVES_EVERY:
            return
        window = records_of(Observations.join(seen.shape, self._window), sorted(ramps))
        question = self._tuner.question
        tune = greedily(question.times, self._budgets.loss)
        moved = move(window, self.thresholds, question.times, tune, self._budgets.ramps)
        self._window = []
        if moved.thresholds != self.thresholds:
            self.set(moved.thresholds, after(seen))


def tuner_of(name: TunerName, case: Case, budgets: Budgets) -> Tuner:
    """A new one for a stream."""
    score = case.stream.records.score
    return make_tuner(name, Question(score=score, guarantee=budgets.guarantee, times=case.times))


def with_even_ramps(case: Case, name: TunerName, budgets: Budgets = Budgets()) -> Replay:
    """The ramps that Apparate begins with, all along; a tuner sets their thresholds."""
    return with_ramps(case, spread_out(case.times, budgets.ramps), name, budgets)


def with_ramps(case: Case, ramps: tuple[int, ...], name: TunerName, budgets: Budgets = Budgets()) -> Replay:
    """These ramps all along; a tuner sets their thresholds."""
    controller = TunedThresholds(tuner_of(name, case, budgets), never(case.stream.records.score, ramps))
    return replay(case.stream.served, controller, case.times)


def with_planned_ramps(case: Case, name: TunerName, budgets: Budgets = Budgets()) -> Replay:
    """Ramps chosen by the beginning, and again every period by what probes saw."""
    initial = case.stream.initial
    ramps = best_ramps(initial, case.times, budgets.ramps, greedily(case.times, budgets.loss)).ramps
    known = observed(initial, {}, np.ones(len(initial), dtype=bool), stay=True, first=-len(initial))
    thresholds = never(case.stream.records.score, ramps)
    controller = PlannedRamps(tuner_of(name, case, budgets), thresholds, known, budgets)
    return replay(case.stream.served, controller, case.times, probe_share=PROBE_SHARE)


def with_moved_ramps(case: Case, name: TunerName, budgets: Budgets = Budgets()) -> Replay:
    """Evenly spaced ramps to begin with, moved every 128 inputs."""
    ramps = spread_out(case.times, budgets.ramps)
    thresholds = never(case.stream.records.score, ramps)
    controller = MovedRamps(tuner_of(name, case, budgets), thresholds, budgets)
    return replay(case.stream.served, controller, case.times)
