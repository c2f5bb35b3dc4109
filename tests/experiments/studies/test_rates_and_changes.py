"""E3's figures 14 to 16 and 19: a rate that is held, and loads that change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from earlyexit.network.split import Split
from experiments.data import data_folder
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies import fig19_bursts as fig19
from experiments.studies import following, least_cost
from experiments.studies.following import BIN_S, SIDES, bench, play, stretch
from experiments.studies.least_cost import PRECISION, FixedRate, accelerators, fixed_rate, least_that_holds, need
from experiments.studies.picture import Bars, Lines
from experiments.studies.sides import equal_cluster
from experiments.studies.study import Comparison, Ratios
from offramp.load.traces import CountTrace
from optimizer.plan import Stage
from tests.experiments.studies.cases import (
    half_leave,
    ours,
    two_blocks,
)

needs_records = pytest.mark.skipif(
    (folder := data_folder()) is None or not (folder / BERT12_SST2).is_file(), reason=f"{BERT12_SST2} is absent"
)
CHEAP = {"K80": (2.0, 0.5)}
"""Half as fast for a quarter of the price."""


def enough(replicas: int) -> Callable[[float], bool]:
    """An accelerator per 100 inputs/s; so many hold the rate."""
    return lambda asked_per_s: math.ceil(asked_per_s / 100) >= replicas


@pytest.mark.parametrize(("replicas", "asked_per_s"), [(10, 900.0), (6, 500.0), (13, 1200.0)])
def test_the_planner_is_asked_for_as_much_as_makes_its_plan_hold_the_rate(replicas: int, asked_per_s: float) -> None:
    asked = least_that_holds(1000.0, enough(replicas))
    assert asked is not None
    assert asked_per_s < asked <= asked_per_s * (1 + PRECISION)
    assert least_that_holds(1000.0, enough(1000)) is None


def test_early_exit_at_batch_1_needs_less_than_the_cost_model_says() -> None:
    # The model charges the second block to all: 2 ms an input, so 1,200/s take 3 accelerators. Half leave: 1.5 ms.
    found = need(two_blocks(batches=(1,)), "early-exit", half_leave(), "quick", rate_per_s=1200.0)
    assert found is not None
    assert accelerators(found.proposed.stages) == {"V100": 3}
    assert (found.number, found.usd_per_hour) == (2, 4.0)
    assert found.share >= 0.99
    assert found.document()["planner"]["usd_per_hour"] == 6.0
    assert need(two_blocks(batches=(1,)), "stock", half_leave(), "quick", rate_per_s=1e5) is None


def test_accelerators_are_counted_by_type() -> None:
    splits = (Split(first=0, end=1, batch=1, ramps=()),)
    counts = (("a", 2), ("b", 1), ("a", 3))
    stages = tuple(Stage(device=device, replicas=count, splits=splits) for device, count in counts)
    assert accelerators(stages) == {"a": 5, "b": 1}


@pytest.fixture(scope="module")
def held() -> FixedRate:
    """1,200/s, one input at a time: 2 ms an input for stock, 1.5 ms for the others, as half leave after the first."""
    return fixed_rate(two_blocks(batches=(1,)), half_leave(), {}, "quick", rate_per_s=1200.0)


def test_14_sides_are_told_by_the_accelerators_that_hold_the_rate(held: FixedRate) -> None:
    result = least_cost.fig14_compare(held)
    (picture,) = result.pictures
    assert isinstance(picture, Bars)
    assert picture.series == {"stock": (3,), "early-exit": (2,), "e3": (2,), "best": (2,)}
    assert result.e3 == Ratios(over_stock=1.5, over_early_exit=1.0)
    early_exit = next(row for row in result.tables[0].rows if row[1] == "early-exit")
    assert (early_exit[2], early_exit[5]) == ("2 V100", "3 V100"), "the cost model asks for more than it takes"


def test_14_other_cases_stand_after_the_largest_batch(held: FixedRate) -> None:
    needs = {**held.needs, "stock": held.needs["e3"], "early-exit": (None,)}
    result = least_cost.fig14_compare(replace(held, cases={"made up": needs}))
    assert ours(result) == {
        "stock / e3, batch 8": 1.5,
        "early-exit / e3, batch 8": 1.0,
        "stock / e3, batch 8, made up": 1.0,
        "early-exit / e3, batch 8, made up": None,
    }
    assert ("batch 8, made up", "early-exit", "no plan") in result.tables[0].rows


def test_15_the_cheaper_type_is_bought_where_it_suffices() -> None:
    # A K80 takes 4 ms an input for 0.5 USD/h: 600/s take 2.4 of them, so 3 of 1.5 USD/h; or 2 V100 of 4 USD/h.
    cluster = two_blocks(batches=(1,), slower=CHEAP)
    result = least_cost.fig15_compare(
        fixed_rate(cluster, half_leave(), {}, "quick", rate_per_s=600.0), cluster, half_leave()
    )
    (picture,) = result.pictures
    assert isinstance(picture, Bars)
    assert (picture.series["stock"], picture.series["e3"]) == ((1.5,), (1.0,))
    assert [row[2] for row in result.tables[0].rows[:3]] == ["3 K80", "2 K80", "2 K80"]
    most, least = result.comparisons[:2]
    assert ((most.ours, most.paper), (least.ours, least.paper)) == ((1.5, 1.78), (1.0, 1.35))
    device, usd_per_hour = least_cost.least_in_fractions(cluster, 600.0)
    assert device == "K80"
    assert usd_per_hour == pytest.approx(600 * 0.004 * 0.5)


PLAYED: dict[str, Any] = {
    "mixes": ("80:20", "50:50", "20:80"),
    "predicted_per_s": (200.0, 160.0, 100.0),
    "goodput_per_s": dict.fromkeys(SIDES, (100.0, 80.0, 50.0)) | {"best": (150.0, 120.0, 60.0)},
    "bins_per_s": dict.fromkeys(SIDES, (1.0, 2.0)),
    "settled_s": dict.fromkeys(SIDES, (30.0, None)),
    "plans": {side: ({"at_s": 0.0, "reason": "start", "plan": []},) for side in SIDES},
}


def test_16_the_paper_is_compared_where_inputs_are_hardest_in_a_closed_loop() -> None:
    slower = PLAYED | {"goodput_per_s": dict.fromkeys(SIDES, (1.0, 1.0, 1.0))}
    result = following.result_of({"homogeneous, closed loop": PLAYED, "homogeneous, open loop": slower})
    first, second, *_ = result.comparisons
    assert first == Comparison("homogeneous, closed loop: e3 / stock, 20:80", 1.0, 0.77)
    assert second == Comparison("homogeneous, closed loop: best / stock, 20:80", 1.2)
    assert [each.paper for each in result.comparisons if "open" in each.name] == [None] * 8
    assert result.best.over_stock == 1.5, "of the first run"
    bars, lines, *_ = result.pictures
    assert isinstance(bars, Bars)
    assert isinstance(lines, Lines)
    assert (bars.labels, lines.x) == (PLAYED["mixes"], (0.0625, 0.1875))
    assert ("omniscient, 80:20: goodput over what is predicted", 0.5) in result.tables[0].rows


def test_16_a_side_without_a_plan_is_a_gap() -> None:
    without = PLAYED | {"goodput_per_s": PLAYED["goodput_per_s"] | {"stock": (None, None, None)}}
    result = following.result_of({"homogeneous, closed loop": without})
    assert (result.comparisons[0].ours, result.best.over_stock) == (None, None)


@needs_records
def test_16_only_a_plan_that_follows_keeps_up_with_harder_inputs() -> None:
    on = bench(equal_cluster(stretch(1000.0)), bert12_sst2("entropy"), time_scale=1000.0, probe_share=0.0)
    kept, follows = (play(on, side, "closed", seed=0) for side in ("first plan", "omniscient"))
    assert kept is not None
    assert follows is not None
    assert kept.words("plan") == []
    assert [words.split()[1] for words in follows.words("plan")] == ["1", "2"]
    last_s = on.phases[-1].scored_s
    slower, faster = (each.outcome.figures_between(*last_s).goodput_per_s for each in (kept, follows))
    assert faster > 1.2 * slower


@needs_records
def test_16_rates_are_those_at_the_speed_of_the_paper() -> None:
    # A phase is many batches long: its ends fall into batches, which answer 128 inputs at once. With phases a tenth as
    # long that alone is worth 7 %.
    on = bench(equal_cluster(stretch(100.0)), bert12_sst2("entropy"), time_scale=100.0, probe_share=0.0)
    played = following.play_all(on, "open", sides=("stock",))
    assert len(played["bins_per_s"]["stock"]) == on.duration_s / BIN_S
    for rate in played["goodput_per_s"]["stock"]:
        assert rate == pytest.approx(5931, rel=0.02)  # 16 V100, batches of 8 in 21.58 ms


def bursty(rates_per_s: list[float]) -> fig19.Traffic:
    """Seconds of equal gaps."""
    arrivals_s = np.concatenate([second + np.arange(0, 1, 1 / rate) for second, rate in enumerate(rates_per_s)])
    return fig19.Traffic(words="made up", arrivals_s=arrivals_s, duration_s=float(len(rates_per_s)))


def test_19_an_hour_of_either_trace_is_shortened_to_a_mean_of_1000() -> None:
    counts_B = np.full(7200, 7.0)
    counts_B[3600:7200:12] = np.where(np.arange(300) < 150, 1.0, 3.0)
    seconds = fig19.twitter(CountTrace(counts_B=counts_B, bin_s=1.0), 12, first_s=3600)
    minutes = fig19.azure(CountTrace(counts_B=np.array([1.0, 3.0] * 60), bin_s=60.0), 12)
    assert (seconds.duration_s, minutes.duration_s) == (300, 300)
    first, second = np.histogram(seconds.arrivals_s, bins=[0, 150, 300])[0]
    assert first + second == pytest.approx(300_000, rel=0.01)
    assert second / first == pytest.approx(3, rel=0.02)
    first, second = np.histogram(minutes.arrivals_s, bins=[0, 5, 10])[0]
    assert second / first == pytest.approx(3, rel=0.1)


def test_19_stock_needs_less_than_half_of_the_accelerators_on_average() -> None:
    # One does 1000/s in twos: 2 ms for 2 inputs.
    assert [fig19.devices_for(two_blocks(count=8), mean_per_s) for mean_per_s in (900.0, 1000.0)] == [2, 3]


def test_19_what_a_burst_brings_beyond_the_rate_is_refused() -> None:
    traffic = bursty([400.0, 3000.0, 400.0, 400.0])
    assert traffic.peak_per_s == 3000
    found = fig19.case("made up", fig19.with_count(two_blocks(), 1), half_leave(), traffic)
    stock, best = found.sides["stock"], found.sides["best"]
    assert stock is not None
    assert best is not None
    assert found.stock_per_s == pytest.approx(1000)
    assert stock.drops["admission"] > 1500
    assert best.goodput_per_s > stock.goodput_per_s
    assert found.ratios("best").over_stock == pytest.approx(best.goodput_per_s / stock.goodput_per_s)


def test_19_the_rule_and_half_of_it_are_played() -> None:
    result = fig19.compare(fig19.cases(two_blocks(count=8), half_leave(), bursty([500.0, 1500.0]), None))
    (picture,) = result.pictures
    assert isinstance(picture, Bars)
    assert picture.labels == ("Twitter\n3 V100", "Twitter\n1 V100")
    assert [each.paper for each in result.comparisons] == [1.16, 1.29, 1.16, 1.29]
    assert [len(each.rows) for each in result.tables] == [4, 4]
