"""Layouts of batches, and what they cost, by hand and against every possible cut."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tcb_device import Cost, Work, fit, grouped

COST = Cost(fixed_s=5.0, token_s=1.0, cell_s=0.1)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.sampled_from([0.0, 1.0, 20.0]))
def test_groups_take_least_of_all_cuts_of_the_sorted_inputs(lengths: list[int], fixed_s: float) -> None:
    cost = Cost(fixed_s=fixed_s, token_s=1.0, cell_s=0.1)
    runs = grouped(lengths, cost)
    assert sorted(position for run in runs for position in run.positions) == list(range(len(lengths)))
    ordered, cuts = sorted(lengths), product([False, True], repeat=len(lengths) - 1)
    took_s = [
        sum(
            fixed_s + (end - first) * (ordered[end - 1] + 0.1 * ordered[end - 1] ** 2)
            for first, end in pairwise([0, *(at for at, cut in enumerate(each, start=1) if cut), len(ordered)])
        )
        for each in cuts
    ]
    assert sum(cost.seconds(run.work) for run in runs) == pytest.approx(min(took_s))


def test_a_cost_is_found_again_from_what_it_gives() -> None:
    works = [Work(1, 1), Work(10, 100), Work(40, 400), Work(64, 4096)]
    found = fit({work: COST.seconds(work) for work in works})
    assert (found.fixed_s, found.token_s, found.cell_s) == pytest.approx((5.0, 1.0, 0.1))
    assert found.worst == pytest.approx(0.0, abs=1e-9)
