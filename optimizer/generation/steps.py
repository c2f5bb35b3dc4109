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
    prompt_s_N: FloatArray
    """Mean seconds of a prompt, per block."""


def step_table(problem: PlanProblem, device: str) -> StepTable:
    """Returns the latency of steps on a device, for a problem of generation."""
    generation, whole = generation_of(problem), problem.latency[device]
    body, head_s_B = without_head(whole)
    prompts = (body, head_s_B) if generation.prefill is None else without_head(generation.prefill[device])
    return StepTable(
        body=at_context(body, generation.mean_context),
        head_s_B=head_s_B,
        prompt_s_N=_prompt_s_N(generation.prompt, *prompts, generation.chunk),
    )


def generation_of(problem: PlanProblem) -> Generation:
    """Returns the demand of a problem of generation."""
    assert problem.generation is not None, "only problems of generation have steps"
    return problem.generation


def chunk_of(table: LatencyTable, chunk: int | None) -> int:
    """Returns the largest number of a prompt's tokens in one batch: the requested one, within what was measured."""
    measured = table.batches[-1] * (table.length or 1)
    return measured if chunk is None else min(chunk, measured)


def num_chunks(problem: PlanProblem, device: str) -> int:
    """Returns the number of batches that a prompt of mean length takes on a device."""
    generation = generation_of(problem)
    table = problem.latency[device] if generation.prefill is None else generation.prefill[device]
    return max(1, int(np.ceil(generation.prompt.mean / chunk_of(table, generation.chunk))))


def _prompt_s_N(prompt: Lengths, body: LatencyTable, head_s_B: FloatArray, chunk: int | None) -> FloatArray:
    """Returns the mean seconds of a prompt per block, in chunks. The head runs on its last token alone."""
    size, length = chunk_of(body, chunk), body.length or 1
    seconds_N = np.zeros(len(body.block_s_NB))
    chunk_s_N = body.blocks_at(np.array([size / length]))[:, 0]
    for tokens, share in prompt.shares or ((prompt.mean, 1.0),):
        chunks, rest = divmod(tokens, size)
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
    ramp_s_EB = ramp_seconds_of(whole, table, generation)
    steps = []
    for block, inside, num_tokens in zip(range(split.first, split.end), survivors, tokens, strict=True):
        block_s = _expected_s(inside, num_tokens, split.batch, table.body.block_s_NB[block], whole.batches)
        block_s += answered * float(table.prompt_s_N[block]) / generation.num_steps
        if block == split.first and block > 0:
            block_s += generation.regroup_s
        ramp_s = 0.0
        if block in split.ramps:
            ramp_s_B = ramp_s_EB[problem.ramps.index(block)]
            ramp_s = _expected_s(inside, inside, split.batch, ramp_s_B, whole.batches)
        steps.append((block_s, ramp_s))
    is_last = split.end == problem.num_blocks
    if generation.late_head:
        head_tokens = split.batch - (0.0 if is_last else split.batch * share_N[split.end] / enters)
    else:
        head_tokens = survivors[-1] if is_last else 0.0
    head_s = _expected_s(head_tokens, head_tokens, split.batch, table.head_s_B, whole.batches)
    steps[-1] = steps[-1][0] + head_s, steps[-1][1]
    return steps


def ramp_seconds_of(whole: LatencyTable, table: StepTable, generation: Generation) -> FloatArray:
    """Returns the seconds of ramps by batch (E, B). With a late head, they do not include the head's time."""
    if not generation.late_head:
        return whole.ramp_s_EB
    return np.asarray(np.maximum(whole.ramp_s_EB - table.head_s_B, 0.0))


def _expected_s(inside: float, tokens: float, batch: float, seconds_B: FloatArray, batches: Sequence[int]) -> float:
    """Returns the mean seconds of a run that is skipped if no input is inside. `inside` and `tokens` are means."""
    probability = 1 - max(0.0, 1 - inside / batch) ** batch
    return probability * float(np.interp(tokens / probability, batches, seconds_B)) if probability else 0.0
