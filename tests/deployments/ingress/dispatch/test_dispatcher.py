"""The dispatcher's driver, isolation of errors, and observations of an ingress."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.ingress.build import check_staying, probe_shape
from deployments.ingress.core.calls import Actions
from deployments.ingress.core.inputs import CALL_GRACE_S, PendingInput
from deployments.settings import ServeSettings
from deployments.wire.messages import Chunk, StageCall
from earlyexit.errors import ExecutionError, OfframpError, PlanError
from earlyexit.network.boundary import AfterAnswer, Answer, Encoded
from optimizer.plans.plan import NO_RAMPS, PlacedPlan, PolicySpec, stock_plan
from profiles.stream import StreamShape
from tests.deployments.ingress.dispatch.dispatcher_scene import PLAN, TIMING, TWO_TOKENS, Scene, survivors
from tests.deployments.wire_fakes import turns
from tests.exit_records import exit_records
from tests.model_cards import a_card


async def test_inputs_that_cannot_be_joined_into_a_batch_fail_alone() -> None:
    scene = Scene()
    scene.submit("abc")
    scene.submit("d", encoded=Encoded(1, (np.zeros((1, 3), dtype=np.int32),)))
    scene.submit("efgh")
    await turns()
    assert scene.errors == [(name, "execution") for name in "abcd"]
    await scene.sent("ijklmnop")  # one call is in flight, and one more is allowed
    assert scene.stages[0].names == ["efgh", "ijkl"]
    assert scene.core.num_unanswered == 12


async def test_a_hop_is_the_time_that_a_call_spent_outside_its_stage() -> None:
    scene = Scene()
    call = await scene.sent("ab")
    scene.clock.advance(1.0)
    call.answer("a")
    await turns()
    scene.clock.advance(1.0)
    call.send_on("b", next_block=2)
    await turns()
    assert scene.dispatcher.hops_s == {"split-cpu-0": [0.25, 1.25]}  # 0.25 s in the queue, 0.5 s computing


async def test_a_cancelled_survivor_is_sent_with_its_batch_and_dropped_by_the_stage() -> None:
    scene = Scene()
    flights = scene.submit("ab")
    await turns()
    scene.dispatcher.give_up(flights[:1], "abandoned")
    scene.stages[0].calls[0].send_on("ab", next_block=2)
    await turns()
    assert scene.stages[1].calls[0].call.remaining_s == (-1.0, 10.0)


async def test_a_plan_of_the_same_epoch_may_avoid_other_replicas() -> None:
    scene = Scene()
    await scene.sent("a")
    placed = PlacedPlan(plan=PLAN, avoided={"r1": "cpu"})
    scene.dispatcher.follow(placed)
    assert scene.core.placed == placed


# Failures


def refuse(flight: PendingInput, outcome: Answer | OfframpError) -> None:
    raise ValueError("its owner takes no outcome")


async def test_a_callback_that_fails_does_not_affect_other_inputs(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.dispatcher.submit([("x", TWO_TOKENS)], 10.0, refuse, request_id="request-1")
    call = await scene.sent("ab")
    call.say(
        Chunk(
            answers=call._answers("xa", 1),
            lost=((call.id_of("b"), ExecutionError("the model failed on it")),),
        )
    )
    call.end()
    await turns()
    assert (scene.answered, scene.errors, scene.core.num_unanswered) == ("a", [("b", "execution")], 0)
    assert "the callback for an input of request-1 failed" in caplog.text


async def test_answers_of_a_malformed_part_are_delivered() -> None:
    scene = Scene()
    call = await scene.sent("abc")
    piece = survivors([call.id_of("b")], 99)
    call.say(Chunk(answers=call._answers("a", 1), survivors=piece, survivor_timings=(TIMING,)))
    await turns()
    assert scene.answered == "a"
    assert scene.stages[0].names == ["abc", "bc"]  # they start again
    scene.stages[0].calls[1].answer("bc")
    await turns()
    assert (scene.answered, scene.core.num_unanswered) == ("abc", 0)


async def test_a_call_that_cannot_be_sent_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    failures = [ValueError("it cannot be sent")]

    def wrong_once(**fields: Any) -> Any:
        if failures:
            raise failures.pop()
        return StageCall(**fields)

    monkeypatch.setattr("deployments.ingress.dispatcher.StageCall", wrong_once)
    scene.submit("ab", deadline_s=1.0)
    await turns()
    assert scene.stages[0].names == ["ab"]
    scene.clock.advance(1.0 + CALL_GRACE_S)
    scene.dispatcher.wake()
    scene.submit("c", deadline_s=9.0)
    await turns()
    assert scene.errors == [("a", "deadline"), ("b", "deadline")]
    assert scene.stages[0].names == ["ab", "c"]


async def test_a_timer_is_set_again_after_its_handler_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, timers_s = Scene(), list[float]()
    monkeypatch.setattr(scene.dispatcher, "set_timer", timers_s.append)
    right, failures = scene.core.wake, [ValueError("it does not wake")]

    def wrong_once(now_s: float) -> Actions:
        if failures:
            raise failures.pop()
        return right(now_s)

    monkeypatch.setattr(scene.core, "wake", wrong_once)
    await scene.sent("a")
    scene.clock.advance(10.0)
    with pytest.raises(ValueError, match="does not wake"):
        scene.dispatcher.wake()
    assert len(timers_s) == 2
    scene.dispatcher.wake()
    assert scene.errors == [("a", "deadline")]


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
        # The state after block 0 cannot be compared with an earlier one.
        pytest.param(PolicySpec(name="similar", thresholds=0.5), 0.02, "stop", seen("similar", 2), id="similar"),
        pytest.param(None, 0.02, "stop", seen(NO_RAMPS.name, 0, 2), id="no policy"),
        pytest.param(ENTROPY, 0.0, "stay", seen("entropy", 0, 2), id="inputs stay, no probes"),
        pytest.param(ENTROPY, 0.0, "stop", None, id="none wanted"),
        pytest.param(PolicySpec(name="patience", patience=2), 0.02, "stop", None, id="no score"),
    ],
)
def test_probes_observe_the_models_ramps_with_the_policys_score(
    policy: PolicySpec | None, probe_share: float, after_answer: AfterAnswer, shape: StreamShape | None
) -> None:
    wanted = settings(policy, probe_share)
    staying = wanted.model_copy(update={"plan": wanted.plan.with_splits(after_answer=after_answer)})
    assert probe_shape(staying, CARD) == shape


def test_probes_under_recorded_exits_observe_the_recorded_score(tmp_path: Path) -> None:
    path = tmp_path / "records.npz"
    exit_records([[0.5]], answers_NE=np.array([[0, 1]]), num_blocks=6, ramps=(1,)).save(path)
    policy = PolicySpec(name="recorded", thresholds=0.5, records=str(path))
    assert probe_shape(settings(policy), CARD) == StreamShape(score="confidence", num_blocks=6, ramps=(1,))


def test_inputs_can_stay_only_under_a_policy_with_scores() -> None:
    patient = settings(PolicySpec(name="patience", patience=2)).plan
    check_staying(patient)
    with pytest.raises(PlanError, match=r"with scores .* because nothing could be recorded with 'patience'"):
        check_staying(patient.with_splits(after_answer="stay"))
    check_staying(settings(PolicySpec(name="entropy", thresholds=0.5)).plan.with_splits(after_answer="stay"))
    check_staying(settings(None).plan.with_splits(after_answer="stay"))
