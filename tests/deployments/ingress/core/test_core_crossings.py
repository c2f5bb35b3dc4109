"""A chain of networks: who ends one enters the next, encoded anew, by whatever plan there is at that moment."""

from __future__ import annotations

import pytest

from deployments.ingress.core.calls import SendCall
from deployments.ingress.core.inputs import PendingInput
from earlyexit.errors import PlanError
from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, PolicySpec, Stage
from profiles.stream import StreamShape
from tests.deployments.ingress.core.core_scene import ALL_SLOTS, CoreScene
from tests.deployments.ingress.core.test_core_probes import ProbeScene

NETWORKS = (2, 6)
SURE = PolicySpec(name="confidence", thresholds=0.9)
SMALL, LARGE = (Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=2, end=6, batch=4))


def chain_plan(*stages: tuple[Split, ...], epoch: int = 1, networks: tuple[int, ...] = NETWORKS) -> PlacedPlan:
    """A small network of two blocks before a large one of four; each stage in the next slot."""
    made = tuple(Stage(device="cpu", replicas=1, splits=splits) for splits in stages)
    plan = Plan(stages=made, epoch=epoch, networks=networks, policy=SURE)
    return PlacedPlan(plan=plan, slots=ALL_SLOTS[: len(stages)])


def cascade(epoch: int = 1) -> PlacedPlan:
    return chain_plan((SMALL,), (LARGE,), epoch=epoch)


def single(epoch: int = 1) -> PlacedPlan:
    return chain_plan((LARGE,), epoch=epoch)


def test_survivors_of_a_network_enter_the_next_one_at_its_first_block() -> None:
    scene = CoreScene(cascade())
    scene.submit("abc")
    scene.answer(0, "a", block=1)
    scene.go_on(0, "bc", block=2)
    scene.answer(1, "bc", block=5)
    assert scene.log == [
        "0 send 0: abc to first for block 0",
        "0 answer a is a after block 1",
        "0 send 1: bc to second for block 2 of network 1",
        "0 answer b is b, c is c after block 5",
    ]


def test_inside_a_network_they_go_on_as_they_are() -> None:
    scene = CoreScene(chain_plan((SMALL,), (Split(first=2, end=4, batch=4),), (Split(first=4, end=6, batch=4),)))
    scene.submit("ab")
    scene.go_on(0, "ab", block=2)
    scene.go_on(1, "ab", block=4)
    assert scene.log[1:] == ["0 send 1: ab to second for block 2 of network 1", "0 send 2: (ab) to third for block 4"]


def test_who_is_not_awaited_does_not_cross() -> None:
    scene = CoreScene(cascade())
    scene.submit("abc")
    scene.give_up("b")
    scene.go_on(0, "abc", block=2)
    assert scene.log[-1] == "0 send 1: ac to second for block 2 of network 1"
    assert scene.calls[1].inputs == scene.calls[1].inside()
    assert scene.inputs["b"].holder is None


def test_a_stage_that_hosts_both_networks_gets_them_back_over_the_ingress() -> None:
    scene = CoreScene(chain_plan((SMALL, LARGE)))
    scene.submit("ab")
    scene.now_s = 1.0
    scene.go_on(0, "ab", block=2)
    scene.now_s = 3.0
    scene.answer(1, "ab", block=5)
    assert scene.log[1] == "1 send 1: ab to first for block 2 of network 1"
    scene.submit("c", deadline_s=99.0)
    assert scene.calls[-1].reserve_s == 2.0  # what follows is the other network, on the same replicas


def test_what_is_reserved_for_a_network_is_what_follows_it() -> None:
    scene = CoreScene(cascade())
    scene.submit("a")
    scene.now_s = 1.0
    scene.go_on(0, "a", block=2)
    scene.now_s = 4.0
    scene.answer(1, "a", block=5)
    scene.submit("b", deadline_s=99.0)
    scene.now_s = 5.0
    scene.go_on(2, "b", block=2)
    assert [call.reserve_s for call in scene.calls] == [0.0, 0.0, 3.0, 0.0]


def test_where_a_plan_leaves_the_first_network_out_inputs_enter_the_next() -> None:
    scene = CoreScene(single())
    scene.submit("ab")
    assert scene.log == ["0 send 0: ab to first for block 2 of network 1"]


def test_who_waits_at_a_change_enters_as_the_new_plan_says() -> None:
    scene = CoreScene(cascade(), calls_per_replica=1)
    scene.submit("a")
    scene.submit("b")
    scene.follow(single(epoch=2))
    scene.submit("c")
    scene.answer(0, "a", block=1)
    assert scene.log[-1] == "0 send 1: bc to first for block 2 of network 1"
    scene.follow(cascade(epoch=3))
    scene.answer(1, "b", block=5)
    scene.submit("d")
    assert scene.log[-1] == "0 send 2: d to first for block 0"


@pytest.mark.parametrize("block", [1, 2])
def test_who_is_in_a_network_that_the_new_plan_leaves_out_enters_the_next_one_that_it_uses(block: int) -> None:
    split = (Split(first=0, end=1, batch=4), Split(first=1, end=2, batch=4, ramps=(1,)))
    scene = CoreScene(chain_plan((split[0],), (split[1],), (LARGE,)))
    scene.submit("a")
    scene.follow(single(epoch=2))
    scene.go_on(0, "a", block=block)
    assert scene.log[-1] == "0 send 1: a to first for block 2 of network 1"


def test_with_three_networks_one_in_between_is_passed_over() -> None:
    three, first, last = (2, 4, 6), Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=4, end=6, batch=4)
    scene = CoreScene(chain_plan((first, last), networks=three))
    scene.submit("a")
    scene.go_on(0, "a", block=2)
    assert scene.log[-1] == "0 send 1: a to first for block 4 of network 2"
    [itinerary] = scene.core.route.chains
    assert [itinerary.hosted(block) for block in range(6)] == [0, 1, 4, 4, 4, 5]
    assert (itinerary.entry, itinerary.network, itinerary.used) == (0, 0, (0, 2))
    assert [itinerary.at(block).index for block in range(6)] == [0, 0, 1, 1, 1, 1]


def test_what_fails_after_a_crossing_starts_again_at_the_first_network() -> None:
    scene = CoreScene(cascade())
    scene.submit("a")
    scene.go_on(0, "a", block=2)
    scene.fail(1)
    scene.until(1.0)
    assert scene.log[-2:] == ["0.05 again 1 of second", "0.05 send 2: a to first for block 0"]
    scene.fail(2)
    scene.follow(single(epoch=2))
    scene.until(2.0)
    assert scene.log[-1] == "1.05 send 3: a to first for block 2 of network 1"


def test_a_plan_of_other_networks_cannot_follow() -> None:
    scene = CoreScene(cascade())
    with pytest.raises(PlanError, match=r"networks that end at \[3, 6\] cannot follow one of \[2, 6\]"):
        scene.core.follow(chain_plan((Split(first=3, end=6, batch=4),), epoch=2, networks=(3, 6)))


def test_what_was_learnt_of_a_network_is_kept_while_it_is_left_out() -> None:
    scene = CoreScene(cascade())
    scene.submit("a")
    scene.now_s = 4.0
    scene.answer(0, "a", block=1)
    scene.follow(single(epoch=2))
    scene.follow(cascade(epoch=3))
    assert [leg.expected_s for leg in scene.core.route.stages] == [4.0, 0.0]


def test_a_probe_that_was_answered_crosses_all_the_same() -> None:
    scene = ProbeScene(cascade(), shape=StreamShape(score="confidence", num_blocks=6, ramps=(1,)))
    scene.submit("ab")
    scene.answer_early(0, "a", block=1)
    scene.go_on(0, "ab", block=2)
    assert scene.log[-1] == "0 send 1: ab to second for block 2 of network 1"
    assert scene.calls[1].probe


def test_of_a_single_network_nothing_is_entered_but_at_its_begin() -> None:
    placed = PlacedPlan(
        plan=Plan(stages=(Stage(device="cpu", replicas=1, splits=(Split(first=0, end=4, batch=4),)),)),
        slots=ALL_SLOTS[:1],
    )
    scene = CoreScene(placed)
    scene.core.submit([PendingInput(1, 0.0, 9.0)], 0.0)
    [sent] = scene.core.pump(0.0)
    assert isinstance(sent, SendCall)
    assert (sent.block, sent.payload, sent.enters) == (0, None, 0)
    assert not scene.core.route.chains[0].crossings


def test_admission_counts_what_inputs_cost_as_they_came() -> None:
    scene = CoreScene(cascade(), slo_s=1.0)
    scene.submit("ab", 5, 7)
    for letter in "ab":
        scene.inputs[letter].tokens = 100  # another network's tokenizer
    assert scene.core.peek(0.0, 0.0).unanswered_tokens == 12
    scene.go_on(0, "ab", block=2)
    scene.answer(1, "ab", block=5)
    assert (scene.core.peek(0.0, 0.0).unanswered_tokens, scene.core.counts.answered_tokens) == (0, 12)
