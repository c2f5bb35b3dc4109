"""Sequences that are probes: their callers get what the full model says, and every ramp is seen on the way."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deployments.ingress.core.calls import Action, SendCall
from deployments.ingress.core.routes import KVPlacement
from optimizer.plan import PolicySpec
from tests.deployments.ingress.core.core_scene import CoreScene as SequenceScene
from tests.deployments.ingress.core.test_core_probes import ProbeScene, probed_plan


class ProbedScene(ProbeScene, SequenceScene):
    """Calls of probes are marked."""

    def _write(self, action: Action) -> None:
        super()._write(action)
        if isinstance(action, SendCall) and action.call.probe:
            self.log[-1] += ", probes"


def test_every_token_of_a_probe_runs_to_the_end_whose_answer_alone_its_caller_gets() -> None:
    scene = ProbedScene()
    scene.begin("x", "a")
    scene.do(())
    scene.see(0, "a", 1, score=0.25, label=7)
    scene.answer_early(0, "a", block=1)
    scene.go_on(0, "a")
    scene.see(1, "a", 2, score=0.125, label=8)
    scene.answer_early(1, "a", block=2)  # a replica does not know that the one before let it out too
    scene.see(1, "a", 3, label=8)
    scene.answer(1, "a")
    scene.step("x", "b")
    scene.do(())
    for block in (1, 2, 3):
        scene.see(2, "b", block, label=5)
    scene.answer(2, "b")
    assert scene.log == [
        "0 send 0: a to first for block 0 at any, probes",
        "0 send 1: (a) to second for block 2 at any, probes",
        "0 answer a is a after block 3",
        "0 send 2: b to first for block 0 at r1, probes",
        "0 answer b is b after block 3",
    ]
    seen = scene.observed()
    assert (seen.exits_N.tolist(), seen.losses_NR.tolist()) == ([1, 3], [[1.0, 0.0], [0.0, 0.0]])
    assert np.array_equal(seen.scores_NR, [[0.25, 0.125], [0.5, 0.5]])
    assert seen.probe_N.all()
    assert scene.core.agreement == 0.5
    assert scene.core.counts.exits == {3: 2}


def test_probes_and_others_of_one_moment_go_in_calls_of_their_own() -> None:
    scene = ProbedScene(probe_share=0.5)
    for name, letter in zip("xyz", "abc", strict=True):
        scene.begin(name, letter)
    scene.do(())
    probes = [name for name in "xyz" if scene.placements[name].is_probe]
    drawn = random.Random(0)
    assert probes == [name for name in "xyz" if drawn.random() < 0.5] == ["z"]
    scene.go_on(0, "ab")
    scene.go_on(1, "c")
    for call, letters in (2, "ab"), (3, "c"):
        scene.answer(call, letters)
    for name, letter in zip("xyz", "def", strict=True):
        scene.step(name, letter)
    scene.do(())
    assert [line for line in scene.log if "send" in line] == [
        "0 send 0: ab to first for block 0 at any",
        "0 send 1: c to first for block 0 at any, probes",
        "0 send 2: (ab) to second for block 2 at any",
        "0 send 3: (c) to second for block 2 at any, probes",
        "0 send 4: de to first for block 0 at r1",
        "0 send 5: f to first for block 0 at r1, probes",
    ]


@pytest.mark.parametrize("was", [True, False])
def test_a_sequence_that_begins_anew_is_what_it_was(was: bool) -> None:
    scene = ProbedScene(probe_share=0.5)
    for name, letter in zip("uvwxyz", "abcdef", strict=True):
        scene.placements[name] = KVPlacement(len(scene.placements) + 1, is_again=True, is_probe=was)
        scene.step(name, letter)
    scene.do(())
    assert {call.probe for call in scene.calls} == {was}


def test_of_the_parts_of_a_prompt_the_last_alone_is_recorded_and_all_run_to_the_end() -> None:
    scene = ProbedScene()
    scene.begin("x", "a")
    scene.placements["x"].says = False
    scene.do(())
    scene.answer(0, "a")
    scene.placements["x"].says = True
    scene.step("x", "b")
    scene.do(())
    for block in (1, 2, 3):
        scene.see(1, "b", block)
    scene.answer(1, "b")
    assert [call.probe for call in scene.calls] == [True, True]
    assert len(scene.observed()) == 1


def test_what_is_lost_on_the_way_is_no_record() -> None:
    scene = ProbedScene()
    scene.begin("x", "a")
    scene.do(())
    scene.see(0, "a", 1)
    scene.answer_early(0, "a", block=1)
    scene.fail(0)
    assert scene.log[1:] == [
        "0 drop a: the sequence is lost: a replica of split-cpu-0 failed under it",
        "0 again 1 of first",
    ]
    assert scene.core.report(0.0, 0.0).probes is None


def test_where_a_plan_sees_nothing_its_steps_are_as_others_are() -> None:
    scene = ProbedScene()
    scene.begin("x", "a")
    scene.do(())
    scene.go_on(0, "a")
    scene.answer(1, "a")
    scene.follow(probed_plan(PolicySpec(name="patience", patience=2), epoch=2))
    scene.step("x", "b")
    scene.begin("y", "c")
    scene.do(())
    assert [call.probe for call in scene.calls] == [True, True, False, False]
    assert (scene.placements["x"].is_probe, scene.placements["y"].is_probe) == (True, False)
