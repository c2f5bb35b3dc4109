"""The cost model, which scores the plans of every planner and of the brute-force reference.

It follows E3 (section 3.2, figure 6), extended to stages with several splits and to plans whose answered inputs stay
(Apparate). Let u(k) be the share of inputs that reach block k without an answer under the plan's active ramps. Let s(k)
be the share that block k computes: u(k) if answered inputs stop, and 1 if they stay. R is the rate.

- A split over blocks i..j-1 at batch size b runs block k at the expected batch b*s(k)/s(i), or skips it if no input of
  the batch remains. Its time T is the mean of the sum over its blocks and active ramps.
- A stage does w = sum of s(i)*T/b seconds of work per input, so m replicas serve m/w inputs per second.
- A hop after a stage takes T_x. It limits the rate to m*b/(s(i)*T_x), because a replica sends while it computes. A
  replica has an equal part of its node's bandwidth (`Supply.per_node`), as if all accelerators there sent at once.
- An input waits for its batch: b/(R*s(i)) at the first split of a stage, and m times as long at the further splits,
  where each replica fills batches of its own. The b-1 other inputs take less on average; the rest is room for arrivals
  at random. A batch of one waits for no others.
- In a cascade, only the networks that the plan uses count. Between two networks, survivors return to the ingress,
  which takes T_x and `crossing_s`, and which fills the next batch as for a first split. A crossing inside a stage does
  not limit the rate.
- The plan's rate is the smallest limit. The worst-case latency is the sum of all waits, T_x, and the splits' times at
  the expected batches: the batch of an input that goes on skips no block. The same times are meant below.
- The mean answer time weights the same seconds by the share of inputs without an answer: half of a split's wait by
  u(i), each block and ramp by u(k), each hop by u(j). If the problem says so, it has the mean queues (`Load`), too.
- The ramp overhead is the time of active ramps divided by the time of blocks, for the expected batches of each split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.cost.batch_seconds import (
    BatchSeconds,
    batch_seconds,
    computed_shares,
    expected_batches,
    recorded_seconds,
)
from optimizer.generation.steps import SequenceFigures, broken_promises, seconds_of_steps, sequence_figures
from optimizer.plans.plan import Stage, chains_of, replicas_of
from optimizer.problems.networks import Subproblem, subproblem_of
from optimizer.problems.problem import MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, Reach, nested_shares
from optimizer.problems.tokens import in_token_batches, in_tokens
from profiles.records import IntArray, RecordedBatches

# Relative difference up to which rates and latencies are equal: planner and evaluator sum in different orders.
TOLERANCE = 1e-9
LEAST_IDLE = 1e-3
"""Least share of idle time for which waits are estimated. Otherwise they would be infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSplit:
    """Expected figures of one split."""

    stage_index: int
    split: Split
    reached_by: float
    """Share of all inputs that enter the split, with or without an answer."""
    seconds: BatchSeconds
    """Times of a batch. T is `seconds.mean_s`."""
    wait_s: float
    """Wait until the batch is full, at the plan's rate."""
    unanswered_s: float
    """The split's contribution to the mean answer time."""
    batch_at_block: tuple[float, ...]
    """Expected batch at each block, in tokens if the split has a token budget, else in inputs."""
    crossing_s: float = 0.0
    """Time until the survivors may begin the next network, without the hop at the stage's end."""

    @property
    def fill(self) -> float:
        """Mean of the expected batches, as a share of the batch size."""
        return sum(self.batch_at_block) / len(self.batch_at_block) / (self.split.tokens or self.split.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """Rate limits of one stage and of the hop after it."""

    work_s: float
    """Device seconds per input of the service."""
    rate_per_s: float
    hop_s: float
    """Transfer time after the stage (T_x); 0 after the last stage."""
    hop_rate_per_s: float

    def per_input(self, mean: float) -> StageFigures:
        """Returns figures per input of `mean` tokens from figures per token. Latencies do not change."""
        rate_per_s, hop_rate_per_s = self.rate_per_s / mean, self.hop_rate_per_s / mean
        return replace(self, work_s=self.work_s * mean, rate_per_s=rate_per_s, hop_rate_per_s=hop_rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures of a plan in the cost model."""

    rate_per_s: float
    """The highest rate that the plan can serve."""
    served_per_s: float
    """The rate for which the latencies hold: the required rate, or the highest rate."""
    latency_s: float
    """Worst-case latency."""
    mean_latency_s: float
    """Mean answer time."""
    ramp_overhead: float
    """Time of active ramps, as a share of the blocks' time."""
    usd_per_hour: float
    splits: tuple[ExpectedSplit, ...]
    stages: tuple[StageFigures, ...]
    shares: tuple[float, ...] = (1.0,)
    """Each chain's share of the rate. By default it is such that all chains are equally busy."""
    sequences: SequenceFigures | None = None
    """If inputs are the steps of sequences, the figures of these sequences."""


def evaluate(
    problem: PlanProblem,
    stages: Sequence[Stage],
    reach: Reach | RecordedBatches | None = None,
    *,
    shares: Sequence[float] = (),
) -> Evaluation:
    """Returns the figures of a plan; raises PlanError if the plan does not fit the problem.

    `stages` holds the stages of all chains, one chain after the other. `shares` holds each chain's share of the rate;
    by default, those of `_default_shares`.

    `reach` replaces the nested survival, for example by the survival of joint exit records. With recorded batches, both
    survival and seconds are theirs; a split that fewer inputs than a batch reach is scored on its mean batch. If inputs
    have lengths, shares count tokens rather than inputs (`optimizer.problems.tokens`). Blocks keep their numbers in the
    cascade even if the plan leaves networks out.
    """
    if isinstance(problem.objective, MinimizeLatency) and problem.objective.queues:
        figures = evaluate(problem.without_queues(), stages, reach, shares=shares)
        waits_s = [load.share * load.queue_s(1.0)[0] for each in loads(problem, stages, figures) for load in each]
        return replace(figures, mean_latency_s=figures.mean_latency_s + sum(waits_s))
    if problem.ingress is not None:
        inner, most_per_s = replace(problem, ingress=None), problem.ingress.most_per_s
        figures = evaluate(inner, stages, reach, shares=shares)
        if figures.rate_per_s < most_per_s * (1 - TOLERANCE):
            return figures
        if problem.required_per_s is None:  # batches fill at the rate that the ingresses carry
            inner = replace(inner, objective=MinimizeCost(rate_per_s=most_per_s))
            figures = evaluate(inner, stages, reach, shares=shares)
        return replace(figures, rate_per_s=most_per_s)
    chains = chains_of(stages)
    if len(chains) > 1:
        return _evaluate_parallel(problem, chains, shares, reach)
    part = _fitting_part(problem, stages)
    inner, inner_stages, mean = part.problem, stages, 1.0
    if inner is not problem:
        inner_stages = part.stages_of(stages)
        reach = inner.batches if isinstance(reach, RecordedBatches) else reach and part.shares_of(reach)
    if inner.lengths is not None:
        mean, inner, inner_stages = inner.lengths.mean, in_tokens(inner), in_token_batches(inner, inner_stages)
    ramps = [ramp for stage in inner_stages for split in stage.splits for ramp in split.ramps]
    exits_N = reach.exits_N(ramps) if isinstance(reach, RecordedBatches) else None
    shares_of = reach.survival if isinstance(reach, RecordedBatches) else reach
    reached_N = nested_shares(inner.survival_N, ramps) if shares_of is None else shares_of(ramps)
    unanswered_N = inner.with_probes(reached_N)
    share_N = computed_shares(stages[0].splits[0], unanswered_N)
    chain = _ChainCost(problem=inner, share_N=share_N, unanswered_N=unanswered_N, exits_N=exits_N, mean=mean)
    return chain.evaluated(inner_stages, stages)


def _evaluate_parallel(
    problem: PlanProblem,
    chains: Sequence[Sequence[Stage]],
    shares: Sequence[float],
    reach: Reach | RecordedBatches | None,
) -> Evaluation:
    """Evaluates parallel chains: rates and prices are summed, and means are weighted by the chains' shares."""
    if problem.generation is not None:
        raise PlanError("the cost model has no figures of generation with several chains; use a plan of one chain")
    alone = [evaluate(problem, chain, reach) for chain in chains]
    shares = shares or _default_shares(problem, alone)
    rate_per_s = min(each.rate_per_s / share for each, share in zip(alone, shares, strict=True))
    served_per_s = rate_per_s if problem.required_per_s is None else problem.required_per_s
    # Batches fill more slowly in a chain that serves less than it could.
    if problem.required_per_s is not None or rate_per_s < sum(each.rate_per_s for each in alone) * (1 - TOLERANCE):
        alone = [
            evaluate(replace(problem, objective=MinimizeCost(rate_per_s=share * served_per_s)), chain, reach)
            for chain, share in zip(chains, shares, strict=True)
        ]
    starts = accumulate([len(chain) for chain in chains], initial=0)
    return Evaluation(
        rate_per_s=rate_per_s,
        served_per_s=served_per_s,
        latency_s=max(each.latency_s for each in alone),
        mean_latency_s=sum(share * each.mean_latency_s for each, share in zip(alone, shares, strict=True)),
        ramp_overhead=sum(share * each.ramp_overhead for each, share in zip(alone, shares, strict=True)),
        usd_per_hour=problem.usd_of(replicas_of(stage for chain in chains for stage in chain)),
        splits=tuple(
            replace(split, stage_index=start + split.stage_index)
            for each, start in zip(alone, starts, strict=False)
            for split in each.splits
        ),
        stages=tuple(stage for each in alone for stage in each.stages),
        shares=tuple(shares),
    )


def _default_shares(problem: PlanProblem, alone: Sequence[Evaluation]) -> Sequence[float]:
    """Returns shares with which all chains are equally busy.

    If the batches of a chain would then fill too slowly for the SLO, every chain gets the rate from which its batches
    fill in time, and an equal part of its rate above that.
    """
    required_per_s, total_per_s = problem.required_per_s, sum(each.rate_per_s for each in alone)
    equal = [each.rate_per_s / total_per_s for each in alone]
    if required_per_s is None:
        return equal
    least = []
    for each in alone:
        wait_s = sum(split.wait_s for split in each.splits)
        room_s = problem.slo.limit_s * (1 + TOLERANCE / 2) - (each.latency_s - wait_s)
        least.append(_ratio(wait_s * required_per_s, room_s))
    part = _ratio(required_per_s - sum(least), total_per_s - sum(least))
    is_in_time = all(share * required_per_s >= rate for share, rate in zip(equal, least, strict=True))
    if is_in_time or not 0 <= part <= 1:
        return equal
    return [(rate + part * (each.rate_per_s - rate)) / required_per_s for rate, each in zip(least, alone, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChainCost:
    """The cost model of a single chain, counted in inputs or in tokens. Figures are per input of the service."""

    problem: PlanProblem
    share_N: Sequence[float]
    """Share of the inputs that each block computes: s."""
    unanswered_N: Sequence[float]
    """Share of the inputs that reach each block without an answer: u."""
    exits_N: IntArray | None
    """The block after which each recorded input leaves; None: seconds are for the mean batch."""
    mean: float
    """Tokens per input if the problem is in tokens, else 1."""

    def evaluated(self, stages: Sequence[Stage], own: Sequence[Stage]) -> Evaluation:
        """Returns the figures of stages that the plan has as `own`: in other blocks, or with budgets of tokens."""
        problem, unanswered_N = self.problem, self.unanswered_N
        seconds = [[self._seconds(stage, split) for split in stage.splits] for stage in stages]
        figures = [self._stage_figures(*each) for each in zip(stages, seconds, strict=True)]
        rate_per_s = min(min(each.rate_per_s, each.hop_rate_per_s) for each in figures)
        served_per_s = rate_per_s if problem.required_per_s is None else problem.required_per_s
        splits = tuple(
            self._expected_split(index, stage, *each, served_per_s)
            for index, stage in enumerate(stages)
            for each in zip(stage.splits, own[index].splits, seconds[index], strict=True)
        )
        whole, hops_s = BatchSeconds.total(each.seconds for each in splits), sum(each.hop_s for each in figures)
        latency_s = sum(each.wait_s + each.seconds.inside_s + each.crossing_s for each in splits) + hops_s
        with_steps = problem.generation is not None
        return Evaluation(
            rate_per_s=rate_per_s / self.mean,
            served_per_s=served_per_s / self.mean,
            latency_s=latency_s,
            mean_latency_s=sum(each.unanswered_s for each in splits)
            + sum(unanswered_N[stage.end] * each.hop_s for stage, each in zip(stages[:-1], figures, strict=False)),
            ramp_overhead=whole.ramp_s / (whole.inside_s - whole.ramp_s),
            usd_per_hour=problem.usd_of(replicas_of(stages)),
            splits=splits,
            stages=tuple(each.per_input(self.mean) for each in figures),
            sequences=sequence_figures(problem, stages, served_per_s, latency_s, hops_s) if with_steps else None,
        )

    def _seconds(self, stage: Stage, split: Split) -> BatchSeconds:
        problem, table = self.problem, self.problem.latency[stage.device]
        if self.exits_N is not None and (known := recorded_seconds(table, problem.ramps, split, self.exits_N)):
            return known
        if problem.generation is not None:
            return seconds_of_steps(problem, stage.device, split, self.unanswered_N)
        return batch_seconds(table, problem.ramps, split, self.unanswered_N, unit=problem.tokens_per_input)

    def _stage_figures(self, stage: Stage, seconds: Sequence[BatchSeconds]) -> StageFigures:
        """Returns the rate limits of a stage, still per token."""
        work_s, hop_s, hop_rate_per_s = 0.0, 0.0, np.inf
        for split, each in zip(stage.splits, seconds, strict=True):
            work_s += self.share_N[split.first] * each.mean_s / split.batch
        if stage.end < self.problem.num_blocks:
            last = stage.splits[-1]
            hop_s = self._hop_s(stage, last)
            hop_rate_per_s = _ratio(stage.replicas * last.batch, self.share_N[last.first] * hop_s)
        rate_per_s = _ratio(stage.replicas, work_s)
        return StageFigures(work_s=work_s, rate_per_s=rate_per_s, hop_s=hop_s, hop_rate_per_s=hop_rate_per_s)

    def _expected_split(
        self, stage_index: int, stage: Stage, split: Split, own: Split, seconds: BatchSeconds, rate_per_s: float
    ) -> ExpectedSplit:
        problem, ends, reached_by = self.problem, self.problem.networks[:-1], self.share_N[split.first]
        # The ingress fills one batch at the first split of a stage or of a network, else each replica fills one.
        num_filling = 1 if split.first == stage.first or split.first in ends else stage.replicas
        waits = split.batch > problem.tokens_per_input
        wait_s = _ratio(num_filling * split.batch * waits, rate_per_s * reached_by)
        unanswered, crossing_s = self.unanswered_N[split.first], 0.0
        # Batches fill evenly, so the mean wait is half of the longest. Without arrivals, the wait is infinite.
        unanswered_s = seconds.unanswered_s + (unanswered * wait_s / 2 if unanswered else 0.0)
        if split.end in ends:
            crossing_s = problem.crossing_s + (0.0 if split.end == stage.end else self._hop_s(stage, split))
            unanswered_s += self.unanswered_N[split.end] * crossing_s
        unit = self.mean if own.tokens is None else 1.0  # batches are in the unit of the plan's own batch size
        return ExpectedSplit(
            stage_index=stage_index,
            split=own,
            reached_by=reached_by,
            seconds=seconds,
            wait_s=wait_s,
            unanswered_s=unanswered_s,
            batch_at_block=tuple(size / unit for size in expected_batches(split, self.share_N, split.batch)),
            crossing_s=crossing_s,
        )

    def _hop_s(self, stage: Stage, split: Split) -> float:
        """Returns the transfer time (T_x in E3) of the inputs of a batch that remain after the split."""
        problem, enters = self.problem, self.share_N[split.first]
        remaining = split.batch * (self.share_N[split.end] / enters if enters else 1.0)
        sent_s = problem.bytes_per_sample_N[split.end - 1] * remaining / problem.bandwidth_of(stage.device)
        return problem.link.delay_s + sent_s


def objective_value(problem: PlanProblem, figures: Evaluation) -> float:
    """Returns the value of the objective: a rate per second, USD per hour, or seconds."""
    if isinstance(problem.objective, MaximizeRate):
        return figures.rate_per_s
    if isinstance(problem.objective, MinimizeCost):
        return figures.usd_per_hour
    mean, worst = problem.time_weights
    return mean * figures.mean_latency_s + (worst * figures.latency_s if worst else 0.0)  # which may be infinite


def merit(problem: PlanProblem, figures: Evaluation) -> tuple[float, ...]:
    """Returns the key by which plans are ranked, best last: by the objective, then by cost, then by latency."""
    sign = 1 if isinstance(problem.objective, MaximizeRate) else -1
    return sign * objective_value(problem, figures), -figures.usd_per_hour, -figures.latency_s


def best_value(problem: PlanProblem, values: Iterable[float]) -> float:
    """Returns the best of several values of the objective. Without values, returns one worse than any plan has."""
    is_rate = isinstance(problem.objective, MaximizeRate)
    return max(values, default=0.0) if is_rate else min(values, default=math.inf)


def worst_value(problem: PlanProblem, values: Iterable[float]) -> float:
    """Returns the worst of at least one value of the objective. The worst of several bounds is the tightest."""
    return (min if isinstance(problem.objective, MaximizeRate) else max)(values)


def predictions(problem: PlanProblem, figures: Evaluation) -> dict[str, float]:
    """Returns the predictions that a plan carries. The mean answer time is included only if it is the objective."""
    predicted = {"rate_per_s": figures.rate_per_s, "latency_s": figures.latency_s, "usd_per_hour": figures.usd_per_hour}
    if isinstance(problem.objective, MinimizeLatency):
        predicted |= {"mean_latency_s": figures.mean_latency_s, "ramp_overhead": figures.ramp_overhead}
    if problem.lengths is not None:
        predicted["tokens_per_input"] = problem.lengths.mean
    if problem.generation is not None:
        predicted["steps_per_sequence"] = problem.generation.num_steps
    return predicted


def violations(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> list[str]:
    """Returns a text, with both numbers, for each limit of the problem that the plan violates."""
    texts = []
    for device, used in replicas_of(stages).items():
        if used > problem.devices[device].count:
            texts.append(f"it needs {used} {device}, and {problem.devices[device].count} are available")
    budget = problem.budget_usd_per_hour
    if budget is not None and figures.usd_per_hour > budget * (1 + TOLERANCE):
        texts.append(f"it costs {figures.usd_per_hour:.2f} USD/h, and the budget is {budget:.2f}")
    if figures.rate_per_s < figures.served_per_s * (1 - TOLERANCE):
        texts.append(f"it serves {figures.rate_per_s:.6g}/s, and {figures.served_per_s:.6g}/s are required")
    queued_s = queue_s(problem, stages, figures)
    if not figures.latency_s + queued_s <= problem.slo.limit_s * (1 + TOLERANCE):
        queues = f" and {milliseconds(queued_s)} in queues" if queued_s else ""
        texts.append(
            f"it takes {milliseconds(figures.latency_s)}{queues}, and {milliseconds(problem.slo.limit_s)} are allowed"
        )
    ramp_budget = problem.ramp_budget
    if ramp_budget is not None and figures.ramp_overhead > ramp_budget * (1 + TOLERANCE):
        texts.append(f"ramps take {figures.ramp_overhead:.3%} of the blocks' time, and {ramp_budget:.3%} are allowed")
    return [*texts, *(text for _, text in broken_promises(problem, figures.sequences))]


def milliseconds(seconds: float) -> str:
    """Returns a time as text for messages. A queue that grows without limit takes unlimited time."""
    return f"{seconds * 1e3:.4g} ms" if seconds < np.inf else "unlimited time"


def queue_s(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> float:
    """Returns the queueing time that only the allowed share of late inputs exceeds, if arrivals are random.

    In each chain, the longest queue counts in full, and the others with their means. Returns 0 if the problem does not
    limit the share of late inputs.
    """
    longest_s = 0.0
    for chain_loads in loads(problem, stages, figures) if problem.in_time else []:
        queues = [load.queue_s(1 - problem.in_time) for load in chain_loads]
        means_s = sum(mean_s for mean_s, _ in queues)
        longest_s = max(longest_s, means_s + max(tail_s - mean_s for mean_s, tail_s in queues))
    return longest_s


class Load(NamedTuple):
    """The load of the replicas of a stage, or of their links, and its queues if inputs arrive at random.

    In heavy traffic, the tail of waits is exponential (Kingman 1962; Köllerström 1974 for m servers). At R inputs per
    second that take x seconds each, a wait exceeds w with probability a exp(-w/t), t = E[x^2] / (2 E[x] (m - R E[x])).
    All replicas are busy with a probability of about a = r^(sqrt(2(m+1)) - 1), with r = R E[x] / m. The mean wait a t
    is that of Sakasegawa (1977), and exact for one replica. In a batch of b inputs that takes T, each input adds T/b,
    so larger batches make queues steadier. A batch takes at most D, its time if it skips no block, so the variance of
    its time is at most T (D - T), which adds T/b (D - T) to the mean square.
    """

    rate_per_s: float
    """Arrival rate of the chain, R."""
    replicas: int
    work_s: float
    """Mean seconds of work per input, E[x]."""
    square_s2: float
    """Mean square of the seconds per input, E[x^2]."""
    share: float
    """Share of all inputs that wait, with or without an answer."""

    def queue_s(self, late: float) -> tuple[float, float]:
        """Returns the mean wait and the wait that a share `late` exceeds, which is infinite if replicas are too few."""
        m, needed = self.replicas, self.rate_per_s * self.work_s
        idle = max(m - needed, LEAST_IDLE * m)
        tail_s = self.square_s2 / (2 * self.work_s * idle) if self.work_s else 0.0
        busy = (1 - idle / m) ** (math.sqrt(2 * (m + 1)) - 1)
        longest_s = tail_s * max(0.0, math.log(busy / late)) if busy else 0.0
        return busy * tail_s, longest_s if needed < m else math.inf

    def overprovisioning(self, late: float, room_s: float) -> float:
        """Returns the factor on the planned rate with which at most a share `late` waits longer than `room_s`."""
        busy = self.rate_per_s * self.work_s
        return 1 - math.log(late) * self.square_s2 / (2 * self.work_s * room_s * busy) if busy else 1.0


def loads(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> list[list[Load]]:
    """Returns, per chain, the loads of its stages and of the links after them at the served rate."""
    loads_by_chain: list[list[Load]] = []
    mean, lengths = (1.0, None) if problem.lengths is None else (problem.lengths.mean, problem.lengths.shares)
    spread = sum(share * (length / mean) ** 2 for length, share in lengths or ((mean, 1.0),))
    numbered = iter(enumerate(figures.stages))
    for chain, share in zip(chains_of(stages), figures.shares, strict=True):
        rate_per_s = share * figures.served_per_s
        chain_loads = []
        for stage, (index, own) in zip(chain, numbered, strict=False):
            before_s, square_s2, splits = 0.0, 0.0, [each for each in figures.splits if each.stage_index == index]
            for each in splits:
                seconds = each.seconds.mean_s / each.batch_at_block[0] * (1.0 if each.split.tokens is None else mean)
                skipped_s = max(0.0, each.seconds.inside_s - each.seconds.mean_s)
                square_s2 += each.reached_by * ((before_s + seconds) ** 2 - before_s**2 + seconds * skipped_s)
                before_s += seconds
            entering, last = share * splits[0].reached_by, splits[-1].reached_by
            chain_loads.append(Load(rate_per_s, stage.replicas, own.work_s, square_s2 * spread, entering))
            if link_s := stage.replicas / own.hop_rate_per_s:
                chain_loads.append(Load(rate_per_s, stage.replicas, link_s, link_s**2 / last, share * last))
        loads_by_chain.append(chain_loads)
    return loads_by_chain


def _ratio(numerator: float, denominator: float) -> float:
    """Returns the quotient, or infinity if the denominator is 0."""
    return numerator / denominator if denominator > 0 else np.inf


def _fitting_part(problem: PlanProblem, stages: Sequence[Stage]) -> Subproblem:
    """Returns the subproblem of a plan; raises PlanError if the stages do not fit it, or do not form one model."""
    splits = [split for stage in stages for split in stage.splits]
    if len({split.after_answer for split in splits}) > 1:
        raise PlanError("after_answer must be the same for all splits of a plan: either stop or stay")
    part = subproblem_of(problem, stages)
    for stage in stages:
        if stage.device not in problem.devices:
            raise PlanError(f"unknown device {stage.device!r}; the problem's devices are {sorted(problem.devices)}")
        measured = problem.latency[stage.device].batches
        for split in stage.splits:
            # If inputs have lengths, a batch may lie between measured sizes; `optimizer.problems.tokens` checks it.
            if problem.lengths is None and split.tokens is not None:
                raise PlanError(f"the plan has batches of {split.tokens} tokens, but the problem has no lengths")
            if problem.lengths is None and split.batch not in measured:
                raise PlanError(f"batch {split.batch} is not measured on {stage.device}; measured are {list(measured)}")
            unknown = sorted(set(split.ramps) - set(problem.ramps))
            if unknown:
                raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(problem.ramps)}")
    return part
