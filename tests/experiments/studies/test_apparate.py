"""Studies of Apparate's evaluation, on made-up streams."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from experiments import studies
from experiments.apparate import made_up
from experiments.apparate.cases import Case, table_of
from experiments.apparate.strategies import Budgets, with_moved_ramps, with_planned_ramps
from experiments.apparate.times import Answered
from experiments.studies import served_streams
from experiments.studies.record import perform
from tests.experiments.studies.cases import ours

CASE = Case(stream=made_up.stream("weather", num_inputs=900), table=made_up.table())


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
    assert served_streams.of_kind(found, "text", "a", "p25 saved (%)") == [75.0]
    assert served_streams.mean(found, "vision", "a", "p95 saved (%)").ours == -25.0
    assert served_streams.table(found).rows[0][:3] == ("weather", "a", 100.0)


@pytest.mark.parametrize(("kind", "blocks"), [("vision", 15), ("text", 6)])
def test_published_times_are_of_as_many_blocks_as_the_recorded_model_has(kind: str, blocks: int) -> None:
    table = table_of("vision" if kind == "vision" else "text")
    assert table.block_s_NB.shape[0] == blocks
    assert table.ramp_s_EB.shape[0] == blocks - 1
    assert 0.002 < table.ramp_s_EB[0, 0] / table.block_s_NB[:, 0].sum() < 0.01
