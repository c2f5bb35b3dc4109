"""What a plan does for sequences: tokens per second, times of tokens, how many run at a time, and pages of memory.

Every replica has one full batch that runs, and short of one input full batches that wait, so a plan's rate needs
enough sequences for that. By Little's law they take, on average, their number over the rate for a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from optimizer.generation.demand import KvMemory
from optimizer.generation.steps import demand_of, num_chunks, step_table
from optimizer.plan import Stage
from optimizer.problem import PlanProblem

ROUNDING = 1e-9
Promise = Literal["ttft", "sequences", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePages:
    """Pages of one replica of a stage."""

    pages: int
    """That there is memory for, beside the weights of its blocks."""
    needed: int
    """For the sequences that keep the plan's batches full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFigures:
    """Of a plan, beside those of its steps."""

    tokens_per_s: float
    """First tokens, which come of prompts, among them."""
    sequences_per_s: float
    running: int
    """Sequences that keep all batches full."""
    token_s: float
    """Mean time of a token after the first, where so many run."""
    most_token_s: float
    """Worst case: the latency of a step."""
    ttft_s: float
    """Worst case, of a prompt of mean length: its chunks, each as late as a step, and what it takes itself."""
    prompt_share: float
    """Of all that accelerators do, what is done for prompts."""
    filled: float
    """Tokens that are filled in, per survivor, in the blocks behind the last active ramp."""
    pages: tuple[StagePages, ...] | None
    """By stage; None where nothing is said of memory."""


def sequence_figures(
    problem: PlanProblem, stages: Sequence[Stage], *, rate_per_s: float, latency_s: float, hops_s: float
) -> SequenceFigures:
    """Of a plan that does `rate_per_s` steps, each within `latency_s`, of which it is on its way for `hops_s`."""
    generation = demand_of(problem)
    running = running_sequences(stages) + math.ceil(rate_per_s * hops_s - ROUNDING)
    per_s = rate_per_s / generation.num_steps
    ramps = [ramp for stage in stages for split in stage.splits for ramp in split.ramps]
    share = problem.share_after(max(ramps, default=None))
    busy_s = sum(stage.replicas for stage in stages) / per_s if per_s else math.inf
    return SequenceFigures(
        tokens_per_s=rate_per_s + per_s,
        sequences_per_s=per_s,
        running=running,
        token_s=running / rate_per_s if rate_per_s else math.inf,
        most_token_s=latency_s,
        ttft_s=ttft_s(problem, stages, latency_s),
        prompt_share=prompt_s(problem, stages) / busy_s,
        filled=generation.reached_in_time(share) / share - 1 if share else 0.0,
        pages=None if generation.kv is None else tuple(_pages(problem, stages, generation.kv, running)),
    )


def running_sequences(stages: Sequence[Stage]) -> int:
    """How many keep every replica's batches full: of each one that runs, of its other queues all but one input.

    The queue of a stage behind the first is one for all its replicas.
    """
    inside = sum(stage.replicas * (1 + sum(split.batch - 1 for split in stage.splits)) for stage in stages)
    return inside + sum(stage.splits[0].batch - 1 for stage in stages[1:])


def prompt_s(problem: PlanProblem, stages: Sequence[Stage]) -> float:
    """What a prompt of mean length takes on a plan's accelerators, alone."""
    tables = {stage.device: step_table(problem, stage.device) for stage in stages}
    return sum(float(tables[stage.device].prompt_s_N[stage.splits[0].first : stage.end].sum()) for stage in stages)


def ttft_s(problem: PlanProblem, stages: Sequence[Stage], latency_s: float) -> float:
    """Worst case of the first token: see `SequenceFigures`."""
    chunks = max(num_chunks(problem, stage.device) for stage in stages)
    return chunks * latency_s + prompt_s(problem, stages)


def _pages(problem: PlanProblem, stages: Sequence[Stage], kv: KvMemory, running: int) -> Iterator[StagePages]:
    """Every sequence has keys and values in every stage, in one of its replicas."""
    for stage in stages:
        share = (stage.end - stage.splits[0].first) / problem.num_blocks
        left = max(0.0, kv.memory_bytes[stage.device] - kv.weights_bytes * share)
        page_bytes = kv.bytes_per_token * share * kv.page_tokens
        apart = math.ceil(running / stage.replicas)
        needed = math.ceil(apart * demand_of(problem).held_tokens / kv.page_tokens - ROUNDING)
        yield StagePages(pages=int(left // page_bytes), needed=needed)


def broken_promises(
    problem: PlanProblem, stages: Sequence[Stage], *, rate_per_s: float, latency_s: float, hops_s: float
) -> Iterator[tuple[Promise, str]]:
    """What a plan does not keep of what sequences ask, with both numbers; nothing where inputs are no steps."""
    generation = problem.generation
    if generation is None:
        return
    figures = sequence_figures(problem, stages, rate_per_s=rate_per_s, latency_s=latency_s, hops_s=hops_s)
    if generation.ttft_s is not None:
        allowed_s = generation.ttft_s * (1 - problem.slo.slack)
        if figures.ttft_s > allowed_s * (1 + ROUNDING):
            yield "ttft", f"the first token takes {figures.ttft_s * 1e3:.4g} ms, {allowed_s * 1e3:.4g} ms are allowed"
    if generation.most_running is not None and figures.running > generation.most_running:
        yield "sequences", f"{figures.running} sequences keep its batches full, {generation.most_running} run at a time"
    for index, each in enumerate(figures.pages or ()):
        if each.needed > each.pages:
            words = f"stage {index} needs {each.needed} pages of keys and values per replica"
            yield "memory", f"{words}, there is memory for {each.pages}"
