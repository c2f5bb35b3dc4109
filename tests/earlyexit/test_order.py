from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.engine.order import OVERDUE_S, Order, OrderSpec, take_from
from earlyexit.errors import PlanError
from earlyexit.network.split import Budget


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of TCB's section 5.1; a batch runs at every whole second."""

    tokens: int
    since_s: float = 0.0
    deadline_s: float = math.inf


NAMES = ["arrival", "deadline", "shortest", "das"]


def order(name: str, overdue_s: float | None = None) -> Order:
    return OrderSpec(name=name, overdue_s=overdue_s).build()  # type: ignore[arg-type]


def waiting(*told: tuple[int, float, float]) -> list[Asked]:
    """Each with tokens, deadline and since when; sorted as a queue is."""
    return sorted(
        (Asked(tokens=tokens, deadline_s=deadline_s, since_s=since_s) for tokens, deadline_s, since_s in told),
        key=lambda each: each.deadline_s,
    )


def picked(
    name: str, who: Sequence[Asked], budget: Budget, now_s: float = 0.9, overdue_s: float | None = None
) -> list[int]:
    return [who[position].tokens for position in order(name, overdue_s).pick(who, budget, now_s)]


def test_each_order_has_its_own_first_ones() -> None:
    # Tokens name them: 30 came first, 10 is the shortest, 20 has the earliest deadline.
    who = waiting((30, 3.0, 0.0), (20, 1.0, 0.2), (10, 2.0, 0.1))
    two = Budget(inputs=2)
    assert picked("arrival", who, two) == [30, 10]
    assert picked("deadline", who, two) == [20, 10]
    assert picked("shortest", who, two) == [10, 20]
    assert picked("das", who, two) == [10, 20]  # p = 1; 1/20 is half of 1/10, and 20's deadline is the earliest


@pytest.mark.parametrize(
    ("name", "expected"), [("arrival", [30]), ("deadline", [20, 10]), ("shortest", [10, 20]), ("das", [10, 20])]
)
def test_a_budget_of_tokens_bounds_them_too(name: str, expected: list[int]) -> None:
    who = waiting((30, 3.0, 0.0), (20, 1.0, 0.2), (10, 2.0, 0.1))
    assert picked(name, who, Budget(inputs=3, tokens=35)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_an_input_larger_than_the_budget_runs_alone(name: str) -> None:
    assert picked(name, waiting((500, 1.0, 0.0), (600, 2.0, 0.0)), Budget(inputs=8, tokens=100)) == [500]


@pytest.mark.parametrize("name", NAMES)
def test_with_equal_lengths_and_deadlines_all_take_the_oldest(name: str) -> None:
    who = waiting(*[(1, 5.0, float(k)) for k in range(9)])
    assert order(name).pick(who, Budget(inputs=3), 0.0) == [0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_without_deadlines_there_is_still_an_order(name: str) -> None:
    who = waiting((5, math.inf, 0.0), (2, math.inf, 0.1), (9, math.inf, 0.2))
    first = {"arrival": [5, 2], "deadline": [5, 2], "shortest": [2, 5], "das": [2, 5]}[name]
    assert picked(name, who, Budget(inputs=2)) == first


@pytest.mark.parametrize("name", ["shortest", "das"])
def test_who_is_past_the_deadline_goes_only_where_all_are(name: str) -> None:
    who = waiting((1, 0.5, 0.0), (7, 2.0, 0.0), (8, 2.0, 0.0))
    assert picked(name, who, Budget(inputs=1), now_s=0.6) == [7]
    assert picked(name, who, Budget(inputs=1), now_s=3.0, overdue_s=9.0) == [1]


def test_at_its_deadline_an_input_is_in_time() -> None:
    assert picked("das", waiting((1, 0.5, 0.0), (2, 1.0, 0.0)), Budget(inputs=1), now_s=0.5) == [1]


@pytest.mark.parametrize("name", ["shortest", "das"])
def test_who_is_overdue_goes_first_the_oldest_before_all(name: str) -> None:
    who = waiting((50, math.inf, 0.1), (60, math.inf, 0.0), (1, math.inf, 1.9), (2, math.inf, 1.9))
    budget = Budget(inputs=3, tokens=70)
    assert picked(name, who, budget, now_s=0.9) == [1, 2, 50]
    assert picked(name, who, budget, now_s=OVERDUE_S) == [60, 1, 2]


@pytest.mark.parametrize("name", ["shortest", "das"])
def test_a_quarter_of_a_batch_is_for_the_overdue(name: str) -> None:
    old = [(50 + k, math.inf, 0.01 * k) for k in range(6)]
    who = waiting(*old, *[(1, math.inf, 5.0)] * 20)
    assert picked(name, who, Budget(inputs=12), now_s=5.0)[:4] == [50, 51, 52, 1]
    assert picked(name, who, Budget(inputs=12, tokens=420), now_s=5.0)[:3] == [50, 51, 1]
    assert picked(name, who, Budget(inputs=12, tokens=40), now_s=5.0) == [50]


@pytest.mark.parametrize("name", ["shortest", "das"])
def test_of_the_overdue_with_deadlines_those_go_first_that_have_most_time_left(name: str) -> None:
    who = waiting((50, 2.0, 0.0), (60, 2.5, 0.5), (70, 2.9, 0.9), (1, 3.5, 1.5), (40, math.inf, 0.2))
    assert picked(name, who, Budget(inputs=4), now_s=1.5)[0] == 40
    assert picked(name, [each for each in who if each.tokens != 40], Budget(inputs=4), now_s=1.5)[0] == 60


def test_by_deadline_too_who_has_none_goes_first_once_overdue() -> None:
    who = waiting((1, 9.0, 0.9), (2, 9.5, 0.9), (30, math.inf, 0.2), (40, math.inf, 0.4))
    assert picked("deadline", who, Budget(inputs=2), now_s=1.0) == [1, 2]
    assert picked("deadline", who, Budget(inputs=2), now_s=1.25) == [30, 1]


@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits_longer_than_until_overdue_and_a_batch_for_each_who_was_before(name: str) -> None:
    """More than fits keeps coming for ever, all of it shorter, sooner due, and younger than the ten that wait."""
    rng, overdue_s = random.Random(3), 5.0
    chosen = order(name, None if name == "arrival" else overdue_s)
    who = [Asked(tokens=50 + k, since_s=0.0) for k in range(10)]
    gone_s: dict[int, float] = {}
    for second in range(40):
        who += [Asked(tokens=rng.randint(1, 9), since_s=float(second), deadline_s=second + 3.0) for _ in range(40)]
        who = sorted((each for each in who if each.deadline_s >= second), key=lambda each: each.deadline_s)
        for each in take_from(who, chosen, Budget(inputs=16, tokens=64), float(second)):
            if each.since_s == 0.0 and each.tokens >= 50:
                gone_s[each.tokens] = second
    assert len(gone_s) == 10
    assert max(gone_s.values()) <= overdue_s + 10


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
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
def test_a_batch_is_never_empty_nor_over_its_budget_and_all_have_their_turn(
    name: str, told: list[tuple[int, float, float]], inputs: int, tokens: int | None
) -> None:
    who, budget = waiting(*told), Budget(inputs=inputs, tokens=tokens)
    everyone = {id(each) for each in who}
    seen: list[int] = []
    while who:
        assert order(name).pick(who, budget, 1.0) == order(name).pick(who, budget, 1.0)
        batch = take_from(who, order(name), budget, 1.0)
        assert 1 <= len(batch) <= inputs
        assert len(batch) == 1 or tokens is None or sum(each.tokens for each in batch) <= tokens
        seen += map(id, batch)
    assert sorted(seen) == sorted(everyone)
    assert order(name).pick(who, budget, 1.0) == []


@settings(max_examples=100, deadline=None)
@given(
    told=st.lists(
        st.tuples(st.integers(1, 40), st.one_of(st.just(math.inf), st.floats(0, 3)), st.floats(-2, 1)), min_size=1
    ),
    tokens=st.one_of(st.none(), st.integers(1, 60)),
)
def test_what_the_default_takes_from_the_front_is_what_it_picks(
    told: list[tuple[int, float, float]], tokens: int | None
) -> None:
    who, budget, default = waiting(*told), Budget(inputs=5, tokens=tokens), order("deadline")
    picks = [who[position] for position in default.pick(who, budget, 0.5)]
    assert [id(each) for each in take_from(who, default, budget, 0.5)] == [id(each) for each in picks]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "das", "eta": 0.0}, "eta must be between 0 and 1, not 0.0"),
        ({"name": "das", "eta": 1.0}, "eta must be between 0 and 1, not 1.0"),
        ({"name": "das", "q": -0.5}, "q must be between 0 and 1, not -0.5"),
        ({"name": "das", "eta": math.nan}, "eta must be between 0 and 1, not nan"),
        ({"name": "das", "eta": 0.5, "q": 0.4}, "eta and q must sum to 1, not to 0.9 as 0.5 and 0.4 do"),
        ({"name": "shortest", "eta": 0.5}, "the order 'shortest' takes no eta; only 'das' does"),
        ({"name": "arrival", "overdue_s": 1.0}, "the order 'arrival' takes no overdue_s"),
        ({"name": "das", "overdue_s": -1.0}, "overdue_s must be a number of seconds, at least 0, not -1.0"),
        ({"name": "das", "overdue_s": math.nan}, "overdue_s must be a number of seconds, at least 0, not nan"),
        ({"name": "longest"}, "there is no order 'longest'; orders are arrival, deadline, shortest, das"),
    ],
)
def test_an_order_refuses_what_it_cannot_work_with(given: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        OrderSpec(**given)  # type: ignore[arg-type]


def test_eta_and_q_say_each_other() -> None:
    assert OrderSpec(name="das").shares == (0.5, 0.5)
    assert OrderSpec(name="das", eta=0.3).shares == (0.3, 0.7)
    assert OrderSpec(name="das", q=0.25).shares == (0.75, 0.25)
    assert OrderSpec(name="das", eta=0.1, q=0.9).shares == (0.1, 0.9)


def test_an_order_is_named_in_one_word() -> None:
    assert OrderSpec.parse("shortest") == OrderSpec(name="shortest")
    assert OrderSpec.parse("das:0.3") == OrderSpec(name="das", eta=0.3)
    for text, message in [
        ("das:much", "an order is a name, or das:eta with a number, not 'das:much'"),
        ("das:", "an order is a name, or das:eta with a number"),
        ("best", "there is no order 'best'"),
        ("deadline:0.5", "takes no eta"),
    ]:
        with pytest.raises(PlanError, match=message):
            OrderSpec.parse(text)
