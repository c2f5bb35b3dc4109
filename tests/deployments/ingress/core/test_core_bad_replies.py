"""Replies that no correct replica sends: they cost their own inputs an attempt at most, and no count."""

from __future__ import annotations

import pytest

from deployments.ingress.core.ingress_core import RETRY_PAUSE_S
from earlyexit.errors import ExecutionError
from tests.deployments.ingress.core.core_scene import CoreScene, plan


def test_an_input_that_a_part_names_twice_is_answered_once_and_counts_once() -> None:
    scene = CoreScene()
    scene.submit("ab")
    scene.follow(plan(epoch=2))
    scene.answer(0, "aa", block=1)
    assert (scene.core.num_unanswered, scene.core.counts.answered, scene.core.oldest_epoch) == (1, 1, 1)
    scene.answer(0, "b")
    assert (scene.core.num_unanswered, scene.core.counts.answered, scene.core.oldest_epoch) == (0, 2, 2)
    assert scene.log[1:] == ["0 answer a is a after block 1", "0 answer b is b after block 3"]


def test_an_input_that_is_answered_early_twice_counts_once() -> None:
    scene = CoreScene()
    scene.submit("ab")
    call, a = scene.calls[0], scene.inputs["a"]
    scene.do(scene.core.answer_early(call, [a, a], 1, 0.0, ["a is a", "a is b"]))
    assert (scene.core.num_unanswered, scene.log[1:]) == (1, ["0 answer a is a after block 1"])


def test_an_input_that_is_lost_twice_gets_one_error() -> None:
    scene = CoreScene()
    scene.submit("ab")
    scene.lose(0, "aa")
    scene.answer(0, "b")
    assert scene.outcomes == {"a": "execution", "b": "answered"}
    assert (scene.core.num_unanswered, scene.core.counts.drops["execution"]) == (0, 1)


def test_an_input_that_goes_on_twice_is_in_the_next_call_once() -> None:
    scene = CoreScene()
    scene.submit("ab")
    scene.go_on(0, "aa")
    assert (scene.calls[0].num_inside, scene.calls[1].num_inside) == (1, 1)
    scene.answer(1, "aa")
    scene.answer(0, "b")
    scene.follow(plan(epoch=2))
    assert (scene.core.num_unanswered, scene.core.oldest_epoch) == (0, 2)


def test_an_input_that_goes_on_twice_and_fails_starts_again_once() -> None:
    scene = CoreScene()
    scene.submit("a")
    scene.go_on(0, "aa")
    scene.fail(1)
    scene.until(1.0)
    assert scene.log[-2:] == [
        f"{RETRY_PAUSE_S:g} again 1 of second",
        f"{RETRY_PAUSE_S:g} send 2: a to first for block 0",
    ]
    scene.answer(2, "a")
    assert (scene.core.num_unanswered, scene.core.num_waiting) == (0, 0)


@pytest.mark.parametrize("block", [-1, 4, 99])
def test_a_block_that_the_model_does_not_have_is_refused_and_changes_nothing(block: int) -> None:
    scene = CoreScene()
    scene.submit("ab")
    call, flights = scene.calls[0], [scene.inputs["a"]]
    with pytest.raises(ExecutionError, match=f"names block {block}; the model has blocks 0 to 3"):
        scene.core.answer(call, flights, block, 0.0, ["a"])
    with pytest.raises(ExecutionError, match=f"names block {block}"):
        scene.core.answer_early(call, flights, block, 0.0, ["a"])
    with pytest.raises(ExecutionError, match=f"names block {block}"):
        scene.core.go_on(call, flights, block, "(a)", 0.0)
    assert (call.num_inside, scene.core.num_unanswered) == (2, 2)
    scene.fail(0)
    scene.until(1.0)
    scene.answer(1, "ab")
    assert scene.outcomes == {"a": "answered", "b": "answered"}
