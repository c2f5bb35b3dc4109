"""Subproblems of a cascade: the problem restricted to the networks that a plan uses, and conversions back.

A subproblem lacks the blocks and ramps of the unused networks, and numbers its blocks from 0. It is solved like any
problem; its splits end where a network ends. `optimizer.search.planner` finds the best subproblem.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plans.plan import Stage, used_networks, with_splits
from optimizer.problems.problem import PlanProblem, nested_shares
from profiles.networks import subsets
from profiles.records import RecordedBatches
from profiles.table import FloatArray, LatencyTable

Used = tuple[int, ...]


def network_sets(problem: PlanProblem) -> tuple[Used, ...]:
    """Returns every set of networks that contains the last network, smaller sets first."""
    return tuple(subsets(max(1, len(problem.networks))))


def ramps_of(problem: PlanProblem, used: Used) -> tuple[int, ...]:
    """Returns the ramps in these networks."""
    return tuple(ramp for ramp in problem.ramps if used_networks(problem.networks, {ramp})[0] in used)


def survival_with(problem: PlanProblem, used: Used) -> tuple[float, ...]:
    """Returns the survival if only the ramps of these networks are active. Blocks keep their numbers in the cascade.

    Blocks of other networks have the survival of the next used block.
    """
    known, blocks = (problem.survival_of or {}).get(used), Subproblem(whole=problem, used=used).blocks
    if known is None:
        return tuple(nested_shares(problem.survival_N, ramps_of(problem, used)))
    return tuple(known[blocks[bisect_left(blocks, block)]] for block in range(problem.num_blocks))


@dataclass(frozen=True, kw_only=True)
class Subproblem:
    """A cascade's problem, restricted to the networks that a plan uses."""

    whole: PlanProblem
    used: Used

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of the used networks, by their numbers in the cascade."""
        ends = self.whole.networks or (self.whole.num_blocks,)
        starts = (0, *ends)
        return tuple(block for network in self.used for block in range(starts[network], ends[network]))

    @cached_property
    def problem(self) -> PlanProblem:
        """The problem of these networks alone, with blocks numbered from 0."""
        whole, blocks = self.whole, self.blocks
        if len(blocks) == whole.num_blocks and whole.survival_of is None and not whole.crossing_tokens:
            return whole  # it does not depend on which networks are used
        new = {block: number for number, block in enumerate(blocks)}
        ramps = tuple(ramp for ramp in whole.ramps if ramp in new)
        ends = tuple(new[whole.networks[network] - 1] + 1 for network in self.used) if whole.networks else ()
        tokens = self._tokens() if whole.networks else whole.network_tokens
        stayers: Sequence[float] | None = whole.stayers_length_N
        if stayers is not None and len(blocks) < whole.num_blocks:
            stayers = nested_shares(stayers, ramps)
        return replace(
            whole,
            num_blocks=len(blocks),
            ramps=tuple(new[ramp] for ramp in ramps),
            survival_N=tuple(survival_with(whole, self.used)[block] for block in blocks),
            latency={device: self._table(table, ramps) for device, table in whole.latency.items()},
            bytes_per_sample_N=tuple(whole.bytes_per_sample_N[block] for block in blocks),
            batches=None if whole.batches is None else _batches(whole.batches, ramps, new),
            stayers_length_N=None if stayers is None else tuple(stayers[block] for block in blocks),
            networks=ends if len(ends) > 1 else (),
            survival_of=None,
            network_tokens=tokens if whole.lengths is not None else (),
            crossing_tokens=(),
        )

    def stages_of(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Converts stages of the cascade to the subproblem's block numbers."""
        return _renumbered(stages, {block: number for number, block in enumerate(self.blocks)})

    def in_cascade(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Converts stages of the subproblem to the cascade's block numbers."""
        return _renumbered(stages, dict(enumerate(self.blocks)))

    def shares_of(self, reach: Callable[[Sequence[int]], Sequence[float]]) -> Callable[[Sequence[int]], list[float]]:
        """Converts a survival function of the cascade to one of the subproblem."""

        def inner(active: Sequence[int]) -> list[float]:
            share_N = reach([self.blocks[ramp] for ramp in active])
            return [share_N[block] for block in self.blocks]

        return inner

    def _tokens(self) -> tuple[float, ...]:
        """Returns the tokens of an input in each used network, relative to `lengths`, after pruning at crossings."""
        tokens = self.whole.network_tokens or (1.0,) * len(self.whole.networks)
        left = self.whole.crossing_tokens or (1.0,) * len(self.whole.networks)
        return tuple(tokens[each] * (left[each] if each != self.used[0] else 1.0) for each in self.used)

    def _table(self, table: LatencyTable, ramps: Sequence[int]) -> LatencyTable:
        """Returns the rows of the used blocks and ramps. Without lengths, batches shrink by the pruned tokens."""
        if self.whole.lengths is None:
            table = pruned_table(self.whole, table, self.used)
        rows = [self.whole.ramps.index(ramp) for ramp in ramps]
        return replace(table, block_s_NB=table.block_s_NB[list(self.blocks)], ramp_s_EB=table.ramp_s_EB[rows])


def pruned_table(problem: PlanProblem, table: LatencyTable, used: Used) -> LatencyTable:
    """Returns a cascade's table for plans of these networks, in which pruned inputs hold fewer tokens.

    A batch of pruned inputs takes the time of the smaller batch with as many tokens.
    """
    if not problem.crossing_tokens:
        return table
    shares = [share if network in used[1:] else 1.0 for network, share in enumerate(problem.crossing_tokens)]
    sizes_NB = np.outer(by_block(problem.networks, shares), table.batches)
    return at_sizes(table, table.batches, sizes_NB, problem.ramps)


def by_block(networks: Sequence[int], values: Sequence[float]) -> FloatArray:
    """Returns, for each block of a cascade, the value of its network."""
    return np.repeat(np.array(values, dtype=np.float64), np.diff(networks, prepend=0))


def with_slower_networks(table: LatencyTable, networks: Sequence[int], factors: Sequence[float]) -> LatencyTable:
    """Returns a cascade's table with the first networks slowed down by factors: they compute attention for pruning."""
    factors_N = by_block(networks, [*factors, *[1.0] * (len(networks) - len(factors))])
    return replace(table, block_s_NB=table.block_s_NB * factors_N[:, None])


def at_sizes(table: LatencyTable, batches: Sequence[int], sizes_NB: FloatArray, ramps: Sequence[int]) -> LatencyTable:
    """Returns a table for other batches. In each block, and in its ramp, they take as long as batches of `sizes_NB`."""

    def read(rows: Iterable[FloatArray], sizes: FloatArray) -> FloatArray:
        seconds = [np.interp(each, table.batches, row) for each, row in zip(sizes, rows, strict=True)]
        return np.array(seconds).reshape(len(seconds), len(batches))

    block_s_NB, ramp_s_EB = read(table.block_s_NB, sizes_NB), read(table.ramp_s_EB, sizes_NB[list(ramps)])
    return replace(table, batches=tuple(batches), block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)


def subproblem_of(problem: PlanProblem, stages: Sequence[Stage]) -> Subproblem:
    """Returns the subproblem of a plan; raises PlanError unless its splits run whole networks and the last one."""
    splits = [split for stage in stages for split in stage.splits]
    part = Subproblem(whole=problem, used=used_networks(problem.networks, {split.first for split in splits}))
    blocks = [block for split in splits for block in range(split.first, split.end)]
    if blocks != list(part.blocks) or blocks[-1] != problem.num_blocks - 1:
        others = ", except for whole networks before the last," if problem.networks else ""
        raise PlanError(f"the splits must run blocks 0 to {problem.num_blocks - 1}{others} without gap or overlap")
    return part


def _renumbered(stages: Sequence[Stage], new: Mapping[int, int]) -> tuple[Stage, ...]:
    def renumbered(_: Stage, split: Split) -> Split:
        ramps = tuple(new[ramp] for ramp in split.ramps)
        return replace(split, first=new[split.first], end=new[split.end - 1] + 1, ramps=ramps)

    return with_splits(stages, renumbered)


def _batches(batches: RecordedBatches, ramps: Sequence[int], new: Mapping[int, int]) -> RecordedBatches:
    columns = [batches.ramps.index(ramp) for ramp in ramps]
    return replace(
        batches,
        num_blocks=len(new),
        ramps=tuple(new[ramp] for ramp in ramps),
        sure_NR=batches.sure_NR[:, columns],
        losses_NR=batches.losses_NR[:, columns],
    )
