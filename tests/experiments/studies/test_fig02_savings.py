from __future__ import annotations

import numpy as np
import pytest

from experiments.studies.distilbert_exits import NUM_BLOCKS, ImdbRun
from experiments.studies.fig02_savings import STUDY, accuracy_lost, chance_of_loss, compare, distilled_savings
from experiments.studies.record import missing_data
from experiments.studies.savings import savings
from profiles.table import LatencyTable
from tests.experiments.studies.small_cases import four_blocks, four_inputs

SIX_BLOCKS = LatencyTable(batches=(1,), block_s_NB=np.full((6, 1), 1.0), ramp_s_EB=np.full((5, 1), 0.1))
# Everybody reaches block 3, half of the inputs block 4 and the rest.
RUN = ImdbRun(requests_per_s=30, is_plain=True, num_inputs=200, exits={2: 100}, agreement=0.97, saving=0.2)


def test_who_leaves_saves_the_blocks_after_and_pays_the_ramps_before() -> None:
    table = four_blocks().latency["V100"]
    found = savings((1.0, 0.5, 0.5, 0.0), table, (0, 1, 2))
    assert found.compute == pytest.approx(0.5)
    assert found.latency == pytest.approx(0.5 - 0.1 * (1 + 0.5 + 0.5) / 4)
    assert found.most_times == pytest.approx(1 / 0.55)


def test_ramps_that_let_nobody_out_cost_more_than_nothing() -> None:
    found = savings((1.0, 1.0, 1.0, 1.0), four_blocks().latency["V100"], (0, 1, 2), batch=8)
    assert found.compute == 0
    assert found.latency == pytest.approx(-0.3 / 4)


def test_the_accuracy_lost_is_the_full_models_less_that_of_early_answers() -> None:
    outcome = four_inputs().outcome({0: 0.4})
    # The first input leaves with a wrong answer; the full model is right on all but the second.
    assert outcome.full_accuracy == 0.75
    assert accuracy_lost(outcome) == 0.25


def test_of_four_inputs_the_accuracy_lost_is_uncertain() -> None:
    outcome = four_inputs().outcome({0: 0.4})
    chance = chance_of_loss(outcome, np.random.default_rng(0), 2000)
    assert chance == pytest.approx((0.25 * 0.75 / 4) ** 0.5, rel=0.1)  # of a share of 4 draws, 1 in 4 of which counts


def test_distilled_savings_are_the_mean_of_the_runs() -> None:
    found = distilled_savings([RUN, RUN], SIX_BLOCKS)
    assert RUN.survival_N == pytest.approx((1, 1, 1, 0.5, 0.5, 0.5))
    assert found.compute == pytest.approx(1.5 / NUM_BLOCKS)
    assert found.latency == pytest.approx((1.5 - 0.1 * (3 + 0.5 + 0.5)) / NUM_BLOCKS)
    assert (found.printed, found.spread) == (0.2, 0)
    assert found.disagreement == pytest.approx(0.03)


def test_the_study_compares_both_models() -> None:
    result = compare(four_inputs(), four_blocks().latency["V100"], [RUN], SIX_BLOCKS, 10)
    ours = {each.name: each.ours for each in result.comparisons}
    # Inputs take 1, 2, 3 and 4 of 4 blocks.
    assert ours["BERT: compute saved (%)"] == pytest.approx(37.5)
    assert ours["DistilBERT: compute saved (%)"] == pytest.approx(25)
    assert len(result.pictures) == 2


@pytest.mark.skipif(bool(missing_data(STUDY.needs)), reason="needs the recorded exits of OFFRAMP_DATA")
def test_on_recorded_exits_bert_saves_more_than_the_distilled_model() -> None:
    ours = {each.name: each.ours or 0.0 for each in STUDY.run("quick").comparisons}
    assert ours["BERT: latency saved (%)"] > ours["DistilBERT: latency saved, as Apparate printed it (%)"] > 0
