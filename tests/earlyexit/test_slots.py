"""Slots of attention: inputs of several lengths in as few rows as first-fit-decreasing finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.engine.order import any_two_fit, first_fit_decreasing

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def fewest_slots(lengths: Sequence[int], slot_length: int) -> int:
    """By trying every assignment."""
    return min(
        len(set(slots))
        for slots in product(range(len(lengths)), repeat=len(lengths))
        if all(
            sum(length for length, at in zip(lengths, slots, strict=True) if at == slot) <= slot_length
            for slot in set(slots)
        )
    )


def test_the_longest_come_first_each_into_the_first_slot_with_room() -> None:
    assert first_fit_decreasing([3, 10, 4, 6, 2], 10) == [[1], [3, 2], [0, 4]]


def test_inputs_of_one_length_keep_their_order() -> None:
    assert first_fit_decreasing([5, 5, 5], 10) == [[0, 1], [2]]


def test_no_input_is_longer_than_a_slot() -> None:
    with pytest.raises(ValueError, match="input 1 has 11 tokens, more than a slot of 10"):
        first_fit_decreasing([3, 11], 10)


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 30))
def test_every_input_has_one_slot_and_none_overflows(lengths: list[int], spare: int) -> None:
    slot_length = max(lengths) + spare
    slots = first_fit_decreasing(lengths, slot_length)
    assert sorted(index for slot in slots for index in slot) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in slot) <= slot_length for slot in slots)


@settings(deadline=None)
@given(LENGTHS)
def test_where_no_two_fit_every_input_has_its_own_slot(lengths: list[int]) -> None:
    slots = first_fit_decreasing(lengths, max(lengths))
    assert any_two_fit(lengths, max(lengths)) == (len(slots) < len(lengths))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_slots_are_nearly_as_few_as_can_be(lengths: list[int]) -> None:
    assert len(first_fit_decreasing(lengths, max(lengths))) <= 11 / 9 * fewest_slots(lengths, max(lengths)) + 6 / 9
