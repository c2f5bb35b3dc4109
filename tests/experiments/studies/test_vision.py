"""Figure 8 of E3 and figure 16 of PAME, on records made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.studies import batch_limits, load_changes
from experiments.studies.batch_limits import cifar, one_threshold, place_in, places_of, vision_cluster
from experiments.studies.load_changes import KINDS, of_kind
from profiles.records import ExitRecords
from tests.experiments.studies.cases import four_blocks, inputs_at, ours


def images(number: int, reach: dict[str, float], *, wrong: float = 0.0) -> ExitRecords:
    """Of every kind so many images, of a model of 15 blocks whose ramps 3 and 10 are sure of a share of them."""
    rng = np.random.default_rng(0)
    sure_NR = np.concatenate([rng.random((number, 2)) < (reach[kind] / 2, reach[kind]) for kind in KINDS])
    lost_NR = (rng.random(sure_NR.shape) < wrong).astype(np.float64)
    return ExitRecords(
        score="confidence",
        num_blocks=15,
        ramps=(3, 10),
        sample_ids=tuple(map(str, range(len(sure_NR)))),
        scores_NR=np.where(sure_NR, 0.96, 0.2).astype(np.float32),
        losses_NR=lost_NR,
        true_losses_NE=np.column_stack([lost_NR, np.zeros(len(lost_NR))]),
    )


def test_ramps_stand_at_the_same_share_of_the_blocks() -> None:
    assert [place_in(16, ramp, 15) for ramp in (0, 4, 6, 7, 13)] == [0, 4, 6, 8, 14]
    clear = of_kind(images(10, dict.fromkeys(KINDS, 0.5)), "clear")
    assert places_of(clear, 16) == (3, 11)
    problem = vision_cluster((3, 11))
    table = problem.latency["V100"]
    assert table.ramp_s_EB.sum(0) == pytest.approx(2 * 0.11 / 16 * table.block_s_NB.sum(0))
    assert cifar(clear, problem, "made up").words == "recorded: made up, confidence 0.5"


def test_one_threshold_is_the_lowest_that_loses_two_per_cent() -> None:
    records = of_kind(images(50, dict.fromkeys(KINDS, 1.0), wrong=0.5), "clear")
    assert one_threshold(records, 0.9) == 0.5
    assert one_threshold(records) == 0.97


def test_8_quick_effort_gives_the_figure_without_other_cases() -> None:
    problem, inputs = four_blocks(), inputs_at(0.4)
    result = batch_limits.fig08_compare((problem, inputs), {}, "quick")
    assert ours(result)["e3 / early-exit, batch 8"] == result.e3.over_early_exit
    assert (batch_limits.FIG08_STUDY.about.paper.over_stock, batch_limits.FIG08_STUDY.about.paper.over_early_exit) == (
        1.58,
        1.74,
    )


def test_16_where_more_move_on_the_exit_goes_later() -> None:
    case = load_changes.case_of("darker", images(3000, {"clear": 0.9, "dark": 0.3, "noisy": 0.5}))
    assert (case.place.ramp, len(case.history), len(case.served)) == (3, 1200, 4800)
    served = load_changes.by_pame(case)
    assert "the exit moves from ramp 3 to ramp 10 at 0.5" in served.changes[0].words
    told = load_changes.parts(case, {"pame": served, "tuned once": load_changes.once(case)})
    assert told["tuned once"]["before"].slow < 2
    assert told["tuned once"]["changed"].slow > 2
    assert told["pame"]["after the reaction"].slow < 2


def test_16_figures_are_of_whole_batches_under_one_setting() -> None:
    case = load_changes.case_of("darker", images(800, dict.fromkeys(KINDS, 2.0)))
    found = load_changes.figures(case, load_changes.once(case), 5, 160)
    table = case.table
    until_s = table.block_s_NB[: case.place.ramp + 1].sum(0) + table.ramp_s_EB[0]
    at_16 = table.batches.index(16)
    assert found.saved == pytest.approx(100 * (1 - until_s[at_16] / table.block_s_NB[:, at_16].sum()))
    assert (found.slow, found.precision, found.agreement) == (0.0, 100.0, 100.0)


def test_16_is_of_pames_paper() -> None:
    about = load_changes.FIG16_STUDY.about
    assert (about.system, about.figure, about.heading) == ("PAME", "16", "Figure 16")
