"""Plans of several chains: the chain of an input is drawn when it arrives, and the input stays in it."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

import pytest

from deployments.ingress.core.ingress_core import HANG_S
from deployments.ingress.core.inputs import RoundRobin
from earlyexit.errors import AdmissionError, SequenceLostError
from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.ingress.core.core_scene import ALL_SLOTS, BATCH, CoreScene, plan
from tests.deployments.ingress.core.core_scene import CoreScene as SequenceScene
from tests.deployments.ingress.core.test_core_at_the_door import happen_at_random


def chains(
    *cuts: Sequence[int], shares: tuple[float, ...], epoch: int = 1, rate_per_s: float | None = None
) -> PlacedPlan:
    """Four blocks. `cuts`: of every chain, where its stages begin after the first; one replica each, in slot order."""
    stages = tuple(
        Stage(device="cpu", replicas=1, splits=(Split(first=first, end=end, batch=BATCH),))
        for each in cuts
        for first, end in zip((0, *each), (*each, 4), strict=True)
    )
    predicted = {} if rate_per_s is None else {"rate_per_s": rate_per_s}
    made = Plan(stages=stages, shares=shares, epoch=epoch, predicted=predicted)
    return PlacedPlan(plan=made, slots=ALL_SLOTS[: len(stages)])


def side_by_side(epoch: int = 1, rate_per_s: float | None = None) -> PlacedPlan:
    """Three quarters of the inputs go through the first slot, the others through the second and the third."""
    return chains((), (2,), shares=(0.75, 0.25), epoch=epoch, rate_per_s=rate_per_s)


@pytest.mark.parametrize(
    ("shares", "drawn"),
    [
        ((1.0,), [0, 0, 0]),
        ((0.75, 0.25), [0, 0, 1, 0, 0, 0, 1, 0]),
        ((5 / 7, 1 / 7, 1 / 7), [0, 0, 1, 0, 2, 0, 0]),  # the example of nginx: a a b a c a a
        ((0.333, 0.333, 0.333), [0, 1, 2, 0, 1, 2]),
    ],
)
def test_chains_are_drawn_by_smooth_weighted_round_robin(shares: tuple[float, ...], drawn: list[int]) -> None:
    turns = RoundRobin(shares)
    assert turns.peek(len(drawn)) == drawn
    assert turns.draw(len(drawn)) == drawn


def test_long_run_shares_of_draws_are_those_of_the_plan() -> None:
    drawn = RoundRobin((0.61, 0.28, 0.11)).draw(10_000)
    assert [drawn.count(position) for position in range(3)] == [6100, 2800, 1100]


def test_inputs_are_divided_between_the_chains_and_stay_in_theirs() -> None:
    scene = CoreScene(side_by_side())
    scene.submit("abcd")
    scene.go_on(1, "c")
    scene.answer(0, "abd")
    scene.answer(2, "c")
    assert scene.log == [
        "0 send 0: abd to first for block 0",
        "0 send 1: c to second for block 0",
        "0 send 2: (c) to third for block 2",
        "0 answer a is a, b is b, d is d after block 3",
        "0 answer c is c after block 3",
    ]


def test_a_chain_whose_replicas_are_busy_keeps_no_other_chain_waiting() -> None:
    scene = CoreScene(side_by_side(), calls_per_replica=1)
    for letter in "abcdef":  # c is of the second chain; the first waits for what came of a
        scene.submit(letter)
    assert scene.log == ["0 send 0: a to first for block 0", "0 send 1: c to second for block 0"]
    assert scene.core.num_waiting == 4
    scene.answer(0, "a")
    assert scene.log[-1] == "0 send 2: bdef to first for block 0"


def test_an_input_that_is_sent_again_stays_in_its_chain() -> None:
    scene = CoreScene(side_by_side())
    scene.submit("abc")
    scene.fail(1)
    scene.until(0.05)
    assert scene.log[-2:] == ["0.05 again 1 of second", "0.05 send 2: c to second for block 0"]


def test_with_fewer_chains_inputs_that_wait_and_those_inside_go_on_in_a_chain_that_is_left() -> None:
    scene = CoreScene(side_by_side(), calls_per_replica=1)
    scene.submit("abcd")
    scene.submit("efgh")
    scene.log.clear()
    scene.follow(plan(epoch=2, cut=1))
    scene.go_on(1, "c", block=2)
    scene.answer(0, "ab", block=1)
    assert scene.log == [
        "0 send 2: (c) to second for block 2",
        "0 answer a is a, b is b after block 1",
        "0 send 3: gefh to first for block 0",  # g waited in the chain that is no more
    ]
    for call, letters in ((0, "d"), (2, "c"), (3, "efgh")):
        scene.answer(call, letters)
    assert (scene.core.num_unanswered, scene.core.counts.answered, scene.core.oldest_epoch) == (0, 8, 2)


def test_with_more_chains_only_inputs_that_arrive_later_enter_the_new_ones() -> None:
    scene = CoreScene(plan())
    scene.submit("ab")
    scene.follow(side_by_side(epoch=2))
    scene.go_on(0, "ab")
    scene.submit("cdef")
    assert scene.log[1:] == [
        "0 send 1: (ab) to first for block 2",
        "0 send 2: cdf to first for block 0",
        "0 send 3: e to second for block 0",
    ]


def test_every_chain_admits_by_its_share_of_the_rate() -> None:
    scene = CoreScene(side_by_side(rate_per_s=16.0), slo_s=1.0)  # 0.7 * 12 = 8.4 and 0.7 * 4 = 2.8 inputs inside
    scene.submit("abcdefghijkl", deadline_s=1.0)
    inside = {letter: flight.ahead for letter, flight in scene.inputs.items()}
    assert (inside["l"], inside["k"]) == (8, 2), "inputs ahead are those of the same chain"
    with pytest.raises(AdmissionError):
        scene.core.check(1, 1.0, 0.0)
    scene.answer(2, "cgk")  # the second chain is empty; the next turn but one is its
    with pytest.raises(AdmissionError):
        scene.core.check(1, 1.0, 0.0)
    scene.core.check(1, 1.0, 0.0)
    scene.submit("m", deadline_s=1.0)
    assert scene.log[-1] == "0 send 3: m to second for block 0"


def test_a_request_that_a_chain_refuses_is_refused_whole() -> None:
    scene = CoreScene(side_by_side(rate_per_s=16.0), slo_s=1.0)
    scene.submit("abcdefgh", deadline_s=1.0)
    with pytest.raises(AdmissionError):
        scene.core.check(8, 1.0, 0.0)
    assert scene.core.counts.drops == {"admission": 8}


def test_a_sequence_stays_in_its_chain_until_the_plan_has_its_blocks_elsewhere() -> None:
    scene = SequenceScene(side_by_side())
    for name, letter in zip("xyz", "abc", strict=True):
        scene.begin(name, letter)
    scene.do(())
    scene.go_on(1, "c")
    scene.answer(0, "ab")
    scene.answer(2, "c")
    scene.log.clear()
    scene.follow(chains((2,), (), shares=(0.5, 0.5), epoch=2))  # the first chain's slot is part of another chain now
    with pytest.raises(SequenceLostError):
        scene.step("x", "d")
    scene.follow(side_by_side(epoch=3))
    scene.step("y", "e")
    scene.step("z", "f")
    scene.do(())
    assert scene.log == ["0 send 3: e to first for block 0 at r1", "0 send 4: f to second for block 0 at r1"]


def any_chains(rng: random.Random, epoch: int) -> PlacedPlan:
    """One to three chains on up to three slots."""
    number = rng.randint(1, 3)
    cuts: list[list[int]] = [[] for _ in range(number)]
    for _ in range(rng.randint(0, 3 - number)):
        cut, chosen = rng.randint(1, 3), rng.choice(cuts)
        if cut not in chosen:
            chosen.append(cut)
    weights = [rng.uniform(0.1, 1.0) for _ in cuts]
    shares = tuple(weight / sum(weights) for weight in weights)
    return chains(*map(sorted, cuts), shares=shares, epoch=epoch)


@pytest.mark.parametrize("seed", range(40))
def test_every_input_has_one_outcome_while_plans_of_one_to_three_chains_follow_each_other(seed: int) -> None:
    rng = random.Random(seed)
    scene = CoreScene(any_chains(rng, 1), max_attempts=4, max_queued=30)
    names, submitted = list(string.printable[:90]), ""
    while names or scene.core.num_unanswered:
        if names and scene.core.num_unanswered < 25:
            letters = "".join(names.pop() for _ in range(min(len(names), rng.randint(1, 5))))
            scene.submit(letters, deadline_s=scene.now_s + rng.uniform(0.1, 6))
            submitted += letters
        happen_at_random(scene, rng, submitted, any_chains)
        scene.until(scene.now_s + rng.uniform(0, 0.5))
    assert scene.outcomes.keys() == set(submitted)
    scene.until(scene.now_s + 10 + HANG_S)
    report = scene.core.peek(0.0, 0.0)
    assert (report.waiting, report.unanswered, report.unanswered_tokens) == (0, 0, 0)
    assert (report.oldest_epoch, report.arrived) == (report.epoch, len(submitted))
    scene.submit("\x00")
    assert scene.log[-1].startswith(f"{scene.now_s:g} send"), "nothing that has ended is still waited for"
