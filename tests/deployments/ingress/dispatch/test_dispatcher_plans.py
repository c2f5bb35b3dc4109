"""A dispatcher whose plan changes while inputs are under way."""

from __future__ import annotations

import random
import string

import pytest

from deployments.ingress.core.ingress_core import SUSPENDED_RETRY_S
from earlyexit.errors import PlanError, StageUnavailableError
from earlyexit.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.ingress.dispatch.dispatcher_scene import PLAN, SLOTS, Scene, StageCallLog, turns

FIRST, SECOND, THIRD = SLOTS


def two_stages(epoch: int, *, cut: int = 3, slots: tuple[str, str] = (THIRD, FIRST), replicas: int = 1) -> PlacedPlan:
    """Blocks 0 to `cut` at batch 3 in one slot, the rest at batch 5 in another."""
    stages = (
        Stage(device="cpu", replicas=replicas, splits=(Split(first=0, end=cut, batch=3),)),
        Stage(device="cpu", replicas=1, splits=(Split(first=cut, end=6, batch=5),)),
    )
    return PlacedPlan(plan=Plan(stages=stages, epoch=epoch), slots=slots)


async def test_new_inputs_go_by_the_new_plan_at_once() -> None:
    scene = Scene()
    await scene.sent("a")
    scene.dispatcher.follow(two_stages(8))
    scene.submit("bcd")
    await turns()
    assert [stage.names for stage in scene.stages] == [["a"], [], ["bcd"]]
    call = scene.stages[2].calls[0]
    assert (call.batch, call.call.assignment.epoch, call.call.assignment.stage.end) == (3, 8, 3)


async def test_what_waited_under_the_old_plan_leaves_by_the_new_one() -> None:
    scene = Scene(calls_per_replica=1)
    await scene.sent("abcdefg")  # efg waits: one call of four is all that the first replica may have
    scene.dispatcher.follow(two_stages(8))
    await turns()
    assert [stage.names for stage in scene.stages] == [["abcd"], [], ["efg"]]


async def test_survivors_go_to_the_slot_that_hosts_their_next_block_now() -> None:
    scene = Scene()
    first = await scene.sent("ab")
    scene.dispatcher.follow(two_stages(8))
    first.send_on("a", next_block=2)  # inside the new first stage, where no split starts
    first.send_on("b", next_block=4)
    await turns()
    assert [stage.names for stage in scene.stages] == [["ab", "b"], [], ["a"]]
    inside, after = scene.stages[2].calls[0], scene.stages[0].calls[1]
    assert [call.call.assignment.epoch for call in (first, inside, after)] == [7, 8, 8]
    assert (inside.batch, after.batch) == (3, 5)


async def test_an_older_plan_is_ignored_and_the_same_epoch_may_avoid_other_replicas() -> None:
    scene = Scene()
    scene.dispatcher.follow(two_stages(6))
    await scene.sent("a")
    placed = PlacedPlan(plan=PLAN, slots=SLOTS, avoided={"r1": FIRST})
    scene.dispatcher.follow(placed)
    scene.stages[0].calls[0].answer("a")
    await scene.sent("b")
    assert [call.avoided for call in scene.stages[0].calls] == [frozenset(), frozenset({"r1"})]
    assert scene.core.placed == placed


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        pytest.param(two_stages(8, slots=(FIRST, "split-cpu-9")), "needs slots .'split-cpu-9'.", id="slot"),
        pytest.param(
            PlacedPlan(
                plan=Plan(stages=(Stage(device="cpu", replicas=1, splits=(Split(first=0, end=5, batch=1),)),), epoch=8),
                slots=(FIRST,),
            ),
            "a plan of 5 blocks cannot follow one of 6",
            id="blocks",
        ),
    ],
)
async def test_a_plan_that_cannot_be_followed_changes_nothing(placed: PlacedPlan, message: str) -> None:
    scene = Scene()
    with pytest.raises(PlanError, match=message):
        scene.dispatcher.follow(placed)
    await scene.sent("a")
    assert (scene.core.placed.epoch, scene.stages[0].names) == (7, ["a"])


async def test_the_oldest_epoch_is_that_of_the_oldest_call_under_way() -> None:
    scene = Scene()
    first = await scene.sent("ab")
    scene.dispatcher.follow(two_stages(9))
    first.send_on("a", next_block=3)
    await turns()
    assert scene.core.oldest_epoch == 7
    first.answer("b")
    first.end()
    await turns()
    assert scene.core.oldest_epoch == 9  # a is under way by the new plan
    scene.stages[0].calls[-1].answer("a")
    scene.stages[0].calls[-1].end()
    await turns()
    assert (scene.core.oldest_epoch, scene.core.num_unanswered) == (9, 0)


async def test_calls_that_the_old_first_slot_has_not_answered_do_not_hold_the_new_one_back() -> None:
    scene = Scene(calls_per_replica=1)
    await scene.sent("a")
    scene.dispatcher.follow(two_stages(8))
    await scene.sent("b")
    assert scene.stages[2].names == ["b"]


async def test_calls_that_the_same_slot_has_not_answered_count_against_its_new_replicas() -> None:
    scene = Scene(calls_per_replica=1)
    await scene.sent("a")
    scene.dispatcher.follow(two_stages(8, slots=(FIRST, SECOND), replicas=2))
    scene.submit("bcdef")
    await turns()
    assert scene.stages[0].names == ["a", "bcd"]  # the second of two replicas; ef waits


async def test_inputs_of_a_failed_call_start_again_by_the_new_plan() -> None:
    scene = Scene()
    first = await scene.sent("a")
    scene.dispatcher.follow(two_stages(8))
    first.fail()
    await turns()
    assert scene.stages[2].names == ["a"]
    assert scene.metrics.retries == [(FIRST, 1)]


async def test_what_later_stages_take_is_carried_over_block_by_block() -> None:
    scene = Scene()
    first = await scene.sent("a")
    first.send_on("a", next_block=2)
    await turns()
    scene.clock.advance(2.0)
    scene.stages[1].calls[0].answer("a")
    await turns()
    assert (await scene.sent("b")).call.reserve_s == pytest.approx(2.0)  # of blocks 2 and 3
    scene.dispatcher.follow(two_stages(8, cut=3))
    scene.submit("c")
    await turns()
    assert scene.stages[2].calls[0].call.reserve_s == pytest.approx(1.0)  # block 3 is in the new second stage


# No plan


async def test_without_a_plan_what_waits_and_what_arrives_is_told_why() -> None:
    scene = Scene(calls_per_replica=1)
    first = await scene.sent("a")
    scene.submit("b")
    scene.dispatcher.suspend("three accelerators are gone")
    assert scene.errors == [("b", "stage_unavailable")]
    with pytest.raises(StageUnavailableError, match="no plan to serve by: three accelerators are gone") as caught:
        scene.dispatcher.check(1, 10.0)
    assert caught.value.retry_after_s == SUSPENDED_RETRY_S
    with pytest.raises(StageUnavailableError):
        scene.submit("c")
    first.answer("a")  # what is under way may still get there
    await turns()
    assert (scene.answered, scene.metrics.drops) == ("a", [("stage_unavailable", 1)] * 3)


async def test_what_fails_while_there_is_no_plan_does_not_start_again() -> None:
    scene = Scene()
    first = await scene.sent("a")
    scene.dispatcher.suspend("nothing is left")
    first.fail()
    await turns()
    assert (scene.errors, scene.stages[0].names) == ([("a", "stage_unavailable")], ["a"])


async def test_a_plan_ends_the_suspension_even_if_it_is_the_last_one() -> None:
    scene = Scene()
    scene.dispatcher.suspend("nothing is left")
    assert scene.core.suspended == "nothing is left"
    scene.dispatcher.follow(PlacedPlan(plan=PLAN, slots=SLOTS))
    await scene.sent("a")
    assert scene.stages[0].names == ["a"]


# Counts


async def test_every_input_is_counted_once_for_what_became_of_it() -> None:
    scene = Scene(max_queued=5, slo_s=2.0)
    scene.dispatcher.give_up(scene.submit("g"), "deadline")
    call = await scene.sent("abcd")
    with pytest.raises(Exception, match="at most 5"):
        scene.submit("ef")
    scene.clock.advance(1.0)
    call.answer("a")
    await turns()
    scene.clock.advance(2.0)
    call.answer("ab")  # a for the second time
    call.lose("c", StageUnavailableError("lost", retry_after_s=1.0))
    call.lose("c", StageUnavailableError("lost", retry_after_s=1.0))
    await turns()
    report = scene.report(1000.0)
    assert (report.arrived, report.answered, report.in_slo, report.unanswered, report.waiting) == (7, 2, 1, 1, 0)
    assert report.drops == {"deadline": 1, "overloaded": 2, "stage_unavailable": 1}
    assert report.latencies == {0: 1, 22: 1}  # 1.05 ** 22 = 2.93 s
    assert (report.name, report.at_s, report.epoch, report.oldest_epoch, report.probes) == ("i", 1000.0, 7, 7, None)


async def test_exits_are_those_of_inputs_that_the_present_plan_sent() -> None:
    scene = Scene()
    first = await scene.sent("ab")
    first.answer("a", exit_block=1)
    await turns()
    assert scene.report(0.0).exits == {1: 1}
    scene.dispatcher.follow(two_stages(8))
    scene.submit("c")
    await turns()
    first.answer("b", exit_block=1)
    scene.stages[2].calls[0].answer("c", exit_block=2)
    await turns()
    report = scene.report(0.0)
    assert (report.exits, report.answered) == ({2: 1}, 3)


@pytest.mark.parametrize("seed", range(8))
async def test_every_input_is_answered_exactly_once_however_stages_and_plans_behave(seed: int) -> None:
    rng = random.Random(seed)
    scene = Scene(max_attempts=100)
    names = string.ascii_letters
    for epoch, start in enumerate(range(0, len(names), 2)):
        scene.submit(names[start : start + 2])
        await turns()
        reply_to_all(scene, rng)
        if rng.random() < 0.5:
            slots = rng.sample(SLOTS, 2)
            scene.dispatcher.follow(two_stages(8 + epoch, cut=rng.randint(1, 5), slots=(slots[0], slots[1])))
        await turns()
    while scene.core.num_unanswered:
        reply_to_all(scene, rng)
        await turns()
    report = scene.report(0.0)
    assert (sorted(scene.answered), scene.errors) == (sorted(names), [])
    assert (report.oldest_epoch, report.answered) == (report.epoch, len(names))


def reply_to_all(scene: Scene, rng: random.Random) -> None:
    for stage in scene.stages:
        calls, stage.calls = stage.calls, []
        for call in calls:
            reply_at_random(call, rng)


def reply_at_random(call: StageCallLog, rng: random.Random) -> None:
    """Answers, survivors to any block, and now and then a failure."""
    for name in rng.sample(call.names, rng.randint(0, len(call.names))):
        if rng.random() < 0.6:
            call.answer(name)
        else:
            call.send_on(name, next_block=rng.randint(1, 5))
    if rng.random() < 0.3:
        call.fail()
    else:
        call.end()
