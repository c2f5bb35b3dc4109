"""Tests of the live controller over a cascade, which it adds and removes with the stream, based on exits alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from earlyexit.network.boundary import Split
from experiments.controlled import Control, Controlled, Order, simulate_controlled
from optimizer.plans.plan import Plan, Stage
from optimizer.problems.problem import PlanProblem
from profiles.table import LatencyTable
from simulator.scenario import Scenario
from tests.experiments.controlled import controlled_cases
from tests.experiments.controlled.controlled_cases import EASY, HARD, POLICY, control, evenly
from tests.experiments.controlled.test_control_run import check_outcomes
from tests.experiments.controlled.troubles import Fault, with_faults

NETWORKS = (2, 4)
"""Two small blocks of 5 ms before two large ones of 20 ms, for one to four inputs."""
SMALL, LARGE = Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=2, end=4, batch=4)


def problem(easy_share: float) -> PlanProblem:
    """Returns a problem in which easy inputs leave at the end of the small network."""
    block_s_NB = np.array([[0.005] * 2, [0.005] * 2, [0.02] * 2, [0.02] * 2])
    table = LatencyTable(batches=(1, 4), block_s_NB=block_s_NB, ramp_s_EB=np.zeros((3, 2)))
    return replace(controlled_cases.problem(easy_share), latency={"cpu": table}, networks=NETWORKS)


def plan(*stages: tuple[int, Split], **predicted: float) -> Plan:
    made = tuple(Stage(device="cpu", replicas=replicas, splits=(split,)) for replicas, split in stages)
    return Plan(stages=made, policy=POLICY, networks=NETWORKS, predicted=predicted)


CASCADE = plan((2, SMALL), (2, LARGE), rate_per_s=500.0, latency_s=0.1)
ALONE = plan((4, LARGE), rate_per_s=400.0, latency_s=0.08)


def scenario(served_by: Plan, easy_shares: tuple[float, ...], each_s: float, rate_per_s: float) -> Scenario:
    """Returns a stream with one share of easy inputs after the other."""
    number = int(rate_per_s * each_s)
    rows = [EASY if place % 10 < 10 * share else HARD for share in easy_shares for place in range(number)]
    duration_s = each_s * len(easy_shares)
    return controlled_cases.scenario(
        served_by, evenly(rate_per_s, duration_s), np.array(rows), duration_s=duration_s, problem=problem(0.0)
    )


def steered(easy_share: float, **options: Any) -> Control:
    return replace(control(problem(easy_share)), **options)


def networks_in_force(result: Controlled) -> list[list[int]]:
    """Returns the first blocks of the splits of every plan that was in force, without repeats."""
    found: list[list[int]] = []
    for row in result.plans:
        stages = row["placed"]["plan"]["chains"][0]["stages"]
        firsts = sorted(split["first"] for stage in stages for split in stage["splits"])
        if row["outcome"] == "in force" and [firsts] != found[-1:]:
            found.append(firsts)
    return found


def test_changes_between_the_cascade_and_the_large_network_lose_no_input() -> None:
    orders = (Order(at_s=10.0, plan=ALONE), Order(at_s=30.0, plan=CASCADE))
    made = scenario(CASCADE, (0.6,), 50.0, 120.0)
    result = simulate_controlled(made, steered(0.6, hold=True, orders=orders))
    figures = result.outcome.figures()
    assert (figures.answered, figures.drops) == (6000, {})
    check_outcomes(result)
    assert result.words("error") == []
    # The large network alone answers inputs until the change, easy or not: about 15 s of 120/s.
    arrived_s_N, exit_N = result.outcome.arrived_s_R, result.outcome.exit_N
    assert set(exit_N[(arrived_s_N > 16.0) & (arrived_s_N < 29.0)]) == {3}
    assert np.mean(exit_N[arrived_s_N < 9.0] == 1) == pytest.approx(0.6, abs=0.01)
    assert np.mean(exit_N[arrived_s_N > 40.0] == 1) == pytest.approx(0.6, abs=0.01)


def test_probes_of_a_plan_without_the_small_network_show_its_exits() -> None:
    made = scenario(ALONE, (0.8,), 30.0, 100.0)
    result = simulate_controlled(made, steered(0.0, hold=True))
    (probes,) = [report.probes for report in result.reports]
    assert probes is not None, "those since the last look"
    assert not np.isnan(probes.scores_NR).any()
    assert probes.exits_N.tolist() == [3] * len(probes), "answered by the plan, which is the large network's"
    assert result.outcome.figures().answered == 3000


def test_the_cascade_is_chosen_while_the_small_network_answers_enough_inputs() -> None:
    made = scenario(ALONE, (0.8, 0.0), 130.0, 40.0)
    result = simulate_controlled(made, steered(0.0))
    check_outcomes(result)
    assert result.outcome.figures().drops == {}
    used = networks_in_force(result)
    assert used[0] == [2], "nothing was known of the small network but that no input leaves it"
    assert any(firsts[0] == 0 for firsts in used)
    assert used[-1] == [2]


@pytest.mark.parametrize("slot", ["split-cpu-0", "split-cpu-1"], ids=["small", "large"])
def test_the_inputs_of_a_dead_replica_of_either_network_are_answered_by_others(slot: str) -> None:
    died = Fault(at_s=10.01, happen=lambda fleet: fleet.die(slot, 1))
    steering = steered(0.6, hold=True, make_fleet=with_faults(died))
    result = simulate_controlled(scenario(CASCADE, (0.6,), 30.0, 120.0), steering)
    assert result.outcome.figures().answered == 3600
    check_outcomes(result)
    assert np.mean(result.outcome.exit_N == 1) == pytest.approx(0.6, abs=0.001)
