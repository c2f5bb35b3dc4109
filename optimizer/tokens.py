"""From a problem whose inputs have several lengths to one of tokens, and from its plan to budgets of tokens.

Planners know nothing of lengths. They are asked the same problem with tokens in the place of inputs: a batch of a
latency table becomes the tokens that such a batch holds, the share of inputs that stay that of tokens that stay, and
the rate so many tokens per second. Of the plan they find, every batch becomes a budget (as TCB, section 4, has it: rows
times their length), with room for as many inputs as the shortest need to fill it.

A budget is hardly ever filled to the last token: what is left is what the next input did not fit into. So a batch is
planned at the tokens that it holds on average (`Lengths.filled`), and bounded by its budget.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plan import Stage, with_splits
from optimizer.problem import PlanProblem
from profiles.lengths import Lengths
from profiles.table import LatencyTable


def in_tokens(problem: PlanProblem) -> PlanProblem:
    """The problem with every token an input; raises PlanError where a budget that was measured holds no mean input."""
    lengths = _lengths(problem)
    latency = {device: _in_tokens(problem, device) for device in problem.devices}
    required_per_s = problem.required_per_s
    same = problem if required_per_s is None else problem.with_rate(required_per_s * lengths.mean)
    return replace(
        same,
        latency=latency,
        survival_N=token_survival_N(problem),
        bytes_per_sample_N=tuple(each / bytes_length(problem) for each in problem.bytes_per_sample_N),
        lengths=None,
        stayers_length_N=None,
        network_tokens=(),
    )


def token_survival_N(problem: PlanProblem) -> tuple[float, ...]:
    """Per block, the share of tokens that no ramp before it lets out, all ramps active."""
    if problem.stayers_length_N is None:
        return problem.survival_N
    share_N = np.array(problem.survival_N) * np.array(problem.stayers_length_N)
    falling_N = np.minimum.accumulate(np.minimum(share_N, 1.0))
    return (1.0, *falling_N[1:].tolist())


def bytes_length(problem: PlanProblem) -> int:
    """Tokens of the input that `bytes_per_sample_N` is of: the longest that a latency is of."""
    return max(each.length or 1 for each in problem.latency.values())


def with_budgets(problem: PlanProblem, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of a plan in tokens, with budgets of tokens and of inputs in the place of its batches."""
    lengths = _lengths(problem)
    return with_splits(stages, lambda stage, split: _with_budget(split, problem, stage.device, lengths))


def in_token_batches(problem: PlanProblem, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Any plan's stages with the tokens that each batch holds on average; raises PlanError for unmeasured ones."""
    lengths = _lengths(problem)
    return with_splits(stages, lambda stage, split: _of_tokens(split, problem, stage.device, lengths))


def most_tokens(table: LatencyTable) -> int:
    """Of the largest batch that was measured."""
    return table.batches[-1] * (table.length or 1)


def full_inputs(table: LatencyTable, split: Split) -> int:
    """A full batch of a split, counted in inputs of the table's length."""
    return split.batch if split.tokens is None else max(1, split.tokens // (table.length or 1))


def mean_tokens(split: Split, lengths: Lengths) -> float:
    """What a full batch of a split holds on average, by its inputs or by its tokens, whichever bounds it."""
    by_inputs = split.batch * lengths.mean
    return by_inputs if split.tokens is None else min(by_inputs, lengths.filled(split.tokens))


def _lengths(problem: PlanProblem) -> Lengths:
    assert problem.lengths is not None, "without lengths batches are counted in inputs"
    return problem.lengths


def tokens_at(problem: PlanProblem, block: int) -> float:
    """Tokens of an input in a block's network, over those that lengths count."""
    if not problem.network_tokens:
        return 1.0
    return problem.network_tokens[bisect_right(problem.networks, block)]


def _in_tokens(problem: PlanProblem, device: str) -> LatencyTable:
    table, lengths = problem.latency[device], _lengths(problem)
    filled = tuple(_budgets(problem, device, lengths))
    size_X = np.array(filled) / (table.length or 1)
    whole = LatencyTable(batches=filled, block_s_NB=table.blocks_at(size_X), ramp_s_EB=table.ramps_at(size_X), length=1)
    if not problem.network_tokens:
        return whole
    blocks = [table.blocks_at(size_X * tokens_at(problem, block))[block] for block in range(problem.num_blocks)]
    ramps = [table.ramps_at(size_X * tokens_at(problem, ramp))[row] for row, ramp in enumerate(problem.ramps)]
    return replace(whole, block_s_NB=np.array(blocks), ramp_s_EB=np.array(ramps).reshape(whole.ramp_s_EB.shape))


def _budgets(problem: PlanProblem, device: str, lengths: Lengths) -> dict[int, int]:
    """By the mean tokens of a batch, ascending, the budget that it has: of all batches that were measured.

    Both are as `lengths` counts; where a network has more tokens of an input, they must be measured as well.
    """
    table, more = problem.latency[device], max((1.0, *problem.network_tokens))
    length = table.length or 1
    budgets: dict[int, int] = {}
    for batch in table.batches:
        filled = round(lengths.filled(batch * length))
        if max(budgets, default=0) < filled and filled * more <= most_tokens(table):
            budgets[filled] = batch * length
    if not budgets:
        raise PlanError(
            f"latency of {device}: inputs have {lengths.mean * more:.4g} tokens, and measured are batches of at most "
            f"{most_tokens(table)} together"
        )
    return budgets


def _with_budget(split: Split, problem: PlanProblem, device: str, lengths: Lengths) -> Split:
    tokens = _budgets(problem, device, lengths)[split.batch]
    batch = max(1, math.ceil(tokens / lengths.shortest))
    return replace(split, batch=batch, tokens=max(1, math.floor(tokens * tokens_at(problem, split.first))))


def _of_tokens(split: Split, problem: PlanProblem, device: str, lengths: Lengths) -> Split:
    """Of a split whose budget counts its own network's tokens, the batch in those that `lengths` counts."""
    table, more = problem.latency[device], tokens_at(problem, split.first)
    tokens = None if split.tokens is None else max(1, round(split.tokens / more))
    most, held = most_tokens(table), mean_tokens(replace(split, tokens=tokens), lengths)
    if held * more > most:
        raise PlanError(f"a batch of {held * more:.6g} tokens is not measured on {device}; measured are at most {most}")
    return replace(split, batch=max(1, round(held)), tokens=None)
