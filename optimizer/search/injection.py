"""Cuts a foreign network into blocks, and selects the ramps that are worth their time, by measured seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def balanced_cuts(shares: Sequence[float], num_blocks: int) -> tuple[int, ...]:
    """Returns the sites that end a block, ascending, such that the longest of `num_blocks` blocks is minimal.

    `shares` holds the share of the model's time before each site, ascending in [0, 1]. Ties are broken by the least sum
    of squares. Raises ValueError for too few sites.
    """
    if not 1 <= num_blocks <= len(shares) + 1:
        raise ValueError(f"{num_blocks} blocks need {num_blocks - 1} sites; there are {len(shares)}")
    ends = [0.0, *shares, 1.0]
    longest, _ = _least(ends, num_blocks, max)
    _, cuts = _least(ends, num_blocks, lambda squares, block: squares + block**2 if block <= longest else math.inf)
    return cuts[:-1]


def worth_their_time(ramp_s: Sequence[float], block_s: Sequence[float], ramps: Sequence[int]) -> tuple[int, ...]:
    """Returns the ramps that take less time than the blocks up to the next kept exit, ascending.

    A slower ramp is useless (Apparate section 3.1), because running on to the next exit is quicker than the ramp. Ramps
    are examined from the last to the first. `ramp_s` is in the order of `ramps`.
    """
    kept: list[int] = []
    following = len(block_s) - 1
    for ramp, seconds in sorted(zip(ramps, ramp_s, strict=True), reverse=True):
        if seconds < sum(block_s[ramp + 1 : following + 1]):
            kept.append(ramp)
            following = ramp
    return tuple(reversed(kept))


def _least(
    ends: Sequence[float], num_blocks: int, join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Returns the least joined value of the lengths of all blocks, and the sites and the end at which blocks end.

    In step n, best[j] is the least value, with its ends, for n blocks up to end j.
    """
    best = [(0.0, ()), *[(math.inf, tuple[int, ...]())] * (len(ends) - 1)]
    for _ in range(num_blocks):
        longer = [
            min((join(best[i][0], ends[j] - ends[i]), (*best[i][1], j - 1)) for i in range(j))
            for j in range(1, len(ends))
        ]
        best = [(math.inf, ()), *longer]
    return best[-1]
