"""Events in, actions out, on a clock that the test moves."""

from __future__ import annotations

import pytest

from deployments.ingress.core.ingress_core import HANG_S, RETRY_PAUSE_S
from earlyexit.errors import (
    PlanError,
)
from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.ingress.core.core_scene import ALL_SLOTS, SLOTS, CoreScene, plan


def whole_model(num_blocks: int) -> PlacedPlan:
    stage = Stage(device="cpu", replicas=1, splits=(Split(first=0, end=num_blocks, batch=1),))
    return PlacedPlan(plan=Plan(stages=(stage,), epoch=2), slots=SLOTS[:1])


# Out and back


def test_inputs_go_through_the_stages_and_are_answered_where_they_leave() -> None:
    scene = CoreScene()
    scene.submit("ab")
    scene.now_s = 1.0
    scene.answer(0, "a", block=1)
    scene.go_on(0, "b")
    scene.now_s = 2.0
    scene.answer(1, "b")
    assert scene.log == [
        "0 send 0: ab to first for block 0",
        "1 answer a is a after block 1",
        "1 send 1: (b) to second for block 2",
        "2 answer b is b after block 3",
    ]
    assert scene.core.num_unanswered == 0


def test_a_call_that_queues_behind_another_is_full_and_the_first_part_of_a_reply_makes_room() -> None:
    scene = CoreScene()
    for letter in "abcdef":
        scene.submit(letter)
    assert scene.log == ["0 send 0: a to first for block 0", "0 send 1: bcde to first for block 0"]
    scene.answer(0, "a")
    assert scene.log[2:] == ["0 answer a is a after block 3"]  # f waits: the next would queue behind bcde
    scene.answer(1, "b")
    assert scene.log[3:] == ["0 answer b is b after block 3", "0 send 2: f to first for block 0"]


def test_no_more_calls_are_unheard_of_than_allowed_and_none_holds_more_than_a_batch() -> None:
    scene = CoreScene(calls_per_replica=2)
    scene.submit("abcdefghijklm")
    assert [words.split()[3] for words in scene.log] == ["abcd", "efgh"]
    scene.answer(0, "a")
    scene.answer(0, "b")  # the first part of a reply alone tells that its batch has run
    assert scene.log[3:] == ["0 send 2: ijkl to first for block 0", "0 answer b is b after block 3"]
    scene.go_on(1, "e")
    scene.answer(2, "i")
    assert scene.log[5:] == [
        "0 send 3: (e) to second for block 2",  # calls to later stages do not count
        "0 answer i is i after block 3",
        "0 send 4: m to first for block 0",
    ]


def test_a_plan_sends_what_waits_and_what_goes_on_by_itself() -> None:
    scene = CoreScene(calls_per_replica=1)
    scene.submit("abcde")
    scene.follow(plan(epoch=2, replicas=2, cut=3))
    scene.go_on(0, "a")  # block 2 is in the first stage now
    assert scene.log[1:] == ["0 send 1: e to first for block 0", "0 send 2: (a) to first for block 2"]
    assert [call.stage.epoch for call in scene.calls] == [1, 2, 2]
    assert scene.core.oldest_epoch == 1
    scene.answer(0, "bcd")
    assert scene.core.oldest_epoch == 2


def test_calls_that_are_unheard_of_count_against_the_slot_that_has_them() -> None:
    scene = CoreScene(calls_per_replica=1)
    scene.submit("a")
    scene.follow(plan(epoch=2, replicas=2))
    scene.submit("bcdefg")
    scene.follow(plan(epoch=3, slots=(ALL_SLOTS[2], ALL_SLOTS[0])))
    assert [words.split(" ", 3)[3] for words in scene.log] == [
        "a to first for block 0",
        "bcde to first for block 0",  # by the second of two replicas
        "fg to third for block 0",
    ]
    scene.fail(0)
    scene.until(1.0)
    scene.answer(2, "f")
    assert scene.log[-1] == "1 send 3: a to third for block 0"  # again, by the newest plan


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        pytest.param(plan(epoch=2, slots=(SLOTS[0], "split-cpu-9")), "needs slots .'split-cpu-9'.", id="slot"),
        pytest.param(whole_model(num_blocks=5), "a plan of 5 blocks cannot follow one of 4", id="blocks"),
    ],
)
def test_a_plan_that_cannot_be_followed_changes_nothing(placed: PlacedPlan, message: str) -> None:
    scene = CoreScene()
    with pytest.raises(PlanError, match=message):
        scene.follow(placed)
    scene.follow(plan(epoch=0, cut=3))  # older than the present: ignored
    scene.submit("a")
    scene.go_on(0, "a")
    assert (scene.core.placed, scene.log[1]) == (plan(), "0 send 1: (a) to second for block 2")


def test_exits_are_those_of_inputs_that_the_present_plan_sent() -> None:
    scene = CoreScene()
    scene.submit("ab")
    scene.answer(0, "a", block=1)
    assert scene.core.counts.exits == {1: 1}
    scene.follow(plan())  # the same again
    assert scene.core.counts.exits == {1: 1}
    scene.follow(plan(epoch=2))
    scene.submit("c")
    scene.answer(0, "b", block=1)
    scene.answer(1, "c", block=2)
    assert (scene.core.counts.exits, scene.core.counts.answered) == ({2: 1}, 3)


# What is left of a deadline for the stages after one


def to_the_end(scene: CoreScene, letter: str, *, stage_s: float) -> None:
    """Through both stages, in `stage_s` each."""
    scene.submit(letter)
    scene.now_s += stage_s
    scene.go_on(len(scene.calls) - 1, letter)
    scene.now_s += stage_s
    scene.answer(len(scene.calls) - 1, letter)


def test_what_later_stages_took_is_expected_of_them_and_what_they_lost_says_nothing() -> None:
    scene = CoreScene()
    to_the_end(scene, "a", stage_s=2.0)
    scene.submit("b")
    scene.go_on(2, "b")
    scene.now_s += 1.0
    scene.lose(3, "b")
    scene.submit("c")
    assert [call.reserve_s for call in scene.calls] == [0.0, 0.0, 2.0, 0.0, 2.0]
    scene.answer(4, "c")
    scene.follow(plan(epoch=2, cut=3))
    scene.submit("d")
    assert scene.calls[5].reserve_s == 1.0  # of block 3 alone


def test_a_stage_that_waits_for_a_full_batch_leaves_slack_and_all_while_later_ones_are_unknown() -> None:
    scene = CoreScene(plan(dispatch="deferred"), slo_s=10.0, slack=0.25, admits=False)
    to_the_end(scene, "a", stage_s=1.0)
    scene.submit("b", deadline_s=13.0)
    assert [call.reserve_s for call in scene.calls] == [10.0, 2.5, 1.0 + 2.5]


def test_without_an_slo_the_slack_is_a_share_of_the_time_that_inputs_have() -> None:
    scene = CoreScene(plan(dispatch="deferred"), slack=0.25)
    to_the_end(scene, "a", stage_s=1.0)
    began_s = scene.now_s
    scene.submit("b", deadline_s=began_s + 8.0)
    assert scene.calls[-1].reserve_s == 1.0 + 2.0
    scene.go_on(2, "b")
    assert scene.calls[-1].reserve_s == 2.0


# What a call does not have is passed over


def test_survivors_that_nobody_waits_for_go_nowhere_and_one_that_somebody_does_takes_them_along() -> None:
    scene = CoreScene()
    scene.submit("abc")
    scene.give_up("ab")
    scene.go_on(0, "a")
    scene.go_on(0, "bc")
    assert scene.log[1:] == ["0 drop ab: abandoned", "0 send 1: (bc) to second for block 2"]
    assert [scene.core.is_awaited(scene.calls[1], flight) for flight in scene.calls[1].inputs] == [False, True]


# Again


def test_what_a_failed_call_had_starts_again_after_a_pause_before_those_that_wait() -> None:
    scene = CoreScene(calls_per_replica=1)
    scene.submit("abcde")
    scene.answer(0, "b")  # e goes, for a batch has run
    scene.submit("f")
    scene.fail(0)
    assert scene.core.wake_s == RETRY_PAUSE_S
    scene.until(1.0)
    scene.answer(1, "e")
    assert scene.log[3:] == [
        "0.05 again 3 of first",
        "1 answer e is e after block 3",
        "1 send 2: acdf to first for block 0",
    ]


def test_an_input_under_which_stages_keep_failing_is_told_so() -> None:
    scene = CoreScene(max_attempts=2)
    scene.submit("a")
    scene.fail(0)
    scene.until(1.0)
    scene.fail(1)
    assert scene.log[-1] == "1 drop a: split-cpu-0 failed 2 times under this input"
    assert scene.core.wake_s == 10.0


def test_a_fresh_input_outlives_an_exhausted_batch_mate() -> None:
    scene = CoreScene(max_attempts=2, calls_per_replica=1)
    scene.submit("a")
    scene.submit("b")
    scene.fail(0)
    scene.until(1.0)
    scene.fail(1)
    scene.until(2.0)
    assert scene.log[1:] == [
        "0 send 1: b to first for block 0",
        "0.05 again 1 of first",
        "1 send 2: a to first for block 0",
        "1.05 again 1 of first",
    ]
    scene.fail(2)
    assert scene.log[-2:] == [
        "2 drop a: split-cpu-0 failed 2 times under this input",
        "2 send 3: b to first for block 0",
    ]


# Later


def test_at_its_deadline_an_input_is_dropped_wherever_it_is() -> None:
    scene = CoreScene(calls_per_replica=1)
    scene.submit("a", deadline_s=2.0)
    scene.submit("b", deadline_s=1.0)
    assert scene.core.wake_s == 1.0
    scene.until(2.5)
    scene.answer(0, "a")
    assert scene.log[1:] == ["1 drop b: no answer within 1 s", "2 drop a: no answer within 2 s"]
    assert (scene.core.num_unanswered, scene.core.num_waiting) == (0, 0)


def test_what_comes_at_the_deadline_comes_before_it_is_missed() -> None:
    scene = CoreScene()
    scene.submit("a", deadline_s=2.0)
    scene.now_s = 2.0
    scene.answer(0, "a")
    scene.until(3.0)
    assert scene.log[1:] == ["2 answer a is a after block 3"]


def test_a_call_of_which_nothing_comes_is_hung_up_a_second_after_its_last_deadline_and_makes_room() -> None:
    scene = CoreScene(calls_per_replica=1)
    scene.submit("ab", deadline_s=2.0)
    scene.submit("c", deadline_s=9.0)
    scene.until(2.0 + HANG_S)
    assert scene.log[1:] == ["2 drop ab: no answer within 2 s", "3 hang up 0", "3 send 1: c to first for block 0"]


def test_of_many_that_wait_and_are_given_up_nobody_is_sent_and_those_around_them_keep_their_turn() -> None:
    scene = CoreScene(calls_per_replica=1, max_queued=500)
    gone = "".join(map(chr, range(200, 500)))
    scene.submit("abcd")
    scene.submit("e" + gone + "f")
    scene.give_up(gone)
    scene.answer(0, "abcd")
    assert scene.log[-1] == "0 send 1: ef to first for block 0"


def test_a_core_that_sees_nothing_reports_all_the_same() -> None:
    report = CoreScene().core.report(1.0, 100.0)
    assert (report.name, report.at_s, report.probes) == ("i", 100.0, None)
