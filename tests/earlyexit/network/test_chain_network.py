"""A chain of several networks is one network: whatever is cut, answers are those of its members run alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, combinations, pairwise

import pytest

from earlyexit.network.boundary import Split
from earlyexit.network.chain_network import ChainNetwork
from earlyexit.network.cut import cut_out
from earlyexit.network.model import from_wire
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.counting import PatiencePolicy, VotingPolicy
from earlyexit.policies.ensemble import EnsemblePolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy
from earlyexit.ramps.heads import Ramp
from tests.earlyexit.network.chains import chained, follow, inputs_for, offline
from tests.earlyexit.network.cuts import assert_same

POLICIES: dict[str, ExitPolicy] = {
    "entropy": EntropyPolicy(0.75),
    "confidence": ConfidencePolicy(0.6),
    "patience": PatiencePolicy(1),
    "voting": VotingPolicy(2),
    "ensemble": EnsemblePolicy(ConfidencePolicy(0.55), {1: 0.3}),
}


@pytest.fixture(scope="module")
def two() -> ChainNetwork:
    return chained(2, 3)


@pytest.fixture(scope="module")
def three() -> ChainNetwork:
    return chained(2, 1, 2)


def plans(network: ChainNetwork, ramps: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[Split, ...]]]:
    """Every set of networks that ends with the last, cut in every way."""
    last = len(network.members) - 1
    found = []
    for used in chain.from_iterable(combinations(range(last), size) for size in range(last + 1)):
        places = (*used, last)
        parts: list[list[tuple[int, ...]]] = [[]]
        for place in places:
            first, end = network.chain.starts[place], network.chain.bounds[place]
            inner = [c for size in range(end - first) for c in combinations(range(first + 1, end), size)]
            parts = [[*before, (first, *cuts, end)] for before in parts for cuts in inner]
        for each in parts:
            splits = tuple(
                Split(first=a, end=b, batch=6, ramps=tuple(r for r in ramps if a <= r < b))
                for bounds in each
                for a, b in pairwise(bounds)
            )
            found.append((places, splits))
    return found


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("lengths", [(2, 3), (2, 1, 2)], ids=str)
def test_every_cut_of_every_set_of_networks_gives_the_answers_of_its_members(
    lengths: tuple[int, ...], policy: ExitPolicy, two: ChainNetwork, three: ChainNetwork
) -> None:
    network = two if lengths == (2, 3) else three
    inputs, exits = inputs_for(network), set[int]()
    for seed, (used, splits) in enumerate(plans(network, network.ramp_indices)):
        expected, _ = offline(network, policy, inputs, network.ramp_indices, used)
        answers, _ = follow(network, policy, inputs, splits, seed=seed)
        assert_same(answers, expected, within=1e-4)
        exits |= {answer.exit for answer in answers.values()}
    assert network.num_blocks - 1 in exits
    assert exits & set(network.chain.end_ramps)


@pytest.mark.parametrize("ramps", [(0, 3), (1,), (0, 1, 2), ()], ids=str)
def test_ramps_may_be_off_ends_of_networks_among_them(ramps: tuple[int, ...], two: ChainNetwork) -> None:
    inputs, policy = inputs_for(two), POLICIES["confidence"]
    for seed, (used, splits) in enumerate(plans(two, ramps)):
        expected, _ = offline(two, policy, inputs, ramps, used)
        answers, _ = follow(two, policy, inputs, splits, seed=seed)
        assert_same(answers, expected, within=1e-4)


@pytest.mark.parametrize("kind", ["stay", "probe"])
def test_who_stays_crosses_too_and_every_exit_is_seen(kind: str, three: ChainNetwork) -> None:
    inputs, policy, ramps = inputs_for(three), POLICIES["confidence"], (0, 2)
    for seed, (used, splits) in enumerate(plans(three, ramps)):
        expected, said = offline(three, policy, inputs, ramps, used)
        answers, seen = follow(three, policy, inputs, splits, seed=seed, kind=kind)
        whose = {block for block in three.ramp_indices if three.chain.network_of(block) in used}
        looked = whose & set(ramps) if kind == "stay" else whose
        last = three.num_blocks - 1
        assert set(seen) == {(each, block) for each in inputs.ids for block in (*looked, last)}
        for key in said.keys() & seen.keys():
            assert seen[key].score == pytest.approx(said[key][0], abs=1e-4)
            assert seen[key].value == said[key][1]
        assert {each.sample_id: each.exit for each in answers.values() if each.exit != last} == {
            each.sample_id: each.exit for each in expected.values() if each.exit != last
        }


def test_a_networks_head_is_computed_where_it_decides(two: ChainNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    heads = {id(member.head): member.info.name for member in two.members}
    forward = Ramp.__call__

    def counted(head: Ramp, *given: object) -> object:
        called.extend([heads[id(head)]] if id(head) in heads else [])
        return forward(head, *given)

    monkeypatch.setattr(Ramp, "__call__", counted)
    inputs = inputs_for(two, count=3)
    runs = [("plain", (0,), []), ("plain", (0, 1), ["m0"]), ("stay", (1,), ["m0"]), ("probe", (), ["m0"])]
    for kind, ramps, expected in runs:
        called.clear()
        cut = cut_out(two, 0, 2, ramps, ConfidencePolicy(math.inf))
        cut = {"plain": cut, "stay": cut.staying(), "probe": cut.for_probes()}[kind]
        [*_, step] = cut.run(from_wire(two, inputs.wire(0, 0, inputs.ids), ConfidencePolicy(math.inf)))
        assert step.survivors is not None
        assert (called, step.survivors.next_block, step.survivors.tensors) == (expected, 2, ())


def test_nothing_crosses_the_end_of_a_network_and_every_start_takes_inputs(two: ChainNetwork) -> None:
    assert [len(two.boundary(block)) for block in range(5)] == [1, 0, 1, 1, 1]
    assert (two.boundary(-1), two.takes(2)) == tuple(member.boundary(-1) for member in two.members)
    assert (two.takes(1), two.takes(3)) == tuple(member.boundary(0) for member in two.members)
