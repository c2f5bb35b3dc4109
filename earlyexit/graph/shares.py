"""How much of a model's time has passed at a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from earlyexit.graph.dataflow import Dataflow
from earlyexit.graph.sites import Site

REPEATS = 10
"""Runs by which an operator is timed. The least counts: what else runs on a machine only adds, and a scheduler that
takes turns adds to the same operator in most runs, so that a median would keep it."""


def with_shares(
    sites: Sequence[Site], flow: Dataflow, outputs: Sequence[str], seconds: Mapping[str, float]
) -> tuple[Site, ...]:
    """The sites with the share of a model's seconds that have passed there.

    `flow`: the graph that was timed, in which the sites' tensors are; of it what leads to `outputs` counts. `seconds`:
    by the name of an operator; what takes none is left out.
    """
    model = flow.before(outputs)
    total = sum(seconds.get(name, 0.0) for name in model)
    if not total:
        return tuple(sites)

    def share(site: Site) -> float:
        return sum(seconds.get(name, 0.0) for name in flow.before(site.tensors) & model) / total

    return tuple(replace(site, seconds_share=share(site)) for site in sites)


def work_shares(sites: Sequence[Site], flow: Dataflow) -> tuple[Site, ...]:
    """The same as if every operator that works lasted equally long."""
    return with_shares(sites, flow, flow.outputs, {each.name: 1.0 for each in flow.live if each.kind == "work"})
