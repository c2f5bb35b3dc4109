from __future__ import annotations

import random
import string

import numpy as np
import pytest

from deployments.ingress.core.ingress_core import RETRY_PAUSE_S
from earlyexit.errors import DeadlineError, ExecutionError, OverloadedError, StageUnavailableError
from earlyexit.signature import Encoded
from tests.deployments.ingress.dispatch.dispatcher_scene import BATCH, PLAN, Scene, StageCallLog, turns

# Out


async def test_requests_that_arrive_in_the_same_turn_of_the_loop_leave_in_one_call() -> None:
    scene = Scene()
    scene.submit("a")
    scene.submit("bc")
    assert scene.stages[0].calls == []
    await turns()
    assert scene.stages[0].names == ["abc"]


async def test_a_call_says_what_it_carries() -> None:
    scene = Scene()
    scene.clock.advance(4.0)
    call = await scene.sent("ab")
    assert call.call.piece.lengths_B.tolist() == [2, 2]
    assert (call.call.remaining_s, call.call.assignment.epoch, call.call.probe) == ((6.0, 6.0), 7, False)
    assert (call.call.assignment.stage, call.avoided) == (PLAN.stages[0], frozenset())
    assert call.batch == BATCH


async def test_a_call_carries_no_more_than_a_batch() -> None:
    scene = Scene()
    await scene.sent("abcdefgh")
    assert scene.stages[0].names == ["abcd", "efgh"]


async def test_a_call_that_queues_behind_another_is_sent_only_when_it_is_full() -> None:
    scene = Scene(calls_per_replica=2)
    for name in "abcd":
        await scene.sent(name)
    assert scene.stages[0].names == ["a"]
    await scene.sent("e")
    assert scene.stages[0].names == ["a", "bcde"]


async def test_no_more_calls_are_unheard_of_than_allowed_and_what_waits_fills_the_next() -> None:
    scene = Scene(calls_per_replica=2)
    await scene.sent("abcdefghijklm")
    assert scene.stages[0].names == ["abcd", "efgh"]
    scene.stages[0].calls[0].answer("a")
    await turns()
    assert scene.stages[0].names == ["abcd", "efgh", "ijkl"]  # one part of its reply is enough: its batch has run
    scene.stages[0].calls[1].answer("e")
    scene.stages[0].calls[2].answer("i")
    await turns()
    assert scene.stages[0].names == ["abcd", "efgh", "ijkl", "m"]


async def test_calls_to_later_stages_do_not_count_against_the_first() -> None:
    scene = Scene(calls_per_replica=1)
    first = await scene.sent("a")
    first.send_on("a", next_block=2)
    first.end()
    await scene.sent("b")
    assert (scene.stages[0].names, scene.stages[1].names) == (["a", "b"], ["a"])


async def test_too_many_inputs_are_refused_whole() -> None:
    scene = Scene(max_queued=3)
    await scene.sent("ab")
    with pytest.raises(OverloadedError) as caught:
        scene.submit("cd")
    assert caught.value.retry_after_s == 1.0
    assert (scene.core.num_unanswered, scene.outcomes) == (2, [])


async def test_refused_callers_are_told_how_long_the_queue_takes() -> None:
    scene = Scene(max_queued=40)
    call = await scene.sent("ab")
    call.answer("a")
    await turns()
    scene.clock.advance(1.0)
    call.answer("b")
    await turns()  # 2 answers in the first second
    scene.submit("x" * 40)
    with pytest.raises(OverloadedError) as caught:
        scene.submit("y")
    assert caught.value.retry_after_s == 20.0


async def test_inputs_that_make_no_piece_get_an_error_and_everything_else_goes_on() -> None:
    scene = Scene(calls_per_replica=2)
    scene.submit("abc")
    scene.submit("d", encoded=Encoded(1, (np.zeros((1, 3), dtype=np.int32),)))
    scene.submit("efgh")
    await turns()
    assert scene.errors == [(name, "execution") for name in "abcd"]
    await scene.sent("ijklmnop")  # one call is under way, and one more may be
    assert scene.stages[0].names == ["efgh", "ijkl"]
    assert scene.core.num_unanswered == 12


def test_what_is_refused_before_it_is_submitted_counts_like_other_refusals() -> None:
    scene = Scene()
    with pytest.raises(OverloadedError, match="too many"):
        scene.dispatcher.refuse(OverloadedError("too many", retry_after_s=1.0), 3)
    counts = scene.core.counts
    assert (counts.arrived, counts.drops, scene.metrics.drops) == (3, {"overloaded": 3}, [("overloaded", 3)])


# Back


async def test_an_answer_settles_at_once_while_survivors_go_on() -> None:
    scene = Scene()
    first = await scene.sent("abc")
    first.answer("b")
    await turns()
    assert scene.answered == "b"
    first.send_on("ac", next_block=2)
    first.end()
    await turns()
    second = scene.stages[1].calls[0]
    assert (second.names, second.batch) == ("ac", 2)
    second.answer("a", exit_block=3)
    second.send_on("c", next_block=4)
    second.end()
    await turns()
    third = scene.stages[2].calls[0]
    assert third.names == "c"
    third.answer("c", exit_block=5)
    third.end()
    await turns()
    assert (scene.answered, scene.metrics.exits) == ("bac", [1, 3, 5])
    assert (scene.core.num_unanswered, scene.alarms.pauses_s) == (0, [])


@pytest.mark.parametrize(
    ("next_block", "stage_index"), [pytest.param(2, 1, id="first-of-stage-1"), pytest.param(4, 2, id="a-stage-over")]
)
async def test_survivors_go_to_the_stage_that_hosts_their_next_block(next_block: int, stage_index: int) -> None:
    scene = Scene()
    first = await scene.sent("a")
    first.send_on("a", next_block=next_block)
    await turns()
    assert scene.stages[stage_index].names == ["a"]


async def test_survivors_go_on_before_their_call_has_ended() -> None:
    scene = Scene()
    first = await scene.sent("ab")
    first.send_on("a", next_block=2)
    await turns()
    scene.stages[1].calls[0].answer("a")
    await turns()
    assert scene.answered == "a"
    first.send_on("b", next_block=2)
    await turns()
    assert scene.stages[1].names == ["a", "b"]


async def test_a_lost_input_gets_its_error_and_its_batch_mates_their_answers() -> None:
    scene = Scene()
    call = await scene.sent("abc")
    call.lose("b", ExecutionError("the model failed on it"))
    call.lose("a", DeadlineError("too late"))
    call.answer("c")
    call.end()
    await turns()
    assert (scene.errors, scene.answered) == ([("b", "execution"), ("a", "deadline")], "c")
    assert (len(scene.stages[0].calls), scene.alarms.pauses_s) == (1, [])


async def test_a_hop_is_the_time_that_a_call_spent_outside_its_stage() -> None:
    scene = Scene()
    call = await scene.sent("ab")
    scene.clock.advance(1.0)
    call.answer("a")
    await turns()
    scene.clock.advance(1.0)
    call.send_on("b", next_block=2)
    await turns()
    assert scene.metrics.hops == [("split-cpu-0", 0.25), ("split-cpu-0", 1.25)]  # 0.25 s in the queue, 0.5 s computing


# Again


async def test_after_a_failure_midway_only_unsettled_inputs_start_again_from_block_0() -> None:
    scene = Scene()
    first = await scene.sent("abcd")
    first.answer("b")
    first.send_on("c", next_block=2)
    first.fail()
    await turns()
    again = scene.stages[0].calls[1]
    assert again.sample_ids == ("a#i.1.1", "d#i.4.1")
    assert again.call.piece.next_block == 0
    again.answer("ad")
    again.end()
    scene.stages[1].calls[0].answer("c")
    scene.stages[1].calls[0].end()
    await turns()
    assert sorted(scene.answered) == ["a", "b", "c", "d"]
    assert (scene.alarms.pauses_s, scene.metrics.retries) == ([RETRY_PAUSE_S], [("split-cpu-0", 2)])


async def test_inputs_that_start_again_go_before_those_that_wait_in_their_old_order() -> None:
    scene = Scene(calls_per_replica=1)
    scene.submit("dcbaz")
    await turns()
    scene.stages[0].calls[0].answer("c")
    scene.stages[0].calls[0].fail()
    await turns()
    scene.submit("y")
    await turns()
    scene.stages[0].calls[1].answer("z")
    await turns()
    assert scene.stages[0].names == ["dcba", "z", "dbay"]


async def test_survivors_of_a_stage_that_fails_start_again_from_the_first() -> None:
    scene = Scene()
    first = await scene.sent("ab")
    first.answer("a")
    first.send_on("b", next_block=2)
    first.end()
    await turns()
    scene.stages[1].calls[0].fail()
    await turns()
    assert scene.stages[0].names == ["ab", "b"]
    assert scene.metrics.retries == [("split-cpu-1", 1)]


async def test_inputs_that_a_reply_leaves_out_start_again() -> None:
    scene = Scene()
    first = await scene.sent("ab")
    first.answer("b")
    first.end()
    await turns()
    assert scene.stages[0].names == ["ab", "a"]


async def test_a_late_answer_of_an_earlier_attempt_is_not_given_a_second_time() -> None:
    scene = Scene()
    first = await scene.sent("ab")
    first.send_on("a", next_block=2)
    first.fail()
    await turns()  # b starts again; a is in stage 1
    stage_1 = scene.stages[1].calls[0]
    again = scene.stages[0].calls[1]
    again.answer("b")
    stage_1.answer("a")
    stage_1.answer("a")
    stage_1.end()
    again.end()
    await turns()
    assert sorted(scene.answered) == ["a", "b"]


async def test_an_input_under_which_stages_keep_failing_is_given_up_with_an_error() -> None:
    scene = Scene(max_attempts=3)
    await scene.sent("a")
    for _ in range(3):
        scene.stages[0].calls[-1].fail()
        await turns()
    assert scene.stages[0].names == ["a", "a", "a"]
    [(name, error)] = scene.outcomes
    assert name == "a"
    assert isinstance(error, StageUnavailableError)
    assert (str(error), error.retry_after_s) == ("split-cpu-0 failed 3 times under this input", 1.0)
    assert (scene.core.num_unanswered, scene.metrics.retries) == (0, [("split-cpu-0", 1)] * 2)


async def test_a_fresh_input_outlives_an_exhausted_batch_mate() -> None:
    scene = Scene(max_attempts=2, calls_per_replica=1)
    await scene.sent("a")
    scene.submit("b")
    scene.stages[0].calls[0].fail()
    await turns()
    assert scene.stages[0].calls[1].sample_ids == ("a#i.1.1", "b#i.2.0")
    scene.stages[0].calls[1].fail()
    await turns()
    assert scene.stages[0].calls[2].sample_ids == ("b#i.2.1",)
    scene.stages[0].calls[2].answer("b")
    await turns()
    assert (scene.errors, scene.answered) == ([("a", "stage_unavailable")], "b")


async def test_other_inputs_leave_while_a_failed_batch_pauses() -> None:
    scene = Scene()
    scene.alarms.hold()
    first = await scene.sent("a")
    first.fail()
    await turns()
    await scene.sent("b")
    assert scene.stages[0].names == ["a", "b"]
    scene.alarms.ring()
    scene.stages[0].calls[1].answer("b")
    await turns()
    assert scene.stages[0].names == ["a", "b", "a"]


# Given up


async def test_given_up_inputs_that_wait_are_never_sent() -> None:
    scene = Scene()
    flights = scene.submit("abc")
    scene.dispatcher.give_up([flights[0], flights[2]], "abandoned")
    await turns()
    assert scene.stages[0].names == ["b"]


async def test_given_up_inputs_in_a_full_house_make_room_for_others() -> None:
    scene = Scene(max_queued=3, calls_per_replica=1)
    await scene.sent("a")
    scene.dispatcher.give_up(scene.submit("bc"), "abandoned")
    scene.submit("de")
    assert scene.core.num_unanswered == 3


async def test_survivors_that_nobody_waits_for_are_not_sent_on() -> None:
    scene = Scene()
    flights = scene.submit("ab")
    await turns()
    scene.dispatcher.give_up(flights, "abandoned")
    scene.stages[0].calls[0].send_on("ab", next_block=2)
    await turns()
    assert scene.stages[1].calls == []


async def test_a_given_up_survivor_travels_with_its_batch_mates_without_time_left() -> None:
    scene = Scene()
    flights = scene.submit("ab")
    await turns()
    scene.dispatcher.give_up(flights[:1], "abandoned")
    scene.stages[0].calls[0].send_on("ab", next_block=2)
    await turns()
    assert scene.stages[1].calls[0].call.remaining_s == (-1.0, 10.0)


async def test_answers_for_given_up_inputs_reach_nobody() -> None:
    scene = Scene()
    flights = scene.submit("ab")
    await turns()
    scene.dispatcher.give_up(flights[:1], "abandoned")
    scene.stages[0].calls[0].answer("ab")
    await turns()
    assert scene.answered == "b"


@pytest.mark.parametrize("during_the_pause", [False, True], ids=["before-the-failure", "during-the-pause"])
async def test_given_up_inputs_do_not_start_again(during_the_pause: bool) -> None:
    scene = Scene()
    scene.alarms.hold()
    flights = scene.submit("a")
    await turns()
    if not during_the_pause:
        scene.dispatcher.give_up(flights, "abandoned")
    scene.stages[0].calls[0].fail()
    await turns()
    scene.dispatcher.give_up(flights, "abandoned")
    scene.alarms.ring()
    await turns()
    assert (scene.stages[0].names, scene.metrics.retries, scene.outcomes) == (["a"], [], [])


# Whatever happens


@pytest.mark.parametrize("seed", range(8))
async def test_every_input_is_answered_exactly_once_however_stages_behave(seed: int) -> None:
    rng = random.Random(seed)
    scene = Scene(max_attempts=100)
    names = string.ascii_letters
    for start in range(0, len(names), 2):
        scene.submit(names[start : start + 2])
        await reply_to_all(scene, rng)
    while scene.core.num_unanswered:
        await reply_to_all(scene, rng)
    assert sorted(scene.answered) == sorted(names)
    assert scene.errors == []


async def reply_to_all(scene: Scene, rng: random.Random) -> None:
    await turns()
    for stage_index, stage in enumerate(scene.stages):
        calls, stage.calls = stage.calls, []
        assert all(len(call.names) <= BATCH for call in calls)
        for call in calls:
            reply_at_random(call, stage_index, rng)
    await turns()


def reply_at_random(call: StageCallLog, stage_index: int, rng: random.Random) -> None:
    """Some answers, some survivors, and now and then too few of them, or a failure."""
    num_settled = rng.randint(0, len(call.names)) if rng.random() < 0.4 else len(call.names)
    for name in rng.sample(call.names, num_settled):
        if stage_index == 2 or rng.random() < 0.5:
            call.answer(name)
        else:
            call.send_on(name, next_block=(2, 4)[stage_index])
    if rng.random() < 0.3:
        call.fail()
    else:
        call.end()
