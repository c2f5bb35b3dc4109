from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.ingress.build import check_staying, probe_shape
from deployments.settings import ServeSettings
from earlyexit.errors import PlanError
from optimizer.plan import NO_RAMPS, PolicySpec, stock_plan
from profiles.records import ExitRecords
from profiles.stream import StreamShape
from tests.model_cards import a_card

CARD = a_card(ramps=(0, 2), num_blocks=4)


def settings(policy: PolicySpec | None, probe_share: float = 0.02) -> ServeSettings:
    plan = replace(stock_plan(4, batch=1), policy=policy)
    return ServeSettings(model="unused", plan=plan, probe_share=probe_share)


@pytest.mark.parametrize("score", ["entropy", "confidence"])
def test_probes_see_the_models_ramps_in_the_policys_unit(score: Any) -> None:
    shape = StreamShape(score=score, num_blocks=4, ramps=(0, 2))
    assert probe_shape(settings(PolicySpec(name=score, thresholds=0.5)), CARD) == shape


def test_nothing_is_seen_after_block_0_where_states_before_and_after_a_block_are_compared() -> None:
    similar = PolicySpec(name="similar", thresholds=0.5)
    assert probe_shape(settings(similar), CARD) == StreamShape(score="similar", num_blocks=4, ramps=(2,))


def test_without_a_policy_probes_see_in_the_unit_in_which_replicas_then_look() -> None:
    shape = probe_shape(settings(None), CARD)
    assert shape is not None
    assert shape.score == NO_RAMPS.name


def test_recorded_exits_are_seen_as_they_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "records.npz"
    ExitRecords.of_answers(
        np.column_stack([np.array([[0]]), np.array([1])]),
        score="confidence",
        num_blocks=6,
        ramps=(1,),
        sample_ids=("a",),
        scores_NR=np.array([[0.5]], dtype=np.float32),
    ).save(path)
    policy = PolicySpec(name="recorded", thresholds=0.5, records=str(path))
    assert probe_shape(settings(policy), CARD) == StreamShape(score="confidence", num_blocks=6, ramps=(1,))


def test_inputs_that_stay_are_seen_without_probes_too() -> None:
    wanted = settings(PolicySpec(name="entropy", thresholds=0.5), 0.0)
    staying = wanted.model_copy(update={"plan": wanted.plan.with_after_answer("stay")})
    assert probe_shape(staying, CARD) == StreamShape(score="entropy", num_blocks=4, ramps=(0, 2))


@pytest.mark.parametrize(
    ("policy", "probe_share"),
    [
        pytest.param(PolicySpec(name="entropy", thresholds=0.5), 0.0, id="none-wanted"),
        pytest.param(PolicySpec(name="patience", patience=2), 0.02, id="no-score"),
    ],
)
def test_there_may_be_nothing_to_probe(policy: PolicySpec, probe_share: float) -> None:
    assert probe_shape(settings(policy, probe_share), CARD) is None


def test_inputs_may_only_stay_under_a_policy_by_which_they_can_be_recorded() -> None:
    patient = settings(PolicySpec(name="patience", patience=2)).plan
    check_staying(patient)
    with pytest.raises(
        PlanError, match=r"with scores \(entropy, confidence, share, foreseen, similar, recorded\): of 'patience'"
    ):
        check_staying(patient.with_after_answer("stay"))
    check_staying(settings(PolicySpec(name="entropy", thresholds=0.5)).plan.with_after_answer("stay"))
    check_staying(settings(None).plan.with_after_answer("stay"))
