"""Cut sets where no single tensor cuts the graph."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from earlyexit.foreign.dataflow import MOST_TENSORS, Dataflow, cut_sets_between, find_sites, with_cut_sets
from tests.earlyexit.foreign.flows import disconnects, flow_of

MASKED = (
    "m = light x",
    "a = work x w",
    *("b = work a m", "c = work b", "d = light c a"),
    *("e = work d m", "f = work e", "g = light f d"),
    *("h = work g m", "y = work h"),
)
"""Layers that each read the hidden state and a mask computed from the input: no single tensor cuts the graph."""


def masked() -> Dataflow:
    return replace(flow_of(*MASKED), bytes_per_input={"x": 50, "m": 1, **dict.fromkeys("abcdefghy", 10)})


def test_a_mask_crosses_with_the_hidden_state_where_that_is_cheapest() -> None:
    flow = masked()
    assert [site.tensors for site in find_sites(flow)] == [("h",)]
    found = with_cut_sets(flow, find_sites(flow))
    assert [site.tensors for site in found] == [("a", "m"), ("d", "m"), ("h",)]
    assert [flow.bytes_of(site.tensors) for site in found] == [11, 11, 10]
    assert [flow.maker[site.tensors[0]].name for site in found] == ["operator1", "operator4", "operator8"]
    flow = replace(flow_of(*MASKED), bytes_per_input={"x": 50, "m": 1, **dict.fromkeys("acdefghy", 10), "b": 3})
    found = with_cut_sets(flow, find_sites(flow))
    assert [site.tensors for site in found] == [("a", "m"), ("d", "m"), ("h",)]
    flow = masked()
    assert len(with_cut_sets(flow, find_sites(flow), long=0.9)) == 1


def test_a_ramp_reads_the_tensor_that_depends_on_the_most_work() -> None:
    flow = flow_of("a = work x w", "m = light x", *MASKED[2:])
    flow = replace(flow, bytes_per_input={"x": 50, "m": 1, **dict.fromkeys("abcdefghy", 10)})
    assert with_cut_sets(flow, find_sites(flow))[0].tensors == ("a", "m")


def test_a_model_with_one_site_after_every_layer_needs_no_sets() -> None:
    flow = flow_of(*(f"h{k + 1} = work h{k} w" for k in range(20)), inputs="h0", outputs="h20")
    assert with_cut_sets(flow, find_sites(flow)) == find_sites(flow)


def drawn(seed: int) -> Dataflow:
    """A graph of 9 operators, each of which reads one or two tensors before it."""
    random = Random(seed)
    names = ["x", *(f"t{k}" for k in range(9))]
    reads = [random.sample(names[:k], k=min(k, random.choice([1, 1, 2]))) for k in range(1, 10)]
    lines = [
        f"{name} = {random.choice(['work', 'light'])} {' '.join(read)}"
        for name, read in zip(names[1:], reads, strict=True)
    ]
    unread = set(names) - {name for read in reads for name in read}
    flow = flow_of(*lines, outputs=" ".join(sorted(unread)))
    return replace(flow, bytes_per_input={name: random.randint(1, 99) for name in names})


def crossing(flow: Dataflow, ran: set[str]) -> set[str]:
    """Returns the inputs, and the results of some operators, that other operators or no operators read."""
    there = set(flow.inputs) | {name for each in flow.live if each.name in ran for name in each.outputs}
    read = {name for each in flow.live if each.name not in ran for name in each.inputs}
    return there & (read | set(flow.outputs))


@pytest.mark.parametrize("seed", range(40))
def test_cut_sets_disconnect_the_graph_in_order(seed: int) -> None:
    flow = drawn(seed)
    ran: set[str] = set()
    for place, each in enumerate(flow.live):
        ran.add(each.name)
        assert flow.crossings[place] == crossing(flow, ran)
    before: frozenset[str] = frozenset()
    for site in cut_sets_between(flow, -1, len(flow.live) - 1):
        assert disconnects(flow, site.tensors)
        assert 1 < len(site.tensors) <= MOST_TENSORS
        assert before < flow.before(site.tensors)
        before = flow.before(site.tensors)
