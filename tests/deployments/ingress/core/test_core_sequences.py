"""Steps of sequences: where they go, and what becomes of them where their home is gone."""

from __future__ import annotations

import random

import pytest

from deployments.ingress.core.attempts import HANG_S
from deployments.ingress.core.routes import SequenceNumbers
from earlyexit.errors import OverloadedError, SequenceLostError, StageUnavailableError
from optimizer.placement import PlacedPlan
from tests.deployments.ingress.core.core_scene import ALL_SLOTS, SLOTS, plan
from tests.deployments.ingress.core.sequence_scene import SequenceScene


def two_at_home() -> SequenceScene:
    """Sequence x has its home at r1 of both stages, y at r1 of the first and r2 of the second."""
    scene = SequenceScene(plan(replicas=2))
    scene.begin("x", "a")
    scene.begin("y", "b")
    scene.do(())
    scene.go_on(0, "a")
    scene.room = "r2"
    scene.go_on(0, "b")
    scene.answer(1, "a")
    scene.answer(2, "b")
    scene.room = "r9"
    scene.log.clear()
    return scene


def test_a_sequence_begins_where_there_is_room_and_its_steps_follow_it_stage_by_stage() -> None:
    scene = SequenceScene()
    scene.begin("x", "a")
    scene.do(())
    scene.go_on(0, "a")
    scene.answer(1, "a")
    scene.room = "r2"
    scene.now_s = 1.0
    scene.step("x", "b")
    scene.do(())
    scene.answer(2, "b", block=1)
    assert scene.log == [
        "0 send 0: a to first for block 0 at any",
        "0 send 1: (a) to second for block 2 at any",
        "0 answer a is a after block 3",
        "1 send 2: b to first for block 0 at r1",
        "1 answer b is b after block 1",
    ]
    assert scene.core.num_unanswered == 0


def test_steps_of_one_moment_go_in_one_call_per_replica_whatever_is_unheard_of() -> None:
    scene = SequenceScene(plan(replicas=2), calls_per_replica=1)
    scene.begin("x", "a")
    scene.begin("y", "b")
    scene.do(())
    scene.answer(0, "ab", block=1)
    scene.homes["y"].replicas["split-cpu-0"] = "r2"
    for name, letter in zip("zuv", "cde", strict=True):
        scene.begin(name, letter)
        scene.do(())
    scene.step("x", "f")
    scene.step("y", "g")
    scene.do(())
    assert scene.log[2:] == [
        "0 send 1: c to first for block 0 at any",
        "0 send 2: d to first for block 0 at any",
        "0 send 3: f to first for block 0 at r1",  # e waits: a call to any would queue behind c or d
        "0 send 4: g to first for block 0 at r2",
    ]


def test_survivors_of_one_part_go_to_their_own_replicas() -> None:
    scene = two_at_home()
    for name, letter in ("x", "c"), ("y", "d"), ("x", "e"):
        scene.step(name, letter)
    scene.do(())
    scene.go_on(3, "cde")
    assert scene.log == [
        "0 send 3: cde to first for block 0 at r1",
        "0 send 4: (cde) to second for block 2 at r1, rows [0, 2]",
        "0 send 5: (cde) to second for block 2 at r2, rows [1]",
    ]


def test_whom_nobody_waits_for_any_more_does_not_go_on() -> None:
    scene = two_at_home()
    scene.step("x", "c")
    scene.step("y", "d")
    scene.do(())
    scene.give_up("c")
    scene.go_on(3, "cd")
    assert scene.log[1:] == ["0 drop c: abandoned", "0 send 4: (cd) to second for block 2 at r2, rows [1]"]
    assert scene.flights["c"].holder is None


def test_a_step_that_is_given_up_before_it_was_sent_is_not_sent() -> None:
    scene = two_at_home()
    scene.step("x", "c")
    scene.give_up("c")
    assert (scene.log, scene.core.num_unanswered, scene.core.num_waiting) == (["0 drop c: abandoned"], 0, 0)


def test_a_sequence_whose_call_fails_is_lost_and_not_sent_again() -> None:
    scene = two_at_home()
    scene.step("x", "c")
    scene.do(())
    scene.fail(3)
    scene.until(5.0)
    assert scene.log[1:] == [
        "0 drop c: the sequence is lost: a replica of split-cpu-0 failed under it",
        "0 again 1 of first",
    ]
    assert (scene.outcomes["c"], scene.core.counts.drops) == ("sequence_lost", {"sequence_lost": 1})


def test_a_plan_with_the_same_replicas_and_blocks_leaves_sequences_where_they_are() -> None:
    scene = two_at_home()
    scene.step("x", "c")
    scene.do(())
    scene.follow(plan(epoch=2, replicas=1, dispatch="deferred"))
    scene.go_on(3, "c")
    scene.step("y", "d")
    scene.do(())
    assert scene.log[1:] == [
        "0 send 4: (c) to second for block 2 at r1",
        "0 send 5: d to first for block 0 at r1",
    ]


@pytest.mark.parametrize(
    "after",
    [plan(epoch=2, replicas=2, cut=1), plan(epoch=2, replicas=2, slots=(SLOTS[1], ALL_SLOTS[2]))],
    ids=["other blocks", "other slots"],
)
def test_a_plan_that_moves_blocks_loses_sequences_wherever_they_are(after: PlacedPlan) -> None:
    scene = two_at_home()
    scene.step("x", "c")
    scene.do(())
    scene.step("y", "d")
    scene.core.follow(after)
    scene.do(())  # d was due when the plan came, c goes on after
    scene.go_on(3, "c", block=2)
    moved = "the sequence is lost: the plan has its blocks elsewhere now"
    assert scene.log[1:] == [f"0 drop d: {moved}", f"0 drop c: {moved}"]
    with pytest.raises(SequenceLostError):
        scene.step("x", "e")
    scene.begin("x", "f", again=True)
    scene.do(())
    assert scene.log[3].startswith("0 send 4: f to ")
    assert scene.log[3].endswith("at any")
    assert scene.core.counts.arrived == 5


def test_what_left_under_the_old_plan_is_an_answer_under_the_new() -> None:
    scene = two_at_home()
    scene.step("x", "c")
    scene.do(())
    scene.follow(plan(epoch=2, replicas=2, cut=1))
    scene.answer(3, "c", block=1)
    assert scene.log[1:] == ["0 answer c is c after block 1"]


def test_sequences_that_run_are_refused_for_nobody_and_new_ones_are() -> None:
    scene = SequenceScene(max_queued=1)
    scene.begin("x", "a")
    scene.do(())
    with pytest.raises(OverloadedError):
        scene.begin("y", "b")
    scene.begin("z", "c", again=True)
    scene.do(())
    scene.answer(0, "a", block=1)
    scene.step("x", "d")
    scene.do(())
    assert scene.core.num_unanswered == 2


def test_without_a_plan_steps_fail_as_all_do() -> None:
    scene = two_at_home()
    scene.step("x", "c")
    scene.suspend()
    assert scene.log == ["0 drop c: there is no plan to serve by: nothing is left"]
    with pytest.raises(StageUnavailableError):
        scene.step("x", "d")


def test_a_call_that_outlives_its_sequences_deadline_is_hung_up_and_others_begin_anew() -> None:
    scene = two_at_home()
    scene.step("x", "c", deadline_s=1.0)
    scene.step("y", "d", deadline_s=1.5)
    scene.do(())
    scene.until(1.0)
    scene.expire("c")
    scene.until(1.5)
    scene.expire("d")
    scene.until(1.5 + HANG_S)
    assert scene.log[1:] == ["1 drop c: no answer within 1 s", "1.5 drop d: no answer within 1.5 s", "2.5 hang up 3"]
    assert scene.core.num_unanswered == 0


def test_numbers_of_two_ingresses_differ_and_have_62_bits() -> None:
    several = [SequenceNumbers(random.Random(seed)) for seed in range(3)]
    numbers = [each.new() for each in several for _ in range(4)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < number < 2**62 for number in numbers)
