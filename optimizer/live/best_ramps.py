"""The ramps that make answers earliest, chosen from records of all of them: what probes, and inputs that stay, allow.

Every set of ramps within the budget is looked at, so nothing is better on these records. Apparate cannot choose so: it
sees no ramp that is not active, and moves ramps one by one (`optimizer/live/ramp_mover.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.greedy import ThresholdGame, greedy
from profiles.records import ExitRecords

ROUNDING = 1e-9
"""Overheads this far above a budget keep it."""

Tune = Callable[[ExitRecords], Mapping[int, float]]
"""From records of the active ramps to their thresholds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRamps:
    """Ramps to be active, and what they do on the records that they were chosen by."""

    ramps: tuple[int, ...]
    thresholds: Mapping[int, float]
    saved: float
    """Share of the model's time that answers come earlier, on average; 0 without ramps."""


def best_ramps(records: ExitRecords, times: ExitTimes, ramp_budget: float, tune: Tune) -> ChosenRamps:
    """The best set of the records' ramps whose overhead is at most the budget; the smaller of equals.

    As many sets are tuned as there are within the budget: with 26 ramps of 0.5 % each and a budget of 2 %, 17,902.
    """
    best = ChosenRamps(ramps=(), thresholds={}, saved=0.0)
    for ramps in affordable(records.ramps, times, ramp_budget):
        window = of_ramps(records, ramps)
        thresholds = tune(window)
        saved = times.saved(window.outcome(thresholds), ramps)
        if saved > best.saved:
            best = ChosenRamps(ramps=ramps, thresholds=dict(thresholds), saved=saved)
    return best


def affordable(ramps: Sequence[int], times: ExitTimes, ramp_budget: float) -> Iterator[tuple[int, ...]]:
    """Every set of ramps, one at least, with an overhead within the budget; small sets first."""
    for number in range(1, len(ramps) + 1):
        some = False
        for each in combinations(ramps, number):
            if fits(each, times, ramp_budget):
                some = True
                yield each
        if not some:
            return


def fits(ramps: Sequence[int], times: ExitTimes, ramp_budget: float) -> bool:
    """Whether the overhead of these ramps is within the budget."""
    return times.overhead(ramps) <= ramp_budget * (1 + ROUNDING)


def of_ramps(records: ExitRecords, ramps: Sequence[int]) -> ExitRecords:
    """What records of these ramps alone would hold; without answers."""
    return replace(records, answers_NE=None, true_losses_NE=None, tallies_NE=None).of_ramps(ramps)


def fixed(thresholds: Mapping[int, float]) -> Tune:
    """These, whatever the records show: thresholds that hold for every subset of their ramps, say."""
    return lambda records: {ramp: thresholds[ramp] for ramp in records.ramps}


def greedily(times: ExitTimes, budget: float) -> Tune:
    """Apparate's search on the records, for a mean loss of at most the budget on them."""
    return lambda records: greedy(ThresholdGame(records, times, budget)).thresholds
