from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from optimizer.search.injection import balanced_cuts, worth_their_time


def seconds_of(shares: Sequence[float], cuts: Sequence[int]) -> list[float]:
    return [end - start for start, end in pairwise([0.0, *(shares[cut] for cut in cuts), 1.0])]


def of_all_ways(shares: Sequence[float], num_blocks: int) -> tuple[float, float]:
    """Returns the minimal length of the longest block, and the least sum of squares with it, by brute force."""
    ways = [seconds_of(shares, cuts) for cuts in combinations(range(len(shares)), num_blocks - 1)]
    longest = min(map(max, ways))
    return longest, min(sum(each**2 for each in way) for way in ways if max(way) <= longest)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cuts_give_a_shorter_longest_block_or_more_equal_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = sorted(rng.uniform(0, 1, rng.integers(1, 9)).round(2).tolist())  # some are equal
    num_blocks = int(rng.integers(1, len(shares) + 2))
    cuts = balanced_cuts(shares, num_blocks)
    assert list(cuts) == sorted(set(cuts))
    assert len(cuts) == num_blocks - 1
    blocks = seconds_of(shares, cuts)
    assert (max(blocks), sum(each**2 for each in blocks)) == pytest.approx(of_all_ways(shares, num_blocks))


def test_even_sites_give_even_blocks_and_no_more_than_there_are_sites() -> None:
    assert balanced_cuts([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], 5) == (1, 3, 5, 7)
    assert balanced_cuts([0.5], 2) == (0,)
    with pytest.raises(ValueError, match="3 blocks need 2 sites; there are 1"):
        balanced_cuts([0.5], 3)


@pytest.mark.parametrize(
    ("ramp_s", "kept"),
    [
        ((1.0, 1.0, 1.0), (0, 1, 2)),
        ((1.0, 1.0, 9.0), (0, 1)),
        ((1.0, 3.5, 1.0), (0, 2)),
        ((5.0, 3.5, 1.0), (0, 2)),  # with ramp 1 gone, the next exit is far enough for ramp 0
        ((6.5, 3.5, 1.0), (2,)),
        ((9.0, 9.0, 9.0), (0,)),
        ((10.0, 9.0, 9.0), ()),
        ((3.0, 1.0, 1.0), (1, 2)),  # a ramp as long as the block gains nothing
    ],
    ids=str,
)
def test_ramps_quicker_than_blocks_to_the_next_exit_stay(ramp_s: tuple[float, ...], kept: tuple[int, ...]) -> None:
    assert worth_their_time(ramp_s, (2.0, 3.0, 3.0, 4.0), (0, 1, 2)) == kept
