from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from experiments.e3_plans import PAPER, Row, figure_problems, solved, stretched, table
from optimizer.decision import NoPlan, Planned
from optimizer.problem import MinimizeCost


def printed(row: Row) -> str:
    console = Console(width=200, file=StringIO())
    console.print(table([row]))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_every_figure_has_problems_and_the_papers_figure_beside_it() -> None:
    assert {figure for figure, _, _ in figure_problems(1.0)} == set(PAPER)


def test_stretching_makes_every_block_and_ramp_slower_by_as_much() -> None:
    _, _, problem = figure_problems(1.0)[0]
    slower = stretched(problem, 3.0).latency["V100"]
    assert slower.block_s_NB == pytest.approx(problem.latency["V100"].block_s_NB * 3)
    assert slower.ramp_s_EB == pytest.approx(problem.latency["V100"].ramp_s_EB * 3)


@pytest.mark.parametrize("position", range(4), ids=["batch 1", "batch 2", "batch 4", "batch 8"])
def test_best_is_never_below_a_baseline(position: int) -> None:
    figure, label, problem = figure_problems(1.0)[position]
    row = solved(figure, label, problem, records_file=False)
    best = row.value("best")
    assert best is not None
    assert all(value is None or value <= best * (1 + 1e-9) for value in map(row.value, row.decisions))


def test_a_fixed_rate_is_told_in_dollars() -> None:
    figure, label, problem = next(each for each in figure_problems(1.0) if each[0] == "14")
    assert isinstance(problem.objective, MinimizeCost)
    row = solved(figure, label, problem, records_file=False)
    decision = row.decisions["best"]
    assert isinstance(decision, Planned)
    assert row.value("best") == decision.figures.usd_per_hour
    assert "USD/h for 6000/s" in printed(row)


def test_a_strategy_without_a_plan_is_told_as_such() -> None:
    figure, label, problem = figure_problems(200.0)[0]
    row = solved(figure, label, problem, records_file=False)
    assert isinstance(row.decisions["best"], NoPlan)
    assert row.value("best") is None
    assert "no plan" in printed(row)
