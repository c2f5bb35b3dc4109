"""Several things at once: what one event must not do to the others."""

from __future__ import annotations

import pytest

from deployments.ingress.core.outcomes import LONGEST_RETRY_S
from earlyexit.errors import AdmissionError, OverloadedError
from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.ingress.core.core_scene import ALL_SLOTS, CoreScene
from tests.deployments.ingress.core.test_core_probes import ProbeScene


def three_stages(epoch: int = 1) -> PlacedPlan:
    stages = tuple(
        Stage(device="cpu", replicas=1, splits=(Split(first=first, end=end, batch=4),))
        for first, end in ((0, 2), (2, 3), (3, 4))
    )
    return PlacedPlan(plan=Plan(stages=stages, epoch=epoch), slots=ALL_SLOTS)


def test_calls_that_fail_together_are_both_sent_again() -> None:
    scene = CoreScene(calls_per_replica=2)
    scene.submit("a")
    scene.submit("b")
    scene.fail(0)
    scene.fail(1)
    scene.until(1.0)
    assert scene.log[2:4] == ["0.05 again 1 of first", "0.05 again 1 of first"]


def test_a_pause_that_begins_during_another_ends_in_its_own_time() -> None:
    scene = CoreScene(calls_per_replica=2)
    scene.submit("a")
    scene.submit("b")
    scene.fail(0)
    scene.now_s = 0.02
    scene.fail(1)
    scene.until(1.0)
    assert [line for line in scene.log if "again" in line] == ["0.05 again 1 of first", "0.07 again 1 of first"]


def test_a_call_with_inputs_of_several_deadlines_is_hung_up_a_second_after_the_last() -> None:
    scene = CoreScene(calls_per_replica=1)
    scene.submit("x")
    scene.submit("a", deadline_s=2.0)
    scene.submit("b", deadline_s=3.5)
    scene.answer(0, "x")
    scene.until(6.0)
    assert [line for line in scene.log if "hang up" in line] == ["4.5 hang up 1"]


def test_who_is_left_behind_in_a_call_by_others_with_later_deadlines_is_hung_up_on_too() -> None:
    scene = CoreScene(calls_per_replica=1)
    scene.submit("x")
    scene.submit("a", deadline_s=2.0)
    scene.submit("b", deadline_s=5.5)
    scene.answer(0, "x")
    scene.until(4.0)  # a is late, and its call has another input that is not
    scene.answer(1, "b")
    scene.until(9.0)
    assert [line for line in scene.log if "hang up" in line] == ["6.5 hang up 1"]
    assert not any(call.num_inside for call in scene.calls)


def test_an_answer_goes_to_the_input_that_it_was_made_for_whoever_has_left_the_batch() -> None:
    scene = CoreScene()
    scene.submit("abc")
    scene.give_up("b")
    scene.answer(0, "abc")
    assert scene.log[1:] == ["0 drop b: abandoned", "0 answer a is a, c is c after block 3"]


def test_a_probe_that_was_answered_early_is_answered_beside_others_that_were_not() -> None:
    scene = ProbeScene()
    scene.submit("abc")
    scene.answer_early(0, "b", block=1)
    scene.answer_early(0, "abc", block=2)
    assert scene.log[1:] == ["0 answer b is b after block 1", "0 answer a is a, c is c after block 2"]
    assert (scene.core.counts.exits, scene.core.num_unanswered) == ({1: 1, 2: 2}, 0)


def test_what_is_reserved_is_the_sum_of_all_later_stages() -> None:
    scene = CoreScene(three_stages())
    scene.submit("a")
    for call, (block, took_s) in enumerate(((2, 1.0), (3, 2.0))):
        scene.now_s += took_s
        scene.go_on(call, "a", block=block)
    scene.now_s += 4.0
    scene.answer(2, "a")
    scene.submit("b", deadline_s=99.0)
    assert scene.calls[-1].reserve_s == 2.0 + 4.0
    scene.follow(three_stages(epoch=2))
    scene.submit("c", deadline_s=99.0)
    assert scene.calls[-1].reserve_s == 2.0 + 4.0  # the new plan knows what the one before has learnt


def test_everything_that_arrived_is_counted_whatever_became_of_it() -> None:
    scene = CoreScene(max_queued=3)
    scene.submit("ab")
    for letters in ("cd", "ef"):
        with pytest.raises(OverloadedError):
            scene.submit(letters)
    scene.submit("g")
    scene.answer(0, "a")
    assert (scene.core.counts.arrived, scene.core.counts.answered, scene.core.counts.drops) == (7, 1, {"overloaded": 4})


def test_a_request_of_exactly_what_waits_here_at_most_is_told_to_come_back() -> None:
    scene = CoreScene(max_queued=3)
    scene.submit("a")
    with pytest.raises(OverloadedError):
        scene.submit("bcd")


def test_who_is_refused_for_lateness_is_told_when_it_would_be_in_time() -> None:
    scene = CoreScene(slo_s=1.0)
    scene.submit("efgh")
    scene.until(10.0)  # these took longer than the SLO
    scene.submit("i")
    with pytest.raises(AdmissionError, match=r"no answer is to be had within 1 s now, but .* s later") as caught:
        scene.core.check(9, 11.0, 10.0)
    with pytest.raises(AdmissionError) as later:
        scene.core.check(18, 11.0, 10.0)
    assert 0 < caught.value.retry_after_s < later.value.retry_after_s
    with pytest.raises(AdmissionError) as much_later:
        scene.core.check(9000, 11.0, 10.0)
    assert much_later.value.retry_after_s == LONGEST_RETRY_S


def test_answers_by_an_older_plan_count_for_no_exit_of_the_present_one() -> None:
    scene = CoreScene()
    scene.submit("ab")
    scene.follow(three_stages(epoch=2))
    scene.go_on(0, "a")
    scene.answer(1, "a")  # by the present plan's stage, but it began before
    scene.answer(0, "b", block=1)
    assert (scene.core.counts.exits, scene.core.counts.answered) == ({}, 2)
