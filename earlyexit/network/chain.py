"""A chain: one network, or several in a row, whose blocks and ramps are numbered consecutively. It needs no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import isfinite

from earlyexit.errors import ModelFolderError, PlanError

Weights = Mapping[int, float]
"""By the last block of each network but the last: the combined share of the networks up to it, in what comes after it.
The next network has the rest. So the last exit of three networks with weights w1 and w2 says
(1 - w2) p3 + w2 ((1 - w1) p2 + w1 p1), which can be any weighted mean."""


def check_weights(weights: Weights) -> None:
    """Raise PlanError for a weight outside 0 to below 1: at 1 a later network would not count."""
    for end, weight in weights.items():
        if not 0 <= weight < 1:
            raise PlanError(
                f"weights: after block {end} the networks before count {weight}; a weight must be at least 0, below 1"
            )


def check_ends(weights: Weights, networks: tuple[int, ...]) -> None:
    """Raise PlanError for a weight that is not after a network's end; `networks`: one past each one's last block."""
    ends = [bound - 1 for bound in networks[:-1]]
    others = sorted(set(weights) - set(ends))
    if others and not ends:
        raise PlanError(f"weights {dict(weights)} are of a chain's networks, and the model is a single one")
    if others:
        raise PlanError(f"weights after blocks {others}; the networks that are not the last end after {ends}")


def proportional(parts: Mapping[int, float], last: float) -> dict[int, float]:
    """Returns the weights with which every network counts in proportion to its number; `last`: the last network's.

    `parts`: the others' numbers, by their last block. Raises PlanError for numbers that are no proportions.
    """
    ends = sorted(parts)
    counts = [*(parts[end] for end in ends), last]
    if not all(map(isfinite, counts)) or min(counts) < 0 or counts[0] + counts[1] <= 0:
        raise PlanError(f"weights in proportion to {counts}: these must be numbers from 0 on, and not all be 0")
    totals = list(accumulate(counts))
    weights = {end: before / after for end, before, after in zip(ends, totals[:-1], totals[1:], strict=True)}
    check_weights(weights)
    return weights


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The blocks of several networks. Raises ModelFolderError for contradictory values.

    The end of every network but the last is a ramp like any other, after its last block. The last network is the
    *reference*; its end answers all inputs that get there.
    """

    names: tuple[str, ...]
    """Names of the networks, first to last."""
    lengths: tuple[int, ...]
    """Number of blocks of every network."""
    ramps: tuple[int, ...] = ()
    """Ascending, in the chain's numbering; the ends of all networks but the last are among them."""

    def __post_init__(self) -> None:
        if not self.lengths or len(self.names) != len(self.lengths):
            raise ModelFolderError(f"a chain of {len(self.names)} networks, with blocks of {len(self.lengths)}")
        if min(self.lengths) < 1:
            raise ModelFolderError(f"every network of a chain has blocks: {list(self.lengths)}")
        if len(set(self.names)) < len(self.names):
            raise ModelFolderError(f"the networks of a chain have different names: {', '.join(self.names)}")
        if list(self.ramps) != sorted(set(self.ramps)):
            raise ModelFolderError(f"a chain's ramps ascend without repeats: {list(self.ramps)}")
        outside = [ramp for ramp in self.ramps if not 0 <= ramp < self.num_blocks]
        if outside:
            raise ModelFolderError(f"a chain of {self.num_blocks} blocks has no ramps {outside}")
        missing = sorted(set(self.end_ramps) - set(self.ramps))
        if missing:
            raise ModelFolderError(f"networks end after blocks {list(self.end_ramps)}: no ramps {missing}")

    @property
    def is_one(self) -> bool:
        """Whether it is a single network."""
        return len(self.lengths) == 1

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """One past the last block of every network, the last being the number of blocks."""
        return tuple(accumulate(self.lengths))

    @property
    def networks(self) -> tuple[int, ...]:
        """The `networks` of plans: `bounds`, or nothing for a single network."""
        return () if self.is_one else self.bounds

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first block of every network."""
        return (0, *self.bounds[:-1])

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The last block of every network."""
        return tuple(bound - 1 for bound in self.bounds)

    @property
    def end_ramps(self) -> tuple[int, ...]:
        """The last block of every network but the reference: the ramps after which inputs cross."""
        return self.ends[:-1]

    @property
    def num_blocks(self) -> int:
        return self.bounds[-1]

    def network_of(self, block: int) -> int:
        """Returns the network of a block."""
        assert 0 <= block < self.num_blocks, f"no block {block} in a chain of {self.num_blocks}"
        return bisect_right(self.bounds, block)

    def name_of(self, block: int) -> str:
        """Returns the name of a block's network."""
        return self.names[self.network_of(block)]

    def locate(self, block: int) -> tuple[int, int]:
        """Returns the network of a block, and the block's number there."""
        network = self.network_of(block)
        return network, block - self.starts[network]

    def ramps_of(self, network: int) -> tuple[int, ...]:
        """Returns a network's own ramps, in its own numbering, without its end."""
        first, last = self.starts[network], self.ends[network]
        return tuple(ramp - first for ramp in self.ramps if first <= ramp < last)


def join_chains(parts: Sequence[Chain]) -> Chain:
    """Returns the chain of the networks of several chains, one after the other; raises ModelFolderError."""
    starts = (0, *accumulate(each.num_blocks for each in parts))
    inner = [start + ramp for start, each in zip(starts, parts, strict=False) for ramp in each.ramps]
    return Chain(
        names=tuple(name for each in parts for name in each.names),
        lengths=tuple(length for each in parts for length in each.lengths),
        ramps=tuple(sorted(inner + [bound - 1 for bound in starts[1:-1]])),
    )


def check_networks(networks: tuple[int, ...]) -> None:
    """Raise PlanError unless these are one past the last block of each network of a chain: two or more, or none."""
    if not networks:
        return
    if len(networks) == 1:
        raise PlanError(f"networks are those of a chain; a plan of one model leaves them out, and so {networks[0]}")
    if networks[0] < 1 or any(after <= before for before, after in pairwise(networks)):
        raise PlanError(f"networks must ascend, each one past the last block of a network, not {list(networks)}")


def used_networks(networks: tuple[int, ...], firsts: set[int]) -> tuple[int, ...]:
    """Returns the networks of splits that begin at these blocks; (0,) for a single network."""
    if not networks:
        return (0,)
    return tuple(sorted({bisect_right(networks, first) for first in firsts}))
