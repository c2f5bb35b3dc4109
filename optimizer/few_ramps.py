"""Which few ramps are worth a promise of their own.

What is promised holds for every subset of the ramps that were tested together (`optimizer.thresholds`), so each more of
them makes the others more careful: it pays only where it saves more than that. The rows that lay the path of thresholds
choose; those that test it have no part in the choice, so what is promised stays promised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optimizer.risk import Guarantee
from optimizer.thresholds import lay_path, worst_totals
from profiles.records import ExitRecords

LEAST_GAIN = 0.25
"""Of what inputs cost without it, what one more ramp must save by the design's rows. Few of these are lost, 4 of 560
for instance, so the best of many ramps looks better than it is: on CLINC150 those that seem to save a twentieth or a
sixth beside the small network's end cost 6 or 3 % more on other rows; where more is saved, as of harm, it is true."""


def few_ramps(
    design: ExitRecords,
    guarantee: Guarantee,
    num_tested: int,
    always: Sequence[int],
    *,
    first: int = 0,
    block_costs: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Those that are `always` among them and, one after the other, the ramps that make inputs cheapest; one at least.

    Inputs enter at block `first`, and are as cheap as with thresholds that the test would accept if the `num_tested`
    rows were like these. `block_costs` as `lay_path` has them. Raises DataError as that does.
    """
    costs = tuple(block_costs or [1.0] * design.num_blocks)
    spent, end_losses_N = np.cumsum(costs[first:]), design.worst_losses_N({})
    all_log_prices_NR = lay_path(design, costs).log_prices_NR(design)

    def mean_cost(ramps: Sequence[int]) -> float:
        """Of the blocks that an input runs, where these ramps are promised and on."""
        columns = [design.ramps.index(ramp) for ramp in sorted(ramps)]
        log_prices_NR = all_log_prices_NR[:, columns]
        prices, totals = worst_totals(log_prices_NR, design.losses_NR[:, columns], end_losses_N)
        as_tested = totals * (num_tested / len(design))
        allowed = guarantee.most_loss(as_tested, num_tested, zero_one=design.zero_one)
        passing = int(np.searchsorted(as_tested, allowed, side="right"))
        up_to = prices[passing - 1] if passing else -np.inf
        sure_NE = np.column_stack([log_prices_NR <= up_to, np.ones(len(design), dtype=bool)])
        by_exit = np.array([*(spent[design.ramps[column] - first] for column in columns), spent[-1]])
        return float(by_exit[sure_NE.argmax(axis=1)].mean())

    chosen, cost = tuple(always), mean_cost(always)
    while others := [ramp for ramp in design.ramps if ramp not in chosen]:
        by_ramp = {ramp: mean_cost((*chosen, ramp)) for ramp in others}
        best = min(others, key=by_ramp.__getitem__)  # of equal ones the first
        if chosen and by_ramp[best] > cost * (1 - LEAST_GAIN):
            break
        chosen, cost = (*chosen, best), by_ramp[best]
    return tuple(sorted(chosen))
