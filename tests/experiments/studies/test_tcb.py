"""TCB's studies on short streams: what they compare, and which way it goes."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import studies, tcb_device
from experiments.kit import Spread
from experiments.studies import packing, scheduling
from experiments.studies.study import StudyResult
from experiments.tcb_device import Cost

NAMES = [name for name in studies.FIGURES if name.startswith("tcb_")]


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds of requests at the highest rate, so that what is too much has the time to show it."""
    monkeypatch.setitem(tcb_device.REQUESTS, "quick", 2400)
    monkeypatch.setitem(tcb_device.RATES, "quick", (250.0, 800.0))
    monkeypatch.setitem(scheduling.FIG15_REQUESTS, "quick", 300)
    monkeypatch.setitem(scheduling.FIG16_REQUESTS, "quick", 400)
    monkeypatch.setattr(tcb_device, "DRAWN", 640)


def told(result: StudyResult) -> dict[str, float | None]:
    return {each.name: each.ours for each in result.comparisons}


def test_every_figure_of_the_evaluation_is_there_and_named_so() -> None:
    about = [studies.load(name).about for name in NAMES]
    assert [each.figure for each in about] == ["9", "10", "11", "12", "13", "14", "15", "16"]
    assert {each.system for each in about} == {"TCB"}


def test_tcb_serves_more_than_rows_that_are_padded_and_packing_more_than_tcb() -> None:
    found = scheduling.simulated("quick")
    result = scheduling.fig10_compare(found)
    assert (told(result)["scheduled in time, TCB / TNB, where it is most"] or 0) > 1.3
    assert (found.over(tcb_device.SCHEDULED, "TCB", "packed, 6400 tokens") or 0) > 1
    assert found.holds_per_s("TNB") == 250.0


def test_utility_after_saturation_is_that_of_the_highest_rate() -> None:
    found = scheduling.simulated("quick")
    result = scheduling.fig09_compare(found, {"as taken": found})
    of = found.series[tcb_device.UTILITY]
    assert told(result)["utility after saturation, TCB / TTB"] == (of["TCB"][-1] or 0) / (of["TTB"][-1] or 1)
    assert [row[0] for row in result.tables[0].rows] == ["as taken"] * 3


def test_orders_are_compared_at_every_point_of_a_sweep() -> None:
    sides = [(scheduling.rows_of(batch), 20.0) for batch in (4, 8)]
    found = scheduling.swept("row length", (4, 8), sides, tcb_device.paper_device(640), "quick")
    result = scheduling.fig15_compare([found])
    assert result.comparisons[0].paper == scheduling.PAPER_SJF
    assert len(result.tables[0].rows) == 2 * len(scheduling.FIG15_ORDERS)


def test_choosing_takes_a_small_part_of_a_batch() -> None:
    result = scheduling.fig16_run("quick")
    assert 0 < (told(result)["DAS at 400 requests/s (% of a batch)"] or 0) < scheduling.FIG16_PAPER


def test_slots_save_attention_alone() -> None:
    assert packing.by_count(400, 1) == 1.0
    # Per token and width: 12 x 400 of linear layers, 2 x 400 of attention in one slot and 2 x 200 in two.
    assert packing.by_count(400, 2) == pytest.approx((4800 + 800) / (4800 + 400))
    result = packing.slots_compare(10, 1.18, {each: Spread(float(each), 1.0, 2.0) for each in packing.SLOTS_SLOTS})
    assert told(result)["fastest of all numbers of slots over one slot, this CPU"] == max(packing.SLOTS_SLOTS)


def test_tokens_bound_what_packing_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcb_device, "BATCH", 2)
    found = packing.bounds(np.array([1, 3, 2, 2]))
    assert found == {
        "tokens of padded rows over tokens": 10 / 8,
        "requests of TCB's batch over those of TNB's": tcb_device.ROW / 2,
    }


def test_a_long_fixed_part_gives_the_paper_s_ratio_and_less_over_groups() -> None:
    slow = packing.with_the_paper_s_ratio(tcb_device.paper_device(640))
    of = packing.capacities(tcb_device.lengths(640, 20.0), slow)
    assert of["TCB"] / of["TNB"] == pytest.approx(packing.PAPER_TNB, rel=0.25)
    assert of["TCB"] / of["TTB"] < 2
    computed = packing.Computed(
        cost=Cost(fixed_s=0, token_s=1, cell_s=0), over_packed={"padded": Spread(1.5, 1.4, 1.6)}
    )
    result = packing.fcfs_compare(
        20.0, scheduling.simulated("quick"), {"V100": of, "slow": of}, computed, {"tokens": 1.5}
    )
    assert told(result)["packed over padded, this CPU, 64 inputs"] == 1.5
