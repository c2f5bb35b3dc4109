from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.planning.e3_plans import PAPER, figure_problems, print_figure, solved, stretched
from optimizer.decision import Planned


def test_every_figure_has_problems_and_the_papers_figure_beside_it() -> None:
    assert {figure for figure, _, _ in figure_problems(1.0)} == set(PAPER)


def test_stretching_makes_every_block_and_ramp_slower_by_as_much() -> None:
    _, _, problem = figure_problems(1.0)[0]
    slower = stretched(problem, 3.0).latency["V100"]
    assert slower.block_s_NB == pytest.approx(problem.latency["V100"].block_s_NB * 3)
    assert slower.ramp_s_EB == pytest.approx(problem.latency["V100"].ramp_s_EB * 3)


def test_best_is_never_below_a_baseline() -> None:
    for problem in figure_problems(1.0)[:4]:
        row = solved(*problem, records_file=False)
        best = row.value("best")
        assert best is not None
        assert all(value is None or value <= best * (1 + 1e-9) for value in map(row.value, row.decisions))


def test_a_fixed_rate_is_told_in_dollars_where_less_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    row = solved(*next(each for each in figure_problems(1.0) if each[0] == "14"), records_file=False)
    best, stock = row.decisions["best"], row.decisions["stock"]
    assert isinstance(best, Planned)
    assert isinstance(stock, Planned)
    assert row.value("best") == best.figures.usd_per_hour
    assert row.times_better("best", "stock") == stock.figures.usd_per_hour / best.figures.usd_per_hour
    print_figure([row])
    assert "figure 14: USD/h for 6000/s" in capsys.readouterr().out


def test_a_strategy_without_a_plan_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    figure, label, problem = figure_problems(1.0)[0]
    hasty = replace(problem, slo=replace(problem.slo, latency_s=1e-4))
    row = solved(figure, label, hasty, records_file=False)
    assert (row.value("best"), row.times_better("best", "e3")) == (None, None)
    print_figure([row])
    assert "no plan" in capsys.readouterr().out
