"""Tests of ramps that are chosen every period, whichever were active, because probes run all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deployments.settings import Tuning
from experiments.controlled import Controlled, Mix
from optimizer.problems.problem import PlanProblem
from profiles.records import ExitRecords
from tests.exit_records import exit_records
from tests.experiments.controlled.controlled_cases import problem, simulated, whole

CHANGES_S, ENDS_S, PERIOD_S = 70.0, 185.0, 60.0


def records() -> ExitRecords:
    """Returns records: ramp 0 is sure of six of ten inputs at first, later ramp 1 is. Sure ramps are right."""
    rng = np.random.default_rng(1)
    sure_N, first_N = rng.random(2000) < 0.6, np.arange(2000) < 1000
    score_N, unsure_N = np.where(sure_N, rng.uniform(0.7, 1.0, 2000), 0.1), np.full(2000, 0.1)
    answers_NE = np.column_stack([sure_N & first_N, sure_N & ~first_N, np.zeros(2000), np.ones(2000)]).astype(np.int64)
    scores_NR = np.column_stack([np.where(first_N, score_N, unsure_N), np.where(first_N, unsure_N, score_N), unsure_N])
    return exit_records(scores_NR, answers_NE=answers_NE)


RECORDS = records()


def with_costs() -> PlanProblem:
    """Returns a problem in which a ramp takes 3 ms, so that a ramp without exits should be off."""
    made = problem(0.6)
    return replace(made, latency={"cpu": replace(made.latency["cpu"], ramp_s_EB=np.full((3, 2), 0.003))})


def ramps_at(result: Controlled, at_s: float) -> set[int]:
    """Returns the ramps of the plan in force at that time."""
    placed = [plan["placed"] for plan in result.plans if plan["outcome"] == "in force" and plan["at_s"] <= at_s][-1]
    stages = placed["plan"]["chains"][0]["stages"]
    return {ramp for stage in stages for split in stage["splits"] for ramp in split["ramps"]}


@pytest.mark.parametrize("tuning", ["off", "guarantee"])
def test_ramps_are_active_a_period_after_they_became_better(tuning: Tuning) -> None:
    mixes = [Mix(at_s=0.0, rows_N=np.arange(1000)), Mix(at_s=CHANGES_S, rows_N=np.arange(1000, 2000))]
    load = {"rate_per_s": 200, "duration_s": ENDS_S}
    result = simulated(with_costs(), whole(4), RECORDS, mixes, tuning=tuning, **load)
    assert ramps_at(result, 59.0) == set()
    assert ramps_at(result, CHANGES_S) == {0}
    assert ramps_at(result, CHANGES_S + PERIOD_S) == {1}
    late = result.outcome.figures_between(ENDS_S - 40.0, ENDS_S)
    assert late.exits[1] / late.answered == pytest.approx(0.6, abs=0.03)
    assert result.words("error") == []
