"""Where a foreign network is cut into blocks, and which ramps are worth their time there; by measured seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def balanced_cuts(shares: Sequence[float], num_blocks: int) -> tuple[int, ...]:
    """Which sites end a block, ascending, so that there are `num_blocks` whose longest takes as little as can be.

    `shares`: of the model's time, that until each site, ascending in [0, 1]. Among equals, blocks as alike as can be
    (least squares). Raises ValueError where there are too few sites.
    """
    if not 1 <= num_blocks <= len(shares) + 1:
        raise ValueError(f"{num_blocks} blocks need {num_blocks - 1} sites; there are {len(shares)}")
    ends = [0.0, *shares, 1.0]
    return _fewest_squares(ends, num_blocks, _least_longest(ends, num_blocks))


def worth_their_time(ramp_s: Sequence[float], block_s: Sequence[float], ramps: Sequence[int]) -> tuple[int, ...]:
    """The ramps that take less time than the blocks up to the next exit, ascending.

    A ramp that takes more is illogical (Apparate section 3.1): running on to the next exit is then quicker than asking
    it. The exits looked at are those that stay, from the last on. `ramp_s` is in the order of `ramps`.
    """
    kept: list[int] = []
    following = len(block_s) - 1
    for ramp, seconds in sorted(zip(ramps, ramp_s, strict=True), reverse=True):
        if seconds < sum(block_s[ramp + 1 : following + 1]):
            kept.append(ramp)
            following = ramp
    return tuple(reversed(kept))


def _least_longest(ends: Sequence[float], num_blocks: int) -> float:
    """The least that the longest of so many blocks can take: best[j] is that of the first blocks, up to end j."""
    best = [0.0, *[math.inf] * (len(ends) - 1)]
    for _ in range(num_blocks):
        best = [math.inf, *(min(max(best[i], ends[j] - ends[i]) for i in range(j)) for j in range(1, len(ends)))]
    return best[-1]


def _fewest_squares(ends: Sequence[float], num_blocks: int, longest: float) -> tuple[int, ...]:
    """Sites of the blocks with the least sum of squares, none of them longer than that."""
    none: tuple[float, tuple[int, ...]] = (math.inf, ())
    best = [(0.0, ()), *[none] * (len(ends) - 1)]
    for _ in range(num_blocks):
        best = [none, *(min(_longer(best[:j], ends[: j + 1], longest), default=none) for j in range(1, len(ends)))]
    return best[-1][1][:-1]


def _longer(
    best: Sequence[tuple[float, tuple[int, ...]]], ends: Sequence[float], longest: float
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Each with one more block, up to the last end, where that is not too long."""
    for (squares, sites), start in zip(best, ends, strict=False):
        if ends[-1] - start <= longest:
            yield squares + (ends[-1] - start) ** 2, (*sites, len(ends) - 2)
