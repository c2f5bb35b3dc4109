"""Apparate's ramp adjustment (section 3.3): ramps are dropped, tried and shifted by what they saved. A baseline.

In a service the planner chooses the ramps. A round reads a window of inputs that saw every *active* ramp, but no other
ramp. The paper leaves open: of two middle positions, the earlier is tried; inputs that left at dropped ramps count for
a candidate behind the last of them; if a position is taken, the next ramp in order is added before or shifted; if no
ramp remains, the adjustment starts again.

`best_ramps` needs records of all ramps, from probes or from inputs that stay. It tries every set of ramps within the
budget, so no set is better on these records. Apparate cannot do that, because it sees only active ramps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from optimizer.cost.batching import Batching
from optimizer.live.tuning.apparate import WindowReplay, greedy
from optimizer.live.tuning.base import never
from profiles.records import ExitOutcome, ExitRecords

ROUNDING = 1e-9
"""Relative amount by which an overhead may exceed the budget."""

Tune = Callable[[ExitRecords], Mapping[int, float]]
"""Maps records of the active ramps to their thresholds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRamps:
    """The chosen active ramps, and their effect on the records."""

    ramps: tuple[int, ...]
    thresholds: Mapping[int, float]
    saved: float
    """Share of the model's time by which answers come earlier, on average; 0 without ramps."""


def best_ramps(records: ExitRecords, batching: Batching, ramp_budget: float, tune: Tune) -> ChosenRamps:
    """Returns the best set of ramps within the budget. Of equally good sets, returns the smaller one.

    Tunes every set within the budget: 17,902 sets for 26 ramps of 0.5 % each and a budget of 2 %.
    """
    best, number = ChosenRamps(ramps=(), thresholds={}, saved=0.0), 1
    while sets := [each for each in combinations(records.ramps, number) if within_budget(each, batching, ramp_budget)]:
        for ramps in sets:
            window = of_ramps(records, ramps)
            thresholds = tune(window)
            saved = batching.saved(window.outcome(thresholds), ramps)
            if saved > best.saved:
                best = ChosenRamps(ramps=ramps, thresholds=dict(thresholds), saved=saved)
        number += 1
    return best


def within_budget(ramps: Sequence[int], batching: Batching, ramp_budget: float) -> bool:
    """Returns whether the share of the model's time that these ramps add is within the budget."""
    return sum(batching.ramp_s[ramp] for ramp in ramps) / batching.whole_s <= ramp_budget * (1 + ROUNDING)


def of_ramps(records: ExitRecords, ramps: Sequence[int]) -> ExitRecords:
    """Returns the records that only these ramps would give, without answers."""
    return replace(records, answers_NE=None, true_losses_NE=None, tallies_NE=None).of_ramps(ramps)


def greedy_tuner(batching: Batching, budget: float) -> Tune:
    """Returns Apparate's threshold search for a mean loss of at most `budget` on the records."""

    def tune(records: ExitRecords) -> Mapping[int, float]:
        window = WindowReplay(records, batching, budget)
        return window.thresholds(greedy(window))

    return tune


PERIOD = 128
"""Inputs between two rounds."""
RAMP_BUDGET = 0.02
"""Largest share of the model's time that the active ramps may add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """The decision of a round."""

    active: tuple[int, ...]
    """Active ramps, ascending."""
    thresholds: Mapping[int, float]
    """At a new ramp no input leaves until thresholds are tuned again."""
    words: str


def evenly_spaced(batching: Batching, ramp_budget: float = RAMP_BUDGET) -> tuple[int, ...]:
    """Returns the initial ramps (section 3.1): as many as the budget allows, evenly spaced."""
    ramps = sorted(batching.ramp_s)
    for number in range(len(ramps), 0, -1):
        positions = np.linspace(0, len(ramps) - 1, number + 2)[1:-1] if number < len(ramps) else np.arange(number)
        chosen = tuple(ramps[int(position)] for position in np.round(positions))
        if len(set(chosen)) == number and within_budget(chosen, batching, ramp_budget):
            return chosen
    return ()


def adjust_ramps(
    window: ExitRecords,
    thresholds: Mapping[int, float],
    batching: Batching,
    tune: Tune,
    ramp_budget: float = RAMP_BUDGET,
) -> Adjustment:
    """Runs one round, with the records and thresholds of the active ramps."""
    if not window.ramps:
        return _adjusted(window, evenly_spaced(batching, ramp_budget), {}, "no ramp is active: starts again")
    utility = utilities(window.outcome(thresholds), window.ramps, batching)
    if min(utility.values()) >= 0:
        return _add_or_shift(window, thresholds, utility, batching, ramp_budget)
    tuned = tune(window)
    if _saved(window, tuned, batching) >= _saved(window, thresholds, batching):
        thresholds, utility = tuned, utilities(window.outcome(tuned), window.ramps, batching)
        if min(utility.values()) >= 0:
            return _adjusted(window, window.ramps, thresholds, "tuned: no ramp costs more than it saves")
    return _drop_and_try(window, thresholds, utility, batching, ramp_budget)


def utilities(outcome: ExitOutcome, active: Sequence[int], batching: Batching) -> dict[int, float]:
    """Returns, per ramp, the seconds it saved for inputs that left there minus those it cost the inputs that passed."""
    released_s = batching.released_s_N(active)
    return {
        ramp: float(
            (outcome.exits_N == ramp).sum() * (released_s[-1] - released_s[ramp])
            - (outcome.exits_N > ramp).sum() * batching.ramp_s[ramp]
        )
        for ramp in active
    }


def run_until_repeat(
    records: ExitRecords, batching: Batching, tune: Tune, ramp_budget: float = RAMP_BUDGET, rounds: int = 100
) -> list[Adjustment]:
    """Runs rounds on the same records of all ramps until a set of ramps repeats.

    Thresholds are tuned before every round, because section 3.2 tunes them all the time.
    """
    active, seen = evenly_spaced(batching, ramp_budget), set[tuple[int, ...]]()
    history: list[Adjustment] = []
    while active not in seen and len(history) < rounds:
        seen.add(active)
        window = of_ramps(records, active)
        history.append(adjust_ramps(window, tune(window) if active else {}, batching, tune, ramp_budget))
        active = history[-1].active
    return history


def _add_or_shift(
    window: ExitRecords,
    thresholds: Mapping[int, float],
    utility: Mapping[int, float],
    batching: Batching,
    budget: float,
) -> Adjustment:
    """All ramps save time: adds one before the best, or shifts the worst one if the budget is used up."""
    active = window.ramps
    best_first = sorted(active, key=lambda ramp: -utility[ramp])
    for ramp in best_first:
        before = _ramp_before(ramp, batching)
        if before is not None and before not in active and within_budget([*active, before], batching, budget):
            return _adjusted(window, (*active, before), thresholds, f"tries ramp {before}, before ramp {ramp}")
    for worst in reversed(best_first[1:]):
        before = _ramp_before(worst, batching)
        if before is not None and before not in active:
            shifted = (*(ramp for ramp in active if ramp != worst), before)
            if within_budget(shifted, batching, budget):
                return _adjusted(window, shifted, thresholds, f"shifts ramp {worst} to {before}")
    return _adjusted(window, active, thresholds, "stays: no ramp can be added or shifted")


def _drop_and_try(
    window: ExitRecords,
    thresholds: Mapping[int, float],
    utility: Mapping[int, float],
    batching: Batching,
    budget: float,
) -> Adjustment:
    """Drops ramps that cost more than they save, and tries the most promising one behind those that stay."""
    dropped = [ramp for ramp in window.ramps if utility[ramp] < 0]
    kept = [ramp for ramp in window.ramps if utility[ramp] >= 0]
    counts = window.outcome(thresholds).exit_counts
    shares = {ramp: counts.get(ramp, 0) / len(window) for ramp in window.ramps}
    candidate = _candidate(kept, dropped, shares, batching, budget)
    if candidate is None:
        return _adjusted(window, kept, thresholds, f"drops ramps {dropped}")
    return _adjusted(window, [*kept, candidate], thresholds, f"drops ramps {dropped}, tries ramp {candidate}")


def _candidate(
    kept: Sequence[int], dropped: Sequence[int], shares: Mapping[int, float], batching: Batching, budget: float
) -> int | None:
    """Returns the candidate of the highest expected utility; None if none is above 0."""
    reaching = 1 - sum(shares[ramp] for ramp in kept)
    intervals = _intervals(kept, dropped, batching)
    while any(intervals):
        expected = {}
        for index, positions in enumerate(intervals):
            if positions:
                position = positions[(len(positions) - 1) // 2]
                leaving = sum(shares[ramp] for ramp in dropped[: index + 1])
                expected[position] = _expected_utility(position, kept, min(leaving, reaching), reaching, batching)
        best = max(expected, key=lambda position: expected[position])
        if expected[best] > 0 and within_budget([*kept, best], batching, budget):
            return best
        intervals = [positions[(len(positions) - 1) // 2 + 1 :] for positions in intervals]
    return None


def _intervals(kept: Sequence[int], dropped: Sequence[int], batching: Batching) -> list[list[int]]:
    """Returns the positions behind the last kept ramp: before, between and behind the dropped ramps."""
    later = [ramp for ramp in sorted(batching.ramp_s) if not kept or ramp > max(kept)]
    bounds = pairwise([-1, *dropped, len(batching.block_s_N)])
    return [[ramp for ramp in later if low < ramp < high] for low, high in bounds]


def _expected_utility(
    position: int, kept: Collection[int], leaving: float, reaching: float, batching: Batching
) -> float:
    """Returns the utility in seconds per input, given the shares that reach a ramp and that leave there."""
    released_s = batching.released_s_N([*kept, position])
    return float(leaving * (released_s[-1] - released_s[position]) - (reaching - leaving) * batching.ramp_s[position])


def _ramp_before(ramp: int, batching: Batching) -> int | None:
    return max((each for each in batching.ramp_s if each < ramp), default=None)


def _saved(window: ExitRecords, thresholds: Mapping[int, float], batching: Batching) -> float:
    return batching.saved(window.outcome(thresholds), window.ramps)


def _adjusted(window: ExitRecords, active: Sequence[int], thresholds: Mapping[int, float], words: str) -> Adjustment:
    new = [ramp for ramp in active if ramp not in window.ramps]
    kept = {ramp: thresholds[ramp] for ramp in active if ramp in window.ramps}
    return Adjustment(active=tuple(sorted(active)), thresholds={**kept, **never(window.score, new)}, words=words)
