"""Early answers as what is sought: in problem files, in words, in what-ifs, and where a new plan is weighed."""

from __future__ import annotations

from typing import Any

import pytest

from offramp.commands.plan import NoPlanAnswer, answer
from optimizer.live.hysteresis import weigh
from optimizer.planner import solve
from optimizer.problem import MinimizeLatency
from optimizer.problem_file import ProblemFile, parse_problem, problem_document
from optimizer.what_if import Axis, variants
from tests.optimizer.answers import planned, told
from tests.optimizer.two_blocks import DOCUMENT


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
