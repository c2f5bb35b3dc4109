"""Studies of Apparate's evaluation, on made-up streams."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from experiments import served_streams, studies
from experiments.served_streams import (
    Answered,
    Budgets,
    Case,
    Fixed,
    replay_replay,
    table_of,
    with_moved_ramps,
    with_planned_ramps,
)
from experiments.studies import apparate_fig17_slo as fig17
from experiments.studies import served
from experiments.studies.record import perform
from tests.experiments.studies.cases import ours

CASE = Case(stream=served_streams.stream("weather", num_inputs=900), table=served_streams.table())


@cache
def figures(name: str) -> dict[str, float | None]:
    outcome = perform(studies.load(name), "quick").outcome
    assert outcome.result is not None
    return ours(outcome.result)


def test_tuned_once_a_drifting_stream_loses_more_than_allowed_and_tuned_on_it_does_not() -> None:
    found = figures("apparate_table1_tuning")
    initial, tuned, guarantee = (
        found[f"vision, {side}: agreement (%)"] for side in ("initial only", "continual", "continual, guarantee")
    )
    assert initial is not None
    assert tuned is not None
    assert guarantee is not None
    assert initial < 98
    assert guarantee > 99
    assert guarantee > tuned > initial


def test_planned_ramps_are_those_that_save_most_within_the_budget() -> None:
    narrow, wide = (with_planned_ramps(CASE, "apparate", Budgets(ramps=budget)) for budget in (0.011, 0.05))
    assert all(len(setting) <= 1 for setting in narrow.settings)
    assert narrow.mean_ramps < wide.mean_ramps


def test_moved_ramps_begin_evenly_spaced_and_stay_within_the_budget() -> None:
    moved = with_moved_ramps(CASE, "apparate")
    assert sorted(moved.settings[0]) == [1, 3]
    assert moved.answered.losses_N[:16].sum() == 0, "nobody leaves at first"
    assert all(len(setting) <= 2 for setting in moved.settings)
    assert len({tuple(sorted(setting)) for setting in moved.settings}) > 1


def test_figures_are_shares_of_the_model_without_ramps() -> None:
    half = Answered(answer_s_N=np.repeat([1.0, 5.0], 50), losses_N=np.zeros(100), whole_s=4.0)
    found = {"weather": {"a": half}, "imdb": {"a": half}}
    assert served.of_kind(found, "text", "a", "p25 saved (%)") == [75.0]
    assert served.mean(found, "vision", "a", "p95 saved (%)").ours == -25.0
    assert served.table(found).rows[0][:3] == ("weather", "a", 100.0)


@pytest.mark.parametrize(("kind", "blocks"), [("vision", 15), ("text", 6)])
def test_published_times_are_of_as_many_blocks_as_the_recorded_model_has(kind: str, blocks: int) -> None:
    table = table_of("vision" if kind == "vision" else "text")
    assert table.block_s_NB.shape[0] == blocks
    assert table.ramp_s_EB.shape[0] == blocks - 1
    assert 0.002 < table.ramp_s_EB[0, 0] / table.block_s_NB[:, 0].sum() < 0.01


@pytest.mark.parametrize("name", ["apparate_fig13_savings", "apparate_table2_strategies", "apparate_table3_budgets"])
def test_what_knows_the_future_saves_most_and_nothing_is_missing(name: str) -> None:
    found = figures(name)
    assert all(value is not None for value in found.values())
    best = {
        "apparate_fig13_savings": (
            "vision, optimal: lowest median saved (%)",
            "vision, Apparate: highest median saved (%)",
        ),
        "apparate_table2_strategies": (
            "vision, tuned on the stream: lowest agreement (%)",
            "vision, a threshold each: lowest agreement (%)",
        ),
        "apparate_table3_budgets": (
            "vision, Apparate, 2 % of ramps, 5 % lost: mean saved (%)",
            "vision, Apparate, 2 % of ramps, 1 % lost: mean saved (%)",
        ),
    }
    larger, smaller = (found[label] for label in best[name])
    assert larger is not None
    assert smaller is not None
    assert larger > smaller


def test_at_rest_no_ramps_that_the_mover_comes_to_save_more_than_those_planned() -> None:
    for seed in range(2):
        resting = served.at_rest(Case(stream=served_streams.stream("weather", seed, 900), table=served_streams.table()))
        assert resting.planned >= resting.moved > 0
        assert resting.planned >= resting.solved > 0
        assert len(resting.planned_ramps) <= 2


def test_without_adjustment_a_part_of_the_movers_savings_is_lost() -> None:
    def saving(seconds: float) -> Answered:
        return Answered(answer_s_N=np.full(10, seconds), losses_N=np.zeros(10), whole_s=4.0)

    found = {"weather": {served.EVEN: saving(3.0), served.MOVED: saving(2.0)}}
    assert served.lost_without(found) == {"vision": pytest.approx(50.0)}
    assert served.lost_without({"weather": {served.EVEN: saving(3.0), served.MOVED: saving(5.0)}}) == {"vision": None}


def test_a_batch_takes_half_of_the_slo_at_most() -> None:
    table = served_streams.table()  # 15, 18, 24 and 36 ms
    assert [fig17.largest_batch(table, slo_s) for slo_s in (0.031, 0.037, 0.049, 1.0)] == [1, 2, 4, 8]


def test_texts_take_longer_in_batches_as_berts_do() -> None:
    text = Case(stream=served_streams.stream("imdb", num_inputs=300), table=table_of("text"))
    table = fig17.with_batches(text)
    assert table.block_s_NB[:, 0].tolist() == pytest.approx(text.table.block_s_NB[:, 0].tolist())
    assert 1 < table.block_s_NB[0, 3] / table.block_s_NB[0, 0] < 8


def test_who_leaves_in_the_simulation_is_who_left_in_the_replay() -> None:
    served = replay_replay(CASE.stream.served, Fixed(thresholds={1: 0.9, 3: 0.8}), CASE.times)
    left_N = fig17.decisions_of(CASE, (1, 3), served).leaves_N((1, 3), (1, 3))
    expected_N = CASE.stream.served.outcome({1: 0.9, 3: 0.8}).exits_N
    assert left_N.tolist() == np.where(expected_N == 5, -1, expected_N).tolist()


def test_exits_save_of_the_latency_of_whoever_leaves() -> None:
    found = figures("apparate_fig17_slo")
    assert set(found) == {"weather, Poisson: median saved, shortest SLO (%)", "weather, Poisson: median saved, 4 x (%)"}
