"""What batches of steps take, block by block: their own tokens, those that are filled in, and their share of prompts.

Of a batch of b steps that enters a split where the share u(i) of all steps comes by, b/u(i) steps of the service are
answered. So much of everything that a step asks falls on the batch:

- block k runs b/u(i) times `Generation.rows` tokens: u(k) survive, the rest was skipped and is filled in now;
- ramps, and the vocabulary head behind the last block, look at survivors alone, b*u(k)/u(i);
- where none of the b survives, the batch is over. Each leaves by itself, so at least one stays with the chance
  1-(1-u(k)/u(i))^b, and then there are that many times more. Of large batches that is nothing, of single steps all;
- with a late head (`Generation.late_head`) ramps take so much less, and a split has one call for all that leave;
- prompts are run by all blocks, as if alone, one for so many steps as an answer has;
- steps look at as many tokens as their sequences have come to on average.

The blocks of a decoder are alike, so what the last takes beyond the one before it is taken for the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.batch_seconds import expected_batches, step_seconds
from optimizer.generation.demand import Generation
from optimizer.generation.seconds import at_context, without_head
from optimizer.problem import PlanProblem
from profiles.lengths import Lengths
from profiles.table import FloatArray, LatencyTable

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """Of one accelerator type."""

    body: LatencyTable
    """Of steps, without the vocabulary head."""
    head_s_B: FloatArray
    prompt_s_N: FloatArray
    """Of a prompt, per block."""


def step_table(problem: PlanProblem, device: str) -> StepTable:
    """See above; the problem is one of generation."""
    generation, whole = demand_of(problem), problem.latency[device]
    body, head_s_B = without_head(whole)
    prompts = (body, head_s_B) if generation.prefill is None else without_head(generation.prefill[device])
    return StepTable(
        body=at_context(body, generation.mean_context),
        head_s_B=head_s_B,
        prompt_s_N=_prompt_s_N(generation.prompt, *prompts, generation.chunk),
    )


def demand_of(problem: PlanProblem) -> Generation:
    """What the sequences of a problem of generation ask."""
    assert problem.generation is not None, "inputs of other problems are no steps"
    return problem.generation


def chunk_of(table: LatencyTable, chunk: int | None) -> int:
    """The most tokens of a prompt in one batch: as asked, and as measured."""
    measured = table.batches[-1] * (table.length or 1)
    return measured if chunk is None else min(chunk, measured)


def num_chunks(problem: PlanProblem, device: str) -> int:
    """In how many batches a prompt of mean length is run on a device."""
    generation = demand_of(problem)
    table = problem.latency[device] if generation.prefill is None else generation.prefill[device]
    return max(1, int(np.ceil(generation.prompt.mean / chunk_of(table, generation.chunk))))


def _prompt_s_N(prompt: Lengths, body: LatencyTable, head_s_B: FloatArray, chunk: int | None) -> FloatArray:
    """Mean seconds of a prompt per block, in chunks, the vocabulary head for its last token alone."""
    size, length = chunk_of(body, chunk), body.length or 1
    seconds_N = np.zeros(len(body.block_s_NB))
    whole_s_N = body.blocks_at(np.array([size / length]))[:, 0]
    for tokens, share in prompt.shares or ((prompt.mean, 1.0),):
        chunks, rest = divmod(tokens, size)
        seconds_N += share * chunks * whole_s_N
        if rest:
            seconds_N += share * body.blocks_at(np.array([rest / length]))[:, 0]
    seconds_N[-1] += head_s_B[0]
    return seconds_N


def seconds_of_steps(
    problem: PlanProblem, device: str, split: Split, share_N: Sequence[float]
) -> list[tuple[float, float]]:
    """What a full batch of a split takes in every block, and in its ramp where it is active: of any problem.

    Raises PlanError for batches of steps that fill in more tokens than were measured together.
    """
    whole = problem.latency[device]
    if problem.generation is None:
        return step_seconds(whole, problem.ramps, split, share_N)
    if split.stays:
        raise PlanError("a step whose token is said does not stay in a batch: what it skipped is filled in later")
    generation, table = problem.generation, step_table(problem, device)
    enters = share_N[split.first] or 1.0
    answered = split.batch / enters  # steps of the service, per batch
    own = expected_batches(split, share_N, split.batch)
    rows = [answered * generation.rows(share_N[block]) for block in range(split.first, split.end)]
    if rows[0] > whole.batches[-1] * (1 + ROUNDING):
        raise PlanError(
            f"blocks {split.first} to {split.end - 1} run {rows[0]:.6g} tokens at once at batch {split.batch}, those "
            f"that were skipped among them; measured on {device} are at most {whole.batches[-1]}"
        )
    ramp_s_EB = ramps_of(whole, table, generation)
    found = []
    for block, inside, tokens in zip(range(split.first, split.end), own, rows, strict=True):
        block_s = _by_chance(inside, tokens, split.batch, table.body.block_s_NB[block], whole.batches)
        block_s += answered * float(table.prompt_s_N[block]) / generation.num_steps
        if block == split.first and block > 0:
            block_s += generation.regroup_s
        ramp_s = 0.0
        if block in split.ramps:
            ramp_s_B = ramp_s_EB[problem.ramps.index(block)]
            ramp_s = _by_chance(inside, inside, split.batch, ramp_s_B, whole.batches)
        found.append((block_s, ramp_s))
    is_last = split.end == problem.num_blocks
    goes_on = 0.0 if is_last else split.batch * share_N[split.end] / enters
    asked = split.batch - goes_on if generation.late_head else own[-1] if is_last else 0.0
    head_s = _by_chance(asked, asked, split.batch, table.head_s_B, whole.batches)
    found[-1] = found[-1][0] + head_s, found[-1][1]
    return found


def ramps_of(whole: LatencyTable, table: StepTable, generation: Generation) -> FloatArray:
    """Seconds of ramps by batch (E, B), without the vocabulary head where leaving tokens wait for its one call."""
    if not generation.late_head:
        return whole.ramp_s_EB
    return np.asarray(np.maximum(whole.ramp_s_EB - table.head_s_B, 0.0))


def _by_chance(inside: float, tokens: float, batch: float, seconds_B: FloatArray, batches: Sequence[int]) -> float:
    """The mean seconds of a run that takes place if any of a batch is inside; `inside` and `tokens` are means."""
    chance = 1 - max(0.0, 1 - inside / batch) ** batch
    return chance * float(np.interp(tokens / chance, batches, seconds_B)) if chance else 0.0
