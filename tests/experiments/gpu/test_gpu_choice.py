from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from earlyexit.errors import DataError
from earlyexit.split import Split
from experiments.gpu.choice import Costs, best_splits, work_of

SURVIVAL = (1.0, 0.5, 0.25, 0.25)
FLAT = Costs(batches=(1, 8), block_s=(1.0, 1.0), ramp_s=(0.0, 0.0), split_s=(0.0, 0.0))
"""A batch costs what it costs, whoever is in it: every cut where inputs leave pays."""


def test_where_only_full_batches_are_worth_it_every_exit_is_cut_at() -> None:
    choice = best_splits(FLAT, SURVIVAL, (0, 1, 2), batch=8)
    assert [(split.first, split.end, split.ramps) for split in choice.splits] == [
        (0, 1, (0,)),
        (1, 2, (1,)),
        (2, 4, ()),
    ]
    # One second per block and batch of 8, for 1, 1/2, and twice 1/4 of the inputs.
    assert choice.work_s == pytest.approx((1 + 0.5 + 2 * 0.25) / 8)
    assert choice.rate_per_s == pytest.approx(4.0)


def test_where_a_split_costs_more_than_it_saves_there_is_one() -> None:
    costs = Costs(batches=(1, 8), block_s=(1.0, 1.0), ramp_s=(0.0, 0.0), split_s=(9.0, 9.0))
    choice = best_splits(costs, SURVIVAL, (0, 1, 2), batch=8)
    assert [(split.first, split.end) for split in choice.splits] == [(0, 4)]
    # Ramps that cost nothing are on: a batch of 8 is empty after block 0 once in 2 ** 8 times.
    assert choice.work_s == pytest.approx((9 + 1 + (1 - 0.5**8) + 2 * (1 - 0.75**8)) / 8)


def test_where_a_ramp_costs_more_than_it_saves_it_is_off() -> None:
    # A block costs its inputs: at 8 one second, at 4 half of it. The ramp after block 0 saves 1.5 s of 4 for 0.5 s.
    costs = Costs(batches=(1, 8), block_s=(0.125, 1.0), ramp_s=(0.5, 0.5), split_s=(0.0, 0.0))
    choice = best_splits(costs, (1.0, 0.5, 0.5, 0.5), (0, 1, 2), batch=8, most_splits=1)
    assert choice.splits == (Split(first=0, end=4, batch=8, ramps=(0,)),)
    assert choice.work_s == pytest.approx((1 + 0.5 + 3 * 0.5) / 8)


def test_no_more_splits_than_are_allowed() -> None:
    assert [len(best_splits(FLAT, SURVIVAL, (0, 1, 2), 8, most_splits=most).splits) for most in (1, 2, 9)] == [1, 2, 3]


def every_plan(num_blocks: int, ramps: tuple[int, ...], batch: int) -> list[tuple[Split, ...]]:
    """All sets of active ramps, and all cuts at some of them."""
    plans = []
    for active in (subset for size in range(len(ramps) + 1) for subset in combinations(ramps, size)):
        for cuts in (subset for size in range(len(active) + 1) for subset in combinations(active, size)):
            bounds = [0, *(cut + 1 for cut in cuts), num_blocks]
            plans.append(
                tuple(
                    Split(first=first, end=end, batch=batch, ramps=tuple(r for r in active if first <= r < end))
                    for first, end in pairwise(bounds)
                )
            )
    return plans


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_is_better_than_the_best_one(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 6)
    survival = [1.0, *sorted((rng.random() for _ in range(num_blocks - 1)), reverse=True)]
    ramps = tuple(sorted(rng.sample(range(num_blocks - 1), rng.randint(1, num_blocks - 1))))
    costs = Costs(
        batches=(1, 4, 8),
        block_s=tuple(sorted(rng.uniform(0.1, 1) for _ in range(3))),
        ramp_s=tuple(sorted(rng.uniform(0, 0.2) for _ in range(3))),
        split_s=tuple(sorted(rng.uniform(0, 0.3) for _ in range(3))),
    )
    choice = best_splits(costs, survival, ramps, batch=8)
    least = min(work_of(costs, survival, plan) for plan in every_plan(num_blocks, ramps, 8))
    assert choice.work_s == pytest.approx(least)
    assert work_of(costs, survival, choice.splits) == pytest.approx(least)


def test_blocks_that_nobody_reaches_cost_nothing() -> None:
    choice = best_splits(FLAT, (1.0, 0.0, 0.0), (0, 1), batch=8)
    assert choice.work_s == pytest.approx(1 / 8)
    assert work_of(FLAT, (1.0, 0.0, 0.0), choice.splits) == pytest.approx(1 / 8)


def test_a_batch_that_everybody_has_left_is_not_run_on() -> None:
    costs = Costs(batches=(1, 2), block_s=(1.0, 1.5), ramp_s=(0.5, 0.75), split_s=(0.0, 0.0))
    assert costs.inside(1, 0.25) == pytest.approx((0.25, 0.125))
    # Of two inputs that each reach it every second time: one or both in 3 of 4 cases, 4/3 of them then.
    assert costs.inside(2, 0.5) == pytest.approx((0.75 * (1 + 0.5 / 3), 0.75 * (0.5 + 0.25 / 3)))
    assert costs.inside(2, 0.0) == (0.0, 0.0)


def test_costs_are_linear_between_measured_sizes_and_constant_outside() -> None:
    costs = Costs(batches=(2, 4), block_s=(1.0, 2.0), ramp_s=(0.0, 0.5), split_s=(3.0, 3.0))
    assert [costs.at(batch) for batch in (1, 3, 9)] == [(1.0, 0.0, 3.0), (1.5, 0.25, 3.0), (2.0, 0.5, 3.0)]


def test_costs_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(DataError, match="ramp_s needs 2 values"):
        Costs(batches=(1, 2), block_s=(1.0, 1.0), ramp_s=(1.0,), split_s=(1.0, 1.0))
    with pytest.raises(DataError, match="must ascend"):
        Costs(batches=(2, 1), block_s=(1.0, 1.0), ramp_s=(1.0, 1.0), split_s=(1.0, 1.0))
