"""A small service with the live controller, whose figures a reader can compute by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deployments.settings import Tuning
from experiments.controlled import Control, Controlled, Mix, rows_in_turn, simulate_controlled
from optimizer.plans.plan import Plan
from optimizer.problems.problem import PlanProblem
from profiles.records import ExitRecords
from simulator.inputs import IntArray, recorded
from simulator.scenario import FloatArray, Scenario
from tests.deployments.control import control_fakes
from tests.deployments.control.control_fakes import POLICY as POLICY
from tests.deployments.control.control_fakes import RAMPS as RAMPS
from tests.exit_records import exit_records
from tests.experiments.controlled.troubles import TroubledFleet

SETTINGS = {"period_s": 60.0, "watch_s": 2.5, "start_s": 4.0}
EASY, HARD = 0, 1
"""Rows of the records: inputs that leave after block 1, and inputs that stay to the end."""


def records() -> ExitRecords:
    """Returns records of two inputs: ramps 1 and 2 are sure of the first, no ramp of the second."""
    return exit_records([[0, 1, 1], [0, 0, 0]], answers_NE=np.array([[0, 1, 1, 1], [0, 0, 0, 1]]))


def problem(easy_share: float, *, count: int = 4) -> PlanProblem:
    """Returns a problem in which a block takes 10 ms for one to four inputs, and a ramp no time."""
    left = 1 - easy_share
    return control_fakes.problem(count=count, survival=(1.0, 1.0, left, left))


def whole(replicas: int) -> Plan:
    """Returns the model in one split without ramps: 4 inputs in 40 ms, so 100/s per replica."""
    predicted = {"rate_per_s": 100.0 * replicas, "latency_s": 0.08}
    return Plan(stages=control_fakes.whole(replicas), policy=POLICY, predicted=predicted)


def halves(first: int, second: int) -> Plan:
    """Returns a cut after ramp 1. Replicas of both halves run 200/s each; only some inputs reach the second."""
    return Plan(stages=control_fakes.halves(first, second), policy=POLICY)


def evenly(rate_per_s: float, duration_s: float) -> FloatArray:
    """Returns arrivals at equal intervals."""
    return np.arange(0.0, duration_s, 1 / rate_per_s)


def rows(easy_share: float, number: int = 10) -> IntArray:
    """Returns rows with the same share in every ten inputs."""
    return np.array([EASY if place % 10 < 10 * easy_share else HARD for place in range(number)])


def scenario(plan: Plan, arrivals_s: FloatArray, rows_N: IntArray, *, duration_s: float, **options: Any) -> Scenario:
    """Returns the service of that plan on as many accelerators as `problem` has."""
    return Scenario(
        **{
            "problem": problem(0.0),
            "plan": plan,
            "decisions": recorded(records(), dict.fromkeys(RAMPS, 0.5)),
            "rows_N": rows_N,
            "arrivals_s": arrivals_s,
            "duration_s": duration_s,
            "slo_s": 1.0,
            **options,
        }
    )


def control(expected: PlanProblem, **options: Any) -> Control:
    """Returns a controller with periods of 60 s and a tick every 2.5 s; a tenth of the inputs are probes."""
    made = Control(
        problem=expected,
        settings=SETTINGS,
        records=records(),
        probe_share=0.1,
        make_fleet=TroubledFleet,
        plan_s=0.0,
    )
    return replace(made, **options)


def simulated(
    expected: PlanProblem,
    plan: Plan,
    of: ExitRecords,
    mixes: Sequence[Mix],
    *,
    rate_per_s: float,
    duration_s: float,
    tuning: Tuning,
    budget: float = 0.02,
    **options: Any,
) -> Controlled:
    """Simulates one mix of rows after the other, under a controller with periods of 60 s and a tick every 2.5 s."""
    arrivals_s = evenly(rate_per_s, duration_s)
    made = Scenario(
        problem=expected,
        plan=plan,
        decisions=recorded(of, dict.fromkeys(RAMPS, 0.5)),
        rows_N=rows_in_turn(mixes, arrivals_s),
        arrivals_s=arrivals_s,
        duration_s=duration_s,
        slo_s=1.0,
    )
    settings = {**SETTINGS, "tuning": tuning, "accuracy_budget": budget}
    fields: dict[str, Any] = {"probe_share": 0.1, "make_fleet": TroubledFleet} | options
    return simulate_controlled(made, Control(problem=expected, settings=settings, records=of, **fields))


def seconds(log: Sequence[tuple[float, str]]) -> list[str]:
    """Returns a log with its times as text."""
    return [f"{at_s:.2f} {words}" for at_s, words in log]
