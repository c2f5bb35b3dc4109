"""Chains of networks at one core: survivors of a network enter the next one of the current plan, encoded again.

Probes also run networks that the plan skips. If words are pruned at a crossing, unpruned copies run too.
"""

from __future__ import annotations

import pytest

from deployments.ingress.core.inputs import CALL_GRACE_S, UNPRUNED
from deployments.wire.messages import assignments_of
from earlyexit.errors import DeadlineError, PlanError
from earlyexit.network.boundary import Answer
from optimizer.plans.plan import PlacedPlan
from tests.deployments.ingress.core.core_world import (
    LARGE,
    OF_NETWORKS,
    SMALL,
    THREE,
    CoreWorld,
    cascade,
    networks,
    observing,
    single,
    split,
)

END = 5
FIRST, LAST = SMALL, split(4, 6)
PRUNES = networks((SMALL,), (LARGE,), prunes=1)


def test_a_plan_may_skip_the_middle_one_of_three_networks() -> None:
    world = CoreWorld(networks((FIRST, LAST), ends=THREE))
    world.submit("a")
    world.go_on(0, "a", block=2)
    assert world.log[-1] == "0 send 1: a to first for block 4 of network 2"
    [chain] = world.core.chains.active
    assert (chain.network, chain.plan.used) == (0, (0, 2))
    assert [chain.stages.index(chain.at(block)) for block in range(6)] == [0, 0, 1, 1, 1, 1]


def test_awaited_survivors_enter_the_next_network_at_its_first_block() -> None:
    world = CoreWorld(cascade())
    world.submit("abcd")
    world.answer(0, "a", block=1)
    world.give_up("c")
    world.go_on(0, "bcd", block=2)
    world.answer(1, "bd", block=END)
    assert world.log == [
        "0 send 0: abcd to first for block 0",
        "0 answer a is a after block 1",
        "0 drop c: abandoned",
        "0 send 1: bd to second for block 2 of network 1",
        "0 answer b is b, d is d after block 5",
    ]
    assert (world.calls[1].remaining(), world.inputs["c"].holder) == ([], None)


def test_expected_times_of_a_skipped_network_are_kept() -> None:
    world = CoreWorld(cascade())
    with pytest.raises(PlanError, match=r"networks that end at \[3, 6\] cannot follow one of \[2, 6\]"):
        world.core.follow(networks((split(3, 6),), epoch=2, ends=(3, 6)))
    world.submit("a")
    world.now_s = 4.0
    world.answer(0, "a", block=1)
    world.follow(single(epoch=2))
    world.follow(cascade(epoch=3))
    assert [each.expected_s for chain in world.core.chains.active for each in chain.stages] == [4.0, 0.0]


def test_unanswered_tokens_are_counted_by_lengths_at_arrival() -> None:
    world = CoreWorld(cascade(), slo_s=1.0)
    world.submit("ab", 5, 7)
    for each in world.named("ab"):
        each.tokens = 100  # another network's tokenizer
    assert world.core.chains.active[0].unanswered_tokens == 12
    world.go_on(0, "ab", block=2)
    world.answer(1, "ab", block=END)
    assert (world.core.chains.active[0].unanswered_tokens, world.core.counts.answered_tokens) == (0, 12)


# Probes


def probing(served_by: PlacedPlan = PRUNES, **rules: float) -> CoreWorld:
    return observing(served_by, shape=OF_NETWORKS, **rules)


def test_an_assignment_has_the_skipped_networks_before_its_stage_as_detours() -> None:
    def detours(served_by: PlacedPlan, stage: int = 0) -> list[tuple[int, int]]:
        assignment = list(assignments_of(served_by).values())[stage]
        assert assignment.allowed_splits == (*served_by.plan.stages[stage].splits, *assignment.detours)
        return [(each.first, each.end) for each in assignment.detours]

    assert detours(single()) == [(0, 2)]
    assert detours(networks((LAST,), ends=THREE)) == [(0, 2), (2, 4)]
    assert detours(networks((FIRST, LAST), ends=THREE)) == [(2, 4)]
    assert [detours(cascade(), stage) for stage in (0, 1)] == [[], []]
    two = networks((FIRST,), (LAST,), ends=THREE)
    assert [detours(two, stage) for stage in (0, 1)] == [[], [(2, 4)]]


def test_a_probe_enters_every_network_even_those_that_the_plan_skips() -> None:
    whole_text = "0 send 3: a to first for block 4 of network 2"
    for prunes, more in ((None, ()), (1, (whole_text,))):
        world = probing(networks((FIRST, LAST), ends=THREE, prunes=prunes))
        world.submit("a")
        world.go_on(0, "a", block=2)
        world.go_on(1, "a", block=4)
        assert world.log[1:] == [
            "0 send 1: a to first for block 2 of network 1",
            "0 send 2: a to first for block 4 of network 2",
            *more,
        ]
    assert [call.watch for call in world.calls] == ["probe", "probe", "unpruned", "probe"]
    alone = probing(single())
    alone.submit("b")
    assert alone.log == ["0 send 0: b to first for block 0"]
    plain = CoreWorld(single())
    plain.submit("c")
    assert plain.log == ["0 send 0: c to first for block 2 of network 1"]


def cross(world: CoreWorld, letters: str = "ab", *, early: str = "a") -> None:
    """Runs call 0 to its crossing. Call 1 then has the pruned texts, and call 2 the whole texts."""
    world.submit(letters)
    for letter in letters:
        world.see(0, letter, 1, score=0.95 if letter in early else 0.5)
    world.answer_early(0, early, block=1)
    world.go_on(0, letters, block=2)


def see_whole(world: CoreWorld, letters: str, label: int) -> None:
    """Reports the full model's results for whole texts."""
    wholes = [each for each in world.calls[2].inputs if each.key in letters]
    said = [(each, Answer(sample_id="", exit=END, score=float("nan"), value=label)) for each in wholes]
    world.core.observe(world.calls[2], said)
    world.do(world.core.answer(world.calls[2], wholes, END, world.now_s, [None] * len(wholes)))


def test_answers_to_pruned_texts_are_compared_with_answers_to_whole_texts() -> None:
    world = probing()
    cross(world)
    assert world.log == [
        "0 send 0: ab to first for block 0",
        "0 answer a is a after block 1",
        "0 send 1: ab to second for block 2 of network 1",
        "0 send 2: ab to second for block 2 of network 1",
    ]
    assert [each.attempt for each in world.calls[2].inputs] == [UNPRUNED, UNPRUNED]
    assert (world.calls[2].probe, world.awaited(2)) == (True, [True, True])
    world.see(1, "ab", 4, label=1)
    world.see(1, "ab", END)
    world.answer(1, "ab", block=END)
    assert world.observed() is None, "the whole texts are still inside"
    see_whole(world, "a", label=1)
    see_whole(world, "b", label=0)
    seen = world.observed()
    assert seen is not None
    assert seen.end_losses_N is not None
    # For a, the end answers 0 without some words and 1 with all, like ramp 4 and unlike ramp 1; for b always 0.
    assert (seen.end_losses_N.tolist(), seen.losses_NR.tolist()) == ([1, 0], [[1, 0], [0, 1]])
    assert (seen.exits_N.tolist(), seen.pruned_agreement, world.core.observations.agreement) == ([1, END], 0.5, 0.5)
    assert world.log[4:] == ["0 answer b is b after block 5"], "whole texts have no answer to give"
    assert (world.core.counts.answered, world.core.num_unanswered) == (2, 0)


@pytest.mark.parametrize("call", [1, 2], ids=["without the words", "whole"])
def test_if_a_probe_or_its_unpruned_copy_is_lost_nothing_is_recorded(call: int) -> None:
    world = probing()
    cross(world, "a")
    world.do(world.core.lose(world.calls[call], world.calls[call].inputs, DeadlineError("no time left"), 0.0))
    assert world.awaited(3 - call) == [False]
    world.see(1, "a", 4, END)
    see_whole(world, "a", label=0)
    assert (world.observed(), world.core.counts.drops) == (None, {})


def test_an_unpruned_copy_that_fails_or_hangs_does_not_affect_the_request() -> None:
    failing, hanging = probing(), probing()
    for world in failing, hanging:
        cross(world, "b", early="")
    failing.fail(2)
    failing.until(1.0)
    failing.answer(1, "b", block=END)
    assert failing.log[3:] == ["1 answer b is b after block 5"]
    hanging.answer(1, "b", block=END)
    hanging.until(20.0)
    assert (hanging.log[-1], hanging.calls[2].remaining()) == (f"{10.0 + CALL_GRACE_S:g} hang up 2", [])
