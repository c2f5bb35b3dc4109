"""Probes get to know networks that the plan leaves out: else no controller could come back to them."""

from __future__ import annotations

import pytest

from deployments.wire.messages import Assignment
from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from profiles.stream import StreamShape
from tests.deployments.ingress.core.test_core_crossings import LARGE, cascade, chain_plan, single
from tests.deployments.ingress.core.test_core_probes import ProbeScene

THREE = (2, 4, 6)
FIRST, LAST = Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=4, end=6, batch=8)


def probing(placed: PlacedPlan) -> ProbeScene:
    return ProbeScene(placed, shape=StreamShape(score="confidence", num_blocks=6, ramps=(1,)))


def assignment(placed: PlacedPlan, stage: int = 0) -> Assignment:
    return Assignment.of(placed.plan, placed.plan.stages[stage])


def test_a_stage_knows_the_networks_that_are_left_out_before_its_own() -> None:
    assert assignment(single()).detours == (Split(first=0, end=2, batch=4),)
    assert assignment(single()).known == (LARGE, Split(first=0, end=2, batch=4))
    alone = chain_plan((LAST,), networks=THREE)
    assert [(each.first, each.end, each.batch) for each in assignment(alone).detours] == [(0, 2, 8), (2, 4, 8)]
    one_stage = chain_plan((FIRST, LAST), networks=THREE)
    assert [(each.first, each.end) for each in assignment(one_stage).detours] == [(2, 4)]


@pytest.mark.parametrize("stage", [0, 1])
def test_where_all_networks_are_used_nobody_makes_a_detour(stage: int) -> None:
    assert assignment(cascade(), stage).detours == ()


def test_a_detour_is_known_by_the_stage_of_the_network_behind_it_alone() -> None:
    two = chain_plan((FIRST,), (LAST,), networks=THREE)
    assert assignment(two, 0).detours == ()
    assert [(each.first, each.end) for each in assignment(two, 1).detours] == [(2, 4)]


def test_a_probe_enters_the_first_network_under_a_plan_that_leaves_it_out() -> None:
    scene = probing(single())
    scene.submit("ab")
    scene.go_on(0, "ab", block=2)
    scene.answer(1, "ab", block=5)
    assert scene.log == [
        "0 send 0: ab to first for block 0",
        "0 send 1: ab to first for block 2 of network 1",
        "0 answer a is a, b is b after block 5",
    ]


def test_a_probe_passes_by_no_network_in_between() -> None:
    scene = probing(chain_plan((FIRST, LAST), networks=THREE))
    scene.submit("a")
    scene.go_on(0, "a", block=2)
    scene.go_on(1, "a", block=4)
    assert scene.log[1:] == [
        "0 send 1: a to first for block 2 of network 1",
        "0 send 2: a to first for block 4 of network 2",
    ]


def test_a_probe_inside_a_network_that_a_new_plan_leaves_out_goes_on_as_it_is() -> None:
    halves = (Split(first=0, end=1, batch=4), Split(first=1, end=2, batch=4, ramps=(1,)))
    scene = probing(chain_plan((halves[0],), (halves[1],), (LARGE,)))
    scene.submit("a")
    scene.follow(single(epoch=2))
    scene.go_on(0, "a", block=1)
    assert scene.log[-1] == "0 send 1: (a) to first for block 1"
    assert scene.calls[1].stage.assignment.detours == (Split(first=0, end=2, batch=4),)
