from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations

import pytest

from earlyexit.engine.order import OrderSpec, das
from earlyexit.network.split import Budget
from tests.earlyexit.test_order import Asked

Chooser = Callable[[Sequence[Asked], float], Iterable[int]]
"""From those who wait, sorted by deadline, and the moment, to the positions of a batch."""


def utility_of(requests: Sequence[Asked], num_batches: int, choose: Chooser) -> Fraction:
    """What is reached, with a batch at every whole second, by who was in one before the deadline."""
    left, total = list(requests), Fraction(0)
    for now in range(num_batches):
        waiting = sorted((n for n in left if n.since_s <= now <= n.deadline_s), key=lambda n: n.deadline_s)
        taken = [waiting[position] for position in choose(waiting, now)]
        total += sum((Fraction(1, n.tokens) for n in taken), Fraction(0))
        left = [n for n in left if not any(n is each for each in taken)]
    return total


def best_utility(requests: Sequence[Asked], num_batches: int, L: int, B: int) -> Fraction:
    """The most that anybody could reach who knew everything beforehand, by trying all."""
    numbers = range(len(requests))
    rows = [set(row) for size in range(1, len(requests) + 1) for row in combinations(numbers, size)]
    rows = [row for row in rows if sum(requests[n].tokens for n in row) <= L]

    @cache
    def best(slot: int, left: frozenset[int]) -> Fraction:
        if slot == num_batches * B or not left:
            return Fraction(0)
        now = slot // B
        found = best(slot + 1, left)
        for row in rows:
            if row <= left and all(requests[n].since_s <= now <= requests[n].deadline_s for n in row):
                worth = sum((Fraction(1, requests[n].tokens) for n in row), Fraction(0))
                found = max(found, worth + best(slot + 1, left - row))
        return found

    return best(0, frozenset(numbers))


def random_requests(rng: random.Random, number: int, longest: int, num_batches: int) -> list[Asked]:
    """Of any lengths, arrivals and deadlines; some deadlines are equal, past, or infinite."""
    requests = []
    for _ in range(number):
        since = rng.randrange(num_batches)
        deadline = since + rng.choice([0, 0, 1, 2, math.inf])
        requests.append(Asked(tokens=rng.randint(1, longest), since_s=since, deadline_s=deadline))
    return requests


ETAS = [Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(9, 10)]


def by_das(length: int, rows: int, eta: Fraction) -> Chooser:
    def choose(waiting: Sequence[Asked], now_s: float) -> list[int]:
        batch = das(
            [each.tokens for each in waiting],
            range(len(waiting)),
            Budget(inputs=99, tokens=length),
            rows=rows,
            eta=float(eta),
            q=float(1 - eta),
        )
        return [position for row in batch for position in row]

    return choose


def test_a_batch_of_two_rows_by_hand() -> None:
    # Row 1, of 10: 1, 2, 3 and 4 saturate it, so s = 4 and p = 2. The mean utility of 1 and 2 is 3/4, half of it 3/8:
    # no other is so short, so the rest goes greedily by utility: 3, 4. Row 2: 5 alone saturates it (5 + 6 > 10), p = 1;
    # half of 1/5 lets 6 and 9 be chosen by deadline, and neither fits.
    lengths = [9, 6, 5, 4, 3, 2, 1]
    batch = das(lengths, range(7), Budget(inputs=99, tokens=10), rows=2, eta=0.5, q=0.5)
    assert [sorted(lengths[position] for position in row) for row in batch] == [[1, 2, 3, 4], [5]]


def test_the_deadline_aware_part_prefers_the_earlier_deadline_to_the_shorter_input() -> None:
    # 10, 11, 12, 13 saturate 50: p = 2, and half of their mean utility lets everything up to 20 go by deadline.
    lengths = [14, 18, 13, 12, 11, 10]
    row = das(lengths, range(6), Budget(inputs=99, tokens=50), rows=1, eta=0.5, q=0.5)[0]
    assert [lengths[position] for position in row] == [10, 11, 14, 13]  # 18 is passed over: 15 are left


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("eta", ETAS, ids=str)
def test_it_reaches_its_bound_against_brute_force(eta: Fraction, rows: int) -> None:
    """Theorem 5.1, and the better bound that holds as well: eta / (1 + eta)."""
    rng = random.Random(f"{eta} {rows}")
    q, worst = 1 - eta, Fraction(1)
    for _ in range(50):
        length, batches = rng.randint(4, 12), rng.randint(2, 3)
        requests = random_requests(rng, 7 if rows == 1 else 6, length, batches)
        best = best_utility(requests, batches, length, rows)
        worst = min(worst, utility_of(requests, batches, by_das(length, rows, eta)) / best)
    assert worst >= eta * q / (eta * q + 1)
    assert worst >= eta / (1 + eta)


def test_shortest_first_reaches_half_of_the_best() -> None:
    """The same argument with eta = 1: a batch of the shortest is worth as much as any that could be made then."""
    rng = random.Random(5)
    order = OrderSpec(name="shortest", overdue_s=math.inf).build()
    worst = Fraction(1)
    for _ in range(100):
        length, batches = rng.randint(4, 12), rng.randint(2, 3)
        requests = random_requests(rng, 7, length, batches)
        budget = Budget(inputs=99, tokens=length)

        def choose(waiting: Sequence[Asked], now_s: float, budget: Budget = budget) -> list[int]:
            return order.pick(waiting, budget, now_s)

        worst = min(worst, utility_of(requests, batches, choose) / best_utility(requests, batches, length, 1))
    assert Fraction(1, 2) <= worst < 1


def test_without_a_budget_of_tokens_an_input_takes_the_room_of_one() -> None:
    # s = 4, so p = 2: the shortest two. Half of the mean of 1 and 1/2 is 3/8, so that nobody else is short enough.
    lengths = [50, 1, 40, 2, 30]
    assert das(lengths, range(5), Budget(inputs=4), rows=1, eta=0.5, q=0.5) == [[1, 3, 4, 2]]


def test_rows_hold_no_more_inputs_than_the_budget_says() -> None:
    batch = das([1] * 9, range(9), Budget(inputs=2, tokens=100), rows=3, eta=0.5, q=0.5)
    assert batch == [[0, 1], [2, 3], [4, 5]]


def test_who_is_longer_than_a_row_is_alone_in_one_once_nobody_shorter_waits() -> None:
    assert das([30, 20, 5], range(3), Budget(inputs=9, tokens=10), rows=3, eta=0.5, q=0.5) == [[2], [0], [1]]
