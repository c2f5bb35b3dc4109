"""Every plan there is, but for its batches and replicas: what the planner's slow twin goes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from earlyexit.network.boundary import AfterAnswer, Split
from optimizer.decision import Strategy
from optimizer.plan import Stage
from optimizer.problem import MinimizeLatency, PlanProblem

T = TypeVar("T")
FloatArray = npt.NDArray[np.float64]
Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan without its batches and replicas."""

    stages: tuple[tuple[Blocks, ...], ...]
    """Per stage its splits, per split its blocks."""
    devices: tuple[str, ...]
    """Per stage."""
    ramps: tuple[int, ...]
    """Active ones."""
    constant_batch: bool
    """All splits at one batch size, as E3 has it."""
    after_answer: AfterAnswer = "stop"
    used: tuple[int, ...] = (0,)
    """Networks of a chain."""

    @property
    def splits(self) -> tuple[tuple[Blocks, str], ...]:
        """With the device that runs each."""
        pairs = zip(self.stages, self.devices, strict=True)
        return tuple((blocks, device) for splits, device in pairs for blocks in splits)


def layouts(problem: PlanProblem, strategy: Strategy) -> Iterator[Layout]:
    """Every way to cut the blocks into splits, group these, place the groups and switch ramps on."""
    there = [device for device, supply in problem.devices.items() if supply.count > 0]
    for used in _sets_of_networks(problem):
        networks = [blocks_of(problem, network) for network in used]
        ramp_sets = _ramp_sets(problem, strategy, {block for blocks in networks for block in blocks})
        for parts in product(*(list(_consecutive_groups(blocks)) for blocks in networks)):
            splits = tuple(chain.from_iterable(parts))
            for stages in _consecutive_groups(splits):
                if _in_space(strategy, len(stages), len(splits)):
                    for ramps, devices in product(ramp_sets, product(there, repeat=len(stages))):
                        for after_answer in _after_answers(problem, strategy):
                            yield Layout(
                                stages=stages,
                                devices=devices,
                                ramps=ramps,
                                constant_batch=strategy == "e3",
                                after_answer=after_answer,
                                used=used,
                            )


def plan_of(layout: Layout, batch_S: FloatArray, replicas_G: FloatArray) -> tuple[Stage, ...]:
    batches = iter(batch_S)
    return tuple(
        Stage(
            device=device,
            replicas=int(replicas),
            splits=tuple(
                Split(
                    first=blocks[0],
                    end=blocks[-1] + 1,
                    batch=int(next(batches)),
                    ramps=tuple(ramp for ramp in layout.ramps if ramp in blocks),
                    after_answer=layout.after_answer,
                )
                for blocks in splits
            ),
        )
        for splits, device, replicas in zip(layout.stages, layout.devices, replicas_G, strict=True)
    )


def blocks_of(problem: PlanProblem, network: int) -> Blocks:
    ends = problem.networks or (problem.num_blocks,)
    return tuple(range(0 if network == 0 else ends[network - 1], ends[network]))


def _sets_of_networks(problem: PlanProblem) -> list[tuple[int, ...]]:
    """All that end with the last."""
    last = max(len(problem.networks), 1) - 1
    sets = chain.from_iterable(combinations(range(last), size) for size in range(last + 1))
    return [(*some, last) for some in sets]


def _in_space(strategy: Strategy, num_stages: int, num_splits: int) -> bool:
    if strategy in ("stock", "early-exit", "apparate"):
        return num_splits == 1
    if strategy == "serial":
        return num_stages == 1
    return strategy == "best" or num_stages == num_splits


def _after_answers(problem: PlanProblem, strategy: Strategy) -> tuple[AfterAnswer, ...]:
    """Nothing but early answers is won by staying."""
    if not isinstance(problem.objective, MinimizeLatency) or strategy in ("stock", "early-exit", "e3"):
        return ("stop",)
    return ("stay",) if strategy == "apparate" else ("stop", "stay")


def _ramp_sets(problem: PlanProblem, strategy: Strategy, blocks: set[int]) -> list[tuple[int, ...]]:
    there = tuple(ramp for ramp in problem.ramps if ramp in blocks)
    stays = strategy == "apparate"
    if strategy == "stock" or (stays and not isinstance(problem.objective, MinimizeLatency)):
        return [()]  # where inputs stay, ramps win neither rate nor money
    if strategy in ("early-exit", "e3"):
        return [there]
    return list(chain.from_iterable(combinations(there, size) for size in range(len(there) + 1)))


def _consecutive_groups(items: Sequence[T]) -> Iterator[tuple[tuple[T, ...], ...]]:
    """All ways to cut a sequence into consecutive groups, none empty."""
    if not items:
        yield ()
    for size in range(1, len(items) + 1):
        for rest in _consecutive_groups(items[size:]):
            yield (tuple(items[:size]), *rest)
