"""Apparate's ramp adjustment, round by round, on small windows, compared with all sets of ramps."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from experiments.ramp_adjustment import adjust_ramps, best_ramps, evenly_spaced, of_ramps, utilities
from optimizer.cost.batching import Batching
from profiles.records import ExitRecords
from profiles.scores import SCORES
from profiles.table import LatencyTable
from tests.exit_records import exit_records

NEVER = SCORES["confidence"].never
NUM_BLOCKS = 11
TIMES = Batching(table=LatencyTable.of_rows((1,), [[1.0]] * NUM_BLOCKS, [[0.1]] * 10), ramps=tuple(range(10)), size=1)
BUDGET = 0.03
"""A share of the 11 seconds of all blocks; three ramps of 0.1 s fit."""


def leaving(counts: dict[int, int], number: int) -> ExitRecords:
    """`counts[ramp]` inputs are confident at a ramp and at all later ones. All answers are right."""
    ramps = tuple(sorted(counts))
    sure_from = np.full(number, NUM_BLOCKS)
    sure_from[: sum(counts.values())] = np.repeat(ramps, [counts[ramp] for ramp in ramps])
    scores_NR = np.where(np.array(ramps) >= sure_from[:, None], 0.9, 0.5).astype(np.float32)
    return exit_records(scores_NR, scores_NR < 0.9, num_blocks=NUM_BLOCKS, ramps=ramps)


def at(*ramps: int, threshold: float = 0.9) -> dict[int, float]:
    return dict.fromkeys(ramps, threshold)


def kept_thresholds(records: ExitRecords) -> dict[int, float]:
    """A search that always ends at 0.9."""
    return at(*records.ramps)


def test_the_utility_of_a_ramp_is_the_time_that_it_saves() -> None:
    table = LatencyTable.of_rows((1,), [[1.0], [2.0], [3.0]], [[0.5], [0.25]])
    times = Batching(table=table, ramps=(0, 1), size=1)
    assert times.released_s_N([]).tolist() == [1, 3, 6]
    assert times.released_s_N([1]).tolist() == [1, 3.25, 6.25]
    window = leaving({2: 1, 8: 1}, 10)
    found = utilities(window.outcome(at(2, 8)), (2, 8), TIMES)
    # Ramp 2 spares one input eight blocks and ramp 8, nine others pass; ramp 8 spares one two blocks, eight pass.
    assert found == {2: pytest.approx(8 + 0.1 - 9 * 0.1), 8: pytest.approx(2 - 8 * 0.1)}


def test_ramps_that_cost_more_than_they_save_are_replaced() -> None:
    # Figure 12: ramp 2 stays, 5 and 9 are dropped. Behind 2 the intervals are 3-4 and 6-8; their middles 3 and 7.
    window = leaving({2: 100, 5: 10, 9: 50}, 1000)
    moved = adjust_ramps(window, at(2, 5, 9), TIMES, kept_thresholds, BUDGET)
    # 10 of 900 may leave at 3: 10 * 7 s less 890 * 0.1 s. 60 may leave at 7: 60 * 3 s less 840 * 0.1 s, which is more.
    assert moved.words == "drops ramps [5, 9], tries ramp 7"
    assert moved.active == (2, 7)
    assert moved.thresholds == {2: 0.9, 7: NEVER}
    window = leaving({2: 10}, 20)
    moved = adjust_ramps(window, {2: NEVER}, TIMES, kept_thresholds, BUDGET)
    assert moved.active == (2,)
    assert moved.thresholds == at(2)
    assert moved.words == "tuned: no ramp costs more than it saves"
    moved = adjust_ramps(leaving({4: 50, 8: 20}, 100), at(4, 8), TIMES, kept_thresholds, BUDGET)
    assert (moved.active, moved.words) == ((3, 4, 8), "tries ramp 3, before ramp 4")
    assert moved.thresholds == {3: NEVER, **at(4, 8)}
    window = leaving({3: 30, 5: 30, 8: 30}, 100)
    moved = adjust_ramps(window, at(3, 5, 8), TIMES, kept_thresholds, BUDGET)
    assert (moved.active, moved.words) == ((3, 5, 7), "shifts ramp 8 to 7")
    empty = of_ramps(leaving({3: 30}, 100), ())
    assert adjust_ramps(empty, {}, TIMES, kept_thresholds, BUDGET).active == evenly_spaced(TIMES, BUDGET)


@pytest.mark.parametrize(
    ("budget", "ramps"), [(0.005, ()), (0.01, (4,)), (0.02, (3, 6)), (0.03, (2, 4, 7)), (1.0, tuple(range(10)))]
)
def test_the_initial_ramps_are_evenly_spaced_within_the_budget(budget: float, ramps: tuple[int, ...]) -> None:
    assert evenly_spaced(TIMES, budget) == ramps


def random_records(seed: int, number: int = 400) -> ExitRecords:
    rng = np.random.default_rng(seed)
    ease_N1 = rng.beta(1, 1, (number, 1))
    scores_NR = np.clip(ease_N1 * np.linspace(0.6, 1.1, 10) + rng.normal(0, 0.1, (number, 10)), 0, 1)
    return exit_records(scores_NR, rng.random((number, 10)) > scores_NR**0.05)


def test_the_best_set_by_given_thresholds_is_that_of_brute_force() -> None:
    records = random_records(5)
    best = best_ramps(records, TIMES, 0.03, lambda window: at(*window.ramps, threshold=0.8))
    each = {
        ramps: TIMES.saved(records.outcome(dict.fromkeys(ramps, 0.8)), ramps)
        for number in range(4)
        for ramps in combinations(records.ramps, number)
    }
    assert best.saved == max(each.values())
    assert each[best.ramps] == best.saved
    assert best.thresholds == dict.fromkeys(best.ramps, 0.8)
