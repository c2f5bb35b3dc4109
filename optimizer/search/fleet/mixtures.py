"""Divides devices among models exactly: the best mixtures of known chains, by dynamic programming.

For each model, the master problem of a plan (`optimizer.search.master`) finds its highest rate on each use of devices.
The devices of all models are then divided like those of chains, but the least share counts instead of the sum.

Prices of devices keep this small. A model that gets a share needs devices of at least a known price. What the others
need is therefore not available to it, and uses of a higher price are left out. The share, or the cost, is required to
be near its bound at first, because few uses are left then, and less near until there is a division.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimizer.plans.plan import Stage
from optimizer.problems.fleet import Fleet
from optimizer.problems.problem import device_names
from optimizer.search.compiled import compiled
from optimizer.search.master import (
    TOLERANCE,
    Chain,
    Options,
    all_uses,
    best_mixture,
    fastest_options,
    with_another_chain,
)
from optimizer.search.space import Space
from optimizer.search.step import FloatArray, IntArray, dominates

MAX_USES = 1_500_000
"""Different uses of the devices that are distinguished."""
ENOUGH = 1 - TOLERANCE
"""The share that each model gets if the cost is minimized."""
FAR = (0.02, 0.05, 0.1, 0.2, 0.4, 1e9)
"""How far the share or the cost may be from its bound, relative to it, in one search after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPrices:
    """A proof that no division has a higher share than `bound`, or a lower cost."""

    bound: float
    price_C: FloatArray
    """Price of a device second; if the cost is minimized, of a device for an hour."""
    surcharge: float
    """What all devices cost more at these prices than at their own prices. Without a cost, their own prices are 0."""
    needed_M: FloatArray
    """Least price of the inputs of a model at a share of 1."""


def best_mixtures(
    fleet: Fleet, chains_M: Sequence[Sequence[Chain]], prices: LeastPrices, space: Space, known: float
) -> tuple[tuple[Stage, ...], ...]:
    """Returns each model's stages in the best division among mixtures of its chains.

    The models have no stages if time is over, or if no division has a higher merit than the `known` one.
    """
    size_C: tuple[int, ...] = tuple((fleet.count_C + 1).astype(int).tolist())
    use_UC = all_uses(size_C)
    price_U, usd_U = use_UC @ prices.price_C, use_UC @ fleet.usd_C
    pairs = zip(chains_M, fleet.problems, strict=True)
    options_M = [fastest_options(chains, problem, MAX_USES) for chains, problem in pairs]
    for far in FAR:
        near = (-1 - far if fleet.is_cost else 1 - far) * prices.bound
        merit = max(near, known + TOLERANCE * prices.bound)
        share, most_share, most_usd = (merit, prices.bound, 0.0) if not fleet.is_cost else (ENOUGH, ENOUGH, -merit)
        needed_M = share * prices.needed_M
        spare = most_usd + prices.surcharge - float(needed_M.sum()) + TOLERANCE * float(price_U[-1])
        if space.is_over():
            break
        shares_MU = list[FloatArray]()
        for options, needed, rate_per_s in zip(options_M, needed_M.tolist(), fleet.rate_M.tolist(), strict=True):
            payable_W = np.flatnonzero(price_U <= needed + spare)
            payable = Options(*(each_O[price_U[options.use_O] <= needed + spare] for each_O in options))
            rate_U = np.zeros(len(use_UC))
            for before in range(fleet.most_chains):
                rate_U, _ = with_another_chain(before, rate_U, payable_W, use_UC, payable)
            share_U = np.minimum(rate_U / rate_per_s, most_share)
            shares_MU.append(np.where(share_U >= share, share_U, 0.0))
        uses = _divided(shares_MU, use_UC, size_C, price_U, np.cumsum(needed_M), spare, usd_U, most_usd)
        if uses is not None:
            return tuple(
                _mixture(fleet, model, chains, use_UC[use])
                for model, (chains, use) in enumerate(zip(chains_M, uses, strict=True))
            )
        if merit > near:
            break
    return tuple(() for _ in fleet.problems)


def _mixture(fleet: Fleet, model: int, chains: Sequence[Chain], count_C: IntArray) -> tuple[Stage, ...]:
    """Returns the stages of the best mixture of a model's chains on these devices."""
    own = fleet.problem_on(model, count_C.tolist())
    index = {name: place for place, name in enumerate(device_names(own))}
    chains = [
        replace(each, devices=tuple(index[stage.device] for stage in each.stages))
        for each in chains
        if all(stage.device in index for stage in each.stages)
    ]
    return best_mixture(chains, fastest_options(chains, own), own).stages


def _divided(
    shares_MU: Sequence[FloatArray], use_UC: IntArray, size_C: tuple[int, ...], price_U: FloatArray,
    needed_M: FloatArray, spare: float, usd_U: FloatArray, most_usd: float,
) -> list[int] | None:  # fmt: skip
    """Returns the use of each model in the cheapest division of the highest least share; None if that is 0.

    `needed_M`: the least price of the devices of each model together with the models before it.
    """
    rests_MU, parts_M = [_accumulated(shares_MU[0], size_C)], [np.arange(0)]
    for share_U, needed in zip(shares_MU[1:], needed_M[1:], strict=True):
        parts_M.append(_corners(share_U, size_C))
        among_W = np.flatnonzero((needed <= price_U) & (price_U <= needed + spare))
        least_U = _least_shares(rests_MU[-1], among_W, use_UC, parts_M[-1], share_U[parts_M[-1]])
        rests_MU.append(_accumulated(least_U, size_C))
    share_U = np.where(usd_U <= most_usd, rests_MU[-1], 0.0)
    left = int(np.argmin(np.where(share_U == share_U.max(), usd_U, np.inf)))
    if not share_U[left]:
        return None
    uses = list[int]()
    for share_U, part_P, rest_U in zip(shares_MU[:0:-1], parts_M[:0:-1], rests_MU[-2::-1], strict=True):
        fitting_P = part_P[(use_UC[part_P] <= use_UC[left]).all(axis=1)]
        best = np.argmax(np.minimum(share_U[fitting_P], rest_U[left - fitting_P]))
        uses.append(int(fitting_P[best]))
        left -= uses[-1]
    return [left, *reversed(uses)]


def _accumulated(share_U: FloatArray, size_C: tuple[int, ...]) -> FloatArray:
    """Returns the highest share on at most the devices of each use."""
    for axis in range(len(size_C)):
        share_U = np.maximum.accumulate(share_U.reshape(size_C), axis=axis)
    return share_U.ravel()


def _corners(share_U: FloatArray, size_C: tuple[int, ...]) -> IntArray:
    """Returns the uses without a superfluous device, those of the highest share first."""
    grid = share_U.reshape(size_C)
    kept = grid > 0
    for axis in range(len(size_C)):
        fewer = np.insert(np.delete(grid, -1, axis=axis), 0, 0.0, axis=axis)
        kept &= grid > fewer * (1 + TOLERANCE)
    corners = np.flatnonzero(kept)
    ordered: IntArray = corners[np.argsort(-share_U[corners], kind="stable")]
    return ordered


@compiled
def _least_shares(
    rest_U: FloatArray, among_W: IntArray, use_UC: IntArray, part_P: IntArray, share_P: FloatArray
) -> FloatArray:
    """Returns, for the uses `among_W`, the highest least share of a model and of the models before it.

    `rest_U` has that of the models before it. Parts (P) are possible uses of the model, by falling share.
    """
    most_U = np.zeros_like(rest_U)
    for use in among_W:
        for place in range(part_P.size):
            part = part_P[place]
            if min(share_P[place], rest_U[use]) <= most_U[use]:
                break
            if dominates(use_UC, part, use, 0, use_UC.shape[1], 0.0):
                most_U[use] = max(most_U[use], min(share_P[place], rest_U[use - part]))
    return most_U
