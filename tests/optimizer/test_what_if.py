from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offramp.commands.plan import NoPlanAnswer, answer
from optimizer.live.hysteresis import weigh
from optimizer.planner import solve
from optimizer.problem import MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.problem_file import ProblemFile, parse_problem, problem_document
from optimizer.what_if import Axis, variants, with_batch_limit
from profiles.table import LatencyTable
from tests.optimizer.answers import planned, told
from tests.optimizer.plain_problem import DOCUMENT, plain_problem

TABLE = LatencyTable(batches=(1, 2, 4), block_s_NB=np.array([[0.001, 0.002, 0.003]]), ramp_s_EB=np.ones((0, 3)))
PROBLEM = plain_problem(survival_N=(1.0,), latency={"V100": TABLE}, slo=Slo(latency_s=1.0, slack=0.2))


def test_an_slo_keeps_its_slack_and_a_batch_limit_devices_that_are_not_there() -> None:
    found = variants(PROBLEM, Axis(name="slo_s", values=(0.025, 0.05)))
    assert [each.value for each in found] == [0.025, 0.05]
    assert [each.problem.slo for each in found] == [Slo(latency_s=0.025, slack=0.2), Slo(latency_s=0.05, slack=0.2)]
    nothing = with_t4(("V100", 0))
    assert dict(with_batch_limit(nothing, 4).devices) == dict(nothing.devices)


COARSE = LatencyTable(batches=(8, 16), block_s_NB=np.array([[0.004, 0.006]]), ramp_s_EB=np.ones((0, 2)))


def with_t4(*devices: tuple[str, int]) -> PlanProblem:
    """The problem with a T4 measured from a batch of 8 on, and these counts."""
    counts = {device: Supply(count=count) for device, count in devices}
    return replace(PROBLEM, latency={**PROBLEM.latency, "T4": COARSE}, devices=counts)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(with_t4(("V100", 4)), id="no device of the problem"),
        pytest.param(with_t4(("V100", 4), ("T4", 0)), id="none of it there"),
        pytest.param(with_t4(("V100", 4), ("T4", 9)), id="another device does it"),
    ],
)
def test_a_batch_limit_drops_the_devices_that_were_not_measured_up_to_it(problem: PlanProblem) -> None:
    limited = with_batch_limit(problem, 4)
    assert (set(limited.latency), set(limited.devices)) == ({"V100"}, {"V100"})
    assert set(with_batch_limit(problem, 8).latency) == {"V100", "T4"}


def document(**objective: Any) -> dict[str, Any]:
    return {**DOCUMENT, "objective": objective}


def asked(**objective: Any) -> ProblemFile:
    return parse_problem(document(minimize="latency", **objective))


@pytest.mark.parametrize("budget", [{}, {"ramp_budget": 0.02}], ids=["any ramps", "ramp budget"])
def test_what_is_written_is_read_back(budget: dict[str, float]) -> None:
    objective = {"minimize": "latency", "rate_per_s": 60, **budget}
    assert problem_document(parse_problem(document(**objective)).problem)["objective"] == objective


def test_the_answer_tells_mean_overhead_and_what_answered_inputs_do() -> None:
    found = told(asked(rate_per_s=500), "apparate")
    # A batch of 1: half of 2 ms until it is there; block 0; block 1 for the half that has no answer yet.
    assert found["mean_latency_s"] == pytest.approx(0.001 + 0.001 + 0.5 * 0.001)
    assert (found["ramp_overhead"], found["after_answer"]) == (0, "stay")
    assert found["baselines"]["stock"]["mean_latency_s"] == pytest.approx(0.003)
    assert found["baselines"]["stock"]["times_better"] == pytest.approx(0.003 / 0.0025)
    assert "after_answer" not in found["baselines"]["stock"]
    found = told(parse_problem(DOCUMENT))
    assert not {"mean_latency_s", "ramp_overhead", "after_answer"} & found.keys()
    assert found["baselines"].keys() == {"stock", "early-exit", "e3", "serial"}
    assert list(told(asked(rate_per_s=60))["baselines"])[-1] == "apparate"


def test_what_binds_where_there_is_none() -> None:
    found = answer(asked(rate_per_s=100_000), "apparate", solve)
    assert isinstance(found, NoPlanAnswer)
    assert found.message == (
        "no plan: the devices (4 V100) are too few for 100000/s; the highest rate that would do is 8000/s"
    )
    dear = {"V100": {"batch": [1], "block_s": [[0.001]] * 2, "ramp_s": [[0.001]]}}
    sought = document(minimize="latency", rate_per_s=100, ramp_budget=0.02)
    found = answer(parse_problem({**sought, "latency": dear}), "early-exit", solve, compared=())
    assert isinstance(found, NoPlanAnswer)
    assert found.message == (
        "no plan: the ramp budget of 2.000% of the blocks' time is too small; no other SLO or rate would do"
    )


def test_rates_and_slos_of_a_latency_problem_are_varied() -> None:
    problem = asked(rate_per_s=60, ramp_budget=0.02).problem
    faster, _ = variants(problem, Axis(name="rate_per_s", values=(500, 600)))
    assert faster.problem.objective == MinimizeLatency(rate_per_s=500, ramp_budget=0.02)


def test_a_plan_that_answers_sooner_is_worth_its_change() -> None:
    problem = asked(rate_per_s=500).problem
    new, old = planned(problem), planned(problem, "stock")
    verdict = weigh(problem, old.stages, new, moved=0, start_s=1, period_s=120, least_gain=0.05)
    assert verdict.change
    assert verdict.gain == pytest.approx(1 - 2.5 / 3)
    assert "answer 16.7% sooner" in verdict.words
    assert (
        "answer 20.0% later" in weigh(problem, new.stages, old, moved=0, start_s=1, period_s=120, least_gain=0.05).words
    )
