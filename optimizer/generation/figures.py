"""Figures of a plan for sequences: tokens per second, time per token, concurrent sequences, and pages of memory.

On every replica a full batch runs, and other batches wait, each short of one input. A plan's rate needs the sequences
for that many steps in flight. By Little's law, the mean time per token is their number divided by the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from optimizer.generation.demand import KvMemory
from optimizer.generation.steps import generation_of, step_table
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem

ROUNDING = 1e-9
Promise = Literal["ttft", "sequences", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePages:
    """Pages of keys and values on one replica of a stage."""

    pages: int
    """Pages that fit into memory beside the weights of its blocks."""
    needed: int
    """Pages that the sequences need which keep the plan's batches full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFigures:
    """Figures of a plan for sequences. `Evaluation` has those for steps."""

    tokens_per_s: float
    """All tokens, including the first one, which comes from the prompt."""
    sequences_per_s: float
    running: int
    """Concurrent sequences that keep all batches full."""
    token_s: float
    """Mean time of a token after the first, with `running` sequences."""
    most_token_s: float
    """Worst-case time of a token after the first: the latency of a step."""
    ttft_s: float
    """Worst-case time to the first token of a prompt of mean length: a step's latency per chunk plus its seconds."""
    prompt_share: float
    """Share of the accelerators' time that prompts take."""
    filled: float
    """Tokens filled in per survivor, in the blocks behind the last active ramp."""
    pages: tuple[StagePages, ...] | None
    """Pages by stage. None if memory is not limited."""


def sequence_figures(
    problem: PlanProblem, stages: Sequence[Stage], *, rate_per_s: float, latency_s: float, hops_s: float
) -> SequenceFigures:
    """Returns the figures at `rate_per_s` steps. A step takes `latency_s` at most, of which `hops_s` are hops."""
    generation = generation_of(problem)
    running = running_sequences(stages) + math.ceil(rate_per_s * hops_s - ROUNDING)
    per_s = rate_per_s / generation.num_steps
    ramps = [ramp for stage in stages for split in stage.splits for ramp in split.ramps]
    share = problem.share_after(max(ramps, default=None))
    tables = [step_table(problem, stage.device) for stage in stages]
    prompt_s = sum(
        float(table.prompt_s_N[stage.first : stage.end].sum()) for table, stage in zip(tables, stages, strict=True)
    )
    busy_s = sum(stage.replicas for stage in stages) / per_s if per_s else math.inf
    return SequenceFigures(
        tokens_per_s=rate_per_s + per_s,
        sequences_per_s=per_s,
        running=running,
        token_s=running / rate_per_s if rate_per_s else math.inf,
        most_token_s=latency_s,
        ttft_s=max(table.num_chunks for table in tables) * latency_s + prompt_s,
        prompt_share=prompt_s / busy_s,
        filled=generation.eventually_run(share) / share - 1 if share else 0.0,
        pages=None if generation.kv is None else tuple(_pages(problem, stages, generation.kv, running)),
    )


def running_sequences(stages: Sequence[Stage]) -> int:
    """Returns how many sequences keep all batches full.

    Per replica, they are one running input and all inputs but one of each batch. The replicas of a later stage share
    the queue of its first split.
    """
    inside = sum(stage.replicas * (1 + sum(split.batch - 1 for split in stage.splits)) for stage in stages)
    return inside + sum(stage.splits[0].batch - 1 for stage in stages[1:])


def _pages(problem: PlanProblem, stages: Sequence[Stage], kv: KvMemory, running: int) -> Iterator[StagePages]:
    """Yields the pages of each stage. Every sequence has keys and values on one replica of every stage."""
    for stage in stages:
        share = (stage.end - stage.first) / problem.num_blocks
        free_bytes = max(0.0, kv.memory_bytes[stage.device] - kv.weights_bytes * share)
        page_bytes = kv.bytes_per_token * share * kv.page_tokens
        per_replica = math.ceil(running / stage.replicas)
        needed = math.ceil(per_replica * generation_of(problem).held_tokens / kv.page_tokens - ROUNDING)
        yield StagePages(pages=int(free_bytes // page_bytes), needed=needed)


def broken_promises(
    problem: PlanProblem, stages: Sequence[Stage], *, rate_per_s: float, latency_s: float, hops_s: float
) -> Iterator[tuple[Promise, str]]:
    """Yields each promise to sequences that a plan breaks, with a message. Yields nothing without generation."""
    generation = problem.generation
    if generation is None:
        return
    figures = sequence_figures(problem, stages, rate_per_s=rate_per_s, latency_s=latency_s, hops_s=hops_s)
    if generation.ttft_s is not None:
        allowed_s = generation.ttft_s * (1 - problem.slo.slack)
        if figures.ttft_s > allowed_s * (1 + ROUNDING):
            yield "ttft", f"the first token takes {figures.ttft_s * 1e3:.4g} ms, {allowed_s * 1e3:.4g} ms are allowed"
    if generation.most_running is not None and figures.running > generation.most_running:
        yield "sequences", f"full batches need {figures.running} sequences; most_running is {generation.most_running}"
    for index, each in enumerate(figures.pages or ()):
        if each.needed > each.pages:
            yield "memory", f"stage {index} needs {each.needed} KV pages per replica, but only {each.pages} fit"
