"""Tests of a cascade by hand-made timetables: two networks with two blocks each, and an exit at the first one's end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimizer.plans.plan import Plan, Stage
from optimizer.problems.problem import PlanProblem
from simulator.outcome import Outcome
from simulator.scenario import Scenario
from simulator.simulate import booted, play, simulate
from tests.simulator import tiny_cases
from tests.simulator.tiny_cases import AT_1, POLICY, TO_END, split, stage

CROSSING_S = 0.25
"""In addition to the 0.5 s that an input takes from one replica to the next."""
SMALL, LARGE = split(0, 2, ramps=(1,)), split(2, 4)


def problem(**changes: Any) -> PlanProblem:
    return replace(tiny_cases.problem(), networks=(2, 4), crossing_s=CROSSING_S, **changes)


def plan(*stages: Stage) -> Plan:
    return Plan(stages=stages, policy=POLICY, networks=(2, 4))


CASCADE = plan(stage(1, SMALL), stage(1, LARGE))
TOGETHER = plan(stage(1, SMALL, LARGE))
ALONE = plan(stage(1, LARGE))


def scenario(served_by: Plan, *rows: int, **options: Any) -> Scenario:
    """Returns one request every ten seconds."""
    arrivals_s = [10.0 * number for number in range(len(rows))]
    return tiny_cases.scenario(served_by, arrivals_s, rows, **{"problem": problem(), **options})


def served(served_by: Plan, *rows: int, **options: Any) -> Outcome:
    return simulate(scenario(served_by, *rows, **options))


@pytest.mark.parametrize("served_by", [CASCADE, TOGETHER], ids=["two stages", "one stage"])
def test_unsure_inputs_cross_through_the_ingress_wherever_the_next_network_runs(served_by: Plan) -> None:
    outcome = served(served_by, AT_1, TO_END)
    assert outcome.exit_N.tolist() == [1, 3]
    # Two blocks of a second; half a second on the link and a quarter for encoding; two more blocks.
    assert outcome.latency_s_N.tolist() == [2.0, 2.0 + 0.5 + 0.25 + 2.0]


def test_a_plan_that_skips_the_first_network_begins_with_the_next() -> None:
    outcome = served(ALONE, AT_1, TO_END)
    assert outcome.exit_N.tolist() == [3, 3]
    assert outcome.latency_s_N.tolist() == [2.0, 2.0]
    assert [(use.first, use.end) for use in outcome.splits] == [(2, 4)]
    service = booted(scenario(CASCADE, AT_1, TO_END, TO_END))
    play(service)
    counts = service.ingresses[0].core.counts
    assert (counts.crossings, counts.crossing_s) == ({2: 2}, {2: 2 * CROSSING_S})


def test_pruned_inputs_take_the_time_of_fewer_tokens_or_smaller_batches() -> None:
    table = replace(tiny_cases.problem().latency["cpu"], length=10)
    told = {"latency": {"cpu": table}, "network_tokens": (1.0, 2.0), "crossing_tokens": (1.0, 1.0)}
    lengths = {"lengths_R": np.array([20, 20, 20, 20])}
    # 20 tokens are two inputs of the profile, 1.25 s a block; 40 tokens four of them, 1.75 s a block.
    crossed_s = 2 * 1.25 + 0.5 * 2 + CROSSING_S + 2 * 1.75
    assert served(CASCADE, TO_END, problem=problem(**told), **lengths).latency_s_N.tolist() == [crossed_s]
    # Half of the words are pruned, so 20 tokens remain. Inputs that enter the large network at once keep all of them.
    pruned = problem(**told | {"crossing_tokens": (1.0, 0.5)})
    assert served(CASCADE, TO_END, problem=pruned, **lengths).latency_s_N.tolist() == [crossed_s - 2 * 0.5]
    assert served(ALONE, TO_END, problem=pruned, **lengths).latency_s_N.tolist() == [2 * 1.75]
    outcome = served(CASCADE, TO_END, problem=problem(crossing_tokens=(1.0, 0.5)), inputs_per_request=4)
    # Four inputs at once: 1.75 s a block, then as two whole ones 1.25 s a block; the link takes half a second each.
    assert outcome.latency_s_N.tolist() == [2 * 1.75 + 4 * 0.5 + CROSSING_S + 2 * 1.25] * 4
    both = replace(CASCADE, stages=(*CASCADE.stages, stage(1, split(2, 4))), shares=(0.5, 0.5))
    for each in (both, both.with_splits(overlap_below=1)):
        outcome = served(each, TO_END, problem=problem(crossing_tokens=(1.0, 0.5)), inputs_per_request=4)
        assert outcome.latency_s_N.tolist() == [2 * 1.25 + 2 * 0.5 + CROSSING_S + 2.0, 2 * 1.25] * 2, "two in each"


def test_inputs_arrive_with_the_tokens_of_the_first_network_that_any_chain_uses() -> None:
    table = replace(tiny_cases.problem().latency["cpu"], length=10)
    told = problem(latency={"cpu": table}, network_tokens=(1.0, 2.0), crossing_tokens=(1.0, 1.0))
    both = replace(CASCADE, stages=(*ALONE.stages, *CASCADE.stages), shares=(0.5, 0.5))
    ingress = booted(scenario(both, TO_END, problem=told, lengths_R=np.array([20, 20, 20, 20]))).ingresses[0]
    ingress.arrive(0)
    assert [chain.unanswered_tokens for chain in ingress.core.chains.active] == [20, 0]


def test_a_chain_of_one_network_is_simulated_as_a_plain_model() -> None:
    arrivals_s, rows = [0.3 * number for number in range(40)], [number % 4 for number in range(40)]
    whole = tiny_cases.plan(stage(2, split(0, 2, ramps=(0, 1))), stage(1, split(2, 4, ramps=(2,))))
    plain = tiny_cases.scenario(whole, arrivals_s, rows)
    told = replace(plain, problem=replace(plain.problem, network_tokens=(1.0,), crossing_s=1.0))
    one, other = simulate(plain), simulate(told)
    assert one.latency_s_N.tolist() == other.latency_s_N.tolist()
    assert one.ended_s == other.ended_s
    assert one.splits == other.splits
