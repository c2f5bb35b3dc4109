"""Orders of inputs: TCB's orders against brute force, and first-fit-decreasing slots of attention."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.engine.queue import OVERDUE_S, OrderSpec, any_two_fit, das, first_fit_decreasing, take_from
from earlyexit.network.boundary import Budget


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of TCB's section 5.1; a batch runs at every whole second."""

    tokens: int
    since_s: float = 0.0
    deadline_s: float = math.inf


NAMES = ["arrival", "deadline", "shortest", "das"]


def order(name: str, overdue_s: float | None = None) -> OrderSpec:
    return OrderSpec(name=name, overdue_s=overdue_s)  # type: ignore[arg-type]


def waiting(*told: tuple[int, float, float]) -> list[Asked]:
    """Requests of (tokens, deadline, arrival), sorted like a queue."""
    return sorted(
        (Asked(tokens=tokens, deadline_s=deadline_s, since_s=since_s) for tokens, deadline_s, since_s in told),
        key=lambda each: each.deadline_s,
    )


def picked(
    name: str, queued: Sequence[Asked], budget: Budget, now_s: float = 0.9, overdue_s: float | None = None
) -> list[int]:
    return [queued[position].tokens for position in order(name, overdue_s).pick(queued, budget, now_s)]


@pytest.mark.parametrize("name", ["shortest", "das"])
def test_overdue_inputs_go_first_within_a_quarter_and_late_ones_last(name: str) -> None:
    queued = waiting((1, 0.5, 0.0), (7, 2.0, 0.0), (8, 2.0, 0.0))
    assert picked(name, queued, Budget(inputs=1), now_s=0.6) == [7]
    assert picked(name, queued, Budget(inputs=1), now_s=3.0, overdue_s=9.0) == [1]
    queued = waiting((50, math.inf, 0.1), (60, math.inf, 0.0), (1, math.inf, 1.9), (2, math.inf, 1.9))
    budget = Budget(inputs=3, tokens=70)
    assert picked(name, queued, budget, now_s=0.9) == [1, 2, 50]
    assert picked(name, queued, budget, now_s=OVERDUE_S) == [60, 1, 2]
    # A quarter of a batch is for them.
    old = [(50 + k, math.inf, 0.01 * k) for k in range(6)]
    queued = waiting(*old, *[(1, math.inf, 5.0)] * 20)
    assert picked(name, queued, Budget(inputs=12), now_s=5.0)[:4] == [50, 51, 52, 1]
    assert picked(name, queued, Budget(inputs=12, tokens=420), now_s=5.0)[:3] == [50, 51, 1]
    assert picked(name, queued, Budget(inputs=12, tokens=40), now_s=5.0) == [50]
    # Of those with deadlines, the one with most time left.
    queued = waiting((50, 2.0, 0.0), (60, 2.5, 0.5), (70, 2.9, 0.9), (1, 3.5, 1.5), (40, math.inf, 0.2))
    assert picked(name, queued, Budget(inputs=4), now_s=1.5)[0] == 40
    assert picked(name, [each for each in queued if each.tokens != 40], Budget(inputs=4), now_s=1.5)[0] == 60


def test_an_overdue_input_without_a_deadline_goes_first_in_the_order_by_deadline() -> None:
    queued = waiting((1, 9.0, 0.9), (2, 9.5, 0.9), (30, math.inf, 0.2), (40, math.inf, 0.4))
    assert picked("deadline", queued, Budget(inputs=2), now_s=1.0) == [1, 2]
    assert picked("deadline", queued, Budget(inputs=2), now_s=1.25) == [30, 1]


@pytest.mark.parametrize("name", NAMES)
def test_no_input_waits_longer_than_overdue_s_and_a_batch_per_earlier_input(name: str) -> None:
    """More inputs than fit keep arriving: shorter, with earlier deadlines, and younger than the ten that wait."""
    rng, overdue_s = random.Random(3), 5.0
    chosen = order(name, None if name == "arrival" else overdue_s)
    queued = [Asked(tokens=50 + k, since_s=0.0) for k in range(10)]
    gone_s: dict[int, float] = {}
    for second in range(40):
        queued += [Asked(tokens=rng.randint(1, 9), since_s=float(second), deadline_s=second + 3.0) for _ in range(40)]
        queued = sorted((each for each in queued if each.deadline_s >= second), key=lambda each: each.deadline_s)
        for each in take_from(queued, chosen, Budget(inputs=16, tokens=64), float(second)):
            if each.since_s == 0.0 and each.tokens >= 50:
                gone_s[each.tokens] = second
    assert len(gone_s) == 10
    assert max(gone_s.values()) <= overdue_s + 10


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150)
@given(
    told=st.lists(
        st.tuples(
            st.integers(0, 40),
            st.one_of(st.just(math.inf), st.floats(-1, 3), st.sampled_from([0.0, 1.0])),
            st.floats(-2, 1),
        ),
        max_size=30,
    ),
    inputs=st.integers(1, 12),
    tokens=st.one_of(st.none(), st.integers(1, 60)),
)
def test_a_batch_is_never_empty_or_over_its_budget_and_all_inputs_run(
    name: str, told: list[tuple[int, float, float]], inputs: int, tokens: int | None
) -> None:
    queued, budget = waiting(*told), Budget(inputs=inputs, tokens=tokens)
    every = {id(each) for each in queued}
    seen: list[int] = []
    while queued:
        assert order(name).pick(queued, budget, 1.0) == order(name).pick(queued, budget, 1.0)
        batch = take_from(queued, order(name), budget, 1.0)
        assert 1 <= len(batch) <= inputs
        assert len(batch) == 1 or tokens is None or sum(each.tokens for each in batch) <= tokens
        seen += map(id, batch)
    assert sorted(seen) == sorted(every)
    assert order(name).pick(queued, budget, 1.0) == []


@settings(max_examples=100)
@given(
    told=st.lists(
        st.tuples(st.integers(1, 40), st.one_of(st.just(math.inf), st.floats(0, 3)), st.floats(-2, 1)), min_size=1
    ),
    tokens=st.one_of(st.none(), st.integers(1, 60)),
)
def test_the_default_order_picks_its_front(told: list[tuple[int, float, float]], tokens: int | None) -> None:
    queued = waiting(*sorted(told, key=lambda each: each[2]))
    budget, default = Budget(inputs=5, tokens=tokens), order("deadline")
    picks = [queued[position] for position in default.pick(queued, budget, 0.5)]
    assert [id(each) for each in take_from(queued, default, budget, 0.5)] == [id(each) for each in picks]


def test_an_order_is_parsed_from_text() -> None:
    assert OrderSpec.parse("shortest") == OrderSpec(name="shortest")
    assert OrderSpec.parse("das:0.3") == OrderSpec(name="das", eta=0.3)


# TCB's DAS

Chooser = Callable[[Sequence[Asked], float], Iterable[int]]
"""Maps waiting inputs, sorted by deadline, and the time to the positions of a batch."""


def utility_of(requests: Sequence[Asked], num_batches: int, choose: Chooser) -> Fraction:
    """Returns the utility of inputs that run before their deadline, with a batch at every whole second."""
    left, total = list(requests), Fraction(0)
    for now in range(num_batches):
        waiting = sorted((n for n in left if n.since_s <= now <= n.deadline_s), key=lambda n: n.deadline_s)
        taken = [waiting[position] for position in choose(waiting, now)]
        total += sum((Fraction(1, n.tokens) for n in taken), Fraction(0))
        left = [n for n in left if not any(n is each for each in taken)]
    return total


def best_utility(requests: Sequence[Asked], num_batches: int, L: int) -> Fraction:
    """Returns the largest utility that any order reaches with knowledge of all arrivals, by brute force."""
    numbers = range(len(requests))
    rows = [set(row) for size in range(1, len(requests) + 1) for row in combinations(numbers, size)]
    rows = [row for row in rows if sum(requests[n].tokens for n in row) <= L]

    @cache
    def best(now: int, left: frozenset[int]) -> Fraction:
        if now == num_batches or not left:
            return Fraction(0)
        found = best(now + 1, left)
        for row in rows:
            if row <= left and all(requests[n].since_s <= now <= requests[n].deadline_s for n in row):
                worth = sum((Fraction(1, requests[n].tokens) for n in row), Fraction(0))
                found = max(found, worth + best(now + 1, left - row))
        return found

    return best(0, frozenset(numbers))


def random_requests(rng: random.Random, number: int, longest: int, num_batches: int) -> list[Asked]:
    """Draws requests of any lengths, arrivals and deadlines; some deadlines are equal, past, or infinite."""
    requests = []
    for _ in range(number):
        since = rng.randrange(num_batches)
        deadline = since + rng.choice([0, 0, 1, 2, math.inf])
        requests.append(Asked(tokens=rng.randint(1, longest), since_s=since, deadline_s=deadline))
    return requests


ETAS = [Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(9, 10)]


def by_das(length: int, eta: Fraction) -> Chooser:
    def choose(waiting: Sequence[Asked], now_s: float) -> list[int]:
        budget = Budget(inputs=99, tokens=length)
        return das([n.tokens for n in waiting], range(len(waiting)), budget, eta=float(eta))

    return choose


def test_das_prefers_the_earlier_deadline_to_the_shorter_input() -> None:
    # 10, 11, 12, 13 saturate 48: p = 2, and half of their mean utility lets everything up to 20 go by deadline.
    lengths = [14, 18, 13, 12, 11, 10]
    row = das(lengths, range(6), Budget(inputs=99, tokens=48), eta=0.5)
    assert [lengths[position] for position in row] == [10, 11, 14, 13]  # 18 is passed over: 13 are left
    # s = 4, so p = 2: the shortest two. Half of the mean of 1 and 1/2 is 3/8, so no other input is short enough.
    lengths = [50, 1, 40, 2, 30]
    assert das(lengths, range(5), Budget(inputs=4), eta=0.5) == [1, 3, 4, 2]


@pytest.mark.parametrize("eta", ETAS, ids=str)
def test_das_reaches_its_bound_against_brute_force(eta: Fraction) -> None:
    """Checks theorem 5.1, and the better bound eta / (1 + eta) that holds as well."""
    rng = random.Random(f"{eta} 1")
    q, worst = 1 - eta, Fraction(1)
    for _ in range(50):
        length, batches = rng.randint(4, 12), rng.randint(2, 3)
        requests = random_requests(rng, 7, length, batches)
        best = best_utility(requests, batches, length)
        worst = min(worst, utility_of(requests, batches, by_das(length, eta)) / best)
    assert worst >= eta * q / (eta * q + 1)
    assert worst >= eta / (1 + eta)


# Slots of attention

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def test_the_longest_come_first_each_into_the_first_slot_with_room() -> None:
    assert first_fit_decreasing([3, 10, 4, 6, 2], 10) == [[1], [3, 2], [0, 4]]


@given(LENGTHS, st.integers(0, 30))
def test_every_input_has_one_slot_and_none_overflows(lengths: list[int], spare: int) -> None:
    slot_length = max(lengths) + spare
    slots = first_fit_decreasing(lengths, slot_length)
    assert sorted(index for slot in slots for index in slot) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in slot) <= slot_length for slot in slots)


@given(LENGTHS)
def test_each_input_has_its_own_slot_if_no_two_fit_together(lengths: list[int]) -> None:
    slots = first_fit_decreasing(lengths, max(lengths))
    assert any_two_fit(lengths, max(lengths)) == (len(slots) < len(lengths))
