"""Which ramps are to be active, from inputs of which all were seen: every set that the budget allows, compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from optimizer.live.exit_times import ExitTimes
from optimizer.thresholds import lay_path
from profiles.records import ExitRecords
from profiles.scores import BoolArray

PRICES = 40
"""Threshold vectors of the path that every set is tried with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A set of ramps, thresholds by which it keeps the budget on these inputs, and the mean seconds to an answer."""

    thresholds: Mapping[int, float]
    mean_s: float


def affordable(times: ExitTimes, ramp_budget: float) -> Iterator[tuple[int, ...]]:
    """Every set of ramps within the budget, small ones too: a ramp that lets too few out only costs."""
    for count in range(len(times.ramps) + 1):
        sets = [ramps for ramps in combinations(times.ramps, count) if times.overhead(ramps) <= ramp_budget]
        if not sets:
            return
        yield from sets


def best_ramps(records: ExitRecords, times: ExitTimes, loss_budget: float, ramp_budget: float) -> Choice:
    """The set and the thresholds with the least mean answer time on these inputs; no ramps where none saves any."""
    path = lay_path(records)
    prices = np.unique(np.quantile(path.log_prices_NR(records), np.linspace(0, 1, PRICES + 1))).tolist()
    best = Choice(thresholds={}, mean_s=times.whole_s)
    sets = list(affordable(times, ramp_budget))
    for price in prices:
        thresholds = path.thresholds(price)
        sure_NR = records.sure_NR(thresholds)
        for ramps in sets:
            loss, mean_s = _served(records, sure_NR, ramps, times)
            if loss <= loss_budget and mean_s < best.mean_s:
                best = Choice(thresholds={ramp: thresholds[ramp] for ramp in ramps}, mean_s=mean_s)
    return best


def _served(records: ExitRecords, sure_NR: BoolArray, ramps: tuple[int, ...], times: ExitTimes) -> tuple[float, float]:
    """Mean loss and mean seconds with a set of ramps."""
    columns = [records.ramps.index(ramp) for ramp in ramps]
    released_s = times.released_s(ramps)
    stays_N = np.ones(len(records), dtype=bool)
    lost, seconds = 0.0, 0.0
    for ramp, column in zip(ramps, columns, strict=True):
        leaves_N = stays_N & sure_NR[:, column]
        lost += float(records.losses_NR[leaves_N, column].sum())
        seconds += float(leaves_N.sum()) * float(released_s[ramp])
        stays_N &= ~leaves_N
    seconds += float(stays_N.sum()) * float(released_s[-1])
    return lost / len(records), seconds / len(records)
