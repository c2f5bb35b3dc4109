"""Seeded small problems of chains: up to three networks of up to three blocks, any of which a plan may leave out."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations

from numpy.random import Generator, default_rng

from optimizer.problem import MinimizeLatency, PlanProblem
from profiles.table import LatencyTable
from tests.optimizer.random_problems import random_problem_of

TWO = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (2, 3), (3, 2))
THREE = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (1, 2, 2))
LARGE = ((3, 3), (1, 2, 3), (3, 1, 2), (2, 2, 2))
"""Rare, and on one device with one or two batch sizes: of these there are many plans."""


def random_chain(seed: int) -> PlanProblem:
    """A chain's problem of any objective; about half know the survival of every set of networks."""
    rng = default_rng((seed, 22))
    large = rng.random() < 0.04
    lengths_there = LARGE if large else (*TWO, *THREE)
    lengths = lengths_there[int(rng.integers(len(lengths_there)))]
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
    if rng.random() < 0.4 and chain.asked_per_s is not None:
        return replace(chain, objective=MinimizeLatency(rate_per_s=chain.asked_per_s))
    return chain


def _survival_of(
    rng: Generator, problem: PlanProblem, networks: tuple[int, ...]
) -> dict[tuple[int, ...], tuple[float, ...]]:
    """Of most sets of networks; falls only behind their own ramps, to other shares than in other sets."""
    found, last = {}, len(networks) - 1
    for size in range(last + 1):
        for some in combinations(range(last), size):
            used = (*some, last)
            starts = (0, *networks)
            there = {block for network in used for block in range(starts[network], networks[network])}
            shares = [1.0]
            for block in range(problem.num_blocks - 1):
                falls = block in problem.ramps and block in there
                shares.append(shares[-1] * (float(rng.random()) if falls else 1.0))
            if rng.random() < 0.8:
                found[used] = tuple(shares)
    return found


def _shares(rng: Generator, count: int) -> tuple[float, ...]:
    return tuple(float(share) for share in rng.uniform(0.3, 1.0, count))


def _small(problem: PlanProblem) -> PlanProblem:
    """On one accelerator type, with at most two batch sizes."""
    name = next(iter(problem.devices))
    return replace(problem, devices={name: problem.devices[name]}, latency={name: _smaller(problem.latency[name])})


def _smaller(table: LatencyTable) -> LatencyTable:
    columns = slice(max(0, len(table.batches) - 2), None)
    return replace(
        table,
        batches=table.batches[columns],
        block_s_NB=table.block_s_NB[:, columns],
        ramp_s_EB=table.ramp_s_EB[:, columns],
    )
