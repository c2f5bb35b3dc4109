"""Planning problems for tests: simple ones, one that is solved by hand, and random ones of one network or a chain."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng

from earlyexit.network.boundary import Split
from optimizer.plans.plan import Stage
from optimizer.problems.problem import (
    Link,
    MaximizeRate,
    MinimizeCost,
    MinimizeLatency,
    Objective,
    PlanProblem,
    Slo,
    Supply,
)
from profiles.table import LatencyTable


def plain_problem(**fields: Any) -> PlanProblem:
    """Returns the problem of the highest rate within a second, on one free accelerator of each type.

    Each block but the last has a ramp, and hops carry nothing. `fields` must hold survival and latency.
    """
    num_blocks = len(fields["survival_N"])
    plain: dict[str, Any] = {
        "num_blocks": num_blocks,
        "ramps": tuple(range(num_blocks - 1)),
        "devices": {name: Supply(count=1) for name in fields["latency"]},
        "link": Link(bandwidth_bytes_per_s=1e9),
        "bytes_per_sample_N": (0.0,) * num_blocks,
        "slo": Slo(latency_s=1.0),
        "objective": MaximizeRate(),
    }
    return PlanProblem(**plain | fields)


DOCUMENT: dict[str, Any] = {
    "blocks": 2,
    "ramps": [0],
    "survival": [1.0, 0.5],
    "latency": {"V100": {"batch": [1, 2, 4], "block_s": [[0.001] * 3] * 2, "ramp_s": [[0.0] * 3]}},
    "devices": {"V100": {"count": 4, "usd_per_hour": 3}},
    "link": {"bandwidth_bytes_per_s": 1e9},
    "bytes_per_sample": 1000,
    "slo": {"latency_s": 0.1, "slack": 0.2},
    "objective": {"maximize": "rate"},
}
BEST = (
    Stage(device="V100", replicas=1, splits=(Split(first=0, end=1, batch=4, ramps=(0,)),)),
    Stage(device="V100", replicas=2, splits=(Split(first=1, end=2, batch=2),)),
)
"""The rate is 4000/s: stage 0 does 4 inputs in 1 ms. Half of them reach stage 1, whose 2 replicas do 4 in 1 ms."""


FloatArray = npt.NDArray[np.float64]
BATCHES = ((1,), (4,), (1, 2), (2, 8), (1, 4), (1, 2, 4), (2, 3, 8), (4, 8, 16))


def random_problem(seed: int) -> PlanProblem:
    """Returns a problem of 1 to 5 blocks and 1 or 2 accelerator types with up to 3 devices. A fifth have no plan."""
    rng = default_rng(seed)
    num_blocks = int(rng.choice([1, 2, 3, 4, 5], p=[0.03, 0.25, 0.35, 0.3, 0.07]))
    ramps = tuple(ramp for ramp in range(num_blocks - 1) if rng.random() < rng.choice([0.5, 1.0, 0.9]))
    return random_problem_of(rng, num_blocks, ramps)


def random_problem_of(rng: Generator, num_blocks: int, ramps: tuple[int, ...]) -> PlanProblem:
    """Returns a random problem with these blocks and ramps."""
    names = ("V100", "T4")[: rng.integers(1, 3)]
    latency = {name: _table(rng, num_blocks, len(ramps)) for name in names}
    devices = {name: _supply(rng) for name in names}
    if len(names) == 2 and rng.random() < 0.1:
        del devices["T4"]
    fastest = max(latency[name].batches[-1] / _whole_s(latency[name]) for name in devices)
    num_devices = max(1, sum(supply.count for supply in devices.values()))
    dearest = max(0.1, sum(supply.count * supply.usd_per_hour for supply in devices.values()))
    return PlanProblem(
        num_blocks=num_blocks,
        ramps=ramps,
        survival_N=_survival(rng, num_blocks, ramps),
        latency=latency,
        devices=devices,
        link=_link(rng),
        bytes_per_sample_N=tuple((rng.choice([0.0, 1e3, 1e5]) * rng.random(num_blocks)).tolist()),
        slo=Slo(
            latency_s=max(_whole_s(table) for table in latency.values()) * _log_uniform(rng, 0.8, 60),
            slack=float(rng.choice([0.0, 0.2, 0.9 * rng.random()], p=[0.3, 0.5, 0.2])),
        ),
        objective=_objective(rng, fastest * num_devices),
        budget_usd_per_hour=dearest * _log_uniform(rng, 0.3, 1.2) if rng.random() < 0.25 else None,
    )


def random_latency_problem(seed: int) -> PlanProblem:
    """Returns a random problem that minimizes the mean answer time at a rate. About half have a ramp budget."""
    problem, rng = random_problem(seed), default_rng((seed, 1))
    rate = problem.required_per_s
    fastest = max(
        supply.count * problem.latency[name].batches[-1] / _whole_s(problem.latency[name])
        for name, supply in problem.devices.items()
    )
    # Most rates are far below the capacity: batches of several splits then wait, and `stay` may be better.
    rate_per_s = rate if rate is not None and rng.random() < 0.5 else max(fastest, 1.0) * _log_uniform(rng, 0.02, 1)
    budget = _log_uniform(rng, 0.005, 0.5) if rng.random() < 0.5 else None
    return replace(problem, objective=MinimizeLatency(queues=False, rate_per_s=rate_per_s, ramp_budget=budget))


def _table(rng: Generator, num_blocks: int, num_ramps: int) -> LatencyTable:
    """Returns random latencies: usually a fixed and a linear part per block, sometimes arbitrary seconds."""
    batches = BATCHES[rng.integers(len(BATCHES))]
    scale_s = _log_uniform(rng, 1e-3, 1e-2)
    ramp_scale_s = scale_s * float(rng.choice([0.0, 0.05, 0.2, 1.5], p=[0.15, 0.45, 0.3, 0.1]))
    rule = _odd if rng.random() < 0.2 else _sublinear
    return LatencyTable(
        batches=batches,
        block_s_NB=scale_s * rule(rng, num_blocks, batches),
        ramp_s_EB=ramp_scale_s * rule(rng, num_ramps, batches),
    )


def _sublinear(rng: Generator, num_rows: int, batches: tuple[int, ...]) -> FloatArray:
    fixed_R1, growing_R1 = rng.uniform(0.2, 1, (num_rows, 1)), rng.uniform(0, 0.3, (num_rows, 1))
    return fixed_R1 + growing_R1 * np.array(batches, dtype=np.float64)


def _odd(rng: Generator, num_rows: int, batches: tuple[int, ...]) -> FloatArray:
    return np.exp(rng.normal(size=(num_rows, len(batches))))


def _survival(rng: Generator, num_blocks: int, ramps: tuple[int, ...]) -> tuple[float, ...]:
    """Returns a survival that falls after ramps. Sometimes it is constant, falls to 0, or falls without a ramp."""
    shares = [1.0]
    flat, dies, anywhere = rng.random() < 0.1, rng.random() < 0.1, rng.random() < 0.2
    for block in range(num_blocks - 1):
        falls = not flat and (anywhere or block in ramps)
        left = 0.0 if dies and block == num_blocks - 2 else rng.choice([rng.random(), 1.0], p=[0.9, 0.1])
        shares.append(shares[-1] * float(left) if falls else shares[-1])
    return tuple(shares)


def _supply(rng: Generator) -> Supply:
    count = int(rng.choice([0, 1, 2, 3], p=[0.05, 0.2, 0.35, 0.4]))
    usd_per_hour = float(rng.choice([0.0, 0.35, rng.uniform(0.5, 4)], p=[0.05, 0.15, 0.8]))
    return Supply(count=count, usd_per_hour=usd_per_hour, per_node=int(rng.spawn(1)[0].choice([1, 2, 8])))


def _link(rng: Generator) -> Link:
    bandwidth = float(rng.choice([1e9, 1e7, 1e6], p=[0.6, 0.3, 0.1]))
    return Link(bandwidth_bytes_per_s=bandwidth, delay_s=float(rng.choice([0.0, 1e-4, 3e-3])))


def _objective(rng: Generator, highest_rate_per_s: float) -> Objective:
    if rng.random() < 0.5:
        return MaximizeRate()
    return MinimizeCost(rate_per_s=highest_rate_per_s * _log_uniform(rng, 0.05, 1.2))


def _whole_s(table: LatencyTable) -> float:
    """Returns the seconds of the whole model at the largest batch."""
    return float(table.block_s_NB[:, -1].sum())


def _log_uniform(rng: Generator, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


TWO = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (2, 3), (3, 2))
THREE = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (1, 2, 2))
LARGE = ((3, 3), (1, 2, 3), (3, 1, 2), (2, 2, 2))
"""Used rarely, and with one device type and at most two batch sizes, because such problems have many plans."""


def random_chain(seed: int) -> PlanProblem:
    """Returns a random problem of a chain with any objective. About half have a survival for each set of networks."""
    rng = default_rng((seed, 22))
    large = rng.random() < 0.04
    choices = LARGE if large else (*TWO, *THREE)
    lengths = choices[int(rng.integers(len(choices)))]
    networks = tuple(int(end) for end in accumulate(lengths))
    ramps = tuple(
        block
        for block in range(networks[-1] - 1)
        if rng.random() < (0.85 if block + 1 in networks else 0.3 if large else 0.5)
    )
    problem = random_problem_of(rng, networks[-1], ramps)
    chain = replace(
        _small(problem) if networks[-1] > 4 else problem,
        networks=networks,
        survival_of=_survival_of(rng, problem, networks) if rng.random() < 0.5 else None,
        crossing_s=float(rng.choice([0.0, 1e-4, 0.3])),
        crossing_tokens=_shares(rng, len(networks)) if rng.random() < 0.2 else (),
    )
    if rng.random() < 0.4 and chain.required_per_s is not None:
        return replace(chain, objective=MinimizeLatency(queues=False, rate_per_s=chain.required_per_s))
    return chain


def _survival_of(
    rng: Generator, problem: PlanProblem, networks: tuple[int, ...]
) -> dict[tuple[int, ...], tuple[float, ...]]:
    """Returns an independent survival for most sets of networks, which falls only after the ramps of the set."""
    survival_of, last = {}, len(networks) - 1
    for size in range(last + 1):
        for others in combinations(range(last), size):
            used = (*others, last)
            starts = (0, *networks)
            blocks = {block for network in used for block in range(starts[network], networks[network])}
            shares = [1.0]
            for block in range(problem.num_blocks - 1):
                falls = block in problem.ramps and block in blocks
                shares.append(shares[-1] * (float(rng.random()) if falls else 1.0))
            if rng.random() < 0.8:
                survival_of[used] = tuple(shares)
    return survival_of


def _shares(rng: Generator, count: int) -> tuple[float, ...]:
    return tuple(float(share) for share in rng.uniform(0.3, 1.0, count))


def _small(problem: PlanProblem) -> PlanProblem:
    """Returns the problem with one accelerator type and at most two batch sizes."""
    name, table = next(iter(problem.latency.items()))
    latency = {name: some_sizes(table, table.batches[-2:])}
    return replace(problem, devices={name: problem.devices[name]}, latency=latency)


def some_sizes(table: LatencyTable, sizes: tuple[int, ...]) -> LatencyTable:
    """Returns the table with only these batch sizes."""
    columns = [table.batches.index(size) for size in sizes]
    return LatencyTable(batches=sizes, block_s_NB=table.block_s_NB[:, columns], ramp_s_EB=table.ramp_s_EB[:, columns])
