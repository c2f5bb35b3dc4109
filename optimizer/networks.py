"""A problem of a chain, reduced to the networks that a plan uses, and the way back.

Networks that are left out take their blocks and ramps with them; what is left is numbered anew, from block 0, and is a
problem like any other, of which splits end where a network does. `optimizer.subsets` asks for the best of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TypeVar

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from earlyexit.network.chain import used_networks
from optimizer.plan import Stage, with_splits
from optimizer.problem import PlanProblem, nested_shares
from profiles.records import RecordedBatches
from profiles.table import FloatArray, LatencyTable

Used = tuple[int, ...]
T = TypeVar("T")


def network_sets(problem: PlanProblem) -> tuple[Used, ...]:
    """Every set of networks that ends with the last, the smaller first; of one network there is one."""
    last = max(1, len(problem.networks)) - 1
    return tuple((*some, last) for size in range(last + 1) for some in combinations(range(last), size))


def crossings(problem: PlanProblem) -> frozenset[int]:
    """The blocks at which networks begin, the first one's apart."""
    return frozenset(problem.networks[:-1])


def is_whole(problem: PlanProblem) -> bool:
    """Whether nothing of it depends on which networks are used: one that was reduced, or has but one."""
    return problem.survival_of is None and not problem.crossing_tokens


def ramps_of(problem: PlanProblem, used: Used) -> tuple[int, ...]:
    """The ramps in these networks."""
    return tuple(ramp for ramp in problem.ramps if used_networks(problem.networks, {ramp})[0] in used)


def survival_with(problem: PlanProblem, used: Used) -> tuple[float, ...]:
    """Survival with the ramps of these networks alone, in the chain's numbers."""
    given = (problem.survival_of or {}).get(used)
    return tuple(nested_shares(problem.survival_N, ramps_of(problem, used))) if given is None else given


@dataclass(frozen=True, kw_only=True)
class Subproblem:
    """A chain's problem, and the networks that are used of it."""

    whole: PlanProblem
    used: Used

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Those that are left, by their numbers in the chain."""
        ends = self.whole.networks or (self.whole.num_blocks,)
        starts = (0, *ends)
        return tuple(block for network in self.used for block in range(starts[network], ends[network]))

    @cached_property
    def problem(self) -> PlanProblem:
        """The problem of these networks alone."""
        whole, blocks = self.whole, self.blocks
        if len(blocks) == whole.num_blocks and is_whole(whole):
            return whole
        new = {block: number for number, block in enumerate(blocks)}
        ramps = tuple(ramp for ramp in whole.ramps if ramp in new)
        ends = tuple(new[whole.networks[network] - 1] + 1 for network in self.used) if whole.networks else ()
        tokens = self._tokens() if whole.networks else whole.network_tokens
        return replace(
            whole,
            num_blocks=len(blocks),
            ramps=tuple(new[ramp] for ramp in ramps),
            survival_N=self._survival_N(ramps),
            latency={device: self._table(table, ramps) for device, table in whole.latency.items()},
            bytes_per_sample_N=tuple(whole.bytes_per_sample_N[block] for block in blocks),
            batches=None if whole.batches is None else _batches(whole.batches, ramps, new),
            stayers_length_N=self._nested(whole.stayers_length_N, ramps),
            networks=ends if len(ends) > 1 else (),
            survival_of=None,
            network_tokens=tokens if whole.lengths is not None else (),
            crossing_tokens=(),
        )

    def stages_of(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """The stages of a plan of the chain, in the numbers of the part."""
        new = {block: number for number, block in enumerate(self.blocks)}
        return with_splits(stages, lambda _, split: _renumbered(split, new))

    def in_chain(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """The way back."""
        chain = dict(enumerate(self.blocks))
        return with_splits(stages, lambda _, split: _renumbered(split, chain))

    def shares_of(self, reach: Callable[[Sequence[int]], Sequence[float]]) -> Callable[[Sequence[int]], list[float]]:
        """From the active ramps to the shares of blocks: what is said of the chain, said of the part."""

        def inner(active: Sequence[int]) -> list[float]:
            share_N = reach([self.blocks[ramp] for ramp in active])
            return [share_N[block] for block in self.blocks]

        return inner

    def splits_of(self, said: Callable[[Stage, Split], T]) -> Callable[[Stage, Split], T]:
        """The same of what is said of a stage's split."""

        def inner(stage: Stage, split: Split) -> T:
            [outer] = self.in_chain([replace(stage, splits=(split,))])
            return said(outer, outer.splits[0])

        return inner

    def _survival_N(self, ramps: Sequence[int]) -> tuple[float, ...]:
        """Recorded where it is known of these networks; else an input that passes a ramp passes all before it."""
        given = (self.whole.survival_of or {}).get(self.used)
        if given is not None:
            return tuple(given[block] for block in self.blocks)
        survival_N = self._nested(self.whole.survival_N, ramps)
        assert survival_N is not None
        return survival_N

    def _nested(self, given_N: Sequence[float] | None, ramps: Sequence[int]) -> tuple[float, ...] | None:
        """Of every block what is said behind the last ramp before it; 1 before the first."""
        if given_N is None:
            return None
        is_all = len(self.blocks) == self.whole.num_blocks
        share_N = given_N if is_all else nested_shares(given_N, ramps)
        return tuple(share_N[block] for block in self.blocks)

    def _tokens(self) -> tuple[float, ...]:
        """Per network that is used, tokens of an input over those that are counted."""
        own = self.whole.network_tokens or (1.0,) * len(self.whole.networks)
        left = self.whole.crossing_tokens or (1.0,) * len(self.whole.networks)
        return tuple(own[each] * (left[each] if each != self.used[0] else 1.0) for each in self.used)

    def _table(self, table: LatencyTable, ramps: Sequence[int]) -> LatencyTable:
        """The rows that are left; without lengths, of the inputs that are left of pruned ones."""
        if self.whole.lengths is None:
            table = pruned_table(self.whole, table, self.used)
        rows = [self.whole.ramps.index(ramp) for ramp in ramps]
        return replace(table, block_s_NB=table.block_s_NB[list(self.blocks)], ramp_s_EB=table.ramp_s_EB[rows])


def pruned_table(problem: PlanProblem, table: LatencyTable, used: Used) -> LatencyTable:
    """A chain's table for plans of these networks: batches of inputs that lost words at a crossing hold fewer tokens.

    They take what so many inputs of the measured length take, row by row.
    """
    if not problem.crossing_tokens:
        return table
    share_N = np.ones(problem.num_blocks)
    for network in used[1:]:
        share_N[problem.networks[network - 1] : problem.networks[network]] = problem.crossing_tokens[network]
    return replace(
        table,
        block_s_NB=_read_at(table.batches, table.block_s_NB, share_N),
        ramp_s_EB=_read_at(table.batches, table.ramp_s_EB, share_N[list(problem.ramps)]),
    )


def measuring(table: LatencyTable, networks: Sequence[int], times: Sequence[float]) -> LatencyTable:
    """A chain's table, whose first networks take so many times as long: they tell where attention went."""
    factors_N = np.ones(len(table.block_s_NB))
    for start, end, factor in zip((0, *networks), networks, times, strict=False):
        factors_N[start:end] = factor
    return replace(table, block_s_NB=table.block_s_NB * factors_N[:, None])


def _read_at(batches: Sequence[int], seconds_RB: FloatArray, share_R: FloatArray) -> FloatArray:
    sizes_B = np.array(batches, dtype=np.float64)
    rows = [np.interp(sizes_B * share, batches, row) for row, share in zip(seconds_RB, share_R, strict=True)]
    return np.array(rows).reshape(seconds_RB.shape)


def subproblem_of(problem: PlanProblem, stages: Sequence[Stage]) -> Subproblem:
    """The networks that a plan uses; raises PlanError unless its splits run these, whole, one after the other."""
    splits = [split for stage in stages for split in stage.splits]
    ends = problem.networks or (problem.num_blocks,)
    part = Subproblem(whole=problem, used=used_networks(problem.networks, {split.first for split in splits}))
    over = [end for end in ends[:-1] for split in splits if split.first < end < split.end]
    if over:
        raise PlanError(f"a split runs over block {over[0]}, where a network begins; it must end there")
    if [block for split in splits for block in range(split.first, split.end)] != list(part.blocks):
        wanted = f"blocks 0 to {problem.num_blocks - 1}"
        if problem.networks:
            wanted += f", less whole networks before the last (they end at blocks {list(ends)}),"
        raise PlanError(f"the splits must run {wanted} without gap or overlap")
    if part.used[-1] != len(ends) - 1:
        raise PlanError(f"the splits leave out the last network, blocks {ends[-2]} to {ends[-1] - 1}")
    return part


def _renumbered(split: Split, new: Mapping[int, int]) -> Split:
    ramps = tuple(new[ramp] for ramp in split.ramps)
    return replace(split, first=new[split.first], end=new[split.end - 1] + 1, ramps=ramps)


def _batches(batches: RecordedBatches, ramps: Sequence[int], new: Mapping[int, int]) -> RecordedBatches:
    columns = [batches.ramps.index(ramp) for ramp in ramps]
    return replace(
        batches,
        num_blocks=len(new),
        ramps=tuple(new[ramp] for ramp in ramps),
        sure_NR=batches.sure_NR[:, columns],
        losses_NR=batches.losses_NR[:, columns],
    )
