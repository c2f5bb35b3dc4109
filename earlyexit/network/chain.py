"""Chains: one or several networks in a row, with consecutively numbered blocks and ramps. It needs no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from earlyexit.errors import ModelFolderError, PlanError

Weights = Mapping[int, float]
"""Ensemble weights by the last block of each network but the last. A weight is the combined share of all networks up to
that block; the next network has the rest. With weights w1 and w2, the last exit of three networks combines their
probabilities to (1 - w2) p3 + w2 ((1 - w1) p2 + w1 p1), which can express any weighted mean."""


def check_weights(weights: Weights) -> None:
    """Raises PlanError unless each weight is at least 0 and below 1. With a weight of 1, a network would not count."""
    for end, weight in weights.items():
        if not 0 <= weight < 1:
            raise PlanError(f"weights: the weight after block {end} must be at least 0 and below 1, not {weight}")


def check_ends(weights: Weights, networks: tuple[int, ...]) -> None:
    """Raises PlanError for a weight whose block is no end of a network before another one; `networks`: as in a plan."""
    ends = [bound - 1 for bound in networks[:-1]]
    others = sorted(set(weights) - set(ends))
    if others and not ends:
        raise PlanError(f"weights {dict(weights)} need a chain of networks; the model is a single network")
    if others:
        raise PlanError(f"weights after blocks {others}: a weight must be after a network before the last: {ends}")


@dataclass(frozen=True, kw_only=True)
class ModelChain:
    """The blocks of one or several networks. Raises ModelFolderError for contradictory values.

    The end of every network but the last is a ramp like any other, after the network's last block. The last network is
    the *reference*. Its head answers all inputs that reach its end.
    """

    names: tuple[str, ...]
    """The names of the networks, in their order."""
    lengths: tuple[int, ...]
    """The number of blocks of every network."""
    ramps: tuple[int, ...] = ()
    """All ramps, ascending, in the chain's numbering. They include the ends of all networks but the last."""

    def __post_init__(self) -> None:
        if not self.lengths or len(self.names) != len(self.lengths):
            raise ModelFolderError(f"a chain has {len(self.names)} names of networks, and {len(self.lengths)} lengths")
        if min(self.lengths) < 1:
            raise ModelFolderError(f"every network of a chain must have blocks, not {list(self.lengths)}")
        if len(set(self.names)) < len(self.names):
            raise ModelFolderError(f"the networks of a chain must have different names, not {', '.join(self.names)}")
        if list(self.ramps) != sorted(set(self.ramps)):
            raise ModelFolderError(f"a chain's ramps must ascend without repeats, not {list(self.ramps)}")
        if outside := [ramp for ramp in self.ramps if not 0 <= ramp < self.num_blocks]:
            raise ModelFolderError(f"a chain of {self.num_blocks} blocks has no ramps {outside}")
        if missing := sorted(set(self.end_ramps) - set(self.ramps)):
            raise ModelFolderError(f"a chain's ramps must include {missing}, the ends of networks before the last")

    @property
    def is_one(self) -> bool:
        """Whether it is a single network."""
        return len(self.lengths) == 1

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """One past the last block of every network."""
        return tuple(accumulate(self.lengths))

    @property
    def networks(self) -> tuple[int, ...]:
        """The value for the field `networks` of plans: `bounds`, or empty for a single network."""
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
        """The last block of every network but the reference. At these ramps, survivors continue in the next network."""
        return self.ends[:-1]

    @property
    def num_blocks(self) -> int:
        return self.bounds[-1]

    def network_of(self, block: int) -> int:
        """Returns the index of a block's network."""
        assert 0 <= block < self.num_blocks, f"no block {block} in a chain of {self.num_blocks}"
        return bisect_right(self.bounds, block)

    def name_of(self, block: int) -> str:
        """Returns the name of a block's network."""
        return self.names[self.network_of(block)]

    def locate(self, block: int) -> tuple[int, int]:
        """Returns the index of a block's network, and the block's number in that network."""
        network = self.network_of(block)
        return network, block - self.starts[network]

    def ramps_of(self, network: int) -> tuple[int, ...]:
        """Returns the ramps of a network in its own numbering, without its end."""
        first, last = self.starts[network], self.ends[network]
        return tuple(ramp - first for ramp in self.ramps if first <= ramp < last)


def join_chains(parts: Sequence[ModelChain]) -> ModelChain:
    """Returns several chains in a row as one chain. Raises ModelFolderError, for example for equal names."""
    starts = (0, *accumulate(each.num_blocks for each in parts))
    inner = [start + ramp for start, each in zip(starts, parts, strict=False) for ramp in each.ramps]
    return ModelChain(
        names=tuple(name for each in parts for name in each.names),
        lengths=tuple(length for each in parts for length in each.lengths),
        ramps=tuple(sorted(inner + [bound - 1 for bound in starts[1:-1]])),
    )


def check_networks(networks: tuple[int, ...]) -> None:
    """Raises PlanError unless `networks` is valid: one past the last block of each of several networks."""
    if len(networks) == 1:
        raise PlanError(f"networks must name at least two networks, not {list(networks)}; leave it out for one network")
    if networks[0] < 1 or any(after <= before for before, after in pairwise(networks)):
        raise PlanError(f"networks must ascend, each one past the last block of a network, not {list(networks)}")
