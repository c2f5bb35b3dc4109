"""Steps of sequences: where they go, and what becomes of them where their home is gone."""

from __future__ import annotations

import random

import pytest

from deployments.ingress.core.routes import SequenceNumbers
from earlyexit.errors import OverloadedError, StageUnavailableError
from tests.deployments.ingress.core.core_scene import CoreScene as SequenceScene
from tests.deployments.ingress.core.core_scene import plan


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


def test_steps_of_one_moment_go_in_one_call_per_replica_whatever_is_unheard_of() -> None:
    scene = SequenceScene(plan(replicas=2), calls_per_replica=1)
    scene.begin("x", "a")
    scene.begin("y", "b")
    scene.do(())
    scene.answer(0, "ab", block=1)
    scene.placements["y"].replicas["split-cpu-0"] = "r2"
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


def test_numbers_of_two_ingresses_differ_and_have_62_bits() -> None:
    several = [SequenceNumbers(random.Random(seed)) for seed in range(3)]
    numbers = [each.new() for each in several for _ in range(4)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < number < 2**62 for number in numbers)
