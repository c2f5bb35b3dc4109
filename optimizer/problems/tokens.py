"""Converts problems with inputs of different lengths to problems in tokens, and their plans to token budgets.

Planners do not model lengths. They solve the same problem with tokens in place of inputs: batch sizes, survival and
rates count tokens. Each batch of their plan becomes a token budget (rows times length in TCB, section 5.1), with
room for as many inputs as the shortest inputs need to fill it.

A budget is rarely filled completely, because the next input does not fit into the rest. A batch is therefore planned at
the tokens that it holds on average (`Lengths.filled`), and limited by its budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plans.plan import Stage, with_splits
from optimizer.problems.networks import at_sizes, by_block
from optimizer.problems.problem import PlanProblem
from profiles.lengths import Lengths
from profiles.table import FloatArray, LatencyTable


def in_tokens(problem: PlanProblem) -> PlanProblem:
    """Returns the problem in which each token is an input; raises PlanError if no measured batch holds a mean input."""
    lengths = _lengths(problem)
    latency = {device: _table_in_tokens(problem, device) for device in problem.devices}
    return replace(
        problem.with_rate((problem.required_per_s or 0.0) * lengths.mean),
        latency=latency,
        survival_N=token_survival_N(problem),
        bytes_per_sample_N=tuple(each / bytes_length(problem) for each in problem.bytes_per_sample_N),
        lengths=None,
        tokens_per_input=lengths.mean,
        stayers_length_N=None,
        network_tokens=(),
    )


def token_survival_N(problem: PlanProblem) -> tuple[float, ...]:
    """Returns the share of tokens that reach each block if all ramps are active."""
    if problem.stayers_length_N is None:
        return problem.survival_N
    share_N = np.array(problem.survival_N) * np.array(problem.stayers_length_N)
    falling_N = np.minimum.accumulate(np.minimum(share_N, 1.0))
    return (1.0, *falling_N[1:].tolist())


def bytes_length(problem: PlanProblem) -> int:
    """Returns the tokens of the input to which `bytes_per_sample_N` applies: the longest measured length."""
    return max(each.length or 1 for each in problem.latency.values())


def with_budgets(problem: PlanProblem, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Converts the stages of a plan in tokens: each batch becomes a budget of tokens and of inputs."""
    tokens_N = _tokens_N(problem)

    def with_budget(stage: Stage, split: Split) -> Split:
        tokens = _budgets(problem, stage.device)[split.batch]
        batch = max(1, math.ceil(tokens / _lengths(problem).shortest))
        return replace(split, batch=batch, tokens=max(1, math.ceil(round(tokens * tokens_N[split.first], 9))))

    return with_splits(stages, with_budget)


def in_token_batches(problem: PlanProblem, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Returns the stages with the mean tokens of each batch as its size; raises PlanError for unmeasured sizes.

    Sizes are in the unit of the problem's lengths rather than of the split's network.
    """
    lengths, tokens_N = _lengths(problem), _tokens_N(problem)

    def with_mean_tokens(stage: Stage, split: Split) -> Split:
        factor, limit = float(tokens_N[split.first]), most_tokens(problem.latency[stage.device])
        held = split.batch * lengths.mean
        if split.tokens is not None:
            held = min(held, lengths.filled(max(1, math.floor(round(split.tokens / factor, 9)))))
        if held * factor > limit:
            size = f"{held * factor:.6g}"
            raise PlanError(f"a batch of {size} tokens is not measured on {stage.device}; measured are at most {limit}")
        return replace(split, batch=max(1, round(held)), tokens=None)

    return with_splits(stages, with_mean_tokens)


def most_tokens(table: LatencyTable) -> int:
    """Returns the tokens of the largest measured batch."""
    return table.batches[-1] * (table.length or 1)


def _lengths(problem: PlanProblem) -> Lengths:
    assert problem.lengths is not None, "without lengths batches are counted in inputs"
    return problem.lengths


def _tokens_N(problem: PlanProblem) -> FloatArray:
    """Returns the tokens of an input in the network of each block, relative to `lengths`."""
    ends = problem.networks or (problem.num_blocks,)
    return by_block(ends, problem.network_tokens or (1.0,) * len(ends))


def _table_in_tokens(problem: PlanProblem, device: str) -> LatencyTable:
    table, sizes = problem.latency[device], tuple(_budgets(problem, device))
    size_X = np.array(sizes) / (table.length or 1)
    return replace(at_sizes(table, sizes, np.outer(_tokens_N(problem), size_X), problem.ramps), length=1)


def _budgets(problem: PlanProblem, device: str) -> dict[int, int]:
    """Returns the token budgets of measured batches, by the ascending mean tokens of a batch with that budget.

    Both are in the unit of `lengths`. If a network has more tokens per input, its batch must be measured as well.
    """
    table, lengths, factor = problem.latency[device], _lengths(problem), max((1.0, *problem.network_tokens))
    length, budgets = table.length or 1, dict[int, int]()
    for batch in table.batches:
        budget = min(batch * length, math.floor(most_tokens(table) / factor))
        filled = round(lengths.filled(budget), 6)
        if max(budgets, default=0) < round(filled) and filled * factor <= most_tokens(table):
            budgets[round(filled)] = budget
    if not budgets:
        raise PlanError(
            f"latency of {device}: batches of these inputs have {filled * factor:.4g} tokens on average, but the "
            f"largest measured batch has {most_tokens(table)}"
        )
    return budgets
