"""E3, figure 17: how latencies of 100,000 inputs are spread.

Simulated under three loads: single inputs at one rate for all sides; batches of 8 at that rate, as E3's
scheduler forms them; and batches of 8 near every side's own capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np

from experiments.recorded_exits import BERT12_SST2
from experiments.studies.picture import Box, Boxes
from experiments.studies.sides import (
    SEED,
    WARM_UP_SLOS,
    Workload,
    decide,
    equal_cluster,
    facing,
    goodput,
    mixed_cluster,
    scenario,
    serve,
    sst2,
)
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, ratio
from optimizer.decision import Planned
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit
from simulator.scenario import FloatArray, poisson_arrivals

BATCH = 8
EASY_SHARE = 0.5
NUM_INPUTS = {"full": 100_000, "quick": 8_000}
OF_SLOWEST = 0.8
"""The one rate, as a share of the goodput of the slowest side."""
OF_OWN = 0.9
"""The rate near a side's own capacity; its batches come in equal gaps, so that queues are short as in a closed loop."""
HELD = "early-exit, held"
"""Answers of a batch that wait for its last one."""
SINGLES, BATCHES, OWN = "inputs, one rate", "batches, one rate", "batches, own capacity"


Load = tuple[float, int]
"""Inputs per second, and how many come at a time: 1 in Poisson arrivals, more in equal gaps."""


def arrivals_s(load: Load, duration_s: float) -> FloatArray:
    """When requests come."""
    rate_per_s, batch = load
    return (
        poisson_arrivals(rate_per_s, duration_s, SEED) if batch == 1 else np.arange(0.0, duration_s, batch / rate_per_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Latencies of one side under one load."""

    rate_per_s: float
    box: Box
    """Milliseconds, each input's own."""
    held: Box
    """The same where a request's inputs wait for its last one."""
    in_slo_share: float


Sides = Mapping[str, Spread]
Spreads = Mapping[str, Mapping[str, Sides]]
"""By load, cluster and side."""


def spread(problem: PlanProblem, planned: Planned, inputs: Workload, load: Load, num_inputs: int) -> Spread:
    """Simulate so many inputs after a warm-up; all are answered."""
    (rate_per_s, batch), warm_up_s = load, WARM_UP_SLOS * problem.slo.latency_s
    duration_s = warm_up_s + num_inputs / rate_per_s
    at_s = arrivals_s(load, duration_s)
    outcome = serve(scenario(problem, planned, inputs, at_s, duration_s, warm_up_s=warm_up_s, inputs_per_request=batch))
    latency_s_RB = outcome.latency_s_N.reshape(-1, outcome.inputs_per_request)
    latency_ms_RB = latency_s_RB[outcome.arrived_s_R >= outcome.warm_up_s] * 1e3
    return Spread(
        rate_per_s=rate_per_s,
        box=box_of(latency_ms_RB.ravel()),
        held=box_of(latency_ms_RB.max(1)),
        in_slo_share=outcome.figures().in_slo_share,
    )


def box_of(values_N: FloatArray) -> Box:
    """Minimum, quartiles and maximum."""
    return Box(*np.percentile(values_N, (0, 25, 50, 75, 100)).tolist())


def loads(one_per_s: float, own_per_s: float) -> dict[str, Load]:
    """From the one rate, and the goodput of a side."""
    return {SINGLES: (one_per_s, 1), BATCHES: (one_per_s, BATCH), OWN: (OF_OWN * own_per_s, BATCH)}


def spreads_of(problem: PlanProblem, inputs: Workload, effort: Effort) -> dict[str, dict[str, Spread]]:
    """On one cluster, every side's spread by load."""
    planned = {side: each for side, each in decide(problem).items() if isinstance(each, Planned)}
    goodputs = {side: goodput(problem, each, inputs, effort).rate_per_s for side, each in planned.items()}
    one_per_s = OF_SLOWEST * min(goodputs.values())
    found: dict[str, dict[str, Spread]] = {SINGLES: {}, BATCHES: {}, OWN: {}}
    for side, each in planned.items():
        for name, load in loads(one_per_s, goodputs[side]).items():
            found[name][side] = spread(problem, each, inputs, load, NUM_INPUTS[effort])
    return found


def compare(by_load: Spreads, slo_s: float) -> StudyResult:
    """A picture per load; ratios of the load that is nearest to the paper's: batches of 8 at one rate."""
    return StudyResult(
        comparisons=tuple(each for cluster, sides in by_load[BATCHES].items() for each in _comparisons(cluster, sides)),
        pictures=tuple(_boxes(load, of_load, 1e3 * slo_s) for load, of_load in by_load.items()),
        tables=(
            Table(
                "Latencies (ms)",
                ("load", "cluster", "side", "inputs/s", "minimum", "quartile", "median", "third", "maximum"),
                tuple(
                    (load, name, side, sides[side.removesuffix(", held")].rate_per_s, *astuple(box))
                    for load, of_load in by_load.items()
                    for name, sides in of_load.items()
                    for side, box in with_held(sides).items()
                ),
            ),
        ),
    )


def _comparisons(cluster: str, sides: Sides) -> tuple[Comparison, ...]:
    """The paper's ratios were all below 1."""
    boxes = with_held(sides)
    return tuple(
        Comparison(f"{words}: e3 / {other}, {cluster}", ratio(getattr(boxes["e3"], name), getattr(boxes[other], name)))
        for name, words in (("median", "median"), ("third_quartile", "third quartile"))
        for other in ("stock", "early-exit", HELD)
        if other in boxes and "e3" in boxes
    )


def with_held(sides: Sides) -> dict[str, Box]:
    """Every side's box, and that of early-exit if a batch's answers came together."""
    boxes = {side: each.box for side, each in sides.items()}
    early_exit = sides.get("early-exit")
    if early_exit is not None and early_exit.held != early_exit.box:
        boxes[HELD] = early_exit.held
    return boxes


def _boxes(load: str, of_load: Mapping[str, Sides], slo_ms: float) -> Boxes:
    by_cluster = {cluster: with_held(sides) for cluster, sides in of_load.items()}
    names = dict.fromkeys(name for boxes in by_cluster.values() for name in boxes)
    series = {name: tuple(boxes.get(name) for boxes in by_cluster.values()) for name in names}
    return Boxes(f"Latency: {load}", "cluster", "latency (ms)", tuple(by_cluster), series, slo_ms)


def run(effort: Effort) -> StudyResult:
    """Half easy, half hard inputs on E3's clusters; quick effort has the one of equal accelerators."""
    clusters, inputs = {"16 V100": equal_cluster()}, sst2(EASY_SHARE)
    slo_s = clusters["16 V100"].slo.latency_s
    if effort == "full":
        clusters["6 V100, 8 P100, 15 K80"] = mixed_cluster()
    found = {
        name: spreads_of(facing(with_batch_limit(problem, BATCH), inputs), inputs, effort)
        for name, problem in clusters.items()
    }
    by_load = {load: {name: spreads[load] for name, spreads in found.items()} for load in (SINGLES, BATCHES, OWN)}
    return compare(by_load, slo_s)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
