"""Algorithm 1 of TCB (ICPP'22, section 5.2): the online deadline-aware scheduling algorithm, DAS. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from earlyexit.split import Budget

SAME: Final = 1e-9
"""Relative: numbers that differ by less are equal but for rounding."""


def das(
    lengths: Sequence[int],
    waiting: Sequence[int],
    budget: Budget,
    *,
    rows: int,
    eta: float,
    q: float,
    lead: Sequence[int] = (),
) -> list[list[int]]:
    """Algorithm 1 of TCB: for every row of a batch, who is in it.

    `lengths`: of everybody. `waiting`: positions of those who may be chosen, by deadline, N_t. `budget`: of one row,
    where the paper's has L tokens and any number of inputs. Without a budget of tokens an input has its utility, and
    takes the room of one input. `lead`: who is in the first row, whatever their utility.

    Where the paper leaves something open:

    - p = eta x s is rounded up, so that the share of the batch that its theorem counts on is never less than eta;
    - equal utilities go by deadline, equal deadlines by their place in `waiting`;
    - "greedily" passes over whoever does not fit, and goes on;
    - who is longer than a row (the paper has none) is alone in one, once nobody shorter waits.
    """
    batch = [_row_of(lengths, waiting, budget, eta, q, lead)]
    while len(batch) < rows:
        taken = set(batch[-1])
        waiting = [position for position in waiting if position not in taken]
        batch.append(_row_of(lengths, waiting, budget, eta, q, ()))
    return batch


def _row_of(
    lengths: Sequence[int], waiting: Sequence[int], budget: Budget, eta: float, q: float, lead: Sequence[int]
) -> list[int]:
    room = Room(budget)
    for position in lead:
        room.take(position, lengths[position])
    if lead:
        waiting = [position for position in waiting if position not in lead]
    by_utility = sorted(waiting, key=lengths.__getitem__)
    saturating = number_that_fits(by_utility, lengths, room)
    if saturating == len(waiting):  # line 4: all fit
        return [*room.row, *waiting]
    if not saturating:
        return room.row or [min(waiting)]
    chosen = math.ceil(eta * saturating - SAME)
    dominant = by_utility[:chosen]
    room.take_fitting(dominant, lengths)
    mean = math.fsum(1 / lengths[position] for position in dominant) / chosen
    longest = (1 + SAME) / (q * mean)  # who may go for the deadline: its utility is at least q times the mean
    end = bisect_right(by_utility, longest, lo=chosen, key=lengths.__getitem__)
    room.take_fitting(sorted(by_utility[chosen:end]), lengths)
    room.take_fitting(by_utility[end:], lengths)
    return room.row


class Room:
    """What is left of a budget."""

    __slots__ = ("inputs", "row", "tokens")

    def __init__(self, budget: Budget) -> None:
        self.inputs = budget.inputs
        self.tokens: float = math.inf if budget.tokens is None else budget.tokens
        self.row: list[int] = []
        """Whom it was given to."""

    def take(self, position: int, length: int) -> None:
        self.row.append(position)
        self.inputs -= 1
        self.tokens -= length

    def take_fitting(self, positions: Sequence[int], lengths: Sequence[int]) -> None:
        for position in positions:
            if not self.inputs:
                return
            if lengths[position] <= self.tokens:
                self.take(position, lengths[position])


def number_that_fits(order: Sequence[int], lengths: Sequence[int], room: Room) -> int:
    """So many of the first, s of algorithm 1."""
    inputs, tokens = room.inputs, room.tokens
    if tokens == math.inf:
        return min(inputs, len(order))
    number = 0
    for position in order:
        tokens -= lengths[position]
        if tokens < 0 or number == inputs:
            break
        number += 1
    return number
