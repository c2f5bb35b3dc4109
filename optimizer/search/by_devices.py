"""The master problem of one model on a small cluster, by a dynamic program over the numbers of devices in use.

A column needs another replica only at certain rates. Between them, it has a best *option*: the replicas of its stages,
and the highest rate that they serve. The fastest options for each use of devices are combined into mixtures of one
chain, two chains, and so on. The result is optimal over all mixtures of the columns, and takes milliseconds where
HiGHS needs seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.search.master import MARGIN, TOLERANCE, Column, Demand, Mixture
from optimizer.search.step import FloatArray, IntArray

MAX_USES = 4000
"""Different uses of a small cluster's devices. In larger clusters, HiGHS is faster."""
Use = tuple[int, ...]
"""Devices in use, by index of their type."""


@dataclass(frozen=True, slots=True)
class Option:
    """A column with integer numbers of replicas."""

    column: int
    replicas: tuple[int, ...]
    rate: float
    """The highest rate."""
    least_rate: float
    """The rate from which batches fill in time."""


def is_small(demand: Demand) -> bool:
    """Returns whether mixtures are found by a dynamic program."""
    return float(np.prod(demand.count_C + 1)) <= MAX_USES


def mixture_by_devices(columns: Sequence[Column], demand: Demand) -> tuple[bool, Mixture | None]:
    """Returns whether the best mixture was found, and the mixture. None: there is none.

    The cost is minimized if the model requires a rate; otherwise, the rate is maximized. The best mixture is not found
    if at the required rate the batches of the cheapest chains would fill too slowly.
    """
    options = fastest_options(columns, demand)
    rate_U, chosen_KU = _combined(options, demand)
    usd_U = np.tensordot(demand.usd_C, np.indices(rate_U.shape), axes=1)
    required = demand.rate_per_s
    enough = TOLERANCE if required is None else required * (1 - TOLERANCE)
    is_possible_U = (rate_U >= enough) & (usd_U <= demand.budget * (1 + TOLERANCE))
    if not is_possible_U.any():
        return True, None
    best = int(np.argmin(np.where(is_possible_U, -rate_U if required is None else usd_U, np.inf)))
    parts = list(_parts(np.unravel_index(best, rate_U.shape), options, chosen_KU))
    least, most = sum(part.least_rate for part in parts), sum(part.rate for part in parts)
    if required is not None and required < least:
        return False, None
    share = 1.0 if required is None or most <= required else (required - least) / (most - least)
    return True, Mixture(
        rates={part.column: part.least_rate + share * (part.rate - part.least_rate) for part in parts},
        replicas={part.column: part.replicas for part in parts},
        bound=most if required is None else float(usd_U.flat[best]),
    )


def fastest_options(columns: Sequence[Column], demand: Demand) -> dict[Use, Option]:
    """Returns the fastest option for each use of devices by one chain."""
    fastest: dict[Use, Option] = {}
    for q, column in enumerate(columns):
        device_S, seconds_S, wait_S = np.array(column.devices), np.array(column.seconds), np.array(column.waits)
        counts = [np.arange(1, demand.count_C[device] + 1) for device in device_S]
        rate_R = np.unique(np.concatenate([n / s for n, s in zip(counts, seconds_S, strict=True) if s > 0]))
        replicas_RS = np.maximum(np.ceil(np.outer(rate_R, seconds_S) * (1 - TOLERANCE)), 1.0)
        used_RC = replicas_RS @ (device_S[:, None] == np.arange(len(demand.count_C)))
        # Above 0, so that without any room only columns that never wait are possible.
        room_s = max((demand.limit_s - column.latency_s) * (1 - MARGIN), 1e-300)
        least_R = (column.fill + replicas_RS @ wait_S) / room_s
        highest_R = rate_R if demand.rate_per_s is None else np.minimum(rate_R, demand.rate_per_s)
        is_possible_R = (used_RC <= demand.count_C).all(axis=1) & (least_R <= highest_R)
        for r in np.flatnonzero(is_possible_R):
            use = tuple(int(count) for count in used_RC[r])
            if use not in fastest or rate_R[r] > fastest[use].rate:
                replicas = tuple(int(count) for count in replicas_RS[r])
                fastest[use] = Option(q, replicas, float(rate_R[r]), float(least_R[r]))
    return fastest


def _combined(options: Mapping[Use, Option], demand: Demand) -> tuple[FloatArray, list[IntArray]]:
    """Returns the highest rate of any mixture on at most these devices, and the option that was added for each chain.

    -1: the mixture has no further chain.
    """
    rate_U = np.zeros([int(count) + 1 for count in demand.count_C])
    chosen_KU: list[IntArray] = []
    for _ in range(demand.most_chains):
        earlier_U, rate_U, chosen_U = rate_U, rate_U.copy(), np.full(rate_U.shape, -1)
        for index, (use, option) in enumerate(options.items()):
            left = tuple(slice(size - count) for size, count in zip(rate_U.shape, use, strict=True))
            here = tuple(slice(count, None) for count in use)
            total = earlier_U[left] + option.rate
            is_better = total > rate_U[here] * (1 + TOLERANCE)
            rate_U[here][is_better], chosen_U[here][is_better] = total[is_better], index
        if (chosen_U < 0).all():
            break
        chosen_KU.append(chosen_U)
    return rate_U, chosen_KU


def _parts(
    devices: tuple[np.intp, ...], options: Mapping[Use, Option], chosen_KU: Sequence[IntArray]
) -> Iterator[Option]:
    """Yields the options of the best mixture on at most these devices."""
    left, of_index = np.array(devices), list(options.items())
    for chosen_U in reversed(chosen_KU):
        if (index := int(chosen_U[tuple(left)])) >= 0:
            use, option = of_index[index]
            left = left - use
            yield option
