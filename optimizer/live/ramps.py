"""Apparate's ramp adjustment (section 3.3): ramps are judged by what they saved, dropped, tried and shifted one by one.

These are baselines; a service's ramps are the planner's choice. A round reads a window of inputs that
saw every *active* ramp, and nothing of other ramps. Where the paper is silent: of two places in the middle the earlier
is tried; inputs that left at dropped ramps count for a candidate behind the last of them; where a place is taken, the
next ramp in line is added before or shifted; where no ramp is left, all begins anew.

`best_ramps` is what records of all ramps allow: probes, and inputs that stay. It looks at every set of ramps within the
budget, so no set is better on these records. Apparate cannot do that, because it sees only active ramps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.apparate import ThresholdGame, greedy
from optimizer.live.tuning.base import never
from profiles.records import ExitOutcome, ExitRecords
from profiles.scores import Score

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
        found = [each for each in combinations(ramps, number) if fits(each, times, ramp_budget)]
        if not found:
            return
        yield from found


def fits(ramps: Sequence[int], times: ExitTimes, ramp_budget: float) -> bool:
    """Whether the seconds of these ramps, as a share of the model's, are within the budget."""
    return sum(times.ramp_s[ramp] for ramp in ramps) / times.whole_s <= ramp_budget * (1 + ROUNDING)


def of_ramps(records: ExitRecords, ramps: Sequence[int]) -> ExitRecords:
    """What records of these ramps alone would hold; without answers."""
    return replace(records, answers_NE=None, true_losses_NE=None, tallies_NE=None).of_ramps(ramps)


def greedily(times: ExitTimes, budget: float) -> Tune:
    """Apparate's search on the records, for a mean loss of at most the budget on them."""
    return lambda records: greedy(ThresholdGame(records, times, budget)).thresholds


PERIOD = 128
"""Samples between two rounds."""
RAMP_BUDGET = 0.02
"""Share by which active ramps may make the slowest answer later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a round decided."""

    active: tuple[int, ...]
    """Ascending."""
    thresholds: Mapping[int, float]
    """By those of new ramps no input leaves, until thresholds are tuned next."""
    words: str


def spread_out(times: ExitTimes, ramp_budget: float = RAMP_BUDGET) -> tuple[int, ...]:
    """To begin with (section 3.1): as many ramps as the budget allows, evenly spaced."""
    ramps = sorted(times.ramp_s)
    for number in range(len(ramps), 0, -1):
        places = np.linspace(0, len(ramps) - 1, number + 2)[1:-1] if number < len(ramps) else np.arange(number)
        chosen = tuple(ramps[int(place)] for place in np.round(places))
        if len(set(chosen)) == number and fits(chosen, times, ramp_budget):
            return chosen
    return ()


def move(
    window: ExitRecords,
    thresholds: Mapping[int, float],
    times: ExitTimes,
    tune: Tune,
    ramp_budget: float = RAMP_BUDGET,
) -> Moved:
    """One round, with the active ramps' records and thresholds."""
    if not window.ramps:
        return _moved((), spread_out(times, ramp_budget), {}, window.score, "no ramp is active: all begins anew")
    utility = utilities(window.outcome(thresholds), window.ramps, times)
    if min(utility.values()) >= 0:
        return _probe(window, thresholds, utility, times, ramp_budget)
    tuned = tune(window)
    if _saved(window, tuned, times) >= _saved(window, thresholds, times):
        thresholds, utility = tuned, utilities(window.outcome(tuned), window.ramps, times)
        if min(utility.values()) >= 0:
            return _moved(
                window.ramps, window.ramps, thresholds, window.score, "tuned: no ramp costs more than it saves"
            )
    return _replace(window, thresholds, utility, times, ramp_budget)


def utilities(outcome: ExitOutcome, active: Sequence[int], times: ExitTimes) -> dict[int, float]:
    """Per ramp, the seconds that it saved inputs which left there, less those it cost inputs that it let pass."""
    released_s = times.released_s(active)
    return {
        ramp: float(
            (outcome.exits_N == ramp).sum() * (released_s[-1] - released_s[ramp])
            - (outcome.exits_N > ramp).sum() * times.ramp_s[ramp]
        )
        for ramp in active
    }


def settled(
    records: ExitRecords, times: ExitTimes, tune: Tune, ramp_budget: float = RAMP_BUDGET, rounds: int = 100
) -> list[Moved]:
    """All rounds on a stream that stays the same, until a set of ramps comes back; records are of all ramps.

    Before every round thresholds are tuned, as section 3.2 does it all along.
    """
    active, met = spread_out(times, ramp_budget), set[tuple[int, ...]]()
    history: list[Moved] = []
    while active not in met and len(history) < rounds:
        met.add(active)
        window = of_ramps(records, active)
        history.append(move(window, tune(window) if active else {}, times, tune, ramp_budget))
        active = history[-1].active
    return history


def _probe(
    window: ExitRecords, thresholds: Mapping[int, float], utility: Mapping[int, float], times: ExitTimes, budget: float
) -> Moved:
    """All are worth their cost: one more before the best while the budget lasts, else the worst one place earlier."""
    active = window.ramps
    best_first = sorted(active, key=lambda ramp: -utility[ramp])
    for ramp in best_first:
        before = _before(ramp, times)
        if before is not None and before not in active and fits([*active, before], times, budget):
            return _moved(
                active, (*active, before), thresholds, window.score, f"tries ramp {before}, before ramp {ramp}"
            )
    for worst in reversed(best_first[1:]):
        before = _before(worst, times)
        if before is not None and before not in active:
            shifted = (*(ramp for ramp in active if ramp != worst), before)
            if fits(shifted, times, budget):
                return _moved(active, shifted, thresholds, window.score, f"shifts ramp {worst} to {before}")
    return _moved(active, active, thresholds, window.score, "stays: no ramp can be added or shifted")


def _replace(
    window: ExitRecords, thresholds: Mapping[int, float], utility: Mapping[int, float], times: ExitTimes, budget: float
) -> Moved:
    """Ramps that cost more than they save go, and the most promising one behind those that stay comes."""
    dropped = [ramp for ramp in window.ramps if utility[ramp] < 0]
    kept = [ramp for ramp in window.ramps if utility[ramp] >= 0]
    counts = window.outcome(thresholds).exit_counts
    shares = {ramp: counts.get(ramp, 0) / len(window) for ramp in window.ramps}
    tried = _candidate(kept, dropped, shares, times, budget)
    words = f"drops ramps {dropped}" + ("" if tried is None else f", tries ramp {tried}")
    active = kept if tried is None else [*kept, tried]
    return _moved(window.ramps, active, thresholds, window.score, words)


def _candidate(
    kept: Sequence[int], dropped: Sequence[int], shares: Mapping[int, float], times: ExitTimes, budget: float
) -> int | None:
    """The candidate of the highest utility that can be hoped for; None where none is above 0."""
    reaching = 1 - sum(shares[ramp] for ramp in kept)
    intervals = _intervals(kept, dropped, times)
    while any(intervals):
        hopes = {}
        for index, places in enumerate(intervals):
            if places:
                place = places[(len(places) - 1) // 2]
                leaving = sum(shares[ramp] for ramp in dropped[: index + 1])
                hopes[place] = _hope(place, kept, min(leaving, reaching), reaching, times)
        best = max(hopes, key=lambda place: hopes[place])
        if hopes[best] > 0 and fits([*kept, best], times, budget):
            return best
        intervals = [places[(len(places) - 1) // 2 + 1 :] for places in intervals]
    return None


def _intervals(kept: Sequence[int], dropped: Sequence[int], times: ExitTimes) -> list[list[int]]:
    """Places behind the last ramp that stays: before, between and behind the ramps that were dropped."""
    behind = [ramp for ramp in sorted(times.ramp_s) if not kept or ramp > max(kept)]
    bounds = pairwise([-1, *dropped, len(times.block_s)])
    return [[ramp for ramp in behind if low < ramp < high] for low, high in bounds]


def _hope(place: int, kept: Collection[int], leaving: float, reaching: float, times: ExitTimes) -> float:
    """Seconds of utility per input, if so many of those that reach it leave."""
    released_s = times.released_s([*kept, place])
    return float(leaving * (released_s[-1] - released_s[place]) - (reaching - leaving) * times.ramp_s[place])


def _before(ramp: int, times: ExitTimes) -> int | None:
    return max((each for each in times.ramp_s if each < ramp), default=None)


def _saved(window: ExitRecords, thresholds: Mapping[int, float], times: ExitTimes) -> float:
    return times.saved(window.outcome(thresholds), window.ramps)


def _moved(
    before: Collection[int], active: Sequence[int], thresholds: Mapping[int, float], score: Score, words: str
) -> Moved:
    new = [ramp for ramp in active if ramp not in before]
    kept = {ramp: thresholds[ramp] for ramp in active if ramp in before}
    return Moved(active=tuple(sorted(active)), thresholds={**kept, **never(score, new)}, words=words)
