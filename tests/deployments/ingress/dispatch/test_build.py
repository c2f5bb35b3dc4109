from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.ingress.build import check_staying, probe_shape
from deployments.settings import ServeSettings
from earlyexit.errors import PlanError
from earlyexit.network.boundary import AfterAnswer
from optimizer.plan import NO_RAMPS, PolicySpec, stock_plan
from profiles.records import ExitRecords
from profiles.stream import StreamShape
from tests.model_cards import a_card

CARD = a_card(ramps=(0, 2), num_blocks=4)


def settings(policy: PolicySpec | None, probe_share: float = 0.02) -> ServeSettings:
    plan = replace(stock_plan(4, batch=1), policy=policy)
    return ServeSettings(model="unused", plan=plan, probe_share=probe_share)


def seen(score: Any, *ramps: int) -> StreamShape:
    return StreamShape(score=score, num_blocks=4, ramps=ramps)


ENTROPY = PolicySpec(name="entropy", thresholds=0.5)


@pytest.mark.parametrize(
    ("policy", "probe_share", "after_answer", "shape"),
    [
        pytest.param(ENTROPY, 0.02, "stop", seen("entropy", 0, 2), id="the policy's unit"),
        pytest.param(PolicySpec(name="confidence", thresholds=0.5), 0.02, "stop", seen("confidence", 0, 2), id="other"),
        # Nothing precedes the state after block 0, which it could be compared with.
        pytest.param(PolicySpec(name="similar", thresholds=0.5), 0.02, "stop", seen("similar", 2), id="similar"),
        pytest.param(None, 0.02, "stop", seen(NO_RAMPS.name, 0, 2), id="no policy"),
        pytest.param(ENTROPY, 0.0, "stay", seen("entropy", 0, 2), id="inputs stay, no probes"),
        pytest.param(ENTROPY, 0.0, "stop", None, id="none wanted"),
        pytest.param(PolicySpec(name="patience", patience=2), 0.02, "stop", None, id="no score"),
    ],
)
def test_probes_see_the_models_ramps_in_the_policys_unit_where_there_is_one(
    policy: PolicySpec | None, probe_share: float, after_answer: AfterAnswer, shape: StreamShape | None
) -> None:
    wanted = settings(policy, probe_share)
    staying = wanted.model_copy(update={"plan": wanted.plan.with_after_answer(after_answer)})
    assert probe_shape(staying, CARD) == shape


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


def test_inputs_may_only_stay_under_a_policy_by_which_they_can_be_recorded() -> None:
    patient = settings(PolicySpec(name="patience", patience=2)).plan
    check_staying(patient)
    with pytest.raises(
        PlanError, match=r"with scores \(entropy, confidence, share, foreseen, similar, recorded\): of 'patience'"
    ):
        check_staying(patient.with_after_answer("stay"))
    check_staying(settings(PolicySpec(name="entropy", thresholds=0.5)).plan.with_after_answer("stay"))
    check_staying(settings(None).plan.with_after_answer("stay"))
