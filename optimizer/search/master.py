"""The master problem: which chains a plan combines, with which replicas, by dynamic programming.

A chain needs another replica only at certain rates. Between them, it has a best *option*: the replicas of its stages,
and the highest rate that they serve. The fastest options for each use of devices are combined into mixtures of one
chain, two chains, and so on. The result is optimal over all mixtures of the chains. In a cluster with more than
`MAX_USES` different uses of its devices, they are counted in units of several devices, and the optimum may be missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from optimizer.plans.plan import Stage, with_replicas
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.compiled import compiled
from profiles.scores import FloatArray, IntArray

TOLERANCE = 1e-9
MAX_USES = 250_000
"""Different uses of the devices that are distinguished, within which a mixture takes at most seconds."""
MAX_COUNTS = 2000
"""Different numbers of devices of one type that are distinguished."""
MOST_TRIED = 100
"""Uses of devices that are tried if the required rate fills the batches of the cheapest mixtures too slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateChain:
    """A chain that mixtures may use, by its needs at each stage (S)."""

    stages: tuple[Stage, ...] = ()
    """One replica each."""
    devices: tuple[int, ...]
    """Index of the accelerator type of each stage in `device_names` of the problem."""
    seconds: tuple[float, ...]
    """Replica seconds of each stage per input of the chain."""
    waits: tuple[float, ...]
    """Inputs per replica for which each stage's own batches wait. Divided by the rate, it is in seconds."""
    latency_s: float
    """Worst-case latency, without waits for batches."""
    fill: float
    """Inputs for which batches wait at the ingress. Divided by the rate, it is in seconds."""
    price: float = 0.0
    """Price at the dual prices with which the chain was found."""


class Mixture(NamedTuple):
    """A solution of the master problem."""

    chains: tuple[tuple[CandidateChain, tuple[int, ...]], ...]
    """Chains with the replicas of their stages. (): there is no mixture, or none was found."""
    bound: float | None
    """Bound on the objective of all mixtures of these chains: a rate, or USD per hour. If there is no mixture, it is 0
    or infinity. None: unknown, because devices were counted in units."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of all chains, with their replicas."""
        return tuple(stage for chain, counts in self.chains for stage in with_replicas(chain.stages, counts))


class Options(NamedTuple):
    """Chains with whole replicas (O), the fastest first."""

    use_O: IntArray
    """Index of the use of devices."""
    rate_O: FloatArray
    """The highest rate."""
    least_O: FloatArray
    """The rate from which batches fill in time."""
    chain_O: IntArray
    """Index of the chain."""


def best_mixtures(chains: Sequence[CandidateChain], problem: PlanProblem) -> list[Mixture]:
    """Returns the best mixture of a single chain, then the best one of up to `most_chains` chains.

    It has the highest rate, or the least cost at the required rate.
    """
    problem, required = _without_idle_devices(problem, chains), problem.required_per_s
    unit_C, size_C = _units(problem)
    options = _fastest_options(chains, problem, unit_C, size_C)
    use_UC = np.indices(size_C).reshape(len(size_C), -1).T.copy()
    usd_U = problem.usd_of(dict(zip(device_names(problem), (use_UC * unit_C).T, strict=True)))
    enough = TOLERANCE if required is None else required * (1 - TOLERANCE)
    rate_U, chosen_KU, mixtures = np.zeros(len(use_UC)), list[IntArray](), list[Mixture]()
    for before in range(problem.most_chains):
        rate_U, chosen_U = _with_another_chain(before, rate_U, use_UC, options)
        chosen_KU.append(chosen_U)
        if 0 < before < problem.most_chains - 1:
            continue
        is_possible_U = (rate_U >= enough) & (usd_U <= problem.max_usd_per_hour * (1 + TOLERANCE))
        worst, value_U = (0.0, -rate_U) if required is None else (math.inf, usd_U)
        excess_U = np.where(is_possible_U, value_U, worst)
        order_U = np.argsort(excess_U, kind="stable")[:MOST_TRIED]
        bound = abs(float(excess_U[order_U[0]])) if (unit_C == 1).all() else None
        every = (_parts(int(use), chosen_KU, options) for use in order_U[is_possible_U[order_U]])
        in_time = (parts for parts in every if required is None or options.least_O[parts].sum() <= required)
        used = [(chains[options.chain_O[part]], options.rate_O[part]) for part in next(in_time, [])]
        counts = [(chain, tuple(replicas_at(rate, chain).astype(int).tolist())) for chain, rate in used]
        mixtures.append(Mixture(tuple(counts), bound))
    return mixtures


def _without_idle_devices(problem: PlanProblem, chains: Sequence[CandidateChain]) -> PlanProblem:
    """Returns the problem without devices that no mixture of these chains needs to serve the required rate."""
    if problem.required_per_s is None or not chains:
        return problem
    devices = dict(problem.devices)
    for index, name in enumerate(device_names(problem)):
        parts = [zip(chain.devices, chain.seconds, strict=True) for chain in chains]
        seconds = [[seconds for device, seconds in stages if device == index] for stages in parts]
        # The chains share the rate, and each of their stages has a whole number of replicas.
        most = math.ceil(problem.required_per_s * max(map(sum, seconds))) + problem.most_chains * max(map(len, seconds))
        devices[name] = replace(devices[name], count=max(1, min(devices[name].count, most)))
    return replace(problem, devices=devices)


def _units(problem: PlanProblem) -> tuple[IntArray, tuple[int, ...]]:
    """Returns the devices of each type in a unit, and how many numbers of units may be in use: at most `MAX_USES`."""
    count_C = problem.count_C.astype(np.int64)
    unit_C = -(-count_C // MAX_COUNTS)
    while np.prod(count_C // unit_C + 1.0) > MAX_USES:
        unit_C[np.argmax(count_C // unit_C)] += 1
    return unit_C, tuple((count_C // unit_C + 1).tolist())


def _fastest_options(
    chains: Sequence[CandidateChain], problem: PlanProblem, unit_C: IntArray, size_C: tuple[int, ...]
) -> Options:
    """Returns the options that no other option beats."""
    stride_C = np.append(np.cumprod(size_C[:0:-1])[::-1], 1)
    rates, leasts, uses = [np.empty(0)], [np.empty(0)], [np.empty(0)]
    for chain in chains:
        rate_R, least_R, use_RC = options_of(chain, problem)
        unit_RC = np.ceil(use_RC / unit_C)
        fits_R = (unit_RC < size_C).all(axis=1)
        rates.append(rate_R[fits_R])
        leasts.append(least_R[fits_R])
        uses.append((unit_RC @ stride_C)[fits_R])
    rate_O, least_O, use_O = np.concatenate(rates), np.concatenate(leasts), np.concatenate(uses).astype(np.int64)
    chain_O = np.repeat(np.arange(len(chains)), [len(each) for each in rates[1:]])
    order_O = np.argsort(rate_O, kind="stable")
    fastest_U = np.full(size_C, -1)
    fastest_U.flat[use_O[order_O]] = np.arange(len(order_O))
    for axis in range(len(size_C)):  # the fastest option on at most these devices
        np.maximum.accumulate(fastest_U, axis=axis, out=fastest_U)
    kept_O = order_O[np.unique(fastest_U[fastest_U >= 0])[::-1]]
    return Options(use_O[kept_O], rate_O[kept_O], least_O[kept_O], chain_O[kept_O])


def options_of(chain: CandidateChain, problem: PlanProblem) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns the rates at which a chain needs another replica (R), as in `Options`, and the devices (R x C) then."""
    count_C = problem.count_C.astype(np.int64)
    counts = [np.arange(step, most + 1, step) for step, most in zip(-(-count_C // MAX_COUNTS), count_C, strict=True)]
    rate_R = np.concatenate([counts[c] / s for c, s in zip(chain.devices, chain.seconds, strict=True) if s > 0])
    replicas_RS = replicas_at(rate_R[:, None], chain)
    use_RC = replicas_RS @ np.eye(len(count_C))[list(chain.devices)]
    # `optimizer.cost.evaluate` has the full tolerance, because it rounds differently. The room is above 0, so that
    # without any only chains that never wait are possible.
    room_s = max(problem.slo.limit_s * (1 + TOLERANCE / 2) - chain.latency_s, 1e-300)
    least_R = (chain.fill + replicas_RS @ np.array(chain.waits)) / room_s
    highest_R = np.minimum(rate_R, problem.required_per_s or math.inf)
    is_possible_R = (use_RC <= count_C).all(axis=1) & (least_R <= highest_R)
    return rate_R[is_possible_R], least_R[is_possible_R], use_RC[is_possible_R]


def replicas_at(rate: FloatArray, chain: CandidateChain) -> FloatArray:
    """Returns the replicas of each stage that a rate needs."""
    return np.asarray(np.maximum(np.ceil(rate * np.array(chain.seconds) * (1 - TOLERANCE)), 1.0))


@compiled
def _with_another_chain(
    before: int, rate_U: FloatArray, use_UC: IntArray, options: Options
) -> tuple[FloatArray, IntArray]:
    """Returns the highest rate of `before` + 1 chains on at most these devices, and the fastest chain's option.

    `rate_U` holds the highest rates of `before` chains. If another chain is no gain, the option is -1.
    """
    use_O, rate_O, use_OC = options.use_O, options.rate_O, use_UC[options.use_O]
    most_U, chosen_U = rate_U.copy(), np.full(rate_U.size, -1)
    for use in range(rate_U.size):
        for option in range(rate_O.size):
            if rate_O[option] + min(rate_U[use], before * rate_O[option]) <= most_U[use] * (1 + TOLERANCE):
                break  # further options are slower; fewer devices are not faster, and the other chains are slower
            device = 0
            while device < use_UC.shape[1] and use_OC[option, device] <= use_UC[use, device]:
                device += 1
            if device < use_UC.shape[1]:
                continue
            rate = rate_U[use - use_O[option]] + rate_O[option]
            if rate > most_U[use] * (1 + TOLERANCE):
                most_U[use], chosen_U[use] = rate, option
    return most_U, chosen_U


def _parts(use: int, chosen_KU: Sequence[IntArray], options: Options) -> list[int]:
    """Returns the options of the best mixture on at most these devices."""
    parts = []
    for chosen_U in reversed(chosen_KU):
        if chosen_U[use] >= 0:
            parts.append(int(chosen_U[use]))
            use -= int(options.use_O[parts[-1]])
    return parts
