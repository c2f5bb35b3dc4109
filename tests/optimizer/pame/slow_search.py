"""The slow twin of PAME's search: input by input, in plain loops, over every sequence of exits.

A sequence is PAME's if each of its exits is the one that the paper's rule takes behind those before it, and the rule
takes none behind the last. There is exactly one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations

import numpy as np
from numpy.random import Generator, default_rng

from optimizer.pame.search import SearchOptions
from profiles.batches import RecordedBatches
from profiles.table import LatencyTable


@dataclass(frozen=True, kw_only=True, eq=False)
class SmallProblem:
    table: LatencyTable
    batches: RecordedBatches
    options: SearchOptions

    @property
    def end(self) -> int:
        return len(self.table.block_s_NB)

    @property
    def size(self) -> int:
        return self.batches.size

    def run_s(self, first: int, exit_: int | None, size: float) -> float:
        """One stage, block by block."""
        last = self.end - 1 if exit_ is None else exit_
        seconds = sum(self._at(self.table.block_s_NB[block], size) for block in range(first, last + 1))
        if exit_ is not None:
            seconds += self._at(self.table.ramp_s_EB[self.batches.ramps.index(exit_)], size)
        return seconds

    def _at(self, row: np.ndarray, size: float) -> float:
        return float(np.interp(size, self.table.batches, row))

    @property
    def larger_takes_longer(self) -> bool:
        """Equation 3 takes it for granted."""
        return not (np.diff(self.table.block_s_NB, axis=1) < 0).any()

    def arrivals(self) -> list[list[int]]:
        """The inputs of every whole batch."""
        count = len(self.batches) // self.size
        return [list(range(k * self.size, (k + 1) * self.size)) for k in range(count)]

    def leaves_at(self, row: int, active: Sequence[int]) -> int | None:
        """The first active exit that is sure of an input."""
        sure = [ramp for ramp in sorted(active) if self.batches.sure_NR[row, self.batches.ramps.index(ramp)]]
        return sure[0] if sure else None

    def left(self, batch: Sequence[int], active: Sequence[int]) -> int:
        return sum(self.leaves_at(row, active) is None for row in batch)

    def precision(self, active: Sequence[int]) -> float:
        lost = 0.0
        for row in range(len(self.batches)):
            exit_ = self.leaves_at(row, active)
            if exit_ is not None:
                lost += self.batches.losses_NR[row, self.batches.ramps.index(exit_)]
        return 1 - lost / len(self.batches)

    def keeps(self, active: Sequence[int]) -> bool:
        """Whether more than eta of the precision is kept; whatever is kept will do where thresholds were given."""
        return self.options.kept is None or self.precision(active) > self.options.kept


def first_exit_by_inputs(problem: SmallProblem) -> tuple[int, float] | None:
    """The single exit of the least mean answer time, every input of every batch timed by itself (intervals of 1)."""
    found = []
    for ramp in problem.batches.ramps:
        to_exit_s = problem.run_s(0, ramp, problem.size)
        times, slow = [], 0
        for batch in problem.arrivals():
            left = problem.left(batch, [ramp])
            last_s = to_exit_s + (problem.run_s(ramp + 1, None, left) if left else 0.0)
            slow += last_s > stock_s(problem) * (1 + 1e-9)
            times += [to_exit_s if problem.leaves_at(row, [ramp]) == ramp else last_s for row in batch]
        mean_s = sum(times) / len(times)
        keeps = problem.keeps([ramp])
        if keeps and slow <= problem.options.slower * len(problem.arrivals()) and mean_s < stock_s(problem):
            found.append((mean_s, ramp))
    return (min(found)[1], min(found)[0]) if found else None


def stock_s(problem: SmallProblem) -> float:
    return problem.run_s(0, None, problem.size)


def sequences_of_the_rule(problem: SmallProblem) -> list[tuple[int, ...]]:
    """Of all sequences of exits, those that the paper's rule gives."""
    ramps = problem.batches.ramps
    every = chain.from_iterable(combinations(ramps, size) for size in range(len(ramps) + 1))
    return [sequence for sequence in every if _is_of_the_rule(problem, sequence)]


def _is_of_the_rule(problem: SmallProblem, sequence: tuple[int, ...]) -> bool:
    taken = (_next(problem, sequence[:count]) for count in range(len(sequence) + 1))
    return all(each == wanted for each, wanted in zip(taken, [*sequence, None], strict=True))


@cache
def _next(problem: SmallProblem, before: tuple[int, ...]) -> int | None:
    size = _allowed_behind(problem, before)
    everybody_left = all(problem.leaves_at(row, before) is not None for row in range(len(problem.batches)))
    if size < 1 or (before and everybody_left):
        return None
    first = before[-1] + 1 if before else 0
    worth = []
    for ramp in problem.batches.ramps:
        if ramp < first or not problem.keeps([*before, ramp]):
            continue
        if all(problem.leaves_at(row, [*before, ramp]) != ramp for row in range(len(problem.batches))):
            continue
        slow = [_is_slow(problem, batch, (*before, ramp)) for batch in problem.arrivals()]
        if sum(slow) > problem.options.slower * len(slow):
            continue
        step = min(problem.options.interval, size)
        quick = [batch for batch, is_slow in zip(problem.arrivals(), slow, strict=True) if not is_slow]
        columns = [problem.left(batch, (*before, ramp)) // step * step for batch in problem.arrivals()]
        whole_s, to_exit_s = problem.run_s(first, None, size), problem.run_s(first, ramp, size)
        if before:
            worst = max(problem.left(batch, (*before, ramp)) // step * step for batch in quick)
            value = to_exit_s + (problem.run_s(ramp + 1, None, worst) if worst else 0.0)
        else:
            rests = [problem.run_s(ramp + 1, None, column) if column else 0.0 for column in columns]
            shares = [column / size for column in columns]
            value = to_exit_s + sum(share * rest for share, rest in zip(shares, rests, strict=True)) / len(rests)
        if value < whole_s * (1 - 1e-9):
            worth.append((value, ramp))
    return min(worth)[1] if worth else None


def _is_slow(problem: SmallProblem, batch: Sequence[int], active: tuple[int, ...]) -> bool:
    """Whether more move on, at one of the exits, than may behind it."""
    for count in range(1, len(active) + 1):
        size = _allowed_behind(problem, active[: count - 1])
        step = min(problem.options.interval, size)
        left = problem.left(batch, active[:count]) // step * step
        if left > _allowed_behind(problem, active[:count]):
            return True
    return False


@cache
def _allowed_behind(problem: SmallProblem, before: tuple[int, ...]) -> int:
    """n_l: tried from none upwards, until one takes too long."""
    if not before:
        return problem.size
    size = _allowed_behind(problem, before[:-1])
    step = min(problem.options.interval, size)
    first = before[-2] + 1 if len(before) > 1 else 0
    whole_s, to_exit_s = problem.run_s(first, None, size), problem.run_s(first, before[-1], size)
    allowed, moving = -1, 0
    while moving <= size:
        rest_s = problem.run_s(before[-1] + 1, None, moving) if moving else 0.0
        if to_exit_s + rest_s > whole_s * (1 + 1e-9):
            break
        allowed, moving = moving, moving + step
    return allowed


def small_problem(seed: int, *, interval: int | None = None) -> SmallProblem:
    """2 to 6 blocks, batches of 2 to 8; of some no exit is worth it, of some several."""
    rng = default_rng(seed)
    num_blocks = int(rng.integers(2, 7))
    ramps = tuple(ramp for ramp in range(num_blocks - 1) if rng.random() < 0.85) or (0,)
    size = int(rng.integers(2, 9))
    num_inputs = int(rng.integers(size, 8 * size))
    sure_NR = _sure(rng, num_inputs, len(ramps))
    losses_NR = (rng.random(sure_NR.shape) < rng.choice([0.0, 0.01, 0.2])) * rng.random(sure_NR.shape) * sure_NR
    return SmallProblem(
        table=_table(rng, num_blocks, len(ramps), size),
        batches=RecordedBatches(
            num_blocks=num_blocks, ramps=ramps, sure_NR=sure_NR, losses_NR=losses_NR, size=size, zero_one=False
        ),
        options=SearchOptions(
            slower=float(rng.choice([0.0, 0.02, 0.2])),
            kept=float(rng.choice([0.9, 0.99])),
            interval=int(rng.integers(1, 4)) if interval is None else interval,
        ),
    )


def _sure(rng: Generator, num_inputs: int, num_ramps: int) -> np.ndarray:
    """Inputs that are easy at one ramp are mostly so at the next; not all are."""
    ease_N1 = rng.random((num_inputs, 1)) ** rng.choice([0.5, 1.0, 2.0])
    hardness_R = np.sort(rng.random(num_ramps))[::-1] * rng.choice([0.3, 0.7, 1.0])
    return np.asarray((ease_N1 > hardness_R) ^ (rng.random((num_inputs, num_ramps)) < 0.05))


def _table(rng: Generator, num_blocks: int, num_ramps: int, size: int) -> LatencyTable:
    """Seconds that grow with the batch, in a few cases by steps or by no rule."""
    batches = tuple(sorted({1, int(rng.integers(1, size + 1)), size}))
    grows_B = np.array(batches) ** rng.uniform(0, 1)
    block_s_NB = rng.uniform(0.5, 1.5, (num_blocks, 1)) * grows_B
    ramp_s_EB = rng.uniform(0.2, 1.0, (num_ramps, 1)) * grows_B * rng.choice([0.0, 0.1, 0.4])
    if rng.random() < 0.15:
        block_s_NB = np.exp(rng.normal(size=block_s_NB.shape))
    return LatencyTable(batches=batches, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)
