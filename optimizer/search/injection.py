"""Cuts a foreign network into blocks, and selects the ramps that are worth their time, by measured seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def balanced_cuts(shares: Sequence[float], num_blocks: int) -> tuple[int, ...]:
    """Returns the sites that end a block, ascending, such that the longest of `num_blocks` blocks is minimal.

    `shares` holds the share of the model's time before each site, ascending in [0, 1]. Ties are broken by the least sum
    of squares. Raises ValueError for too few sites.
    """
    if not 1 <= num_blocks <= len(shares) + 1:
        raise ValueError(f"{num_blocks} blocks need {num_blocks - 1} sites; there are {len(shares)}")
    ends = [0.0, *shares, 1.0]
    return _most_even_cuts(ends, num_blocks, _min_longest_block(ends, num_blocks))


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


def _min_longest_block(ends: Sequence[float], num_blocks: int) -> float:
    """Returns the minimal length of the longest block. In step n, best[j] is the minimum for n blocks up to end j."""
    best = [0.0, *[math.inf] * (len(ends) - 1)]
    for _ in range(num_blocks):
        best = [math.inf, *(min(max(best[i], ends[j] - ends[i]) for i in range(j)) for j in range(1, len(ends)))]
    return best[-1]


def _most_even_cuts(ends: Sequence[float], num_blocks: int, longest: float) -> tuple[int, ...]:
    """Returns the sites of the blocks with the least sum of squares, among those of at most this length."""
    none: tuple[float, tuple[int, ...]] = (math.inf, ())
    best = [(0.0, ()), *[none] * (len(ends) - 1)]
    for _ in range(num_blocks):
        best = [none, *(min(_extended(best[:j], ends[: j + 1], longest), default=none) for j in range(1, len(ends)))]
    return best[-1][1][:-1]


def _extended(
    best: Sequence[tuple[float, tuple[int, ...]]], ends: Sequence[float], longest: float
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yields each solution with one more block up to the last end, if that block is not too long."""
    for (squares, sites), start in zip(best, ends, strict=False):
        if ends[-1] - start <= longest:
            yield squares + (ends[-1] - start) ** 2, (*sites, len(ends) - 2)
