"""A core's probes: seen to the end, whoever was answered on the way, and no caller any the wiser."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deployments.ingress.core.ingress_core import HANG_S
from earlyexit.network.split import AfterAnswer, Split
from earlyexit.network.wire import Seen
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, PolicySpec, Stage
from profiles.stream import Observations, StreamShape
from tests.deployments.ingress.core.core_scene import SLOTS, CoreScene

SHAPE = StreamShape(score="entropy", num_blocks=4, ramps=(1, 2))
ENTROPY = PolicySpec(name="entropy", thresholds=0.5)


def probed_plan(
    policy: PolicySpec | None = ENTROPY,
    *,
    epoch: int = 1,
    ramps: tuple[int, ...] = (1, 2),
    cut: int = 2,
    after_answer: AfterAnswer = "stop",
) -> PlacedPlan:
    """Four blocks in two stages."""
    stages = tuple(
        Stage(
            device="cpu",
            replicas=1,
            splits=(
                Split(
                    first=first,
                    end=end,
                    batch=4,
                    ramps=tuple(ramp for ramp in ramps if first <= ramp < end),
                    after_answer=after_answer,
                ),
            ),
        )
        for first, end in ((0, cut), (cut, 4))
    )
    return PlacedPlan(plan=Plan(stages=stages, policy=policy, epoch=epoch), slots=SLOTS)


class ProbeScene(CoreScene):
    """Every first call is a probe."""

    def __init__(self, placed: PlacedPlan | None = None, **rules: Any) -> None:
        super().__init__(placed or probed_plan(), **{"shape": SHAPE, "probe_share": 1.0, **rules})

    def see(self, call: int, letter: str, block: int, *, score: float = 0.5, label: int = 0) -> None:
        said = Seen(sample_id="", block=block, score=math.nan if block == 3 else score, value=label)
        self.core.see(self.calls[call], [(self.inputs[letter], said)])

    def answer_early(self, call: int, letters: str, *, block: int) -> None:
        flights = [self.inputs[letter] for letter in letters]
        said = [f"{letter} is {letter}" for letter in letters]
        self.do(self.core.answer_early(self.calls[call], flights, block, self.now_s, said))

    def observed(self, wall_s: float = 0.0) -> Observations:
        probes = self.core.report(self.now_s, wall_s).probes
        assert probes is not None
        return probes


def test_an_answered_probe_goes_on_to_the_end_and_its_caller_has_the_early_answer() -> None:
    scene = ProbeScene()
    scene.now_s = 2.0
    scene.submit("ab")
    scene.see(0, "a", 1, score=0.25, label=0)
    scene.see(0, "b", 1, score=0.9, label=2)
    scene.answer_early(0, "a", block=1)
    scene.now_s = 3.0
    scene.go_on(0, "ab")
    assert [scene.core.is_awaited(scene.calls[1], flight) for flight in scene.calls[1].inputs] == [True, True]
    for letter, label in (("a", 1), ("b", 0)):
        scene.see(1, letter, 2, label=label + 1)
        scene.see(1, letter, 3, label=label)
    scene.answer(1, "ab")  # a is a duplicate
    assert scene.log == [
        "2 send 0: ab to first for block 0",
        "2 answer a is a after block 1",
        "3 send 1: (ab) to second for block 2",
        "3 answer b is b after block 3",
    ]
    assert [call.probe for call in scene.calls] == [True, True]
    assert scene.core.agreement == 0.5  # a left with 0, the full model says 1
    seen = scene.observed(wall_s=1003.0)
    assert (seen.times_s_N.tolist(), seen.probe_N.tolist(), seen.exits_N.tolist()) == ([1002.0] * 2, [True] * 2, [1, 3])
    assert (seen.scores_NR[0].tolist(), seen.losses_NR[0].tolist()) == ([0.25, 0.5], [1, 1])
    assert seen.active_NR.tolist() == [[True, True]] * 2
    assert scene.core.report(3.0, 1003.0).probes is None  # handed over once
    assert scene.core.peek(0.0, 0.0).probes is None


def test_what_is_said_of_inputs_that_stay_makes_no_room_for_the_next_call_until_they_leave() -> None:
    scene = ProbeScene(calls_per_replica=1)
    scene.submit("a")
    scene.submit("b")
    scene.see(0, "a", 1)
    scene.answer_early(0, "a", block=1)  # the replica still runs the batch: whatever came now would wait there
    assert scene.log[1:] == ["0 answer a is a after block 1"]
    scene.go_on(0, "a")
    assert scene.log[2:] == ["0 send 1: (a) to second for block 2", "0 send 2: b to first for block 0"]


def test_the_share_says_how_many_first_calls_are_probes() -> None:
    scene = ProbeScene(probe_share=0.25)
    for number in range(200):
        scene.submit(chr(1000 + number))
        scene.answer(number, chr(1000 + number))
    assert 30 <= sum(call.probe for call in scene.calls) <= 70  # 50 expected, deviation 6


@pytest.mark.parametrize(
    "policy",
    [PolicySpec(name="confidence", thresholds=0.5), PolicySpec(name="patience", patience=2), None],
    ids=["confidence", "patience", "none"],
)
def test_a_policy_that_does_not_see_in_the_shapes_unit_is_not_probed(policy: PolicySpec | None) -> None:
    scene = ProbeScene(probed_plan(policy, ramps=() if policy is None else (1, 2)))
    scene.submit("a")
    assert not scene.calls[0].probe


def test_a_probe_that_a_changed_plan_let_out_counts_for_that_plan() -> None:
    scene = ProbeScene(probed_plan(ramps=(1,)))
    scene.submit("a")
    scene.follow(probed_plan(epoch=2, ramps=(2,)))
    scene.see(0, "a", 1)
    scene.go_on(0, "a")
    scene.see(1, "a", 2)
    scene.answer_early(1, "a", block=2)
    scene.see(1, "a", 3)
    assert scene.observed().active_NR.tolist() == [[False, True]]


def test_survivors_of_probes_that_nobody_will_see_the_end_of_are_not_sent_on() -> None:
    scene = ProbeScene()
    scene.submit("a")
    scene.answer_early(0, "a", block=1)
    scene.now_s = 10.0 + HANG_S + 0.1
    scene.submit("bcde", deadline_s=99.0)  # a departure forgets what is past
    scene.go_on(0, "a")
    assert scene.log[2:] == ["11.1 send 1: bcde to first for block 0"]
