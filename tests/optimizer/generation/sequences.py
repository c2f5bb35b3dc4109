"""Problems of generation that a reader can follow, and every plan of small ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from optimizer.cost.evaluate import Evaluation, evaluate, violations
from optimizer.generation.demand import Generation
from optimizer.generation.steps import generation_of
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem, Slo, Supply, nested_shares
from optimizer.search.decision import Strategy
from profiles.lengths import Lengths
from profiles.table import LatencyTable
from tests.optimizer.brute_force import layouts, plan_of
from tests.optimizer.plain_problem import plain_problem

BATCHES = (1, 2, 4, 8, 16)
GENERATION = Generation(prompt=Lengths(mean=16), output=Lengths(mean=5))


def two_blocks(*, count: int = 1, per_token_s: float = 0.0, half: float = 0.5, **changes: object) -> PlanProblem:
    """Two blocks of 10 ms and a time per token, a ramp of 1 ms between them, where `1 - half` of the steps leave."""
    block_s = 0.01 + per_token_s * np.array([BATCHES, BATCHES])
    table = LatencyTable(batches=BATCHES, block_s_NB=block_s, ramp_s_EB=np.full((1, len(BATCHES)), 0.001))
    facts = {
        "survival_N": (1.0, half),
        "latency": {"gpu": table},
        "devices": {"gpu": Supply(count=count, usd_per_hour=1.0)},
        "slo": Slo(latency_s=10.0, slack=0.0),
        "generation": GENERATION,
    }
    return plain_problem(**facts | changes)


def asking(problem: PlanProblem, **changes: object) -> PlanProblem:
    """The problem with other sequences."""
    assert problem.generation is not None
    return replace(problem, generation=replace(problem.generation, **changes))  # type: ignore[arg-type]


def every_plan(problem: PlanProblem, strategy: Strategy) -> Iterator[tuple[tuple[Stage, ...], Evaluation]]:
    """Those that keep what the problem promises, all batches and replicas of all layouts one by one."""
    for layout in layouts(problem, strategy):
        sizes = [problem.latency[device].batches for _, device in layout.splits]
        counts = [range(1, problem.devices[device].count + 1) for device in layout.devices]
        for batches in product(*sizes):
            if layout.constant_batch and len(set(batches)) > 1:
                continue
            for replicas in product(*counts):
                stages = plan_of(layout, np.array(batches), np.array(replicas))
                figures = _figures(problem, stages)
                if figures is not None and not violations(problem, stages, figures):
                    yield stages, figures


def _figures(problem: PlanProblem, stages: tuple[Stage, ...]) -> Evaluation | None:
    """None where a batch holds more tokens than were measured at once: the tests of `evaluate` see that refused."""
    for stage in stages:
        most = problem.latency[stage.device].batches[-1] * (1 + 1e-9)
        for split in stage.splits:
            share = _enters(problem, stages, split.first)
            if share > 0 and split.batch * generation_of(problem).tokens_per_step(share) / share > most:
                return None
    return evaluate(problem, stages)


def _enters(problem: PlanProblem, stages: tuple[Stage, ...], block: int) -> float:
    before = [ramp for stage in stages for split in stage.splits for ramp in split.ramps if ramp < block]
    return nested_shares(problem.survival_N, before)[-1]
