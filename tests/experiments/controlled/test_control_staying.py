"""Tests of the live controller over a simulated service with early answers: objective and plans that stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.settings import Tuning
from earlyexit.network.boundary import Split
from experiments.controlled import Controlled, Mix, Order
from optimizer.plans.plan import Plan, Stage
from optimizer.problems.problem import MinimizeLatency, PlanProblem
from tests.experiments.controlled.controlled_cases import POLICY, problem, simulated, whole
from tests.experiments.controlled.test_control_tuning import AFTER, BEFORE, BUDGET, RECORDS, epochs

DRIFTS_S, ENDS_S = 90.0, 180.0


def soonest() -> PlanProblem:
    return replace(problem(0.6), objective=MinimizeLatency(rate_per_s=100.0))


def staying(replicas: int) -> Plan:
    """Returns a plan of the whole model with ramp 1 on, in which answered inputs stay."""
    split = Split(first=0, end=4, batch=4, ramps=(1,), after_answer="stay")
    return Plan(stages=(Stage(device="cpu", replicas=replicas, splits=(split,)),), policy=POLICY)


def stream(plan: Plan, tuning: Tuning, **options: Any) -> Controlled:
    """Returns a stream that drifts in the middle."""
    mixes = [Mix(at_s=0.0, rows_N=BEFORE), Mix(at_s=DRIFTS_S, rows_N=AFTER)]
    steered = {"probe_share": 0.05, "budget": BUDGET, **options}
    return simulated(soonest(), plan, RECORDS, mixes, rate_per_s=100, duration_s=ENDS_S, tuning=tuning, **steered)


def test_the_plan_with_the_earliest_answers_is_chosen_and_kept() -> None:
    result = stream(whole(4), "off")
    taken = epochs(result, "period")[0]
    assert taken["at_s"] == pytest.approx(60.3)
    assert taken["words"].startswith("changes the plan: the new one would answer")
    assert {
        ramp
        for stage in taken["placed"]["plan"]["chains"][0]["stages"]
        for split in stage["splits"]
        for ramp in split["ramps"]
    } == {1}
    assert result.words("trial")[0].startswith("keeps the plan")
    outcome = result.outcome
    before_N = (outcome.arrived_s_R >= 20.0) & (outcome.arrived_s_R < 60.0)
    after_N = (outcome.arrived_s_R >= 70.0) & (outcome.arrived_s_R < DRIFTS_S)
    assert outcome.latency_s_N[after_N].mean() < 0.8 * outcome.latency_s_N[before_N].mean()
    assert outcome.figures_between(0.0, ENDS_S).in_slo == len(outcome.arrived_s_R)
    assert result.words("error") == []


def test_a_plan_that_stays_is_put_in_force_and_left_without_losing_an_input() -> None:
    orders = (Order(at_s=20.0, plan=staying(4)), Order(at_s=40.0, plan=whole(4)))
    result = stream(whole(4), "off", hold=True, orders=orders)
    during = result.outcome.figures_between(25.0, 39.0)
    assert during.exits[1] / during.answered == pytest.approx(0.6, abs=0.03)
    assert set(result.outcome.figures_between(45.0, 60.0).exits) == {3}
    assert result.outcome.figures_between(0.0, ENDS_S).answered == len(result.outcome.arrived_s_R)


def test_a_plan_that_stays_is_planned_again_without_probes_from_the_expected_survival() -> None:
    result = stream(staying(4), "off", probe_share=0.0)
    assert result.words("error") == []
    assert epochs(result, "period")[0]["at_s"] == pytest.approx(60.3)
    assert result.outcome.figures_between(0.0, ENDS_S).answered == len(result.outcome.arrived_s_R)


def test_if_inputs_stay_the_alarm_observes_all_without_a_loss_of_capacity() -> None:
    result = stream(staying(4), "guarantee", hold=True)
    alarm = epochs(result, "alarm")[0]
    # 100 answers per second are compared with the full model's, 5 of them of probes: one tick is enough.
    assert DRIFTS_S < alarm["at_s"] <= DRIFTS_S + 2.6
    assert {row["placed"]["plan"]["after_answer"] for row in epochs(result, "alarm")} == {"stay"}
    assert result.outcome.figures_between(0.0, ENDS_S).drops == {}
    late = result.outcome.figures_between(ENDS_S - 20.0, ENDS_S)
    assert 0.1 < late.exits.get(1, 0) / late.answered < 0.35
    assert not np.isnan(result.outcome.latency_s_N).any()
