"""Tests of thresholds that the live controller tunes while a simulated service serves a stream that drifts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.settings import Tuning
from experiments.controlled import Controlled, Mix, rows_in_turn
from profiles.records import ExitRecords
from tests.exit_records import exit_records
from tests.experiments.controlled.controlled_cases import halves, problem, simulated

BEFORE, AFTER = np.arange(2000), np.arange(2000, 4000)
"""Rows of the records before and after the drift."""
DRIFTS_S, ENDS_S = 35.0, 115.0
MIXES = [Mix(at_s=0.0, rows_N=BEFORE), Mix(at_s=DRIFTS_S, rows_N=AFTER)]
BUDGET = 0.02


def records() -> ExitRecords:
    """Returns records: ramp 1 is sure (0.6 to 1) of six of ten inputs; after the drift it is wrong below 0.8.

    It guesses the other inputs. Ramp 2 answers as ramp 1 does, ramp 0 nothing.
    """
    rng = np.random.default_rng(0)
    sure_N = rng.random(4000) < 0.6
    score_N = np.where(sure_N, rng.uniform(0.6, 1.0, 4000), rng.uniform(0.0, 0.4, 4000))
    guesses_N = rng.random(4000) < np.where(sure_N, 0.002, 0.5)
    said_N = np.where(guesses_N | ((score_N < 0.8) & (np.arange(4000) >= 2000)), 0, 1)
    answers_NE = np.column_stack([np.zeros(4000), said_N, said_N, np.ones(4000)]).astype(np.int64)
    return exit_records(np.column_stack([np.full(4000, 0.01), score_N, score_N]), answers_NE=answers_NE)


RECORDS = records()


def drifting(rate_per_s: float, tuning: Tuning) -> Controlled:
    """Returns a service with thresholds of 0.5, at which six of ten leave at ramp 1."""
    load = {"rate_per_s": rate_per_s, "duration_s": ENDS_S}
    return simulated(problem(0.6), halves(3, 1), RECORDS, MIXES, tuning=tuning, budget=BUDGET, plan_s=0.3, **load)


def agreement(result: Controlled, from_s: float, until_s: float) -> float:
    """Returns the share of answers to inputs that arrived in between which equal the full model's."""
    outcome, rows_N = result.outcome, rows_in_turn(MIXES, result.outcome.arrived_s_R)
    losses_NE = np.column_stack([RECORDS.losses_NR, np.zeros(len(RECORDS))])
    between_N = (outcome.arrived_s_R >= from_s) & (outcome.arrived_s_R < until_s) & (outcome.exit_N >= 0)
    return 1 - float(losses_NE[rows_N[between_N], outcome.exit_N[between_N]].mean())


def epochs(result: Controlled, reason: str) -> list[Any]:
    """Returns the epochs of plans that were put in force for this reason."""
    return [plan for plan in result.plans if plan["outcome"] == "in force" and plan["reason"] == reason]


def test_tuning_keeps_the_agreement_of_a_stream_that_drifts() -> None:
    tuned = drifting(150, "guarantee")
    alarm = epochs(tuned, "alarm")[0]
    # Of 15 probes per second three in ten are answered wrongly: one or two ticks are enough.
    assert DRIFTS_S < alarm["at_s"] <= DRIFTS_S + 5.0
    assert agreement(tuned, 0.0, DRIFTS_S) > 1 - BUDGET
    assert agreement(tuned, alarm["at_s"], ENDS_S) > 1 - BUDGET
    alarm_s, tested_s = alarm["at_s"], epochs(tuned, "thresholds")[0]["at_s"]
    # 114 probes without loss make a test at 2 % and 90 %. 15 per second arrive; earlier ones design the path.
    assert 5.0 < tested_s - alarm_s < 20.0
    assert set(tuned.outcome.figures_between(alarm_s + 0.5, tested_s - 0.5).exits) == {3}
    late = tuned.outcome.figures_between(ENDS_S - 30.0, ENDS_S)
    early = late.exits.get(1, 0) + late.exits.get(2, 0)
    assert 0.15 < early / late.answered < 0.35  # three in ten have a score above 0.8
    assert late.in_slo == late.inputs
    assert tuned.words("error") == []


def test_the_same_stream_loses_agreement_without_tuning() -> None:
    kept = drifting(150, "off")
    assert (epochs(kept, "alarm"), epochs(kept, "thresholds")) == ([], [])
    assert agreement(kept, 0.0, DRIFTS_S) > 1 - BUDGET
    assert agreement(kept, DRIFTS_S, ENDS_S) == pytest.approx(0.7, abs=0.02)


def test_a_plan_that_needs_exits_is_replaced_at_once_after_an_alarm() -> None:
    tuned = drifting(380, "guarantee")
    (alarm,), another = epochs(tuned, "alarm"), epochs(tuned, "after an alarm")[0]
    # The one replica of the second half runs 200 of the 380 inputs/s. The new plan has the whole model on all four.
    assert another["at_s"] - alarm["at_s"] == pytest.approx(0.3)
    assert another["placed"]["plan"]["predicted"]["rate_per_s"] >= 400
    before, then, later = (
        tuned.outcome.figures_between(alarm["at_s"] + from_s, alarm["at_s"] + until_s)
        for from_s, until_s in ((-20.0, 0.0), (0.0, 10.0), (10.0, 70.0))
    )
    assert (before.drops, later.drops) == ({}, {})
    assert then.drops == {}
    assert then.in_slo == then.answered
