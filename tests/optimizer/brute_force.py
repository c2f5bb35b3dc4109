"""A brute-force reference for the planner: it scores every plan of a strategy's space, and shares no code with it.

Plans are scored one layout at a time: all choices of batches (P) times all choices of replicas (Q), with S splits in G
stages. The scores are implemented again from the definitions of the cost model. The best plan is scored by `evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain, combinations, product
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from earlyexit.network.boundary import AfterAnswer, Split
from optimizer.cost.evaluate import TOLERANCE, Evaluation, evaluate, violations
from optimizer.plans.plan import Stage
from optimizer.problems.problem import MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem
from optimizer.search.decision import Strategy
from profiles.table import LatencyTable

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of all plans of one layout."""

    batch_PS: FloatArray
    replicas_QG: FloatArray
    rate_per_s_PQ: FloatArray
    filled_PQ: FloatArray
    """Inputs for which batches wait."""
    latency_s_PQ: FloatArray
    mean_s_PQ: FloatArray
    overhead_P: FloatArray
    usd_per_hour_Q: FloatArray


@dataclass(slots=True, kw_only=True)
class Parts:
    """Sums over the splits, for each choice of batches. They are accumulated split by split."""

    cycle_s_PG: FloatArray
    """Seconds per input of one replica of each stage."""
    fixed_s_P: FloatArray
    """Sum of T and T_x."""
    first_P: FloatArray
    """Inputs that fill the batches of first splits."""
    further_PG: FloatArray
    mean_s_P: FloatArray
    """The same sums, weighted by the inputs without an answer, with half of each wait."""
    mean_first_P: FloatArray
    mean_further_PG: FloatArray
    block_s_P: FloatArray
    ramp_s_P: FloatArray

    @classmethod
    def empty(cls, num_choices: int, num_stages: int) -> Parts:
        per_stage = ("cycle_s_PG", "further_PG", "mean_further_PG")
        shapes = {each.name: (num_choices, num_stages)[: 1 + (each.name in per_stage)] for each in fields(cls)}
        return cls(**{name: np.zeros(shape) for name, shape in shapes.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    stages: tuple[Stage, ...]
    figures: Evaluation


class BruteForce:
    """Solves one problem for any strategy, with a cache of the times of splits."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._seconds: dict[tuple[object, ...], FloatArray] = {}
        self._rows_of = cache(_rows)
        self._replicas_on = cache(self._replicas)

    def best(self, strategy: Strategy) -> Optimum | None:
        """Returns the plan with the highest rate, the least cost or the least mean answer time, or None."""
        least, best = np.inf, None
        for layout in layouts(self._problem, strategy):
            scores = self.scores(layout)
            is_early_PQ = scores.latency_s_PQ <= self._problem.slo.limit_s * (1 + TOLERANCE)
            feasible_PQ = self._keeps_rate_and_budgets(scores) & is_early_PQ
            regret_PQ = np.where(feasible_PQ, self._regret(scores), np.inf)
            if regret_PQ.size and regret_PQ.min() < least:
                least = float(regret_PQ.min())
                p, q = np.unravel_index(regret_PQ.argmin(), regret_PQ.shape)
                best = plan_of(layout, scores.batch_PS[p], scores.replicas_QG[q])
        return None if best is None else self._checked(best)

    def least_latency_s(self, strategy: Strategy) -> float | None:
        """Returns the least worst-case latency of plans that keep the rate and the budgets, or None."""
        least = np.inf
        for layout in layouts(self._problem, strategy):
            scores = self.scores(layout)
            latency_s_PQ = np.where(self._keeps_rate_and_budgets(scores), scores.latency_s_PQ, np.inf)
            least = min(least, float(latency_s_PQ.min(initial=np.inf)))
        return least if np.isfinite(least) else None

    def scores(self, layout: Layout) -> Scores:
        """Returns the scores of all plans of a layout, by the definitions of the cost model."""
        problem = self._problem
        batch_PS = self._batches(layout)
        replicas_QG = self._replicas_on(layout.devices)
        parts = self._parts(layout, batch_PS)
        rate_PQ = 1 / (parts.cycle_s_PG[:, None, :] / replicas_QG[None, :, :]).max(axis=2)
        served = rate_PQ if isinstance(problem.objective, MaximizeRate) else problem.objective.rate_per_s
        filled_PQ, mean_filled_PQ = (
            first_P[:, None] + (further_PG[:, None, :] * replicas_QG[None, :, :]).sum(axis=2)
            for first_P, further_PG in (
                (parts.first_P, parts.further_PG),
                (parts.mean_first_P, parts.mean_further_PG),
            )
        )
        prices = np.array([problem.devices[device].usd_per_hour for device in layout.devices])
        return Scores(
            batch_PS=batch_PS,
            replicas_QG=replicas_QG,
            rate_per_s_PQ=rate_PQ,
            filled_PQ=filled_PQ,
            latency_s_PQ=parts.fixed_s_P[:, None] + filled_PQ / served,
            mean_s_PQ=parts.mean_s_P[:, None] + mean_filled_PQ / served,
            overhead_P=parts.ramp_s_P / parts.block_s_P,
            usd_per_hour_Q=(replicas_QG * prices).sum(axis=1),
        )

    def _parts(self, layout: Layout, batch_PS: FloatArray) -> Parts:
        problem = self._problem
        reached = reached_by(problem, layout.ramps, layout.used)
        runs = [1.0] * len(reached) if layout.after_answer == "stay" else reached
        parts = Parts.empty(len(batch_PS), len(layout.stages))
        column = 0
        for stage, (splits, device) in enumerate(zip(layout.stages, layout.devices, strict=True)):
            for index, blocks in enumerate(splits):
                batch_P, share, waiting = batch_PS[:, column], runs[blocks[0]], reached[blocks[0]]
                block_s_P, ramp_s_P, mean_s_P, busy_s_P = self._split_s(layout, blocks, device, batch_P, runs, reached)
                parts.block_s_P += block_s_P
                parts.ramp_s_P += ramp_s_P
                parts.mean_s_P += mean_s_P
                parts.cycle_s_PG[:, stage] += share * busy_s_P / batch_P
                parts.fixed_s_P += block_s_P + ramp_s_P
                waiting_P = batch_P * (batch_P > problem.tokens_per_input)
                filled_P = waiting_P / share if share else np.full(len(batch_P), np.inf)
                # Half of the wait, weighted by the inputs without an answer. If inputs stop, these are all inputs.
                mean_filled_P = waiting_P / 2 * (waiting if layout.after_answer == "stay" else 1.0)
                if index == 0 or blocks[0] in problem.networks:  # the ingress fills these batches
                    parts.first_P += filled_P
                    parts.mean_first_P += mean_filled_P
                else:
                    parts.further_PG[:, stage] += filled_P
                    parts.mean_further_PG[:, stage] += mean_filled_P
                column += 1
                if blocks[-1] + 1 in problem.networks[:-1]:
                    inside = index + 1 < len(splits)
                    crossing_s_P = problem.crossing_s + inside * self._hop_s(device, blocks, batch_P, runs)
                    parts.fixed_s_P += crossing_s_P
                    parts.mean_s_P += reached[blocks[-1] + 1] * crossing_s_P
            if stage + 1 < len(layout.stages):
                hop_s_P = self._hop_s(device, blocks, batch_P, runs)
                parts.cycle_s_PG[:, stage] = np.maximum(parts.cycle_s_PG[:, stage], share * hop_s_P / batch_P)
                parts.fixed_s_P += hop_s_P
                parts.mean_s_P += reached[blocks[-1] + 1] * hop_s_P
        return parts

    def _split_s(
        self, layout: Layout, blocks: Blocks, device: str, batch_P: FloatArray, runs: Shares, reached: Shares
    ) -> FloatArray:
        """Returns the seconds of blocks, of ramps, of both weighted by the inputs without an answer, and busy: (4, P).

        Busy seconds are a mean over batches, some of which have no input at a block.
        Ramps before the split matter only through the share of inputs that enter it.
        """
        problem, table = self._problem, self._problem.latency[device]
        network = sum(end <= blocks[0] for end in problem.networks)
        crossed = bool(problem.crossing_tokens) and network != layout.used[0]
        left = problem.crossing_tokens[network] if crossed else 1.0
        inside = tuple(ramp for ramp in layout.ramps if ramp in blocks)
        key = blocks, device, inside, *((runs[block], reached[block]) for block in blocks), left
        if key not in self._seconds:
            block_s_LB, ramp_s_LB, busy_s_LB = np.zeros((3, len(blocks), len(table.batches)))
            for index, block in enumerate(blocks):
                share_left = _share_left(runs, blocks[0], block)
                expected_B = np.array(table.batches) * share_left
                some_B = 1 - (1 - share_left) ** (np.array(table.batches) / problem.tokens_per_input)
                occupied_B = np.divide(expected_B, some_B, out=np.ones(len(some_B)), where=some_B > 0)
                seconds_B = _pruned(table, table.block_s_NB[block], left)
                block_s_LB[index] = _linear(expected_B, table.batches, seconds_B)
                if block in inside:
                    ramp_s_B = _pruned(table, table.ramp_s_EB[problem.ramps.index(block)], left)
                    ramp_s_LB[index] = _linear(expected_B, table.batches, ramp_s_B)
                    seconds_B = seconds_B + ramp_s_B
                busy_s_LB[index] = some_B * _linear(occupied_B, table.batches, seconds_B)
            mean_s_B = np.array([reached[block] for block in blocks]) @ (block_s_LB + ramp_s_LB)
            self._seconds[key] = np.array([block_s_LB.sum(0), ramp_s_LB.sum(0), mean_s_B, busy_s_LB.sum(0)])
        return self._seconds[key][:, np.searchsorted(table.batches, batch_P)]

    def _hop_s(self, device: str, blocks: Blocks, batch_P: FloatArray, reached: Sequence[float]) -> FloatArray:
        """Returns the transfer time (T_x) of the survivors of one batch, while all devices of the node send as many."""
        link, leave_P = self._problem.link, batch_P * _share_left(reached, blocks[0], blocks[-1] + 1)
        sent_P = self._problem.devices[device].per_node * self._problem.bytes_per_sample_N[blocks[-1]] * leave_P
        return link.delay_s + sent_P / link.bandwidth_bytes_per_s

    def _batches(self, layout: Layout) -> FloatArray:
        batch_PS = self._rows_of(*(self._problem.latency[device].batches for _, device in layout.splits))
        return batch_PS[(batch_PS == batch_PS[:, :1]).all(axis=1)] if layout.constant_batch else batch_PS

    def _replicas(self, devices: tuple[str, ...]) -> FloatArray:
        counts = {device: self._problem.devices[device].count for device in devices}
        replicas_QG = _rows(*(range(1, counts[device] + 1) for device in devices))
        enough_Q = np.ones(len(replicas_QG), dtype=bool)
        for device, count in counts.items():
            enough_Q &= replicas_QG[:, [each == device for each in devices]].sum(axis=1) <= count
        return replicas_QG[enough_Q]

    def _regret(self, scores: Scores) -> FloatArray:
        """Returns the objective of each plan, to be minimized."""
        if isinstance(self._problem.objective, MinimizeLatency):
            return scores.mean_s_PQ
        return scores.usd_per_hour_Q if isinstance(self._problem.objective, MinimizeCost) else -scores.rate_per_s_PQ

    def _keeps_rate_and_budgets(self, scores: Scores) -> npt.NDArray[np.bool_]:
        objective, budget = self._problem.objective, self._problem.budget_usd_per_hour
        kept_PQ = np.ones(scores.rate_per_s_PQ.shape, dtype=bool)
        if not isinstance(objective, MaximizeRate):
            kept_PQ &= scores.rate_per_s_PQ >= objective.rate_per_s * (1 - TOLERANCE)
        if budget is not None:
            kept_PQ &= scores.usd_per_hour_Q[None, :] <= budget * (1 + TOLERANCE)
        if isinstance(objective, MinimizeLatency) and objective.ramp_budget is not None:
            kept_PQ &= scores.overhead_P[:, None] <= objective.ramp_budget * (1 + TOLERANCE)
        return kept_PQ

    def _checked(self, stages: tuple[Stage, ...]) -> Optimum:
        figures = evaluate(self._problem, stages)
        assert violations(self._problem, stages, figures) == []
        return Optimum(stages=stages, figures=figures)


def reached_by(problem: PlanProblem, active: Sequence[int], used: tuple[int, ...] = ()) -> list[float]:
    """Returns the share of inputs that reach each block and the end: the survival after the last active ramp.

    `used` are the used networks of a chain.
    """
    before = [[ramp for ramp in active if ramp < block] for block in range(problem.num_blocks + 1)]
    known = (problem.survival_of or {}).get(used)
    if known is None:
        return [problem.survival_N[max(ramps) + 1] if ramps else 1.0 for ramps in before]
    blocks = [block for network in used for block in blocks_of(problem, network)]
    after = {ramp: next(block for block in blocks if block > ramp) for ramp in active}
    return [known[after[max(ramps)]] if ramps else 1.0 for ramps in before]


def _rows(*choices: Sequence[int]) -> FloatArray:
    """Returns the Cartesian product, one row per combination."""
    return np.array(list(product(*choices)), dtype=np.float64).reshape(-1, len(choices))


def _share_left(reached: Sequence[float], first: int, block: int) -> float:
    """Returns the share of a full batch at block `first` that reaches `block`. An unreached split counts as full."""
    return reached[block] / reached[first] if reached[first] else 1.0


def _pruned(table: LatencyTable, seconds_B: FloatArray, left: float) -> FloatArray:
    """Returns the seconds of the measured batches if a share `left` of each input's tokens remains."""
    return _linear(np.array(table.batches) * left, table.batches, seconds_B)


def _linear(x_B: FloatArray, known: Sequence[int], value_B: FloatArray) -> FloatArray:
    """Interpolates linearly between known points, and is constant below the first. No point is above the last."""
    values = []
    for x in x_B:
        right = next((index for index, point in enumerate(known) if point >= x), len(known) - 1)
        if right == 0:
            values.append(value_B[0])
        else:
            way = (x - known[right - 1]) / (known[right] - known[right - 1])
            values.append((1 - way) * value_B[right - 1] + way * value_B[right])
    return np.array(values)


T = TypeVar("T")
Blocks = tuple[int, ...]
Shares = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan without its batches and replicas."""

    stages: tuple[tuple[Blocks, ...], ...]
    """The blocks of each split of each stage."""
    devices: tuple[str, ...]
    """The device of each stage."""
    ramps: tuple[int, ...]
    """The active ramps."""
    constant_batch: bool
    """Whether all splits have one batch size, as in E3."""
    after_answer: AfterAnswer = "stop"
    used: tuple[int, ...] = (0,)
    """The used networks of a chain."""

    @property
    def splits(self) -> tuple[tuple[Blocks, str], ...]:
        """The blocks and the device of each split."""
        pairs = zip(self.stages, self.devices, strict=True)
        return tuple((blocks, device) for splits, device in pairs for blocks in splits)


def layouts(problem: PlanProblem, strategy: Strategy) -> Iterator[Layout]:
    """Yields every way to cut blocks into splits, group splits into stages, assign devices and activate ramps."""
    available = [device for device, supply in problem.devices.items() if supply.count > 0]
    for used in _sets_of_networks(problem):
        networks = [blocks_of(problem, network) for network in used]
        ramp_sets = _ramp_sets(problem, strategy, {block for blocks in networks for block in blocks})
        for parts in product(*(list(_consecutive_groups(blocks)) for blocks in networks)):
            splits = tuple(chain.from_iterable(parts))
            for stages in _consecutive_groups(splits):
                if _in_space(strategy, len(stages), len(splits)):
                    for ramps, devices in product(ramp_sets, product(available, repeat=len(stages))):
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
    """Returns all sets that contain the last network."""
    last = max(len(problem.networks), 1) - 1
    sets = chain.from_iterable(combinations(range(last), size) for size in range(last + 1))
    return [(*others, last) for others in sets]


def _in_space(strategy: Strategy, num_stages: int, num_splits: int) -> bool:
    if strategy in ("stock", "early-exit", "apparate"):
        return num_splits == 1
    if strategy == "serial":
        return num_stages == 1
    return strategy == "best" or num_stages == num_splits


def _after_answers(problem: PlanProblem, strategy: Strategy) -> tuple[AfterAnswer, ...]:
    """Returns the allowed values of `after_answer`: `stay` can only improve the mean answer time."""
    if not isinstance(problem.objective, MinimizeLatency) or strategy in ("stock", "early-exit", "e3"):
        return ("stop",)
    return ("stay",) if strategy == "apparate" else ("stop", "stay")


def _ramp_sets(problem: PlanProblem, strategy: Strategy, blocks: set[int]) -> list[tuple[int, ...]]:
    ramps = tuple(ramp for ramp in problem.ramps if ramp in blocks)
    stays = strategy == "apparate"
    if strategy == "stock" or (stays and not isinstance(problem.objective, MinimizeLatency)):
        return [()]  # if inputs stay, ramps improve neither the rate nor the cost
    if strategy in ("early-exit", "e3"):
        return [ramps]
    return list(chain.from_iterable(combinations(ramps, size) for size in range(len(ramps) + 1)))


def _consecutive_groups(items: Sequence[T]) -> Iterator[tuple[tuple[T, ...], ...]]:
    """Yields all ways to cut a sequence into consecutive, non-empty groups."""
    if not items:
        yield ()
    for size in range(1, len(items) + 1):
        for rest in _consecutive_groups(items[size:]):
            yield (tuple(items[:size]), *rest)
