"""TurboTransformers' dynamic program against every way to divide a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tcb_device import Cost, Work, grouped


def divisions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to divide them into groups, whether or not inputs of a group are neighbours in length."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for division in divisions(rest):
        yield [[first], *division]
        for at, group in enumerate(division):
            yield [*division[:at], [first, *group], *division[at + 1 :]]


def padded_s(cost: Cost, lengths: Sequence[int]) -> float:
    longest = max(lengths)
    return cost.seconds(Work(len(lengths) * longest, len(lengths) * longest**2))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    fixed=st.sampled_from([0.0, 5.0, 40.0, 1000.0]),
    cell=st.sampled_from([0.0, 0.1, 2.0]),
)
def test_no_division_takes_less(lengths: list[int], fixed: float, cell: float) -> None:
    cost = Cost(fixed_s=fixed, token_s=1.0, cell_s=cell)
    runs = grouped(lengths, cost)
    assert sorted(position for run in runs for position in run.positions) == list(range(len(lengths)))
    least_s = min(sum(padded_s(cost, group) for group in division) for division in divisions(lengths))
    assert sum(cost.seconds(run.work) for run in runs) == pytest.approx(least_s)


def test_a_run_is_told_with_its_padding() -> None:
    (run,) = grouped([2, 5], Cost(fixed_s=100.0, token_s=1.0, cell_s=0.0))
    assert (run.positions, run.work) == ((0, 1), Work(10, 50))
