"""E3's figure 16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.data import data_folder
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.adapting import BIN_S, SIDES, bench, play, stretch
from experiments.studies.fig16_adaptation import HOMOGENEOUS, STUDY, Played, play_all, result_of
from experiments.studies.kit import Bars, Comparison, Lines
from experiments.studies.sides import equal_cluster

PLAYED = Played(
    cluster="homogeneous",
    load="closed",
    mixes=("80:20", "50:50", "20:80"),
    predicted_per_s=(200.0, 160.0, 100.0),
    goodput_per_s=dict.fromkeys(SIDES, (100.0, 80.0, 50.0)) | {"best": (150.0, 120.0, 60.0)},
    bins_per_s=dict.fromkeys(SIDES, (1.0, 2.0)),
    settled_s=dict.fromkeys(SIDES, (30.0, None)),
    plans={side: ({"at_s": 0.0, "reason": "start", "plan": []},) for side in SIDES},
)


def test_the_paper_is_compared_where_inputs_are_hardest_in_a_closed_loop() -> None:
    first, second, *_ = result_of([PLAYED]).comparisons
    assert first == Comparison(name="homogeneous, closed loop: e3 / stock, 20:80", ours=1.0, paper=0.77)
    assert second == Comparison(name="homogeneous, closed loop: best / stock, 20:80", ours=1.2)
    in_open_loop, *_ = result_of([replace(PLAYED, load="open")]).comparisons
    assert in_open_loop.paper is None


def test_ratios_are_those_of_the_first_run() -> None:
    slower = replace(PLAYED, goodput_per_s=dict.fromkeys(SIDES, (1.0, 1.0, 1.0)))
    assert result_of([PLAYED, slower]).best.over_stock == 1.5


def test_a_run_has_bars_per_mix_and_lines_over_periods() -> None:
    bars, lines = result_of([PLAYED]).pictures
    assert isinstance(bars, Bars)
    assert bars.labels == PLAYED.mixes
    assert isinstance(lines, Lines)
    assert lines.x == (0.0625, 0.1875)


def test_notes_say_when_plans_changed_and_what_was_predicted() -> None:
    (note,) = result_of([PLAYED]).notes
    assert "best changed its plan 0 times; the plans that were scored were in force 30 s and not at all after" in note
    assert note.endswith("Omniscient's plans gave 50%, 50%, 50% of what is predicted.")


def test_a_side_without_a_plan_is_a_gap() -> None:
    without = replace(PLAYED, goodput_per_s=dict(PLAYED.goodput_per_s) | {"stock": (None, None, None)})
    result = result_of([without])
    assert result.comparisons[0].ours is None
    assert result.best.over_stock is None


needs_records = pytest.mark.skipif(
    (folder := data_folder()) is None or not (folder / BERT12_SST2).is_file(), reason=f"{BERT12_SST2} is absent"
)


@needs_records
def test_only_a_plan_that_follows_keeps_up_with_harder_inputs() -> None:
    records = bert12_sst2("entropy")
    on = bench(equal_cluster(stretch(1000.0)), records, time_scale=1000.0, probe_share=0.0)
    kept, told = (play(on, side, "closed", seed=0) for side in ("first plan", "omniscient"))
    assert kept is not None
    assert told is not None
    last_s = on.phases[-1].scored_s
    assert kept.words("plan") == []
    assert [words.split()[1] for words in told.words("plan")] == ["1", "2"]
    slower, faster = (each.outcome.figures_between(*last_s).goodput_per_s for each in (kept, told))
    assert faster > 1.2 * slower


@needs_records
def test_rates_are_those_at_the_speed_of_the_paper() -> None:
    # A phase is many batches long: its ends fall into batches, which answer 128 inputs at once. With phases a tenth as
    # long that alone is worth 7 %.
    on = bench(equal_cluster(stretch(100.0)), bert12_sst2("entropy"), time_scale=100.0, probe_share=0.0)
    played = play_all(on, HOMOGENEOUS, "open", seed=0, sides=("stock",))
    assert len(played.bins_per_s["stock"]) == on.duration_s / BIN_S
    for rate in played.goodput_per_s["stock"]:
        assert rate == pytest.approx(5931, rel=0.02)  # 16 V100, batches of 8 in 21.58 ms


def test_the_study_says_what_it_needs() -> None:
    assert STUDY.needs == (BERT12_SST2,)
