"""Selects the few ramps for which thresholds are calibrated.

A guarantee holds for every subset of the ramps that are tested together (`optimizer.thresholds`). Each additional ramp
therefore makes the thresholds of the others stricter, and pays only if it saves more than that. The design rows select
the ramps. The tested rows have no part in the selection, so the guarantee stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optimizer.risk import Guarantee
from optimizer.thresholds import lay_path, worst_totals
from profiles.records import ExitRecords

LEAST_GAIN = 0.25
"""Share of the mean cost that an additional ramp must save on the design rows. The margin is large because the best of
many ramps looks better on few rows than it is on others."""


def few_ramps(
    design: ExitRecords,
    guarantee: Guarantee,
    num_tested: int,
    always: Sequence[int],
    *,
    first: int = 0,
    block_costs: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Returns the ramps in `always` and, by greedy selection, those that reduce the mean cost most; at least one.

    Inputs enter at block `first`. Their cost is estimated with the thresholds that the test would accept if the
    `num_tested` rows were like the design rows. `block_costs` are those of `lay_path`. Raises DataError as it does.
    """
    costs = tuple(block_costs or [1.0] * design.num_blocks)
    spent, end_losses_N = np.cumsum(costs[first:]), design.worst_losses_N({})
    all_log_prices_NR = lay_path(design, costs).log_prices_NR(design)

    def mean_cost(ramps: Sequence[int]) -> float:
        """Returns the mean cost of the blocks that an input runs if these ramps are calibrated and active."""
        columns = [design.ramps.index(ramp) for ramp in sorted(ramps)]
        log_prices_NR = all_log_prices_NR[:, columns]
        prices, totals = worst_totals(log_prices_NR, design.losses_NR[:, columns], end_losses_N)
        as_tested = totals * (num_tested / len(design))
        allowed = guarantee.most_loss(as_tested, num_tested, zero_one=design.zero_one)
        passing = int(np.searchsorted(as_tested, allowed, side="right"))
        max_price = prices[passing - 1] if passing else -np.inf
        leaves_NE = np.column_stack([log_prices_NR <= max_price, np.ones(len(design), dtype=bool)])
        cost_E = np.array([*(spent[design.ramps[column] - first] for column in columns), spent[-1]])
        return float(cost_E[leaves_NE.argmax(axis=1)].mean())

    chosen, cost = tuple(always), mean_cost(always)
    while others := [ramp for ramp in design.ramps if ramp not in chosen]:
        by_ramp = {ramp: mean_cost((*chosen, ramp)) for ramp in others}
        best = min(others, key=by_ramp.__getitem__)
        if chosen and by_ramp[best] > cost * (1 - LEAST_GAIN):
            break
        chosen, cost = (*chosen, best), by_ramp[best]
    return tuple(sorted(chosen))
