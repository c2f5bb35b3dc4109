"""Probes, inputs that stay, and probe sequences at one core, which are observed to the model's end."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.ingress.core.inputs import CALL_GRACE_S
from deployments.ingress.core.routes import KVPlacement
from optimizer.plans.plan import PolicySpec
from tests.deployments.ingress.core.core_world import observed_plan, observing, staying

PATIENCE = PolicySpec(name="patience", patience=2)


@pytest.mark.parametrize("is_probe", [True, False], ids=["probe", "stays"])
def test_an_answered_input_that_stays_runs_to_the_end(is_probe: bool) -> None:
    world = observing() if is_probe else staying()
    world.now_s = 2.0
    world.submit("ab")
    world.see(0, "a", 1, score=0.25)
    world.see(0, "b", 1, score=0.9)
    world.answer_early(0, "a", block=1)
    world.now_s = 3.0
    world.go_on(0, "ab")
    assert world.awaited(1) == [True, True]
    world.see(1, "a", 2, 3, label=1)
    world.see(1, "b", 2, 3)
    world.answer(1, "ab")  # a is a duplicate
    assert world.log == [
        "2 send 0: ab to first for block 0",
        "2 answer a is a after block 1",
        "3 send 1: (ab) to second for block 2",
        "3 answer b is b after block 3",
    ]
    assert [call.probe for call in world.calls] == [is_probe] * 2
    assert world.core.observations.agreement == 0.5  # a left with 0, and the full model answers 1
    seen = world.observed(wall_s=1003.0)
    assert seen is not None
    assert (seen.times_s_N.tolist(), seen.exits_N.tolist()) == ([1002.0] * 2, [1, 3])
    assert (seen.probe_N.tolist(), seen.stayed_N.tolist()) == ([is_probe] * 2, [not is_probe] * 2)
    assert (seen.scores_NR[0].tolist(), seen.losses_NR.tolist()) == ([0.25, 0.5], [[1, 0], [0, 0]])
    assert seen.active_NR.tolist() == [[True, True]] * 2
    assert world.observed() is None, "handed over once"
    assert (world.core.num_unanswered, world.core.oldest_epoch) == (0, 1)


def test_early_answers_do_not_make_room_for_another_call() -> None:
    world = observing(calls_per_replica=1)
    world.submit("a")
    world.submit("b")
    world.see(0, "a", 1)
    world.answer_early(0, "a", block=1)  # the replica still runs the batch, so another call would wait there
    assert world.log[1:] == ["0 answer a is a after block 1"]
    world.go_on(0, "a")
    assert world.log[2:] == ["0 send 1: (a) to second for block 2", "0 send 2: b to first for block 0"]


def test_answered_probes_that_are_no_longer_observed_are_not_sent_on() -> None:
    world = observing()
    world.submit("a")
    world.answer_early(0, "a", block=1)
    world.now_s = 10.0 + CALL_GRACE_S + 0.1
    world.submit("bcde", deadline_s=99.0)  # a new call ends old observations
    world.go_on(0, "a")
    assert world.log[2:] == ["11.1 send 1: bcde to first for block 0"]


def test_retried_inputs_are_not_recorded_because_they_are_biased() -> None:
    world = staying()
    world.submit("ab")
    world.see(0, "ab", 1)
    world.answer_early(0, "a", block=1)
    world.fail(0)
    world.until(1.0)
    world.submit("c")
    for call, letter in ((1, "b"), (2, "c")):
        world.see(call, letter, 1, 2, 3)
        world.answer(call, letter)
    assert world.outcomes == {"a": "answered", "b": "answered", "c": "answered"}
    seen = world.observed(wall_s=world.now_s)
    assert seen is not None
    assert seen.times_s_N.tolist() == [1.0]  # c alone


@pytest.mark.parametrize(("rules", "goes_on"), [({"shape": None}, True), ({}, False)], ids=["no shape", "entropy"])
def test_under_a_policy_without_scores_inputs_go_on_only_if_nothing_is_observed(
    rules: dict[str, None], goes_on: bool
) -> None:
    world = staying(observed_plan(PATIENCE, after="stay"), **rules)
    world.submit("a")
    world.answer_early(0, "a", block=1)
    world.go_on(0, "a")
    assert (len(world.calls) == 2) is goes_on


def test_answered_inputs_do_not_go_on_under_a_plan_that_stops() -> None:
    world = staying()
    world.submit("a")
    world.answer_early(0, "a", block=1)
    world.follow(observed_plan(epoch=2))
    world.go_on(0, "a")
    assert len(world.calls) == 1


# Sequences


def test_callers_of_probe_sequences_get_only_the_full_models_tokens() -> None:
    world = observing()
    world.begin("x", "a")
    world.do()
    world.see(0, "a", 1, score=0.25, label=7)
    world.answer_early(0, "a", block=1)
    world.go_on(0, "a")
    world.see(1, "a", 2, score=0.125, label=8)
    world.answer_early(1, "a", block=2)  # a replica does not know that an earlier one has answered it
    world.see(1, "a", 3, label=8)
    world.answer(1, "a")
    world.step("x", "b")
    world.do()
    world.see(2, "b", 1, 2, 3, label=5)
    world.answer(2, "b")
    assert world.log == [
        "0 send 0: a to first for block 0 at any, probes",
        "0 send 1: (a) to second for block 2 at any, probes",
        "0 answer a is a after block 3",
        "0 send 2: b to first for block 0 at r1, probes",
        "0 answer b is b after block 3",
    ]
    seen = world.observed()
    assert seen is not None
    assert (seen.exits_N.tolist(), seen.losses_NR.tolist()) == ([1, 3], [[1.0, 0.0], [0.0, 0.0]])
    assert np.array_equal(seen.scores_NR, [[0.25, 0.125], [0.5, 0.5]])
    assert seen.probe_N.all()
    assert (world.core.observations.agreement, world.core.counts.exits) == (0.5, {3: 2})


@pytest.mark.parametrize(("was", "probes"), [(None, {True, False}), (True, {True}), (False, {False})])
def test_some_new_sequences_are_probes_and_a_restarted_one_keeps_its_draw(was: bool | None, probes: set[bool]) -> None:
    world = observing(probe_share=0.5)
    for name, letter in zip("uvwxyz", "abcdef", strict=True):
        world.placements[name] = KVPlacement(len(world.placements) + 1, is_retry=True, is_probe=was)
        world.step(name, letter)
    world.do()
    assert {call.probe for call in world.calls} == probes


def test_only_the_last_chunk_of_a_prompt_is_recorded() -> None:
    world = observing()
    world.begin("x", "a")
    world.placements["x"].yields_token = False
    world.do()
    world.answer(0, "a")
    world.placements["x"].yields_token = True
    for letter in "bc":
        world.step("x", letter)
        world.do()
        world.see(len(world.calls) - 1, letter, 1)
        world.answer_early(len(world.calls) - 1, letter, block=1)
    world.see(1, "b", 2, 3)
    world.answer(1, "b")
    world.fail(2)
    assert world.log[-2:] == [
        "0 again 1 of first",
        "0 drop c: the sequence is lost: a replica of split-cpu-0 failed",
    ]
    assert all(call.probe for call in world.calls)
    seen = world.observed()
    assert seen is not None
    assert len(seen) == 1
