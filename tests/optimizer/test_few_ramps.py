"""Which few ramps are promised together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from optimizer.few_ramps import few_ramps
from optimizer.risk import Guarantee
from profiles.records import ExitRecords
from tests.exit_records import exit_records

BUDGET = Guarantee(budget=0.1, confidence=0.9)
ROWS = 400


def records(sure: Mapping[int, float], wrong: Mapping[int, float]) -> ExitRecords:
    """Six blocks; by ramp the share of inputs that it is sure of, and of these, spread evenly, the share it gets wrong.

    It errs in half of the others. No two ramps err on the same inputs among those that both are sure of.
    """
    ramps = tuple(sure)
    scores_NR, losses_NR = np.ones((ROWS, len(ramps))), np.zeros((ROWS, len(ramps)))
    for column, ramp in enumerate(ramps):
        known = round(sure[ramp] * ROWS)
        scores_NR[:known, column] = 0.0
        losses_NR[known::2, column] = 1.0
        number = round(wrong[ramp] * known)
        losses_NR[column : column + number * len(ramps) : len(ramps), column] = 1.0
    return exit_records(scores_NR, losses_NR, score="entropy", num_blocks=6, ramps=ramps)


@pytest.mark.parametrize(
    ("sure", "wrong", "chosen"),
    [
        pytest.param({0: 0.8, 2: 0.8}, {0: 0.0, 2: 0.0}, (0, 2), id="an earlier one that errs nowhere"),
        pytest.param({0: 0.3, 2: 0.8}, {0: 0.0, 2: 0.0}, (2,), id="it saves too little"),
        pytest.param({0: 0.8, 2: 0.8}, {0: 0.12, 2: 0.06}, (2,), id="both together lose too much"),
    ],
)
def test_a_ramp_is_taken_where_it_saves_much_beside_the_others(
    sure: dict[int, float], wrong: dict[int, float], chosen: tuple[int, ...]
) -> None:
    assert few_ramps(records(sure, wrong), BUDGET, ROWS, (2,)) == chosen


def test_a_network_alone_has_its_best_ramp_by_what_blocks_cost() -> None:
    known = records({3: 0.05, 4: 0.1}, {3: 0.0, 4: 0.0})
    assert few_ramps(known, BUDGET, ROWS, (), first=3) == (3,)
    known = records({2: 0.8}, {2: 0.06})
    assert few_ramps(known, BUDGET, ROWS, ()) == (2,)
    [alone] = few_ramps(known, BUDGET, BUDGET.least_inputs, ())
    assert alone == 2, "one at least"
    known = records({3: 0.5, 4: 0.8}, {3: 0.0, 4: 0.0})
    dear, cheap = ((1.0, 1.0, 1.0, 1.0, seconds, 1.0) for seconds in (9.0, 0.1))
    assert few_ramps(known, BUDGET, ROWS, (), first=3, block_costs=dear) == (3,)
    assert few_ramps(known, BUDGET, ROWS, (), first=3, block_costs=cheap) == (4,)
