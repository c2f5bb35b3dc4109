"""A core whose plan has inputs run on when they are answered: nobody waits for them but the book."""

from __future__ import annotations

import random
import string
from collections import Counter
from typing import Any

import pytest

from deployments.ingress.core.ingress_core import HANG_S
from earlyexit.network.split import AfterAnswer
from optimizer.placement import PlacedPlan
from optimizer.plan import PolicySpec
from tests.deployments.ingress.core.test_core_probes import ProbeScene, probed_plan

STOP: AfterAnswer = "stop"
STAY: AfterAnswer = "stay"


class StayScene(ProbeScene):
    """Without probes."""

    def __init__(self, placed: PlacedPlan | None = None, **rules: Any) -> None:
        super().__init__(placed or probed_plan(after_answer=STAY), **{"probe_share": 0.0, **rules})


def test_an_answered_input_goes_on_to_the_end_and_its_caller_has_the_early_answer() -> None:
    scene = StayScene()
    scene.submit("ab")
    for letter, score in (("a", 0.25), ("b", 0.9)):
        scene.see(0, letter, 1, score=score)
    scene.answer_early(0, "a", block=1)
    scene.go_on(0, "ab")
    for letter, label in (("a", 1), ("b", 0)):
        scene.see(1, letter, 2, label=label)
        scene.see(1, letter, 3, label=label)
    scene.answer(1, "ab")  # of a it is the second
    assert scene.log == [
        "0 send 0: ab to first for block 0",
        "0 answer a is a after block 1",
        "0 send 1: (ab) to second for block 2",
        "0 answer b is b after block 3",
    ]
    seen = scene.observed()
    assert (seen.stayed_N.tolist(), seen.probe_N.tolist(), seen.exits_N.tolist()) == ([True] * 2, [False] * 2, [1, 3])
    assert seen.losses_NR.tolist() == [[1, 0], [0, 0]]
    assert scene.core.agreement == 0.5
    assert (scene.core.num_unanswered, scene.core.oldest_epoch) == (0, 1)


def test_of_a_call_that_failed_nobody_is_recorded_so_the_records_do_not_lean_to_hard_inputs() -> None:
    scene = StayScene()
    scene.submit("ab")
    for letter in "ab":
        scene.see(0, letter, 1)
    scene.answer_early(0, "a", block=1)
    scene.fail(0)
    scene.until(1.0)
    scene.submit("c")
    for call, letter in ((1, "b"), (2, "c")):
        for block in (1, 2, 3):
            scene.see(call, letter, block)
        scene.answer(call, letter)
    assert scene.outcomes == {"a": "answered", "b": "answered", "c": "answered"}
    assert scene.observed(wall_s=scene.now_s).times_s_N.tolist() == [1.0]  # c alone


def test_a_share_of_them_are_probes() -> None:
    scene = StayScene(probe_share=0.25)
    for number in range(200):
        scene.submit(chr(1000 + number))
        scene.answer(number, chr(1000 + number))
    assert 30 <= sum(call.probe for call in scene.calls) <= 70  # 50 expected, deviation 6
    assert {call.watch for call in scene.calls} == {"probe", "stay"}


def test_no_more_answered_inputs_run_on_than_may_wait_for_their_answers() -> None:
    scene = StayScene(max_queued=4)
    for call, letters in ((0, "ab"), (1, "cdef")):
        scene.submit(letters)
        scene.answer_early(call, letters, block=1)
    assert [call.watch for call in scene.calls] == ["stay", None]
    for call, letters in ((0, "ab"), (1, "cdef")):
        scene.go_on(call, letters)
    assert scene.log[4:] == ["0 send 2: (ab) to second for block 2"]


@pytest.mark.parametrize("shape", [None, "entropy"])
def test_a_policy_without_scores_has_inputs_stay_where_nobody_takes_notes(shape: str | None) -> None:
    policy = PolicySpec(name="patience", patience=2)
    rules = {"shape": None} if shape is None else {}
    scene = StayScene(probed_plan(policy, after_answer=STAY), **rules)
    scene.submit("a")
    scene.answer_early(0, "a", block=1)
    scene.go_on(0, "a")
    assert (len(scene.calls) == 2) == (shape is None)


# Plans that change under way


def test_inputs_that_began_to_stop_are_let_go_where_a_plan_came_that_has_them_stay() -> None:
    scene = StayScene(probed_plan())
    scene.submit("ab")
    scene.follow(probed_plan(epoch=2, after_answer=STAY))
    scene.answer_early(0, "a", block=1)  # the replica stays already
    scene.go_on(0, "ab")  # b is waited for, and a travels along
    assert [scene.core.is_awaited(scene.calls[1], flight) for flight in scene.calls[1].inputs] == [False, True]
    scene.answer(1, "b")
    assert scene.outcomes == {"a": "answered", "b": "answered"}
    assert scene.core.report(0.0, 0.0).probes is None


def test_inputs_that_began_to_stay_are_not_waited_for_once_a_plan_has_them_stop() -> None:
    scene = StayScene()
    scene.submit("ab")
    scene.answer_early(0, "a", block=1)
    scene.follow(probed_plan(epoch=2))
    scene.go_on(0, "a")
    scene.answer(0, "b", block=1)
    assert scene.log[1:] == ["0 answer a is a after block 1", "0 answer b is b after block 1"]
    scene.follow(probed_plan(epoch=3, after_answer=STAY))
    scene.submit("c")
    assert scene.calls[-1].watch == "stay"


@pytest.mark.parametrize("seed", range(40))
def test_every_input_has_exactly_one_outcome_whatever_comes_back_and_however_plans_change(seed: int) -> None:
    """Early answers, kills, and plans that stop and stay by turns, at random; the scene refuses a second outcome."""
    rng = random.Random(seed)
    scene = StayScene(max_attempts=4, max_queued=30, probe_share=0.2)
    names, submitted = list(string.ascii_letters), ""
    while names or scene.core.num_unanswered:
        if names and scene.core.num_unanswered < 25:
            letters = "".join(names.pop() for _ in range(min(len(names), rng.randint(1, 5))))
            scene.submit(letters, deadline_s=scene.now_s + rng.uniform(0.1, 6))
            submitted += letters
        happen_at_random(scene, rng)
        scene.until(scene.now_s + rng.uniform(0, 0.5))
    assert scene.outcomes.keys() == set(submitted)
    scene.until(scene.now_s + 10 + HANG_S)
    seen = scene.core.report(scene.now_s, scene.now_s).probes
    assert Counter(() if seen is None else seen.times_s_N.tolist()) <= Counter(
        flight.arrived_s for flight in scene.inputs.values()
    ), "none is recorded twice"
    book, before = scene.core._observations, list(scene.inputs.values())
    scene.follow(probed_plan(epoch=scene.core.route.epoch + 1, after_answer=STAY))
    scene.submit("!", deadline_s=scene.now_s + 10.0)  # a departure forgets what is past
    assert book is not None
    assert not any(book.holds(flight) for flight in before)
    assert book.holds(scene.inputs["!"])
    scene.answer(len(scene.calls) - 1, "!")
    submitted += "!"
    report = scene.core.peek(0.0, 0.0)
    assert (report.waiting, report.unanswered, report.oldest_epoch) == (0, 0, report.epoch)
    assert report.arrived == report.answered + sum(report.drops.values()) == len(submitted)
    assert not any(call.num_inside for call in scene.calls)


def happen_at_random(scene: StayScene, rng: random.Random) -> None:
    for index, call in enumerate(scene.calls):
        some = "".join(flight.key for flight in call.inputs if rng.random() < 0.5)
        match rng.randint(0, 11):
            case 0 | 1:
                scene.answer_early(index, some, block=rng.choice((1, 2)))
            case 2:
                for letter in some:
                    scene.see(index, letter, rng.choice((1, 2, 3)), label=rng.randint(0, 1))
            case 3 | 4:
                scene.go_on(index, some, block=rng.randint(1, 3))
            case 5 | 6:
                for letter in some:
                    for block in (1, 2, 3):
                        scene.see(index, letter, block)
                scene.answer(index, some)
            case 7:
                scene.lose(index, some)
            case 8:
                scene.fail(index)
    if rng.random() < 0.15:
        epoch, after = scene.core.route.epoch + rng.randint(0, 1), rng.choice((STOP, STAY))
        ramps = rng.choice(((1,), (1, 2), (2,)))
        scene.follow(probed_plan(epoch=epoch, ramps=ramps, cut=rng.randint(1, 3), after_answer=after))
