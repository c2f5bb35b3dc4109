"""Cost model of generation: seconds of batches of steps, and what a plan promises to sequences.

A batch takes the seconds of its own tokens, of the tokens filled in, and of a share of the prompts, block by block.

Let u(k) be the share of all steps that reach block k. A batch of b steps that enters a split at block i stands for
b/u(i) steps of the service, and it carries the work of all of them:

- Block k runs b/u(i) times `Generation.tokens_per_step` tokens: those that survive, and skipped ones, filled in now.
- Ramps, and the vocabulary head behind the last block, run on survivors alone, b*u(k)/u(i).
- A batch without survivors ends. Steps leave independently, so a survivor remains with probability
  1-(1-u(k)/u(i))^b, and on that condition there are more of them. This matters for small batches.
- With a late head (`Generation.late_head`), ramps take less by the head's time, and a split has one call of the head.
- Prompts run through all blocks, as if alone. There is one prompt per answer.
- Steps attend to contexts of mean length.

All blocks of a decoder are alike, so the excess of the last block over the one before it is the time of the head.

From these seconds follow a plan's figures for sequences. On every replica a full batch runs, and other batches wait,
each short of one input. A plan's rate needs the sequences for that many steps in flight. By Little's law, the mean time
per token is their number divided by the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.cost.batch_seconds import BatchSeconds, expected_batches, mean_seconds
from optimizer.generation.demand import Generation, KvSpec
from optimizer.generation.seconds import at_context, without_head
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem, nested_shares
from profiles.lengths import Lengths
from profiles.table import FloatArray, LatencyTable

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """Latency of steps on one accelerator type."""

    body: LatencyTable
    """Steps, without the vocabulary head."""
    head_s_B: FloatArray
    ramp_s_EB: FloatArray
    """Seconds of ramps, by batch size. With a late head, they do not include the head's time."""
    prompt_s_N: FloatArray
    """Mean seconds of a prompt, per block."""
    num_chunks: int
    """The number of batches that a prompt of mean length takes."""


def step_table(problem: PlanProblem, device: str) -> StepTable:
    """Returns the latency of steps on a device, for a problem of generation."""
    generation, whole = generation_of(problem), problem.latency[device]
    prefill = whole if generation.prefill is None else generation.prefill[device]
    chunk = chunk_of(prefill, generation.chunk)
    return _step_table(whole, prefill, generation.prompt, chunk, generation.mean_context, generation.late_head)


@lru_cache(maxsize=32)  # a search asks for the same tables for each of its splits and plans
def _step_table(
    whole: LatencyTable, prefill: LatencyTable, prompt: Lengths, chunk: int, context: float, late_head: bool
) -> StepTable:
    body, head_s_B = without_head(whole)
    return StepTable(
        body=at_context(body, context),
        head_s_B=head_s_B,
        ramp_s_EB=np.maximum(whole.ramp_s_EB - (head_s_B if late_head else 0.0), 0.0),
        prompt_s_N=_prompt_s_N(prompt, *without_head(prefill), chunk),
        num_chunks=max(1, int(np.ceil(prompt.mean / chunk))),
    )


def generation_of(problem: PlanProblem) -> Generation:
    """Returns the demand of a problem of generation."""
    assert problem.generation is not None, "only problems of generation have steps"
    return problem.generation


def chunk_of(table: LatencyTable, chunk: int | None) -> int:
    """Returns the largest number of a prompt's tokens in one batch: the requested one, within what was measured."""
    measured = table.batches[-1] * (table.length or 1)
    return measured if chunk is None else min(chunk, measured)


def _prompt_s_N(prompt: Lengths, body: LatencyTable, head_s_B: FloatArray, chunk: int) -> FloatArray:
    """Returns the mean seconds of a prompt per block, in chunks. The head runs on its last token alone."""
    length, seconds_N = body.length or 1, np.zeros(len(body.block_s_NB))
    chunk_s_N = body.blocks_at(np.array([chunk / length]))[:, 0]
    for tokens, share in prompt.shares or ((prompt.mean, 1.0),):
        chunks, rest = divmod(tokens, chunk)
        seconds_N += share * chunks * chunk_s_N
        if rest:
            seconds_N += share * body.blocks_at(np.array([rest / length]))[:, 0]
    seconds_N[-1] += head_s_B[0]
    return seconds_N


def seconds_of_steps(problem: PlanProblem, device: str, split: Split, share_N: Sequence[float]) -> BatchSeconds:
    """Returns the times of a full batch of steps in a split, for a problem of generation.

    Steps have means alone, because the promise to a sequence is a mean over many steps.
    Raises PlanError if a batch of steps fills in more tokens than the largest measured batch holds.
    """
    if split.stays:
        raise PlanError("steps cannot stay after their answer: blocks that a token skips run later, with another token")
    whole, generation, table = problem.latency[device], generation_of(problem), step_table(problem, device)
    enters = share_N[split.first] or 1.0
    answered = split.batch / enters  # steps of the service per batch
    survivors = expected_batches(split, share_N, split.batch)
    tokens = [answered * generation.tokens_per_step(share_N[block]) for block in range(split.first, split.end)]
    if tokens[0] > whole.batches[-1] * (1 + ROUNDING):
        raise PlanError(
            f"blocks {split.first} to {split.end - 1} run {tokens[0]:.6g} tokens at once at batch {split.batch}, "
            f"including skipped ones; the largest measured batch on {device} is {whole.batches[-1]}"
        )

    def mean_s(inside: float, num_tokens: float, seconds_B: FloatArray) -> float:
        return mean_seconds(whole, seconds_B, num_tokens, inside / split.batch, split.batch)

    is_last = split.end == problem.num_blocks
    if generation.late_head:
        head_tokens = split.batch - (0.0 if is_last else split.batch * share_N[split.end] / enters)
    else:
        head_tokens = survivors[-1] if is_last else 0.0
    blocks = []
    for block, inside, num_tokens in zip(range(split.first, split.end), survivors, tokens, strict=True):
        block_s, ramp_s = mean_s(inside, num_tokens, table.body.block_s_NB[block]), 0.0
        block_s += answered * float(table.prompt_s_N[block]) / generation.num_steps
        if block == split.first and block > 0:
            block_s += generation.regroup_s
        if block == split.end - 1:
            block_s += mean_s(head_tokens, head_tokens, table.head_s_B)
        if block in split.ramps:
            ramp_s = mean_s(inside, inside, table.ramp_s_EB[problem.ramps.index(block)])
        inside_s = block_s + ramp_s
        blocks.append(BatchSeconds(inside_s, ramp_s, inside_s, share_N[block] * inside_s))
    return BatchSeconds.total(blocks)


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
    problem: PlanProblem, stages: Sequence[Stage], rate_per_s: float, latency_s: float, hops_s: float
) -> SequenceFigures:
    """Returns the figures at `rate_per_s` steps. A step takes `latency_s` at most, of which `hops_s` are hops."""
    generation = generation_of(problem)
    running = running_sequences(stages) + math.ceil(rate_per_s * hops_s - ROUNDING)
    per_s = rate_per_s / generation.num_steps
    ramps = [ramp for stage in stages for split in stage.splits for ramp in split.ramps]
    share = problem.with_probes(nested_shares(problem.survival_N, ramps))[-1]
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

    Per replica, they are one running input and all inputs but one of each batch. Replicas of a later stage share one
    queue of its first split.
    """
    inside = sum(stage.replicas * (1 + sum(split.batch - 1 for split in stage.splits)) for stage in stages)
    return inside + sum(stage.splits[0].batch - 1 for stage in stages[1:])


def _pages(problem: PlanProblem, stages: Sequence[Stage], kv: KvSpec, running: int) -> Iterator[StagePages]:
    """Yields the pages of each stage. Every sequence has keys and values on one replica of every stage."""
    for stage in stages:
        share = (stage.end - stage.first) / problem.num_blocks
        free_bytes = max(0.0, kv.memory_bytes[stage.device] - kv.weights_bytes * share)
        page_bytes = kv.bytes_per_token * share * kv.page_tokens
        per_replica = math.ceil(running / stage.replicas)
        needed = math.ceil(per_replica * generation_of(problem).held_tokens / kv.page_tokens - ROUNDING)
        yield StagePages(pages=int(free_bytes // page_bytes), needed=needed)


def broken_promises(problem: PlanProblem, figures: SequenceFigures | None) -> Iterator[tuple[Promise, str]]:
    """Yields each promise to sequences that a plan breaks, with a message. Yields nothing without sequences."""
    if figures is None:
        return
    generation = generation_of(problem)
    if generation.ttft_s is not None:
        allowed_s = generation.ttft_s * (1 - problem.slo.slack)
        if figures.ttft_s > allowed_s * (1 + ROUNDING):
            yield "ttft", f"the first token takes {figures.ttft_s * 1e3:.4g} ms; {allowed_s * 1e3:.4g} are allowed"
    if generation.most_running is not None and figures.running > generation.most_running:
        yield "sequences", f"full batches need {figures.running} sequences; most_running is {generation.most_running}"
    for index, each in enumerate(figures.pages or ()):
        if each.needed > each.pages:
            yield "memory", f"stage {index} needs {each.needed} KV pages per replica, but only {each.pages} fit"
