"""Probes at a crossing where words are pruned: their texts go on without those words, and whole beside that."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from deployments.ingress.core.ingress_core import HANG_S
from deployments.ingress.core.inputs import WHOLE
from earlyexit.errors import DeadlineError
from earlyexit.network.wire import Seen
from optimizer.placement import PlacedPlan
from profiles.stream import StreamShape
from tests.deployments.ingress.core.test_core_crossings import cascade, chain_plan, single
from tests.deployments.ingress.core.test_core_detours import FIRST, LAST, THREE
from tests.deployments.ingress.core.test_core_probes import ProbeScene

SHAPE = StreamShape(score="confidence", num_blocks=6, ramps=(1, 4))
END = 5


def pruning(placed: PlacedPlan, *blocks: int) -> PlacedPlan:
    return replace(placed, plan=replace(placed.plan, prune=dict.fromkeys(blocks, 0.7)))


PRUNES = pruning(cascade(), 1)


class BothScene(ProbeScene):
    """Letters that go on in capitals were not cut."""

    def see_whole(self, call: int, letters: str, label: int) -> None:
        """What the full model says of whole texts."""
        flights = [flight for flight in self.calls[call].inputs if flight.key in letters]
        said = [(flight, Seen(sample_id="", block=END, score=math.nan, value=label)) for flight in flights]
        self.core.see(self.calls[call], said)
        self.do(self.core.answer(self.calls[call], flights, END, self.now_s, [None] * len(flights)))

    def cross(self, letters: str = "ab", *, early: str = "a") -> None:
        """A departure to its crossing, call 0; then call 1 has what lost words, call 2 what did not."""
        self.submit(letters)
        for letter in letters:
            self.see(0, letter, 1, score=0.95 if letter in early else 0.5)
        self.answer_early(0, early, block=1)
        self.go_on(0, letters, block=2)


def probing(placed: PlacedPlan = PRUNES, **rules: float) -> BothScene:
    return BothScene(placed, shape=SHAPE, **rules)


def test_answers_to_texts_that_lost_words_are_held_against_the_full_models_to_whole_ones() -> None:
    scene = probing()
    scene.cross()
    assert scene.log == [
        "0 send 0: ab to first for block 0",
        "0 answer a is a after block 1",
        "0 send 1: ab to second for block 2 of network 1",
        "0 send 2: ab to second for block 2 of network 1",
    ]
    wholes = scene.calls[2].inputs
    assert ([flight.attempt for flight in wholes], scene.calls[2].probe) == ([WHOLE, WHOLE], True)
    assert all(scene.core.is_awaited(scene.calls[2], flight) for flight in wholes)
    for letter in "ab":
        scene.see(1, letter, 4, score=0.5, label=1)
        scene.see(1, letter, END, label=0)
    scene.answer(1, "ab", block=END)
    assert scene.core.report(0.0, 0.0).probes is None, "the whole texts are still inside"
    scene.see_whole(2, "a", label=1)
    scene.see_whole(2, "b", label=0)
    seen = scene.observed()
    assert seen.end_losses_N is not None
    # Of a the end says 0 without some words and 1 with all, as ramp 4 does and ramp 1 does not; of b always 0.
    assert (seen.end_losses_N.tolist(), seen.losses_NR.tolist()) == ([1, 0], [[1, 0], [0, 1]])
    assert (seen.exits_N.tolist(), seen.pruned_agreement, scene.core.agreement) == ([1, END], 0.5, 0.5)
    assert scene.log[4:] == ["0 answer b is b after block 5"], "whole texts have no answer to give"
    assert (scene.core.counts.answered, scene.core.num_unanswered) == (2, 0)


def test_an_answer_at_the_end_costs_what_pruning_changed() -> None:
    scene = probing()
    scene.cross("b", early="")
    scene.see(1, "b", 4, score=0.5)
    scene.see(1, "b", END, label=0)
    scene.see_whole(2, "b", label=1)
    assert scene.core.agreement is None, "its caller still waits"
    scene.answer(1, "b", block=END)
    assert scene.core.agreement == 0.0


@pytest.mark.parametrize("call", [1, 2], ids=["without the words", "whole"])
def test_where_one_of_both_is_lost_nothing_is_recorded(call: int) -> None:
    scene = probing()
    scene.cross("a")
    scene.do(scene.core.lose(scene.calls[call], scene.calls[call].inputs, DeadlineError("no time left"), 0.0))
    other = scene.calls[3 - call]
    assert [scene.core.is_awaited(other, flight) for flight in other.inputs] == [False]
    scene.see(1, "a", 4)
    scene.see(1, "a", END)
    scene.see_whole(2, "a", label=0)
    assert scene.core.report(0.0, 0.0).probes is None
    assert scene.core.counts.drops == {}, "it had its answer"


def test_a_whole_text_that_fails_does_not_start_again_and_its_caller_is_answered() -> None:
    scene = probing()
    scene.cross("b", early="")
    scene.fail(2)
    scene.until(1.0)
    scene.answer(1, "b", block=END)
    assert scene.log[3:] == ["1 answer b is b after block 5"]


def test_a_stage_that_never_gives_a_whole_text_back_is_hung_up() -> None:
    scene = probing()
    scene.cross("b", early="")
    scene.answer(1, "b", block=END)
    assert scene.core.wake_s <= 10.0 + HANG_S
    scene.until(20.0)
    assert scene.log[-1] == "11 hang up 2"
    assert scene.calls[2].inside() == []


def test_what_was_seen_of_both_is_given_up_once_nobody_will_see_the_end_of_it() -> None:
    scene = probing()
    scene.cross("a")
    scene.now_s = 10.0 + HANG_S + 0.1
    scene.submit("bcde", deadline_s=99.0)  # a departure forgets what is past
    assert [scene.core.is_awaited(scene.calls[2], flight) for flight in scene.calls[2].inputs] == [False]


def test_inside_the_network_a_whole_text_goes_on_as_a_probe() -> None:
    scene = probing()
    scene.cross("a")
    whole = scene.calls[2]
    scene.do(scene.core.go_on(whole, whole.inputs, 4, "(A)", 0.0))
    assert scene.log[-1] == "0 send 3: (A) to second for block 4"
    assert (scene.calls[3].probe, scene.calls[3].watch) == (True, "whole")


@pytest.mark.parametrize(
    ("placed", "share"),
    [pytest.param(cascade(), 1.0, id="nothing is pruned"), pytest.param(PRUNES, 0.0, id="it is no probe")],
)
def test_others_go_on_one_way(placed: PlacedPlan, share: float) -> None:
    scene = probing(placed, probe_share=share)
    scene.submit("a")
    scene.go_on(0, "a", block=2)
    assert scene.log[1:] == ["0 send 1: a to second for block 2 of network 1"]


def test_a_plan_that_prunes_no_more_sends_no_whole_texts_beside() -> None:
    scene = probing()
    scene.submit("a")
    scene.follow(single(epoch=2))
    scene.go_on(0, "a", block=2)
    assert scene.log[1:] == ["0 send 1: a to first for block 2 of network 1"]


def test_of_three_networks_the_whole_text_goes_to_the_last_at_once_and_only_once() -> None:
    three = pruning(chain_plan((FIRST, LAST), networks=THREE), 1)
    scene = probing(three)
    scene.submit("a")
    scene.go_on(0, "a", block=2)
    scene.go_on(1, "a", block=4)
    assert scene.log[1:] == [
        "0 send 1: a to first for block 2 of network 1",
        "0 send 2: a to first for block 4 of network 2",
        "0 send 3: a to first for block 4 of network 2",
    ]
    assert [call.watch for call in scene.calls] == ["probe", "probe", "whole", "probe"]
