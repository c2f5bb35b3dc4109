"""E3, figure 17: the distribution of the latencies of 100,000 inputs.

Simulated under three loads: single inputs at one rate for all sides; batches of 8 at that rate, as E3's scheduler forms
them; and batches of 8 near every side's own capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import NamedTuple

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
from optimizer.problems.problem import PlanProblem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Planned
from simulator.scenario import FloatArray, poisson_arrivals

BATCH = 8
EASY_SHARE = 0.5
NUM_INPUTS = {"full": 100_000, "quick": 8_000}
OF_SLOWEST = 0.8
"""The common rate, as a share of the goodput of the slowest side."""
OF_OWN = 0.9
"""The rate near a side's own capacity, in batches at equal intervals, so that queues are short."""
HELD = "early-exit, held"
"""Answers of a batch that wait for its last one."""
SINGLES, BATCHES, OWN = "inputs, one rate", "batches, one rate", "batches, own capacity"
COLUMNS = ("load", "cluster", "side", "inputs/s", "answered", "minimum", "quartile", "median", "third", "maximum")


class Spread(NamedTuple):
    """Latencies of one side under one load, in milliseconds."""

    rate_per_s: float
    answered: float
    """Share of answered inputs. The others were dropped, and are not in the box."""
    box: Box


Sides = Mapping[str, Spread]


def spreads(
    problem: PlanProblem, planned: Planned, inputs: Workload, load: tuple[float, int], num_inputs: int
) -> Sides:
    """Returns latencies after a warm-up: per input, and per request as `HELD`, which waits for its last input.

    `load`: inputs per second, and the number that arrive together: 1 as Poisson arrivals, more at equal intervals.
    """
    (rate_per_s, batch), warm_up_s = load, WARM_UP_SLOS * problem.slo.latency_s
    duration_s = warm_up_s + num_inputs / rate_per_s
    gaps_s = np.arange(0.0, duration_s, batch / rate_per_s)
    at_s = poisson_arrivals(rate_per_s, duration_s, SEED) if batch == 1 else gaps_s
    outcome = serve(scenario(problem, planned, inputs, at_s, duration_s, warm_up_s=warm_up_s, inputs_per_request=batch))
    latency_s_RB = outcome.latency_s_N.reshape(-1, outcome.inputs_per_request)
    latency_ms_RB = latency_s_RB[outcome.arrived_s_R >= outcome.warm_up_s] * 1e3
    own, held = (spread(rate_per_s, each) for each in (latency_ms_RB.ravel(), latency_ms_RB.max(1)))
    return {"own": own, "held": held}


def spread(rate_per_s: float, values_N: FloatArray) -> Spread:
    """Returns minimum, quartiles and maximum of the answers; NaN marks an input without an answer."""
    box = Box(*np.nanpercentile(values_N, (0, 25, 50, 75, 100)).tolist())
    return Spread(rate_per_s, float(np.isfinite(values_N).mean()), box)


def on_cluster(problem: PlanProblem, inputs: Workload, effort: Effort) -> dict[str, dict[str, Spread]]:
    """Returns the latencies by load and side; for early-exit also if a batch's answers were sent together."""
    planned = {side: each for side, each in decide(problem).items() if isinstance(each, Planned)}
    goodputs = {side: goodput(problem, each, inputs, effort).rate_per_s for side, each in planned.items()}
    one_per_s = OF_SLOWEST * min(goodputs.values())
    found: dict[str, dict[str, Spread]] = {SINGLES: {}, BATCHES: {}, OWN: {}}
    held: dict[str, dict[str, Spread]] = {SINGLES: {}, BATCHES: {}, OWN: {}}
    for side, each in planned.items():
        loads = {SINGLES: (one_per_s, 1), BATCHES: (one_per_s, BATCH), OWN: (OF_OWN * goodputs[side], BATCH)}
        for name, load in loads.items():
            of = spreads(problem, each, inputs, load, NUM_INPUTS[effort])
            found[name][side] = of["own"]
            if side == "early-exit" and of["held"] != of["own"]:
                held[name][HELD] = of["held"]
    return {load: of | held[load] for load, of in found.items()}


def run(effort: Effort) -> StudyResult:
    """Runs half easy, half hard inputs on E3's clusters; with quick effort only on equal accelerators.

    There is a picture per load. The ratios are those of the load closest to the paper's: batches of 8 at one rate.
    """
    clusters, inputs = {"16 V100": equal_cluster()}, sst2(EASY_SHARE)
    slo_ms = 1e3 * clusters["16 V100"].slo.latency_s
    if effort == "full":
        clusters["6 V100, 8 P100, 15 K80"] = mixed_cluster()
    found = {
        name: on_cluster(facing(with_batch_limit(problem, BATCH), inputs), inputs, effort)
        for name, problem in clusters.items()
    }
    by_load = {load: {name: of[load] for name, of in found.items()} for load in (SINGLES, BATCHES, OWN)}
    return StudyResult(
        comparisons=tuple(each for cluster, sides in by_load[BATCHES].items() for each in _comparisons(cluster, sides)),
        pictures=tuple(_boxes(load, clusters_, slo_ms) for load, clusters_ in by_load.items()),
        tables=(
            Table(
                "Latencies (ms)",
                COLUMNS,
                tuple(
                    (load, name, side, each.rate_per_s, f"{each.answered:.2%}", *astuple(each.box))
                    for load, of_load in by_load.items()
                    for name, sides in of_load.items()
                    for side, each in sides.items()
                ),
            ),
        ),
    )


def _comparisons(cluster: str, sides: Sides) -> tuple[Comparison, ...]:
    """The paper's ratios were all below 1."""
    return tuple(
        Comparison(
            f"{words}: e3 / {other}, {cluster}", ratio(getattr(sides["e3"].box, name), getattr(sides[other].box, name))
        )
        for name, words in (("median", "median"), ("third_quartile", "third quartile"))
        for other in ("stock", "early-exit", HELD)
        if other in sides and "e3" in sides
    )


def _boxes(load: str, by_cluster: Mapping[str, Sides], slo_ms: float) -> Boxes:
    names = dict.fromkeys(name for sides in by_cluster.values() for name in sides)
    series = {
        name: tuple(sides[name].box if name in sides else None for sides in by_cluster.values()) for name in names
    }
    return Boxes(f"Latency: {load}", "cluster", "latency (ms)", tuple(by_cluster), series, slo_ms)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
