"""Early answers as what is sought: in problem files, in words, in what-ifs, and where a new plan is weighed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from earlyexit.errors import PlanError
from offramp.commands.plan import NoPlanAnswer, PlanAnswer, answer, answer_document
from optimizer.decision import Planned, strategies_for
from optimizer.live.hysteresis import weigh
from optimizer.planner import solve
from optimizer.problem import MaximizeRate, MinimizeLatency
from optimizer.problem_file import ProblemFile, parse_problem, problem_document
from optimizer.what_if import Axis, variants
from tests.optimizer.two_blocks import DOCUMENT


def document(**objective: Any) -> dict[str, Any]:
    return {**DOCUMENT, "objective": objective}


def asked(**objective: Any) -> ProblemFile:
    return parse_problem(document(minimize="latency", **objective))


def test_a_latency_objective_is_read_with_its_ramp_budget() -> None:
    problem = asked(rate_per_s=60, ramp_budget=0.02).problem
    assert problem.objective == MinimizeLatency(rate_per_s=60, ramp_budget=0.02)
    assert (problem.asked_per_s, problem.ramp_budget) == (60, 0.02)
    assert (replace(problem, objective=MaximizeRate()).asked_per_s, asked(rate_per_s=60).problem.ramp_budget) == (
        None,
        None,
    )


@pytest.mark.parametrize("budget", [{}, {"ramp_budget": 0.02}], ids=["any ramps", "ramp budget"])
def test_what_is_written_is_read_back(budget: dict[str, float]) -> None:
    objective = {"minimize": "latency", "rate_per_s": 60, **budget}
    assert problem_document(parse_problem(document(**objective)).problem)["objective"] == objective


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"minimize": "latency"}, "objective minimizes the latency of no rate_per_s; allowed are"),
        (
            {"minimize": "cost", "rate_per_s": 5, "ramp_budget": 0.1},
            "objective has a ramp_budget, and does not minimize latency; allowed are",
        ),
        (
            {"minimize": "latency", "rate_per_s": 5, "ramp_budget": 0},
            "a ramp_budget of 0 lets no ramp be active; allowed is a share above 0, such as 0.02 for 2 %",
        ),
        (
            {"minimize": "latency", "rate_per_s": 5, "ramp_budget": -1},
            "ramp_budget must be a finite number above 0, not -1",
        ),
        ({"minimize": "latency", "rate_per_s": 5, "ramp_budget": float("nan")}, "ramp_budget"),
        ({"minimize": "joy", "rate_per_s": 5}, "objective.minimize"),
    ],
)
def test_an_objective_that_contradicts_itself_is_refused(objective: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_problem(document(**objective))


def test_apparate_is_compared_only_where_early_answers_are_sought() -> None:
    problem = asked(rate_per_s=60).problem
    assert strategies_for(problem)[-1] == "apparate"
    assert "apparate" not in strategies_for(replace(problem, objective=MaximizeRate()))


def test_the_answer_tells_mean_overhead_and_what_answered_inputs_do() -> None:
    found = answer(asked(rate_per_s=500), "apparate", solve)
    assert isinstance(found, PlanAnswer)
    told = answer_document(found)
    # A batch of 1: half of 2 ms until it is there; block 0; block 1 for the half that has no answer yet.
    assert told["mean_latency_s"] == pytest.approx(0.001 + 0.001 + 0.5 * 0.001)
    assert (told["ramp_overhead"], told["after_answer"]) == (0, "stay")
    assert told["baselines"]["stock"]["mean_latency_s"] == pytest.approx(0.003)
    assert told["baselines"]["stock"]["times_better"] == pytest.approx(0.003 / 0.0025)
    assert "after_answer" not in told["baselines"]["stock"]


def test_other_objectives_tell_nothing_of_it() -> None:
    told = answer_document(answer(parse_problem(DOCUMENT), "best", solve))
    assert not {"mean_latency_s", "ramp_overhead", "after_answer"} & told.keys()
    assert told["baselines"].keys() == {"stock", "early-exit", "e3", "serial"}


def test_what_binds_where_there_is_none() -> None:
    found = answer(asked(rate_per_s=100_000), "apparate", solve)
    assert isinstance(found, NoPlanAnswer)
    assert found.message == (
        "no plan: the devices (4 V100) are too few for 100000/s; the highest rate that would do is 8000/s"
    )


def test_ramps_that_must_all_be_on_are_said_to_take_too_long() -> None:
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
    new, old = solve(problem, "best"), solve(problem, "stock")
    assert isinstance(new, Planned)
    assert isinstance(old, Planned)
    verdict = weigh(problem, old.stages, new, moved=0, start_s=1, period_s=120, least_gain=0.05)
    assert verdict.change
    assert verdict.gain == pytest.approx(1 - 2.5 / 3)
    assert "answer 16.7% sooner" in verdict.words
    assert (
        "answer 20.0% later" in weigh(problem, new.stages, old, moved=0, start_s=1, period_s=120, least_gain=0.05).words
    )
