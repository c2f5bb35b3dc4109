"""What a dispatcher adds to the core: calls, one timer, owners and metrics; what the core decides is tested there."""

from __future__ import annotations

import random
import string
from dataclasses import replace

import numpy as np
import pytest

from earlyexit.errors import OverloadedError
from earlyexit.network.split import Split
from earlyexit.network.wire import Encoded
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from profiles.stream import StreamShape
from tests.deployments.ingress.dispatch.dispatcher_scene import BATCH, PLAN, SLOTS, Scene, StageCallLog, turns

FIRST, SECOND, THIRD = SLOTS


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


async def test_where_tokens_bound_batches_a_call_holds_and_weighs_what_its_inputs_tokens_fill() -> None:
    first, *others = PLAN.stages
    stages = (replace(first, splits=tuple(replace(split, tokens=8) for split in first.splits)), *others)
    scene = Scene(plan=replace(PLAN, stages=stages), calls_per_replica=9)
    scene.submit("abcdef")  # of two tokens each
    scene.submit("g", encoded=Encoded(11, (np.zeros(11, dtype=np.int32),)))
    await turns()
    first_calls = scene.stages[0].calls
    assert [call.names for call in first_calls] == ["abcd", "ef", "g"]
    assert [(call.weight, call.batch) for call in first_calls] == [(8, 8), (4, 8), (11, 8)]
    first_calls[2].answer("g")
    await turns()
    assert scene.answered == "g"
    assert scene.report(0.0).answered_tokens == 11


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


async def test_a_given_up_survivor_travels_with_its_batch_mates_without_time_left() -> None:
    scene = Scene()
    flights = scene.submit("ab")
    await turns()
    scene.dispatcher.give_up(flights[:1], "abandoned")
    scene.stages[0].calls[0].send_on("ab", next_block=2)
    await turns()
    assert scene.stages[1].calls[0].call.remaining_s == (-1.0, 10.0)


def two_stages(epoch: int, *, cut: int = 3, slots: tuple[str, str] = (THIRD, FIRST), replicas: int = 1) -> PlacedPlan:
    """Blocks 0 to `cut` at batch 3 in one slot, the rest at batch 5 in another."""
    stages = (
        Stage(device="cpu", replicas=replicas, splits=(Split(first=0, end=cut, batch=3),)),
        Stage(device="cpu", replicas=1, splits=(Split(first=cut, end=6, batch=5),)),
    )
    return PlacedPlan(plan=Plan(stages=stages, epoch=epoch), slots=slots)


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


@pytest.mark.parametrize("seed", range(4))
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


# Probes


async def test_an_answered_probe_goes_on_to_the_end_and_its_caller_has_the_early_answer() -> None:
    shape = StreamShape(score="confidence", num_blocks=6, ramps=(1, 3))
    scene = Scene(shape=shape)
    first = await scene.sent("ab")
    first.see("a", 1, score=0.1, label=0)
    first.answer_early("a", exit_block=1)
    first.send_on("ab", next_block=2)
    first.end()
    await turns()
    assert (scene.answered, scene.core.num_unanswered) == ("a", 1)
    scene.clock.advance(3.0)
    second = scene.stages[1].calls[0]
    assert (second.names, second.call.probe, second.call.remaining_s) == ("ab", True, (10.0, 10.0))
    second.see("a", 3, score=0.2, label=0)
    second.see("a", 5, score=float("nan"), label=1)
    second.answer("ab", exit_block=5)  # a is a duplicate
    second.end()
    await turns()
    assert (scene.answered, scene.metrics.exits) == ("ab", [1, 5])
