"""Seconds of batches of steps, block by block: their own tokens, the tokens filled in, and a share of the prompts.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.cost.batch_seconds import expected_batches, step_seconds
from optimizer.generation.demand import Generation
from optimizer.generation.seconds import at_context, without_head
from optimizer.problems.problem import PlanProblem
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
    """With a late head, ramps do not include the head's time."""
    prompt_s_N: FloatArray
    """Mean seconds of a prompt, per block."""
    num_chunks: int
    """The number of batches that a prompt of mean length takes."""


def step_table(problem: PlanProblem, device: str) -> StepTable:
    """Returns the latency of steps on a device, for a problem of generation."""
    generation, whole = generation_of(problem), problem.latency[device]
    body, head_s_B = without_head(whole)
    prefill = whole if generation.prefill is None else generation.prefill[device]
    chunk = chunk_of(prefill, generation.chunk)
    return StepTable(
        body=at_context(body, generation.mean_context),
        head_s_B=head_s_B,
        ramp_s_EB=np.maximum(whole.ramp_s_EB - (head_s_B if generation.late_head else 0.0), 0.0),
        prompt_s_N=_prompt_s_N(generation.prompt, *without_head(prefill), chunk),
        num_chunks=max(1, int(np.ceil(generation.prompt.mean / chunk))),
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


def seconds_of_steps(
    problem: PlanProblem, device: str, split: Split, share_N: Sequence[float]
) -> list[tuple[float, float]]:
    """Returns the seconds of a full batch in every block of a split, and in its ramp if it is active, for any problem.

    Raises PlanError if a batch of steps fills in more tokens than the largest measured batch holds.
    """
    whole = problem.latency[device]
    if problem.generation is None:
        return step_seconds(whole, problem.ramps, split, share_N)
    if split.stays:
        raise PlanError("steps cannot stay after their answer: blocks that a token skips run later, with another token")
    generation, table = problem.generation, step_table(problem, device)
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
        """Returns the mean seconds of a run that is skipped if no input is inside. Both numbers are means."""
        probability = 1 - max(0.0, 1 - inside / split.batch) ** split.batch
        return (
            probability * float(np.interp(num_tokens / probability, whole.batches, seconds_B)) if probability else 0.0
        )

    steps = []
    for block, inside, num_tokens in zip(range(split.first, split.end), survivors, tokens, strict=True):
        block_s = mean_s(inside, num_tokens, table.body.block_s_NB[block])
        block_s += answered * float(table.prompt_s_N[block]) / generation.num_steps
        if block == split.first and block > 0:
            block_s += generation.regroup_s
        is_active = block in split.ramps
        steps.append(
            (block_s, mean_s(inside, inside, table.ramp_s_EB[problem.ramps.index(block)]) if is_active else 0.0)
        )
    is_last = split.end == problem.num_blocks
    if generation.late_head:
        head_tokens = split.batch - (0.0 if is_last else split.batch * share_N[split.end] / enters)
    else:
        head_tokens = survivors[-1] if is_last else 0.0
    steps[-1] = steps[-1][0] + mean_s(head_tokens, head_tokens, table.head_s_B), steps[-1][1]
    return steps
