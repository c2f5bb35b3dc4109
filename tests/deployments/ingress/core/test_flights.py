from __future__ import annotations

import math

import numpy as np
import pytest

from deployments.ingress.core.flights import (
    LONGEST_RETRY_S,
    AnswerRate,
    Flight,
    FlightBook,
    departure,
    serial_and_attempt,
)
from earlyexit.errors import DeadlineError, InputError, OfframpError, OverloadedError
from earlyexit.signature import Encoded
from earlyexit.wire import Answer

Outcomes = list[tuple[str, Answer | OfframpError]]


def tokens(*ids: int) -> Encoded:
    return Encoded(len(ids), (np.array(ids, dtype=np.int32),))


def answer(sample_id: str) -> Answer:
    return Answer(sample_id=sample_id, value=0, score=1.0, exit=0)


class Owner:
    """Whoever waits for the answers; keeps what it was told."""

    def __init__(self) -> None:
        self.outcomes: Outcomes = []

    def settle(self, flight: Flight, outcome: Answer | OfframpError) -> None:
        self.outcomes.append((flight.key, outcome))


def admit(book: FlightBook, owner: Owner, names: str) -> list[Flight]:
    """One input per letter."""
    return book.admit([(name, tokens(1)) for name in names], 10.0, owner.settle, arrived_s=0.0, retry_after_s=3.0)


def ids_of(flights: list[Flight]) -> list[str]:
    return [flight.sample_id for flight in flights]


def test_inputs_depart_in_the_order_of_their_arrival_and_at_most_a_batch_at_once() -> None:
    book, owner = FlightBook(max_queued=10, name="i"), Owner()
    admit(book, owner, "ab")
    admit(book, owner, "cde")
    assert ids_of(book.depart(4, 0)) == ["a#i.1.0", "b#i.2.0", "c#i.3.0", "d#i.4.0"]
    assert ids_of(book.depart(4, 0)) == ["e#i.5.0"]
    assert book.depart(4, 0) == []


def test_inputs_count_as_unanswered_until_they_are_settled() -> None:
    book, owner = FlightBook(max_queued=10, name="i"), Owner()
    admit(book, owner, "abc")
    book.depart(2, 0)
    assert (book.num_waiting, book.num_unanswered) == (1, 3)
    book.settle("a#i.1.0", answer("a#i.1.0"))
    assert (book.num_waiting, book.num_unanswered) == (1, 2)


def test_a_request_is_taken_whole_or_not_at_all() -> None:
    book, owner = FlightBook(max_queued=4, name="i"), Owner()
    admit(book, owner, "abc")
    with pytest.raises(OverloadedError, match="3 inputs wait for their answers here, at most 4 are taken") as caught:
        admit(book, owner, "de")
    assert caught.value.retry_after_s == 3.0
    assert (book.num_waiting, owner.outcomes) == (3, [])
    assert ids_of(admit(book, owner, "d")) == ["d#i.4.0"]


def test_inputs_under_way_count_against_the_limit() -> None:
    book, owner = FlightBook(max_queued=2, name="i"), Owner()
    admit(book, owner, "ab")
    book.depart(2, 0)
    with pytest.raises(OverloadedError):
        admit(book, owner, "c")


def test_an_input_is_settled_once() -> None:
    book, owner = FlightBook(max_queued=2, name="i"), Owner()
    admit(book, owner, "a")
    book.depart(1, 0)
    assert book.settle("a#i.1.0", answer("a#i.1.0"))
    assert not book.settle("a#i.1.0", DeadlineError("too late"))
    assert owner.outcomes == [("a", answer("a#i.1.0"))]


def test_an_input_that_has_not_departed_cannot_be_settled() -> None:
    book, owner = FlightBook(max_queued=2, name="i"), Owner()
    admit(book, owner, "a")
    assert not book.settle("a#i.1.0", answer("a#i.1.0"))
    assert not book.settle("stranger#i.9.0", answer("stranger#i.9.0"))
    assert owner.outcomes == []


def test_the_same_key_twice_is_two_inputs() -> None:
    book, owner = FlightBook(max_queued=2, name="i"), Owner()
    admit(book, owner, "aa")
    assert ids_of(book.depart(2, 0)) == ["a#i.1.0", "a#i.2.0"]


def test_given_up_inputs_do_not_depart_and_make_room() -> None:
    book, owner = FlightBook(max_queued=3, name="i"), Owner()
    first, _, third = admit(book, owner, "abc")
    book.give_up([first, third])
    assert (book.num_waiting, book.num_unanswered) == (1, 1)
    admit(book, owner, "de")
    assert [flight.key for flight in book.depart(8, 0)] == ["b", "d", "e"]


def test_an_answer_for_a_given_up_input_reaches_nobody() -> None:
    book, owner = FlightBook(max_queued=2, name="i"), Owner()
    admit(book, owner, "a")
    departed = book.depart(1, 0)
    book.give_up(departed)
    assert book.find("a#i.1.0") is None
    assert not book.settle("a#i.1.0", answer("a#i.1.0"))
    assert book.num_unanswered == 0


def test_inputs_sent_again_go_before_those_that_wait_in_their_old_order() -> None:
    book, owner = FlightBook(max_queued=9, name="i"), Owner()
    admit(book, owner, "abcd")
    book.depart(3, 0)
    assert book.send_again(["a#i.1.0", "c#i.3.0"]) == 2
    assert ids_of(book.depart(9, 0)) == ["a#i.1.1", "c#i.3.1", "d#i.4.0"]


def test_a_late_answer_of_an_earlier_attempt_is_a_strangers() -> None:
    book, owner = FlightBook(max_queued=9, name="i"), Owner()
    admit(book, owner, "a")
    book.depart(1, 0)
    book.send_again(["a#i.1.0"])
    book.depart(1, 0)
    assert book.find("a#i.1.0") is None
    assert not book.settle("a#i.1.0", answer("a#i.1.0"))
    assert book.settle("a#i.1.1", answer("a#i.1.1"))
    assert owner.outcomes == [("a", answer("a#i.1.1"))]


def test_answered_given_up_and_unknown_inputs_are_not_sent_again() -> None:
    book, owner = FlightBook(max_queued=9, name="i"), Owner()
    admit(book, owner, "ab")
    _, b = book.depart(2, 0)
    book.settle("a#i.1.0", answer("a#i.1.0"))
    book.give_up([b])
    assert book.send_again(["a#i.1.0", "b#i.2.0", "c#i.3.0"]) == 0
    assert book.depart(9, 0) == []


def test_an_input_given_up_while_it_waits_for_its_second_attempt_does_not_depart() -> None:
    book, owner = FlightBook(max_queued=9, name="i"), Owner()
    admit(book, owner, "a")
    departed = book.depart(1, 0)
    book.send_again(["a#i.1.0"])
    book.give_up(departed)
    assert (book.depart(9, 0), book.num_unanswered) == ([], 0)


def test_a_departure_is_a_packed_piece_before_block_0() -> None:
    book, owner = FlightBook(max_queued=9, name="i"), Owner()
    book.admit([("a", tokens(5, 6, 7)), ("b", tokens(8))], 10.0, owner.settle, arrived_s=0.0, retry_after_s=1.0)
    piece = departure(book.depart(2, 0))
    assert (piece.sample_ids, piece.next_block, piece.state_BS) == (("a#i.1.0", "b#i.2.0"), 0, None)
    assert piece.lengths_B.tolist() == [3, 1]
    [token_ids] = piece.values
    assert (token_ids.tolist(), token_ids.dtype) == ([5, 6, 7, 8], np.dtype(np.int32))


# How many answers a second


def test_without_a_rate_refused_callers_come_back_after_a_second() -> None:
    assert AnswerRate().seconds_for(1000) == 1.0


def test_the_first_second_gives_the_first_rate() -> None:
    rate = AnswerRate()
    rate.record(20, 0.0)
    rate.record(20, 0.5)
    assert rate.rate_per_s == 0
    rate.record(60, 2.0)
    assert rate.rate_per_s == 50.0  # 100 answers in 2 s
    assert rate.seconds_for(200) == 4.0


def test_the_rate_moves_to_a_new_one_within_about_ten_seconds() -> None:
    rate = AnswerRate()
    rate.record(0, 0.0)
    rate.record(100, 1.0)
    rate.record(200, 2.0)
    assert rate.rate_per_s == pytest.approx(100 + 100 * (1 - math.exp(-0.1)))


def test_nobody_is_told_to_come_back_sooner_than_in_a_second_or_much_later() -> None:
    rate = AnswerRate(rate_per_s=50.0)
    assert rate.seconds_for(1) == 1.0
    assert rate.seconds_for(10**6) == LONGEST_RETRY_S


def test_an_idle_hour_does_not_count_as_slowness() -> None:
    rate = AnswerRate()
    rate.record(0, 0.0)
    rate.record(100, 1.0)
    rate.begin(3600.0)
    rate.record(50, 3600.5)
    rate.record(50, 3601.0)
    assert rate.rate_per_s == pytest.approx(100.0)


def test_books_of_different_ingresses_never_give_the_same_sample_id() -> None:
    ids = set()
    for name in ("one", "two"):
        book, owner = FlightBook(max_queued=9, name=name), Owner()
        admit(book, owner, "ab")
        ids |= set(ids_of(book.depart(9, 0)))
    assert len(ids) == 4


def test_a_request_that_could_never_fit_is_not_told_to_come_back() -> None:
    book, owner = FlightBook(max_queued=2, name="i"), Owner()
    with pytest.raises(InputError, match="3 inputs in one request; at most 2 wait here at a time"):
        admit(book, owner, "abc")


@pytest.mark.parametrize("key", ["", "a", "x#1.2", "a.b"])
def test_a_sample_id_tells_serial_and_attempt_whatever_the_callers_id_holds(key: str) -> None:
    owner, book = Owner(), FlightBook(10, "i")
    book.admit([("first", tokens(1)), (key, tokens(1))], 1.0, owner.settle, arrived_s=0.0, retry_after_s=1.0)
    _, flight = book.depart(2, 0)
    book.send_again([flight.sample_id])
    assert serial_and_attempt(flight.sample_id) == (2, 1)
