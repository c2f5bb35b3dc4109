"""New inputs under load: they wait at the ingress, for a batch or until a share of their time is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.ingress.core.core_scene import CoreScene, plan

SLOT = "split-cpu-0"


def loaded(busy: float, placed: PlacedPlan | None = None) -> CoreScene:
    """A call of `x` took a second; the first stage says how busy it was. SLO 10 s, of which nothing is kept."""
    scene = CoreScene(placed or plan(dispatch="filling"))
    scene.submit("x")
    scene.now_s = 1.0
    scene.core.hear(scene.calls[0], busy, 1.0)
    scene.answer(0, "x")
    return scene


def test_below_two_fifths_new_inputs_leave_at_once() -> None:
    scene = loaded(0.3)
    scene.submit("a", deadline_s=11.0)
    assert [call.started_s for call in scene.calls] == [0.0, 1.0]


def test_under_load_they_wait_for_a_share_of_what_their_deadline_leaves() -> None:
    scene = loaded(0.6)
    scene.submit("a", deadline_s=4.4)  # of 3.4 seconds the stage takes 1; half of the rest is longer than a gap of 1
    scene.now_s = 1.5
    scene.submit("b", deadline_s=4.9)
    assert len(scene.calls) == 1
    assert scene.core.wake_s == pytest.approx(2.2)
    scene.until(2.2)
    assert [len(call.inputs) for call in scene.calls] == [1, 2]


def test_however_far_the_deadline_is_they_wait_for_three_halves_of_what_a_call_takes() -> None:
    scene = loaded(0.6)
    scene.submit("a", deadline_s=1000.0)
    assert scene.core.wake_s == pytest.approx(2.5)


def test_they_wait_for_nobody_who_comes_no_sooner() -> None:
    scene = loaded(0.48)  # a fifth of three seconds, where inputs come a second apart
    scene.submit("a", deadline_s=1000.0)
    assert len(scene.calls) == 2


def test_a_full_batch_leaves_at_once() -> None:
    scene = loaded(1.0)
    scene.submit("abcde", deadline_s=12.0)
    assert [len(call.inputs) for call in scene.calls] == [1, 4]


def test_what_was_heard_long_ago_holds_nobody() -> None:
    scene = loaded(1.0)
    scene.now_s = 3.0
    scene.submit("a", deadline_s=12.0)
    assert len(scene.calls) == 2


def test_who_is_given_up_meanwhile_is_not_sent() -> None:
    scene = loaded(1.0)
    scene.submit("a", deadline_s=12.0)
    scene.give_up("a")
    scene.until(13.0)
    assert len(scene.calls) == 1


def test_a_replica_of_several_splits_is_sent_new_inputs_while_it_runs() -> None:
    splits = tuple(Split(first=first, end=first + 2, batch=4) for first in (0, 2))
    stages = (Stage(device="cpu", replicas=1, splits=splits),)
    several = PlacedPlan(plan=Plan(stages=stages, epoch=1, dispatch="filling"), slots=(SLOT,))
    scene = CoreScene(several)
    for letter in "abcdef":
        scene.submit(letter)
    assert [len(call.inputs) for call in scene.calls] == [1, 1, 1, 1]
    at_once = CoreScene(replace(several, plan=replace(several.plan, dispatch="work-conserving")))
    for letter in "abcdef":
        at_once.submit(letter)
    assert [len(call.inputs) for call in at_once.calls] == [1, 4]
