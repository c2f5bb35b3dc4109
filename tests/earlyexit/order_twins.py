"""What the orders are held against: algorithm 1 of TCB word for word, and the best that could have been done."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of the paper's section 5.1; a batch runs at every whole second."""

    tokens: int
    since_s: float = 0.0
    deadline_s: float = math.inf


def algorithm_1(requests: Sequence[Asked], L: int, B: int, eta: Fraction, now_s: float) -> list[list[Asked]]:
    """DAS as the paper prints it, in its letters and exact fractions; `requests` are sorted by deadline."""
    q = 1 - eta
    N_t = [n for n in requests if n.deadline_s >= now_s]
    H_t: list[list[Asked]] = []
    for _ in range(B):
        H_tk: list[Asked] = []
        if sum(n.tokens for n in N_t) <= L:
            H_tk += N_t
        else:
            by_utility = sorted(N_t, key=lambda n: -Fraction(1, n.tokens))
            s = 0
            while sum(n.tokens for n in by_utility[: s + 1]) <= L:
                s += 1
            p = math.ceil(eta * s)
            N_U = by_utility[:p]
            H_tk += N_U
            v = sum((Fraction(1, n.tokens) for n in N_U), Fraction(0)) / p
            others = by_utility[p:]
            N_D = [n for n in others if Fraction(1, n.tokens) >= q * v]
            rest = [n for n in others if Fraction(1, n.tokens) < q * v]
            in_order = [n for n in N_t if any(n is each for each in N_D)]
            for n in sorted(in_order, key=lambda n: n.deadline_s) + rest:
                if sum(each.tokens for each in H_tk) + n.tokens <= L:
                    H_tk.append(n)
        N_t = [n for n in N_t if not any(n is each for each in H_tk)]
        H_t.append(H_tk)
    return H_t


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
