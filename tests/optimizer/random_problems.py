"""Seeded small plan problems, odd ones among them: what the planner and its twin are compared on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng

from optimizer.problem import Link, MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem, Slo, Supply
from profiles.table import LatencyTable

FloatArray = npt.NDArray[np.float64]
BATCHES = ((1,), (4,), (1, 2), (2, 8), (1, 4), (1, 2, 4), (2, 3, 8), (4, 8, 16))


def random_problem(seed: int) -> PlanProblem:
    """1 to 5 blocks, one or two accelerator types, up to three of each; about a fifth have no plan."""
    rng = default_rng(seed)
    num_blocks = int(rng.choice([1, 2, 3, 4, 5], p=[0.03, 0.25, 0.35, 0.3, 0.07]))
    ramps = tuple(ramp for ramp in range(num_blocks - 1) if rng.random() < rng.choice([0.5, 1.0, 0.9]))
    return random_problem_of(rng, num_blocks, ramps)


def random_problem_of(rng: Generator, num_blocks: int, ramps: tuple[int, ...]) -> PlanProblem:
    """Of these blocks and ramps."""
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
    """The same problem, of which early answers at a rate are sought; about half have a budget for ramps."""
    problem, rng = random_problem(seed), default_rng((seed, 1))
    asked = problem.asked_per_s
    fastest = max(
        supply.count * problem.latency[name].batches[-1] / _whole_s(problem.latency[name])
        for name, supply in problem.devices.items()
    )
    # Mostly far below what the devices do: there batches of several splits wait, and staying may be worth it.
    rate_per_s = asked if asked is not None and rng.random() < 0.5 else max(fastest, 1.0) * _log_uniform(rng, 0.02, 1)
    budget = _log_uniform(rng, 0.005, 0.5) if rng.random() < 0.5 else None
    return replace(problem, objective=MinimizeLatency(rate_per_s=rate_per_s, ramp_budget=budget))


def _table(rng: Generator, num_blocks: int, num_ramps: int) -> LatencyTable:
    """Mostly a fixed and a growing part per block; at times seconds that follow no rule."""
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
    """Falls after ramps; at times not at all, down to 0, or (which a planner must not mind) where no ramp is."""
    shares = [1.0]
    flat, dies, anywhere = rng.random() < 0.1, rng.random() < 0.1, rng.random() < 0.2
    for block in range(num_blocks - 1):
        falls = not flat and (anywhere or block in ramps)
        left = 0.0 if dies and block == num_blocks - 2 else rng.choice([rng.random(), 1.0], p=[0.9, 0.1])
        shares.append(shares[-1] * float(left) if falls else shares[-1])
    return tuple(shares)


def _supply(rng: Generator) -> Supply:
    count = int(rng.choice([0, 1, 2, 3], p=[0.05, 0.2, 0.35, 0.4]))
    return Supply(count=count, usd_per_hour=float(rng.choice([0.0, 0.35, rng.uniform(0.5, 4)], p=[0.05, 0.15, 0.8])))


def _link(rng: Generator) -> Link:
    bandwidth = float(rng.choice([1e9, 1e7, 1e6], p=[0.6, 0.3, 0.1]))
    return Link(bandwidth_bytes_per_s=bandwidth, delay_s=float(rng.choice([0.0, 1e-4, 3e-3])))


def _objective(rng: Generator, highest_rate_per_s: float) -> Objective:
    if rng.random() < 0.5:
        return MaximizeRate()
    return MinimizeCost(rate_per_s=highest_rate_per_s * _log_uniform(rng, 0.05, 1.2))


def _whole_s(table: LatencyTable) -> float:
    """The whole model at the largest batch."""
    return float(table.block_s_NB[:, -1].sum())


def _log_uniform(rng: Generator, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())
