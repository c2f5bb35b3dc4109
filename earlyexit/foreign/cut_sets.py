"""Where no tensor carries everything: sets of a few that do together, chosen by their bytes. Beyond Apparate.

A mask that the model computes and reads in every layer runs beside the hidden state, so no vertex cuts it; the two
together do. A cut is a set of operators that have run, with everything that they need; what crosses is each tensor of
theirs that others read. The cheapest is a minimum cut, with the bytes of tensors as capacities and endless edges back
from every operator to what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import inf

from earlyexit.foreign.dataflow import Dataflow, Operator, Site, regions_of, site_of, work_shares

MOST_TENSORS = 3
LONG = 0.1
"""Of the model's time: a stretch between two sites in which sets are looked for."""
MOST_TRIED = 200
"""Operators of a stretch behind which a set is looked for; of more that work, so many evenly. Each is a minimum cut."""
_START, _END = ("start", ""), ("end", "")


def with_sets(flow: Dataflow, sites: Sequence[Site], *, long: float = LONG) -> tuple[Site, ...]:
    """The sites, and sets of two or three tensors in the stretches between them that are long.

    Stretches are as long as the sites' shares say; where a site has none, by how many of the operators work.
    """
    counted = sites if all(site.seconds_share is not None for site in sites) else work_shares(sites, flow)
    ends = [0.0, *(site.seconds_share or 0.0 for site in counted), 1.0]
    regions = regions_of(flow, [site.tensors[0] for site in sites])
    found: list[Site] = []
    for (begin, end), region, site in zip(pairwise(ends), regions, [*sites, None], strict=True):
        if end - begin > long:
            found += sets_in(flow, region)
        if site is not None:
            found.append(site)
    return tuple(found)


def sets_in(flow: Dataflow, region: Sequence[Operator]) -> Iterator[Site]:
    """Sets that cut a stretch, each behind what the one before it cuts off.

    Behind every operator that works the cheapest is found; of these the ones before and behind which cuts are dearer.
    """
    works = [each for each in region if each.kind == "work"]
    tried = works[:: max(1, -(-len(works) // MOST_TRIED))]
    cuts = [cheapest_cut(flow, region, last) for last in tried]
    passed: frozenset[str] = frozenset()
    for ran, lowest in zip(cuts, _lowest(_costs(flow, region, tried, cuts)), strict=True):
        if ran is None or not lowest or not passed < ran:
            continue
        crossing = crossing_tensors(flow, region, ran)
        if len(crossing) > 1:
            passed = ran
            yield site_of(flow, _most_work_first(flow, crossing))


def _costs(
    flow: Dataflow, region: Sequence[Operator], tried: Sequence[Operator], cuts: Sequence[frozenset[str] | None]
) -> list[float]:
    """Bytes that cross before the stretch, at each cut in it, and behind it; the model's inputs are no cut."""

    def cost(ran: frozenset[str]) -> float:
        return sum(flow.bytes_per_input.get(name, inf) for name in crossing_tensors(flow, region, ran))

    nothing, everything = frozenset[str](), frozenset(each.name for each in region)
    begins = not set(crossing_tensors(flow, region, nothing)).isdisjoint(flow.inputs)
    inside = [
        cost(ran) if ran is not None else inf if _behind(region, last) else cost(everything)
        for last, ran in zip(tried, cuts, strict=True)
    ]
    return [inf if begins else cost(nothing), *inside, cost(everything)]


def _lowest(costs: Sequence[float]) -> Iterator[bool]:
    """Of all but the first and the last, whether the next other cost to the left and that to the right are higher."""
    levels = [(cost, len(list(group))) for cost, group in groupby(costs)]
    flat = [
        lower
        for (before, _), (cost, count), (after, _) in zip(
            [(inf, 0), *levels], levels, [*levels[1:], (inf, 0)], strict=False
        )
        for lower in [before > cost < after] * count
    ]
    yield from flat[1:-1]


def crossing_tensors(flow: Dataflow, region: Sequence[Operator], ran: frozenset[str]) -> frozenset[str]:
    """What a stretch's operators that have not run, and all behind it, read of what was before them."""
    waiting = [each for each in region if each.name not in ran]
    made = {name for each in region if each.name in ran for name in each.outputs}
    later = {name for each in waiting for name in each.outputs}
    read = {name for each in waiting for name in each.inputs} - flow.free
    return frozenset((read | (made & _left(flow, region))) - later)


def _most_work_first(flow: Dataflow, tensors: Iterable[str]) -> tuple[str, ...]:
    """A ramp looks at the first of a set: of a hidden state and a mask, at the hidden state."""
    places = {name: place for place, each in enumerate(flow.live) for name in each.outputs}

    def work(name: str) -> tuple[int, int]:
        before = flow.before((name,))
        return sum(each.kind == "work" and each.name in before for each in flow.live), places.get(name, -1)

    return tuple(sorted(tensors, key=work, reverse=True))


def _left(flow: Dataflow, region: Sequence[Operator]) -> frozenset[str]:
    """What a stretch's operators give that is read behind it, or is an output."""
    inside = {each.name for each in region}
    read = {name for each in flow.live if each.name not in inside for name in each.inputs}
    return frozenset(name for each in region for name in each.outputs if name in read or name in flow.outputs)


def cheapest_cut(flow: Dataflow, region: Sequence[Operator], last: Operator) -> frozenset[str] | None:
    """The operators that have run at the cheapest cut right behind one; None where no work is behind it.

    The cheapest in bytes; where that takes too many tensors, that of the fewest.
    """
    behind = _behind(region, last)
    if not behind:
        return None
    for count_first in (False, True):
        ran = _minimum_cut(flow, region, last, behind, count_first=count_first)
        if len(crossing_tensors(flow, region, ran)) <= MOST_TENSORS:
            return ran
    return None


def _behind(region: Sequence[Operator], last: Operator) -> list[Operator]:
    """The operators that work on what `last` gives."""
    reached = set(last.outputs)
    found = []
    for each in region:
        if reached.intersection(each.inputs):
            reached.update(each.outputs)
            if each.kind == "work":
                found.append(each)
    return found


def _minimum_cut(
    flow: Dataflow, region: Sequence[Operator], last: Operator, behind: Sequence[Operator], *, count_first: bool
) -> frozenset[str]:
    import networkx as nx

    graph = nx.DiGraph()
    endless = sum(flow.bytes_per_input.values()) + 1
    left = _left(flow, region)

    def capacity(name: str) -> int:
        return flow.bytes_per_input.get(name, endless) + (endless if count_first else 0)

    def read(name: str, reader: tuple[str, str]) -> None:
        graph.add_edge(("tensor", name), reader)  # without a capacity: endless
        maker = ("operator", flow.maker[name].name) if name in inside else _START
        graph.add_edge(maker, ("tensor", name), capacity=capacity(name))
        if maker != _START:
            graph.add_edge(reader, maker)

    inside = {name for each in region for name in each.outputs}
    for each in region:
        for name in set(each.inputs) - flow.free:
            read(name, ("operator", each.name))
    for name in left:
        read(name, _END)
    graph.add_edge(_START, ("operator", last.name))
    for each in behind:
        graph.add_edge(("operator", each.name), _END)
    _, (ran, _) = nx.minimum_cut(graph, _START, _END)
    return frozenset(name for kind, name in ran if kind == "operator")
