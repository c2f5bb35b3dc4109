from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optimizer.problems.problem import MaximizeRate, PlanProblem
from optimizer.problems.problem_file import ProblemFile, parse_problem
from optimizer.search.decision import strategies_for
from tests.optimizer.answers import plan_json, planned, refused

DOCUMENT: dict[str, Any] = {
    "blocks": 3,
    "ramps": [0, 1],
    "survival": [1.0, 0.25, 0.25],
    "latency": {
        "V100": {
            "batch": [1, 2, 4],
            "block_s": [[0.010, 0.011, 0.012]] * 3,
            "ramp_s": [[0.0001, 0.0001, 0.0001]] * 2,
        }
    },
    "devices": {"V100": {"count": 2, "usd_per_hour": 3}},
    "link": {"bandwidth_bytes_per_s": 1e9},
    "bytes_per_sample": 0,
    "slo": {"latency_s": 1, "slack": 0},
    "objective": {"minimize": "latency", "rate_per_s": 100, "queues": False},
    "batches": {"size": 4, "losses": [[0, 0], [0, 0], [0, 0], [None, None]] * 3},
}
"""Stock: 4 inputs in 36 ms on one V100, 111/s. Three of four leave after block 0, the fourth never: 32.1 ms, 125/s."""


def problem(**changed: Any) -> PlanProblem:
    return parse_problem({**DOCUMENT, **changed}).problem


def test_the_stock_plans_batch_gets_the_exits_that_are_found() -> None:
    [stage] = planned(problem(), "pame").stages
    [split] = stage.splits
    stock = planned(problem(), "stock")
    assert (split.first, split.end, split.batch, split.stays) == (0, 3, stock.stages[0].splits[0].batch, False)
    assert split.ramps == (0,)  # behind it no input leaves
    best = planned(problem())
    assert best.figures.mean_latency_s <= planned(problem(), "pame").figures.mean_latency_s * (1 + 1e-9)
    found = planned(problem(), "pame")
    assert found.bound <= found.figures.mean_latency_s
    assert found.gap == pytest.approx(found.figures.mean_latency_s / found.bound - 1)
    assert "note" not in plan_json(ProblemFile(problem=problem()), "pame")


def test_pame_uses_no_more_replicas_than_needed() -> None:
    asked = problem(objective={"minimize": "latency", "rate_per_s": 123})
    stock = planned(asked, "stock")
    assert (stock.stages[0].replicas, planned(asked, "pame").stages[0].replicas) == (2, 1)
    lossy = {"size": 4, "losses": [[1, 1], [0, 0], [0, 0], [None, None]] * 3}  # a quarter of the answers
    assert planned(problem(batches=lossy), "pame").stages[0].splits[0].ramps == (0,)


def test_pame_needs_an_answer_time_objective_and_a_stock_plan() -> None:
    assert strategies_for(problem())[-1] == "pame"
    assert "pame" not in strategies_for(replace(problem(), batches=None))
    assert "pame" not in strategies_for(replace(problem(), objective=MaximizeRate()))
    assert plan_json(ProblemFile(problem=problem()))["baselines"]["pame"]["times_better"] >= 1
    decision = refused(problem(objective={"minimize": "latency", "rate_per_s": 1000}), "pame")
    assert (decision.strategy, decision.binding) == ("pame", "devices")


ONE_IN_TWO = {"size": 4, "losses": [[0, 0]] * 4 + [[None, None]] * 4}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"batches": {"size": 1, "losses": [[0, 0]]}, "survival": [1, 0, 0]}, "fewer inputs are recorded than"),
        ({"batches": {"size": 4, "losses": [[None, None]] * 8}, "survival": [1, 1, 1]}, "no input leaves"),
        ({"batches": ONE_IN_TWO, "survival": [1, 0.5, 0.5]}, "at least 50.0% of the batches of "),
        ({"objective": {**DOCUMENT["objective"], "ramp_budget": 0.001}}, "would break a promise"),
    ],
)
def test_a_plan_without_exits_says_why(changed: dict[str, Any], why: str) -> None:
    assert planned(problem(**changed), "pame").stages[0].splits[0].ramps == ()
    note = plan_json(ProblemFile(problem=problem(**changed)), "pame")["note"]
    assert note.startswith("no exit: ")
    assert why in note
