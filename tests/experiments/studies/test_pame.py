"""PAME's studies on made-up records: what they say of exits that are known."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.pame_cases import KINDS, Case, in_orders, in_steps, judged, promised
from experiments.studies import exit_search
from optimizer.risk import Guarantee
from profiles.records import ExitRecords
from profiles.table import LatencyTable

TABLE = LatencyTable(batches=(1, 64), block_s_NB=np.array([[1.0, 64.0]] * 4), ramp_s_EB=np.array([[0.1, 6.4]] * 2))


def case(*, wrong_when_unsure: bool = True) -> Case:
    """Half of the inputs are sure at ramp 0, all at ramp 2; who is not sure at ramp 0 would be answered wrong."""
    easy_N = np.arange(64) % 2 == 0
    scores_NR = np.column_stack([np.where(easy_N, 0.92, 0.52), np.full(64, 0.92)]).astype(np.float32)
    losses_NR = np.column_stack([~easy_N & wrong_when_unsure, np.zeros(64)]).astype(np.float64)
    records = ExitRecords(
        score="confidence",
        num_blocks=4,
        ramps=(0, 2),
        sample_ids=tuple(map(str, range(64))),
        scores_NR=scores_NR,
        losses_NR=losses_NR,
        true_losses_NE=np.column_stack([losses_NR, np.zeros(64)]),
    )
    return Case(name="sst2", kind=KINDS["sst2"], search=records, known=records, test=records, table=TABLE)


def test_exits_are_judged_by_what_batches_take() -> None:
    found = judged(case(), 64)
    # Half leave after 1.1 of 4 parts; the other 32 take half of what is left up to ramp 2, where all are sure.
    assert found.found.ramps == (0, 2)
    assert found.moving == (0.5, 0.0)
    assert found.mean_saved == pytest.approx(1 - (0.5 * 1.1 + 0.5 * (1.1 + 0.5 * 2.1)) / 4)
    assert (found.precision, found.times.slower) == (1.0, 0.0)


def test_thresholds_with_a_guarantee_take_the_place_of_searched_ones_where_there_are_inputs_enough() -> None:
    found = promised(case(), 64, Guarantee(budget=0.1, confidence=0.9))
    assert found is not None
    assert (found.precision, found.times.slower) == (1.0, 0.0)
    assert found.mean_saved > 0
    assert promised(case(), 64, Guarantee(budget=0.01, confidence=0.9)) is None  # 64 inputs show no such agreement


def test_the_studies_tell_what_is_saved() -> None:
    latency = exit_search.fig09_compare([[case()], [case()]])
    told = {each.name: each.ours for each in latency.comparisons}
    assert told["precision kept (%), over all"] == 100
    assert told["GLUE (sst2): mean saved (%)"] == pytest.approx(100 * judged(case(), 64).mean_saved)
    places = exit_search.places(case())
    assert [(each.ramp, each.is_chosen) for each in places] == [(0, True), (2, False)]
    assert all(each.error == pytest.approx(0) for each in places)
    assert exit_search.fig12_compare({"sst2": places}, {"sst2": 4}).comparisons[1].ours == 25
    moving = exit_search.fig14_compare([[case()]])
    assert [each.ours for each in moving.comparisons] == [50, 50, 50]
    number = exit_search.fig15_compare([[case()]])
    assert number.comparisons[0].ours is not None
    assert number.comparisons[0].ours > 0


def test_padded_batches_take_what_the_next_size_takes() -> None:
    table = in_steps(TABLE, (16, 64), 20)
    assert table.batches == tuple(range(1, 21))
    assert table.block_s_NB[0, [0, 15, 16, 19]].tolist() == [16, 16, 64, 64]


def test_orders_hold_every_input_as_often() -> None:
    records = case().search
    many = in_orders(records, orders=3)
    assert sorted(many.sample_ids) == sorted(records.sample_ids * 3)
    assert records.of_ramps((2,)).scores_NR.tolist() == records.scores_NR[:, [1]].tolist()
