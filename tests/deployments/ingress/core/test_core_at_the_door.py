"""What the core takes, what it refuses, and that everything it took has one outcome."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

import pytest

from deployments.ingress.core.ingress_core import HANG_S
from earlyexit.errors import (
    AdmissionError,
    DeadlineError,
    InputError,
    OverloadedError,
    StageUnavailableError,
)
from optimizer.placement import PlacedPlan
from tests.deployments.ingress.core.core_scene import CoreScene, plan

# At the door


def test_too_many_inputs_are_refused_whole() -> None:
    scene = CoreScene(max_queued=3)
    scene.submit("ab")
    with pytest.raises(OverloadedError, match="2 inputs wait for their answers here, at most 3 are taken"):
        scene.submit("cd")
    with pytest.raises(InputError, match="4 inputs in one request; at most 3 wait here at a time"):
        scene.submit("cdef")
    scene.submit("c")
    assert (scene.core.num_unanswered, scene.core.counts.drops) == (3, {"overloaded": 2})


def test_refused_callers_are_told_how_long_the_queue_takes() -> None:
    waits_s = []
    for seconds in (0.0, 1.0):
        scene = CoreScene(max_queued=40)
        scene.submit("AB")
        scene.answer(0, "A")
        scene.now_s = seconds
        scene.answer(0, "B")  # 2 answers in the first second, or none known yet
        scene.submit(string.printable[:36])
        with pytest.raises(OverloadedError) as caught:
            scene.submit("vwxyz")
        waits_s.append(caught.value.retry_after_s)
    assert waits_s == [1.0, 18.0]


def test_what_cannot_be_in_time_is_refused() -> None:
    scene = CoreScene(slo_s=1.0)
    scene.submit("abcd")
    scene.lose(0, "abcd", DeadlineError("late"))  # at 0 s of 10: nothing is learnt
    scene.submit("efgh")
    scene.until(10.0)  # these took longer than the SLO
    scene.submit("i")
    with pytest.raises(AdmissionError):
        scene.core.check(9, 11.0, 10.0)
    assert scene.core.counts.drops == {"deadline": 8, "admission": 9}


@pytest.mark.parametrize(("took_s", "refused"), [(5.0, True), (0.3, False)], ids=["late", "in-time"])
def test_answers_that_come_late_close_the_door(took_s: float, refused: bool) -> None:
    scene = CoreScene(slo_s=1.0)
    scene.submit("efgh", deadline_s=99.0)
    scene.now_s = took_s
    scene.answer(0, "efgh")
    scene.submit("i", deadline_s=99.0)
    if refused:
        with pytest.raises(AdmissionError):
            scene.core.check(9, took_s + 1.0, took_s)
    else:
        scene.core.check(9, took_s + 1.0, took_s)
    assert scene.core.counts.drops == ({"admission": 9} if refused else {})


def test_what_is_still_to_be_submitted_takes_the_room_of_what_comes_after() -> None:
    scene = CoreScene(slo_s=1.0)
    scene.submit("efgh")
    scene.until(10.0)  # these took longer than the SLO
    scene.core.check(1, 11.0, 10.0)
    with pytest.raises(AdmissionError):
        scene.core.check(1, 11.0, 10.0, num_coming=9)
    assert scene.core.counts.drops == {"deadline": 4, "admission": 1}


def test_without_a_plan_what_waits_what_comes_and_what_comes_back_is_told_why() -> None:
    scene = CoreScene(calls_per_replica=1)
    scene.submit("abcde")
    scene.fail(0)
    scene.suspend()
    with pytest.raises(StageUnavailableError, match="no plan to serve by: nothing is left"):
        scene.submit("f")
    scene.until(1.0)
    why = "there is no plan to serve by: nothing is left"
    assert scene.log[-2:] == ["0.05 again 4 of first", f"0.05 drop abcd: {why}"]
    scene.answer(1, "e")  # what is under way may still get there
    scene.follow(plan())
    scene.submit("g")
    assert scene.log[-2:] == ["1 answer e is e after block 3", "1 send 2: g to first for block 0"]


# Whatever happens


@pytest.mark.parametrize("seed", range(40))
def test_every_input_has_exactly_one_outcome_whatever_comes_back(seed: int) -> None:
    """Parts, failures, plans, deadlines and owners that go, at random; `CoreScene` sees to it that nobody has two."""
    rng = random.Random(seed)
    scene = CoreScene(max_attempts=4, max_queued=30)
    names, submitted = list(string.printable[:90]), ""
    while names or scene.core.num_unanswered:
        if names and scene.core.num_unanswered < 25:
            letters = "".join(names.pop() for _ in range(min(len(names), rng.randint(1, 5))))
            scene.submit(letters, deadline_s=scene.now_s + rng.uniform(0.1, 6))
            submitted += letters
        happen_at_random(scene, rng, submitted)
        scene.until(scene.now_s + rng.uniform(0, 0.5))
    assert scene.outcomes.keys() == set(submitted)
    scene.until(scene.now_s + 10 + HANG_S)
    report = scene.core.peek(0.0, 0.0)
    assert (report.waiting, report.unanswered, report.oldest_epoch) == (0, 0, report.epoch)
    assert report.arrived == report.answered + sum(report.drops.values()) == len(submitted)
    assert not any(call.num_inside for call in scene.calls)
    scene.submit("\x00")
    assert scene.log[-1].startswith(f"{scene.now_s:g} send"), "nothing that has ended is still waited for"


def any_plan(rng: random.Random, epoch: int) -> PlacedPlan:
    """Two stages."""
    return plan(epoch=epoch, replicas=rng.randint(1, 3), cut=rng.randint(1, 3))


def happen_at_random(
    scene: CoreScene, rng: random.Random, submitted: str, make: Callable[[random.Random, int], PlacedPlan] = any_plan
) -> None:
    for index, call in enumerate(scene.calls):
        some = "".join(flight.key for flight in call.inputs if rng.random() < 0.5)
        match rng.randint(0, 11):
            case 0 | 1 | 2:
                scene.answer(index, some)
            case 3 | 4:
                scene.go_on(index, some, block=rng.randint(1, 3))
            case 5:
                scene.lose(index, some)
            case 6:
                scene.fail(index)
    if rng.random() < 0.1:
        scene.give_up("".join(rng.sample(submitted, min(3, len(submitted)))))
    if rng.random() < 0.1:
        epoch = scene.core.route.epoch + rng.randint(0, 1)
        scene.follow(make(rng, epoch))
