"""The cost model: what a plan does, by the figures of its problem. Every planner, and its twin, is scored by this.

E3 section 3.2 and figure 6, extended to stages of several splits, and to plans whose inputs stay (Apparate). In short,
with u(k) the share of inputs without an answer on reaching block k under the plan's active ramps, and s(k) the share
that is computed there, which is u(k) where answered inputs stop, and 1 where they stay:

- a split over blocks i..j-1 at batch b runs block k at the expected batch b*s(k)/s(i), and takes the sum T of its
  blocks and active ramps;
- a stage does w = sum of s(i)*T/b seconds of work per input, so m replicas do m/w inputs per second;
- a hop after a stage takes T_x and bounds the rate at m*b/(s(i)*T_x): a replica sends while it computes;
- an input waits for its batch: b/(R*s(i)) for the first split of a stage, m times that for the further ones, where
  each replica fills its own;
- of a chain, only the networks that the plan uses count. Between two of them survivors go back to the ingress: that
  takes T_x and `crossing_s`, in the middle of a stage as well, where it bounds no rate, and the batches behind it are
  filled there, as those of a first split;
- the rate is the smallest bound, the worst-case latency the sum of all waits, T and T_x;
- the mean answer time weighs the same seconds by the share of inputs without an answer: half of a split's wait by
  u(i), every block and ramp by u(k), every hop by u(j);
- the ramp overhead is the seconds of active ramps over those of blocks, of one batch of every split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.batch_seconds import computed_shares, expected_batches, total_s
from optimizer.generation.figures import broken_promises
from optimizer.generation.steps import seconds_of_steps
from optimizer.networks import crossings, subproblem_of
from optimizer.plan import Stage, chains_of
from optimizer.problem import MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, Reach, nested_reach
from optimizer.queues import Load
from optimizer.tokens import in_token_batches, in_tokens
from profiles.lengths import Lengths

# Rates and latencies that agree to this are equal: planner and evaluator sum in different orders.
TOLERANCE = 1e-9


class StepSeconds(NamedTuple):
    """What a batch takes in one block, and in its ramp where that is active."""

    block_s: float
    ramp_s: float
    unanswered_s: float
    """Both together, counted by the share of all inputs that have no answer on reaching the block."""


Steps = Callable[[Stage, Split], Sequence[StepSeconds] | None]
"""Of a split of a stage, block by block; None where only the mean batch is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSplit:
    """What one split is expected to do."""

    stage_index: int
    split: Split
    reached_by: float
    """Share of all inputs that enter it, answered or not."""
    seconds: float
    """T, of one batch."""
    ramp_s: float
    """Of these, what its active ramps take."""
    wait_s: float
    """Until its batch is full, at the plan's rate."""
    unanswered_s: float
    """Its part of the mean answer time: what an input without an answer waits and runs here, over all inputs."""
    batch_at_block: tuple[float, ...]
    """Expected batch at each of its blocks: tokens where its split has a budget of them, else inputs."""
    crossing_s: float = 0.0
    """Until what is left of a batch may begin the next network; a hop at its stage's end is not in it."""

    @property
    def fill(self) -> float:
        """Mean expected batch over its blocks, as a share of its batch size."""
        return sum(self.batch_at_block) / len(self.batch_at_block) / (self.split.tokens or self.split.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What bounds one stage."""

    work_s: float
    """Device seconds per input of the service."""
    rate_per_s: float
    hop_s: float
    """T_x after it; 0 after the last."""
    hop_rate_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a plan does on the cost model."""

    rate_per_s: float
    """The most it can do."""
    served_per_s: float
    """What its latency holds for: the rate asked for, or the most it can do."""
    latency_s: float
    """Worst case."""
    mean_latency_s: float
    """Mean answer time."""
    ramp_overhead: float
    """Seconds of active ramps per second of blocks."""
    usd_per_hour: float
    splits: tuple[ExpectedSplit, ...]
    stages: tuple[StageFigures, ...]
    shares: tuple[float, ...] = (1.0,)
    """Of the rate, per chain: all are equally busy, unless they were given."""


def evaluate(
    problem: PlanProblem,
    stages: Sequence[Stage],
    reach: Reach | None = None,
    recorded: Steps | None = None,
    *,
    shares: Sequence[float] = (),
) -> Evaluation:
    """Score a plan; raises PlanError where it names what the problem lacks.

    `stages` are of all chains, one chain after the other. Each serves its share of the rate: of `shares`, or as much as
    it can do of what all of them can.

    `reach` replaces the nested survival, for example by that of joint exit records; `recorded` the seconds of the mean
    batch by those of recorded ones. Where inputs have lengths, shares are of tokens (`optimizer.tokens`): of what
    reaches a block, and of what counts in the mean answer time. Stages, and what `reach` and `recorded` are asked, are
    in the chain's numbers, where a plan leaves networks out as well.
    """
    chains = chains_of(stages, problem.num_blocks)
    if len(chains) > 1:
        return _side_by_side(problem, chains, shares, reach, recorded)
    _check_fits(problem, stages)
    part = subproblem_of(problem, stages)
    if part.problem is problem:
        return _of_part(problem, stages, reach, recorded)
    inner_reach = None if reach is None else part.shares_of(reach)
    inner_recorded = None if recorded is None else part.splits_of(recorded)
    figures = _of_part(part.problem, part.stages_of(stages), inner_reach, inner_recorded)
    splits = [split for stage in stages for split in stage.splits]
    named = tuple(replace(each, split=split) for each, split in zip(figures.splits, splits, strict=True))
    return replace(figures, splits=named)


def _side_by_side(
    problem: PlanProblem,
    chains: Sequence[Sequence[Stage]],
    shares: Sequence[float],
    reach: Reach | None,
    recorded: Steps | None,
) -> Evaluation:
    """Rates and prices add up, the slowest chain's latency is the plan's, and means are weighted by shares."""
    alone = [evaluate(problem, chain, reach, recorded) for chain in chains]
    together_per_s = sum(each.rate_per_s for each in alone)
    if not shares:
        shares = [each.rate_per_s / together_per_s for each in alone]
    rate_per_s = min(each.rate_per_s / share for each, share in zip(alone, shares, strict=True))
    if problem.required_per_s is not None:
        alone = [
            evaluate(problem.with_rate(share * problem.required_per_s), chain, reach, recorded)
            for chain, share in zip(chains, shares, strict=True)
        ]
    starts = accumulate([len(chain) for chain in chains], initial=0)
    return Evaluation(
        rate_per_s=rate_per_s,
        served_per_s=rate_per_s if problem.required_per_s is None else problem.required_per_s,
        latency_s=max(each.latency_s for each in alone),
        mean_latency_s=sum(share * each.mean_latency_s for each, share in zip(alone, shares, strict=True)),
        ramp_overhead=sum(share * each.ramp_overhead for each, share in zip(alone, shares, strict=True)),
        usd_per_hour=sum(each.usd_per_hour for each in alone),
        splits=tuple(
            replace(split, stage_index=start + split.stage_index)
            for each, start in zip(alone, starts, strict=False)
            for split in each.splits
        ),
        stages=tuple(stage for each in alone for stage in each.stages),
        shares=tuple(shares),
    )


def _of_part(problem: PlanProblem, stages: Sequence[Stage], reach: Reach | None, recorded: Steps | None) -> Evaluation:
    """Of a problem whose networks are all used."""
    if problem.lengths is not None:
        figures = _evaluated(in_tokens(problem), in_token_batches(problem, stages), reach, recorded)
        return _of_inputs(figures, stages, problem.lengths)
    return _evaluated(problem, stages, reach, recorded)


def _evaluated(
    problem: PlanProblem, stages: Sequence[Stage], reach: Reach | None, recorded: Steps | None
) -> Evaluation:
    ramps = [ramp for stage in stages for split in stage.splits for ramp in split.ramps]
    unanswered_N = (reach or nested_reach(problem))(ramps)
    share_N = computed_shares(stages[0].splits[0], unanswered_N)
    steps = [
        [
            (recorded and recorded(stage, split)) or _of_the_mean_batch(problem, stage, split, share_N, unanswered_N)
            for split in stage.splits
        ]
        for stage in stages
    ]
    figures = tuple(
        _stage_figures(problem, stage, [total_s(each) for each in of_splits], share_N)
        for stage, of_splits in zip(stages, steps, strict=True)
    )
    rate_per_s = min(min(each.rate_per_s, each.hop_rate_per_s) for each in figures)
    served_per_s = rate_per_s if problem.required_per_s is None else problem.required_per_s
    splits = tuple(
        _expected(problem, stages, stage_index, index, steps[stage_index][index], served_per_s, share_N, unanswered_N)
        for stage_index, stage in enumerate(stages)
        for index in range(len(stage.splits))
    )
    ramp_s = sum(each.ramp_s for each in splits)
    return Evaluation(
        rate_per_s=rate_per_s,
        served_per_s=served_per_s,
        latency_s=sum(each.wait_s + each.seconds + each.crossing_s for each in splits)
        + sum(each.hop_s for each in figures),
        mean_latency_s=sum(each.unanswered_s for each in splits)
        + sum(unanswered_N[stage.end] * each.hop_s for stage, each in zip(stages[:-1], figures, strict=False)),
        ramp_overhead=ramp_s / (sum(each.seconds for each in splits) - ramp_s),
        usd_per_hour=sum(stage.replicas * problem.devices[stage.device].usd_per_hour for stage in stages),
        splits=splits,
        stages=figures,
    )


def _of_inputs(figures: Evaluation, stages: Sequence[Stage], lengths: Lengths) -> Evaluation:
    """Figures of tokens as those of inputs, by the mean length; latencies and prices are the same."""
    mean, splits = lengths.mean, [split for stage in stages for split in stage.splits]
    return replace(
        figures,
        rate_per_s=figures.rate_per_s / mean,
        served_per_s=figures.served_per_s / mean,
        splits=tuple(
            replace(each, split=split, batch_at_block=tuple(tokens / counted for tokens in each.batch_at_block))
            for each, split in zip(figures.splits, splits, strict=True)
            for counted in [mean if split.tokens is None else 1.0]  # a batch as its split counts it
        ),
        stages=tuple(
            replace(
                each,
                work_s=each.work_s * mean,
                rate_per_s=each.rate_per_s / mean,
                hop_rate_per_s=each.hop_rate_per_s / mean,
            )
            for each in figures.stages
        ),
    )


def _of_the_mean_batch(
    problem: PlanProblem, stage: Stage, split: Split, share_N: Sequence[float], unanswered_N: Sequence[float]
) -> list[StepSeconds]:
    steps = seconds_of_steps(problem, stage.device, split, share_N)
    return [
        StepSeconds(block_s, ramp_s, unanswered_N[block] * (block_s + ramp_s))
        for block, (block_s, ramp_s) in enumerate(steps, start=split.first)
    ]


def objective_value(problem: PlanProblem, figures: Evaluation) -> float:
    """What the objective is about: a rate per second, USD per hour, or seconds."""
    if isinstance(problem.objective, MaximizeRate):
        return figures.rate_per_s
    return figures.usd_per_hour if isinstance(problem.objective, MinimizeCost) else figures.mean_latency_s


def merit(problem: PlanProblem, figures: Evaluation) -> tuple[float, ...]:
    """Larger is better: by the objective, then the cheaper, then the quicker."""
    sign = 1 if isinstance(problem.objective, MaximizeRate) else -1
    return sign * objective_value(problem, figures), -figures.usd_per_hour, -figures.latency_s


def promised(problem: PlanProblem, figures: Evaluation) -> dict[str, float]:
    """What a plan carries of its figures; of the mean answer time only where that is sought."""
    promises = {"rate_per_s": figures.rate_per_s, "latency_s": figures.latency_s, "usd_per_hour": figures.usd_per_hour}
    if isinstance(problem.objective, MinimizeLatency):
        promises |= {"mean_latency_s": figures.mean_latency_s, "ramp_overhead": figures.ramp_overhead}
    if problem.lengths is not None:
        promises["tokens_per_input"] = problem.lengths.mean
    if problem.generation is not None:
        promises["steps_per_sequence"] = problem.generation.num_steps
    return promises


def violations(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> list[str]:
    """Every promise of the problem that the plan breaks, with both numbers; none for a plan that meets it."""
    found = []
    for device in dict.fromkeys(stage.device for stage in stages):
        used = sum(stage.replicas for stage in stages if stage.device == device)
        if used > problem.devices[device].count:
            found.append(f"{used} {device} used, {problem.devices[device].count} there")
    limit = problem.budget_usd_per_hour
    if limit is not None and figures.usd_per_hour > limit * (1 + TOLERANCE):
        found.append(f"costs {figures.usd_per_hour:.2f} USD/h, the budget is {limit:.2f}")
    if figures.rate_per_s < figures.served_per_s * (1 - TOLERANCE):
        found.append(f"does {figures.rate_per_s:.6g}/s, {figures.served_per_s:.6g}/s are asked for")
    queued_s = queue_s(problem, stages, figures)
    if not figures.latency_s + queued_s <= problem.slo.limit_s * (1 + TOLERANCE):
        queues = f" and {milliseconds(queued_s)} in queues" if queued_s else ""
        found.append(
            f"takes {milliseconds(figures.latency_s)}{queues}, {milliseconds(problem.slo.limit_s)} are allowed"
        )
    most = problem.ramp_budget
    if most is not None and figures.ramp_overhead > most * (1 + TOLERANCE):
        found.append(f"ramps take {figures.ramp_overhead:.3%} of the blocks' time, {most:.3%} are allowed")
    return [*found, *(text for _, text in broken_promises(problem, stages, **step_figures(figures)))]


def milliseconds(seconds: float) -> str:
    """Returns a time in words; a queue that grows without end takes an endless one."""
    return f"{seconds * 1e3:.4g} ms" if seconds < np.inf else "an endless time"


def queue_s(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> float:
    """What inputs that arrive at random queue, but for the share that may be late; 0 where the problem says no share.

    Of each chain the longest of its queues counts, and the means of the others.
    """
    of_chains_s = [0.0]
    for of_chain in loads(problem, stages, figures) if problem.in_time else []:
        queues = [each.queue_s(1 - problem.in_time) for each in of_chain]
        of_chains_s.append(sum(mean_s for mean_s, _ in queues) + max(most_s - mean_s for mean_s, most_s in queues))
    return max(of_chains_s)


def loads(problem: PlanProblem, stages: Sequence[Stage], figures: Evaluation) -> list[list[Load]]:
    """What the stages of each chain, and the links behind them, have to do at the rate that is served."""
    found: list[list[Load]] = []
    mean, lengths = (1.0, None) if problem.lengths is None else (problem.lengths.mean, problem.lengths.shares)
    spread = sum(share * (length / mean) ** 2 for length, share in lengths or ((mean, 1.0),))
    numbered = iter(enumerate(figures.stages))
    for chain, share in zip(chains_of(stages, problem.num_blocks), figures.shares, strict=True):
        rate_per_s = share * figures.served_per_s
        found.append([])
        for stage, (index, own) in zip(chain, numbered, strict=False):
            before_s, square_s2, reached_by = 0.0, 0.0, 1.0
            for each in (each for each in figures.splits if each.stage_index == index):
                seconds = each.seconds / each.batch_at_block[0] * (1.0 if each.split.tokens is None else mean)
                square_s2 += each.reached_by * ((before_s + seconds) ** 2 - before_s**2)
                before_s, reached_by = before_s + seconds, each.reached_by
            found[-1].append(Load(rate_per_s, stage.replicas, own.work_s, square_s2 * spread))
            if link_s := stage.replicas / own.hop_rate_per_s:
                found[-1].append(Load(rate_per_s, stage.replicas, link_s, link_s**2 / reached_by))
    return found


def step_figures(figures: Evaluation) -> dict[str, float]:
    """What `optimizer.generation.figures` asks of a plan's."""
    hops_s = sum(each.hop_s for each in figures.stages)
    return {"rate_per_s": figures.served_per_s, "latency_s": figures.latency_s, "hops_s": hops_s}


def _expected(
    problem: PlanProblem,
    stages: Sequence[Stage],
    stage_index: int,
    index: int,
    steps: Sequence[StepSeconds],
    rate_per_s: float,
    share_N: Sequence[float],
    unanswered_N: Sequence[float],
) -> ExpectedSplit:
    split = stages[stage_index].splits[index]
    waits_s = _wait_s(problem, stages[stage_index], index, rate_per_s, share_N)
    crosses_s = _crossing_s(problem, stages[stage_index], split, share_N)
    steps_s = sum(each.unanswered_s for each in steps)
    unanswered = unanswered_N[split.first]
    return ExpectedSplit(
        stage_index=stage_index,
        split=split,
        reached_by=share_N[split.first],
        seconds=total_s(steps),
        ramp_s=sum(each.ramp_s for each in steps),
        wait_s=waits_s,
        # Batches fill evenly, so an input waits half of the time on average, and not at all if none arrives.
        unanswered_s=steps_s
        + (unanswered * waits_s / 2 if unanswered else 0.0)
        + (unanswered_N[split.end] * crosses_s if crosses_s else 0.0),
        batch_at_block=tuple(expected_batches(split, share_N, split.batch)),
        crossing_s=crosses_s,
    )


def _stage_figures(
    problem: PlanProblem, stage: Stage, seconds: Sequence[float], share_N: Sequence[float]
) -> StageFigures:
    work_s = sum(share_N[split.first] * each / split.batch for split, each in zip(stage.splits, seconds, strict=True))
    after_s, hop_rate_per_s = 0.0, np.inf
    if stage.end < problem.num_blocks:
        last = stage.splits[-1]
        after_s = _hop_s(problem, last, share_N)
        hop_rate_per_s = _divided(stage.replicas * last.batch, share_N[last.first] * after_s)
    return StageFigures(
        work_s=work_s,
        rate_per_s=_divided(stage.replicas, work_s),
        hop_s=after_s,
        hop_rate_per_s=hop_rate_per_s,
    )


def _hop_s(problem: PlanProblem, split: Split, share_N: Sequence[float]) -> float:
    """E3's T_x, of what is left of a batch."""
    enters = share_N[split.first]
    leaves = split.batch * (share_N[split.end] / enters if enters else 1.0)
    return problem.link.seconds(problem.bytes_per_sample_N[split.end - 1] * leaves)


def _crossing_s(problem: PlanProblem, stage: Stage, split: Split, share_N: Sequence[float]) -> float:
    """From a network's end to the next one's batches, without the hop that ends a stage anyway; 0 elsewhere."""
    if split.end not in crossings(problem):
        return 0.0
    return problem.crossing_s + (0.0 if split.end == stage.end else _hop_s(problem, split, share_N))


def _wait_s(problem: PlanProblem, stage: Stage, index: int, rate_per_s: float, share_N: Sequence[float]) -> float:
    """Until a split's batch is full: at the ingress by all that comes, inside a stage by every replica for itself."""
    split = stage.splits[index]
    filled_apart = 1 if index == 0 or split.first in crossings(problem) else stage.replicas
    return _divided(filled_apart * split.batch, rate_per_s * share_N[split.first])


def _divided(amount: float, by: float) -> float:
    """A quotient; infinite where nothing divides."""
    return amount / by if by > 0 else np.inf


def _check_fits(problem: PlanProblem, stages: Sequence[Stage]) -> None:
    """Raise PlanError where a plan's stages name what the problem lacks, or do not make one model."""
    splits = [split for stage in stages for split in stage.splits]
    if len({split.after_answer for split in splits}) > 1:
        raise PlanError("the splits of a plan all stop after an answer, or all stay")
    subproblem_of(problem, stages)
    for stage in stages:
        if stage.device not in problem.devices:
            raise PlanError(f"unknown device {stage.device!r}; the problem's devices are {sorted(problem.devices)}")
        measured = problem.latency[stage.device].batches
        for split in stage.splits:
            # Where inputs have lengths, a batch may lie between measured ones: `optimizer.tokens` sees to it.
            if problem.lengths is None and split.tokens is not None:
                raise PlanError(f"the plan has batches of {split.tokens} tokens; the problem says nothing of lengths")
            if problem.lengths is None and split.batch not in measured:
                raise PlanError(f"batch {split.batch} is not measured on {stage.device}; measured are {list(measured)}")
            unknown = sorted(set(split.ramps) - set(problem.ramps))
            if unknown:
                raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(problem.ramps)}")
