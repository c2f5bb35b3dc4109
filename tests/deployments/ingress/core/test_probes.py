from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from deployments.ingress.core.flights import Flight
from deployments.ingress.core.probes import ProbeBook
from earlyexit.tasks.label import differ
from earlyexit.wire import Numbers, Seen
from optimizer.plan import PolicySpec
from profiles.records import ValueArray
from profiles.scores import FloatArray, Score
from profiles.stream import StreamShape

SHAPE = StreamShape(score="entropy", num_blocks=4, ramps=(0, 2))
BOTH = frozenset({0, 2})
Probed = Flight[int]
SCORES: tuple[Score, ...] = ("entropy", "confidence")


def flight(serial: int, *, deadline_s: float = 10.0) -> Probed:
    return Flight(serial, 1.5, deadline_s, 0)


def seen(each: Probed, block: int, *, score: float = 0.5, label: int = 1) -> tuple[Probed, Seen]:
    return each, Seen(sample_id="", block=block, score=math.nan if block == 3 else score, value=label)


def begun(*flights: Probed, active: frozenset[int] = BOTH, most_complete: int = 10) -> ProbeBook:
    book = ProbeBook(SHAPE, differ, outlive_s=1.0, most_complete=most_complete)
    assert book.begin(flights, active, 2.0)
    return book


def finish(book: ProbeBook, each: Probed, *, exit_block: int = 3) -> None:
    book.answered(each, exit_block, BOTH)
    book.see([seen(each, block) for block in (0, 2, 3)])


@pytest.mark.parametrize("answer_first", [True, False], ids=["answered-before-the-end", "answered-after-the-end"])
def test_a_probe_is_complete_when_it_was_answered_and_the_last_block_was_seen(answer_first: bool) -> None:
    probe = flight(1)
    book = begun(probe)
    if answer_first:
        book.answered(probe, 0, BOTH)
    book.see([seen(probe, 0), seen(probe, 2), seen(probe, 3)])
    if not answer_first:
        assert book.hand_over() is None
        book.answered(probe, 0, BOTH)
    observations = book.hand_over()
    assert observations is not None
    assert (len(observations), observations.exits_N.tolist()) == (1, [0])
    assert not book.holds(probe)


def test_the_first_answer_counts() -> None:
    probe = flight(1)
    book = begun(probe)
    book.answered(probe, 2, BOTH)
    finish(book, probe, exit_block=3)
    observations = book.hand_over(100.0)
    assert observations is not None
    assert (observations.exits_N.tolist(), observations.times_s_N.tolist()) == ([2], [101.5])


def test_agreement_is_the_share_of_answers_that_were_the_full_models() -> None:
    flights = [flight(serial) for serial in range(4)]
    book = begun(*flights)
    assert book.agreement is None
    for each, label in zip(flights, (1, 1, 1, 2), strict=True):
        book.see([seen(each, 0, label=label), seen(each, 2)])
        book.answered(each, 0, BOTH)
        book.see([seen(each, 3)])
    assert book.agreement == 0.75


def test_answers_may_be_anything_that_has_a_loss() -> None:
    def wrong_pixels(early: ValueArray, full: ValueArray) -> FloatArray:
        return np.asarray((early != full).mean((1, 2)), dtype=np.float64)

    probe = flight(1)
    book = ProbeBook(replace(SHAPE, zero_one=False), wrong_pixels, outlive_s=1.0)
    book.begin([probe], BOTH, 2.0)
    book.answered(probe, 2, BOTH)
    for block, pixels in ((0, [[1, 1], [0, 0]]), (2, [[0, 1], [0, 0]]), (3, [[0, 0], [0, 0]])):
        book.see([(probe, replace(seen(probe, block)[1], value=Numbers.of(np.array(pixels))))])
    assert book.agreement == 0.75
    observations = book.hand_over()
    assert observations is not None
    assert observations.losses_NR.tolist() == [[0.5, 0.25]]


def test_what_is_seen_of_other_inputs_and_at_other_blocks_is_ignored() -> None:
    probe, stranger = flight(1), flight(2)
    book = begun(probe)
    book.see([seen(stranger, 0), seen(probe, 1)])
    book.answered(stranger, 0, BOTH)
    finish(book, probe)
    finish(book, stranger)
    assert book.num_complete == 1


@pytest.mark.parametrize(
    ("exit_block", "blocks", "score"),
    [
        pytest.param(1, (0, 2), 0.5, id="an-exit-that-is-no-ramp"),
        pytest.param(0, (2,), 0.5, id="a-ramp-that-said-nothing"),
        pytest.param(0, (0, 2), math.nan, id="a-score-that-is-no-number"),
    ],
)
def test_probes_that_contradict_themselves_are_counted_and_left_out(
    exit_block: int, blocks: tuple[int, ...], score: float
) -> None:
    probe = flight(1)
    book = begun(probe)
    book.answered(probe, exit_block, BOTH)
    book.see([*(seen(probe, block, score=score) for block in blocks), seen(probe, 3)])
    assert (book.hand_over(), book.num_refused, book.num_complete) == (None, 1, 0)


@pytest.mark.parametrize(
    ("active_now", "active"),
    [
        pytest.param(frozenset({0}), [True, False], id="the-plan-at-its-answer"),
        pytest.param(frozenset({2}), None, id="neither-plan"),
    ],
)
def test_an_exit_that_the_senders_plan_had_off_counts_for_the_plan_at_its_answer(
    active_now: frozenset[int], active: list[bool] | None
) -> None:
    probe = flight(1)
    book = begun(probe, active=frozenset({2}))
    book.answered(probe, 0, active_now)
    book.see([seen(probe, block) for block in (0, 2, 3)])
    observations = book.hand_over()
    assert (None if observations is None else observations.active_NR[0].tolist()) == active
    assert book.num_refused == (active is None)


def test_a_forgotten_probe_never_completes() -> None:
    probe = flight(1)
    book = begun(probe)
    book.forget([probe, "stranger"])
    finish(book, probe)
    assert (book.holds(probe), book.hand_over()) == (False, None)


def test_probes_whose_deadline_is_long_past_are_forgotten() -> None:
    early, late = flight(1, deadline_s=5.0), flight(2, deadline_s=9.0)
    book = begun(early, late)
    book.begin([], BOTH, 6.0)
    assert book.holds(early)  # something may still be seen of it for a second
    book.begin([], BOTH, 7.1)
    assert (book.holds(early), book.holds(late)) == (False, True)


def test_of_complete_probes_that_nobody_asks_for_the_oldest_go() -> None:
    flights = [flight(serial) for serial in range(5)]
    book = begun(*flights, most_complete=3)
    for each, exit_block in zip(flights, (0, 0, 2, 3, 3), strict=True):
        finish(book, each, exit_block=exit_block)
    observations = book.hand_over()
    assert observations is not None
    assert (observations.exits_N.tolist(), book.num_overflown) == ([2, 3, 3], 2)


def test_no_more_probes_begin_than_there_is_room_for() -> None:
    book = ProbeBook(SHAPE, differ, outlive_s=1.0, most_open=2)
    assert book.begin([flight(1)], BOTH, 2.0)
    assert not book.begin([flight(2), flight(3)], BOTH, 2.0)
    assert book.begin([flight(4)], BOTH, 2.0)


def test_only_a_policy_of_the_same_unit_is_probed_and_without_one_replicas_look_at_confidence() -> None:
    entropy, confidence = (ProbeBook(replace(SHAPE, score=score), differ, outlive_s=1.0) for score in SCORES)
    policies = [
        PolicySpec(name="entropy", thresholds=0.5),
        PolicySpec(name="recorded", thresholds=0.5, records="records.npz"),
        PolicySpec(name="confidence", thresholds=0.5),
        PolicySpec(name="patience", patience=2),
        None,
    ]
    assert [entropy.can_look(policy) for policy in policies] == [True, True, False, False, False]
    assert [confidence.can_look(policy) for policy in policies] == [False, True, True, False, True]
